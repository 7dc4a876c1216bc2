"""Operations of tokens and quotas: who may use this daemon, and how much of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema
from starlette.responses import Response

from skerry.daemon.http import schemas
from skerry.daemon.http.answers import reply
from skerry.daemon.http.environments import OneIsolation, Size
from skerry.daemon.http.operations import Call, Operation, Parameter
from skerry.daemon.http.requests import Body, Seconds, Text, Texts
from skerry.errors import InvalidRequest, NotFound, StoreUnavailable
from skerry.manager.caller import VERBS, Caller
from skerry.manager.tenants.tokens import DEFAULT_VERBS
from skerry.policy import ISOLATIONS, parse_size, seconds
from skerry.store.quotas import Quota
from skerry.store.tokens import Token

Verbs = Annotated[Texts, WithJsonSchema({"type": "array", "items": {"enum": list(VERBS)}})]


class NewToken(Body):
    name: Text
    """For people: who or what has it."""
    tenant: Text | None = None
    """Whose environments it is for; without it, the caller's."""
    verbs: Verbs | None = None
    """What it allows."""
    lifetime: Seconds | None = None
    """It expires this many seconds from now; without it, never."""


class NewQuota(Body):
    """What is left out, or null, is not limited."""

    environments: Annotated[int, Field(ge=0, le=1 << 31)] | None = None
    cpus: Annotated[float, Field(ge=0, le=1 << 20, allow_inf_nan=False)] | None = None
    """Cores, of all environments together."""
    memory: Size | None = None
    """Bytes, or a text like `16g`, of all environments together."""
    disk: Size | None = None
    """Bytes, or a text like `100g`: of all workspaces, as large as they may get, and of installed packages."""
    isolation: OneIsolation | None = None
    """The least that new environments have, whatever they ask for."""


async def create_token(call: Call, body: NewToken) -> Response:
    token, text = await call.engine.tokens.create(
        call.caller,
        call.caller.tenant if body.tenant is None else body.tenant,
        body.name,
        DEFAULT_VERBS if body.verbs is None else tuple(body.verbs),
        None if body.lifetime is None else seconds(body.lifetime, "lifetime"),
    )
    return reply({**_shown(token), "token": text}, 201)


async def list_tokens(call: Call, tenant: str) -> Response:
    return reply({"tokens": [_shown(token) for token in await call.engine.tokens.list(tenant or None)]})


async def revoke_token(call: Call, token_id: str) -> Response:
    if not await call.engine.tokens.revoke(call.caller, token_id):
        raise NotFound(f"no token {token_id!r}", hint="`skerry token ls` lists them")
    call.engine.authenticator.revoked(token_id)
    return reply({})


async def get_quota(call: Call, tenant: str) -> Response:
    _check_sees(call.caller, tenant)
    return reply(_quota(call, *await call.engine.quotas.get(tenant)))


async def set_quota(call: Call, tenant: str, body: NewQuota) -> Response:
    memory = None if body.memory is None else parse_size(body.memory, "memory")
    disk = None if body.disk is None else parse_size(body.disk, "disk")
    if body.isolation is not None and body.isolation not in ISOLATIONS:
        raise InvalidRequest(f"unknown isolation {body.isolation!r}", hint=f"known: {', '.join(ISOLATIONS)}")
    quota = Quota(
        tenant=tenant,
        environments=body.environments,
        cpus=body.cpus,
        memory=memory,
        disk=disk,
        isolation=body.isolation,
    )
    return reply(_quota(call, quota, await call.engine.quotas.set(call.caller, quota)))


def _check_sees(caller: Caller, tenant: str) -> None:
    if tenant != caller.tenant and "admin" not in caller.verbs:
        raise NotFound(f"no tenant {tenant!r}")


def _quota(call: Call, quota: Quota, used: Quota) -> dict[str, Any]:
    found = asdict(used)
    del found["tenant"], found["isolation"]
    return {**asdict(quota), "used": found, "caused": call.engine.metrics.accounts.told(quota.tenant)}


def _shown(token: Token) -> dict[str, Any]:
    return asdict(token)


TOKEN = {
    "id": "t4n8q2r6w1zc",
    "tenant": "acme",
    "name": "ci",
    "verbs": ["create", "delete", "execute", "read", "write"],
    "created_at": 1767225600.0,
    "expires_at": 1769817600.0,
    "revoked_at": None,
    "last_used_at": None,
}
QUOTA = {
    "tenant": "acme",
    "environments": 20,
    "cpus": 8.0,
    "memory": 17179869184,
    "disk": 107374182400,
    "isolation": "gvisor",
    "used": {"environments": 2, "cpus": 2.0, "memory": 1073741824, "disk": 4294967296},
    "caused": {
        "requests": 5321,
        "loop_seconds": 4.2,
        "received_bytes": 1048576,
        "sent_bytes": 52428800,
        "rows": 10642,
        "connections": 12,
        "network_sent_bytes": 20480,
        "network_received_bytes": 7340032,
    },
}

OPERATIONS = (
    Operation(
        name="create_token",
        method="POST",
        path="/tokens",
        tag="tenants",
        verb="admin",
        summary="Create a token",
        text="Its text is in this answer and nowhere else. Without `verbs` it allows "
        + ", ".join(f"`{verb}`" for verb in DEFAULT_VERBS)
        + ".",
        handler=create_token,
        body=NewToken,
        body_example={"name": "ci", "tenant": "acme", "lifetime": 2592000},
        status=201,
        answer=schemas.CreatedToken,
        answer_example={**TOKEN, "token": "skt_t4n8q2r6w1zc_..."},
        errors=(StoreUnavailable,),
    ),
    Operation(
        name="list_tokens",
        method="GET",
        path="/tokens",
        tag="tenants",
        verb="admin",
        summary="List tokens",
        text="Includes expired and revoked tokens; never their text.",
        handler=list_tokens,
        query=(Parameter("tenant", "string", "Only those of this tenant.", default="", example="acme"),),
        answer=schemas.Tokens,
        answer_example={"tokens": [TOKEN]},
        errors=(StoreUnavailable,),
    ),
    Operation(
        name="revoke_token",
        method="DELETE",
        path="/tokens/{token_id}",
        tag="tenants",
        verb="admin",
        summary="Revoke a token",
        text="Ends every request and stream that uses it. Revoking a revoked token succeeds.",
        handler=revoke_token,
        answer=schemas.Nothing,
        answer_example={},
        errors=(NotFound, StoreUnavailable),
    ),
    Operation(
        name="get_quota",
        method="GET",
        path="/quotas/{tenant}",
        tag="tenants",
        verb="read",
        summary="Show quota and usage of a tenant",
        text="null: unlimited.",
        handler=get_quota,
        answer=schemas.QuotaDetails,
        answer_example=QUOTA,
        errors=(NotFound, StoreUnavailable),
    ),
    Operation(
        name="set_quota",
        method="PUT",
        path="/quotas/{tenant}",
        tag="tenants",
        verb="admin",
        summary="Set the quota of a tenant",
        text="Existing environments are not affected.",
        handler=set_quota,
        body=NewQuota,
        body_example={"environments": 20, "cpus": 8, "memory": "16g", "disk": "100g"},
        answer=schemas.QuotaDetails,
        answer_example=QUOTA,
        errors=(StoreUnavailable,),
    ),
)
