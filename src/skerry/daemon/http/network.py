"""Operations of an environment's network: what it may reach, and what it was refused."""

from __future__ import annotations

from starlette.responses import Response

from skerry.daemon.http import schemas
from skerry.daemon.http.answers import reply
from skerry.daemon.http.environments import Network, Size, Whole
from skerry.daemon.http.operations import IN_ENVIRONMENT, Call, Operation
from skerry.daemon.http.requests import Body, Texts
from skerry.errors import EnvironmentNotFound, IsolationUnavailable


class NewNetwork(Body):
    network: Network | None = None
    """`none`, `allowlist` or `public`; without it, as it is."""
    allow: Texts | None = None
    """The rules of an allowlist, instead of those that it has: `api.example.com`, `*.example.com`, `example.com:8443`,
    `203.0.113.0/24:22`."""
    connections: Whole | None = None
    """Most connections at once; of those that are too many now, the oldest stay."""
    traffic: Size | None = None
    """Most bytes that are sent and received as long as it lives, with those that were already."""


class Rules(Body):
    rules: Texts


async def get_network(call: Call, environment_id: str) -> Response:
    return reply(call.manager.network(call.caller, environment_id))


async def set_network(call: Call, environment_id: str, body: NewNetwork) -> Response:
    await call.manager.set_network(call.caller, environment_id, **body.model_dump())
    return await get_network(call, environment_id)


async def allow(call: Call, environment_id: str, body: Rules) -> Response:
    await call.manager.change_network(call.caller, environment_id, add=body.rules)
    return await get_network(call, environment_id)


async def deny(call: Call, environment_id: str, body: Rules) -> Response:
    await call.manager.change_network(call.caller, environment_id, remove=body.rules)
    return await get_network(call, environment_id)


EXAMPLE = {
    "network": "allowlist",
    "allow": ["api.example.com", "*.example.org:443"],
    "limits": {"connections": 1024, "traffic": 107374182400},
    "connections": 1,
    "sent_bytes": 1204,
    "received_bytes": 53170,
    "denials": [
        {
            "at": 1767225601.5,
            "host": "example.net",
            "port": 443,
            "reason": "example.net:443 is not in this environment's allowlist",
            "count": 2,
        }
    ],
}
ERRORS = (*IN_ENVIRONMENT, IsolationUnavailable)

OPERATIONS = (
    Operation(
        name="get_network",
        method="GET",
        path="/environments/{environment_id}/network",
        tag="network",
        verb="read",
        summary="Show network rules and recent denials",
        handler=get_network,
        answer=schemas.NetworkDetails,
        answer_example=EXAMPLE,
        errors=(EnvironmentNotFound,),
    ),
    Operation(
        name="set_network",
        method="PUT",
        path="/environments/{environment_id}/network",
        tag="network",
        verb="create",
        summary="Change network rules and limits",
        text="Omitted fields keep their value. Takes effect at once: open connections that are no longer allowed are "
        "closed. Internal addresses are never reached, whatever is allowed.",
        handler=set_network,
        body=NewNetwork,
        body_example={"network": "allowlist", "allow": ["api.example.com"], "traffic": "10g"},
        answer=schemas.NetworkDetails,
        answer_example=EXAMPLE,
        errors=ERRORS,
    ),
    Operation(
        name="allow_network",
        method="POST",
        path="/environments/{environment_id}/network/allow",
        tag="network",
        verb="create",
        summary="Add rules to the allowlist",
        text="An environment without network gets an allowlist.",
        handler=allow,
        body=Rules,
        body_example={"rules": ["api.example.com"]},
        answer=schemas.NetworkDetails,
        answer_example=EXAMPLE,
        errors=ERRORS,
    ),
    Operation(
        name="deny_network",
        method="POST",
        path="/environments/{environment_id}/network/deny",
        tag="network",
        verb="create",
        summary="Remove rules from the allowlist",
        handler=deny,
        body=Rules,
        body_example={"rules": ["api.example.com"]},
        answer=schemas.NetworkDetails,
        answer_example=EXAMPLE,
        errors=ERRORS,
    ),
)
