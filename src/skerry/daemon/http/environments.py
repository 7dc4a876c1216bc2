"""Operations of environments: create, find, keep alive, delete."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from typing import Annotated, Any

from pydantic import WithJsonSchema
from starlette.responses import Response

from skerry.daemon.http import schemas
from skerry.daemon.http.answers import Receipt, reply
from skerry.daemon.http.operations import IN_ENVIRONMENT, Call, Operation, Parameter
from skerry.daemon.http.requests import Body, Seconds, Text, Texts, TextsByName
from skerry.daemon.peers import gone_of
from skerry.errors import (
    Busy,
    Conflict,
    DaemonUnavailable,
    DiskFull,
    EnvironmentEnded,
    EnvironmentNotFound,
    GuestFailed,
    ImageNotFound,
    InvalidRequest,
    IsolationUnavailable,
    LaunchFailed,
    QuotaExceeded,
    RegistryUnavailable,
    StoreUnavailable,
)
from skerry.manager.environments.environment import Environment, Key
from skerry.manager.environments.request import CreateRequest
from skerry.models import State, Usage
from skerry.policy import ISOLATIONS, NETWORKS, WORKSPACES, Limits, Policy

PAGE_MAX = 1000
KEY_MAX = 255

# Checked by `skerry.policy`, whose words are better than a validator's; described here.
Size = Annotated[Any, WithJsonSchema({"type": ["integer", "string"]})]
Number = Annotated[Any, WithJsonSchema({"type": "number"})]
Whole = Annotated[Any, WithJsonSchema({"type": "integer"})]
_ISOLATION = f"(?:{'|'.join(ISOLATIONS)})"
Isolation = Annotated[
    Text, WithJsonSchema({"type": "string", "pattern": f"^{_ISOLATION}(?:, ?{_ISOLATION})*$"})
]
OneIsolation = Annotated[Text, WithJsonSchema({"enum": list(ISOLATIONS)})]
Network = Annotated[Text, WithJsonSchema({"enum": list(NETWORKS)})]
Workspace = Annotated[Text, WithJsonSchema({"enum": list(WORKSPACES)})]


class Create(Body):
    image: Text | None = None
    """Name, beginning of a digest, or `docker://` and an image of a Docker Engine; without it, `host`: this machine's
    own programs, read-only."""
    name: Text | None = None
    """One by which it can be found again, as long as it lives."""
    isolation: Isolation | None = None
    """At least this much, or the request fails. Several, separated by commas, are tried in this order."""
    backend: Text | None = None
    """The backend to use; the request fails if it gives less isolation than was asked for."""
    profile: Text | None = None
    """Which system calls there are: `default`, `strict`, `debug` or `filters`."""
    network: Network | None = None
    """`none`, `allowlist` or `public`; never internal addresses."""
    allow: Texts | None = None
    """The rules of an allowlist: `api.example.com`, `*.example.com`, `example.com:8443`, `203.0.113.0/24:22`."""
    workspace: Workspace | None = None
    """`disk`, `memory`, or `auto`: disk where its limits can be enforced."""
    memory: Size | None = None
    """Bytes, or a text like `512m`; without swap, for everything inside."""
    cpus: Number | None = None
    """Cores; 0.5 is half of one."""
    pids: Whole | None = None
    fds: Whole | None = None
    """Open files of each process."""
    disk: Size | None = None
    """Of the workspace."""
    inodes: Whole | None = None
    """Files and directories in the workspace."""
    connections: Whole | None = None
    """Out of it, at once."""
    traffic: Size | None = None
    """Bytes that it sends and receives over its network, as long as it lives."""
    lifetime: Seconds | None = None
    """It ends this many seconds from now, whatever it does, unless a heartbeat comes."""
    idle: Seconds | None = None
    """It ends when nothing has run in it for this many seconds."""
    env: TextsByName | None = None
    """Variables of everything that runs in it."""

    def policy(self) -> Policy:
        wanted = self._given("isolation", "profile", "network", "workspace")
        limits = self._given("memory", "cpus", "pids", "fds", "disk", "inodes", "connections", "traffic")
        return Policy(**wanted, allow=tuple(self.allow or ()), limits=Limits.parse(limits))

    def request(self, key: Key | None) -> CreateRequest:
        rest = self._given("image", "name", "backend", "lifetime", "idle", "env")
        return CreateRequest(policy=self.policy(), **rest, key=key)

    def _given(self, *names: str) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class Heartbeat(Body):
    lifetime: Seconds | None = None
    """Seconds from now; without it, what the environment was created with."""


async def create(call: Call, body: Create) -> Response:
    text = call.header(b"idempotency-key")
    key = None
    if text:
        if len(text) > KEY_MAX:
            raise InvalidRequest(f"an Idempotency-Key has at most {KEY_MAX} characters")
        asked = json.dumps(body.model_dump(mode="python"), sort_keys=True)
        key = Key(text, hashlib.sha256(asked.encode("utf-8", "surrogateescape")).hexdigest())
    environment = await call.manager.create(call.caller, body.request(key))
    answer = environment.info.to_dict()
    if key is not None or environment.name:  # by which it can be found
        return reply(answer, 201)
    return Receipt(answer, 201, gone_of(call.scope), partial(call.manager.abandon, environment))


async def list_environments(
    call: Call, all: bool, state: str, name: str, image: str, limit: int, after: str
) -> Response:
    begin = _cursor(after) if after else (0.0, "")
    found = [
        environment
        for environment in call.manager.environments(call.caller, ended=all or state == State.ENDED)
        if (not state or environment.told_state == state)
        and (not name or environment.name == name)
        and (not image or image in (environment.image.name, environment.image.digest))
        and _place(environment) > begin
    ]
    found.sort(key=_place)
    page = found[:limit]
    return reply(
        {
            "environments": [environment.info.to_dict() for environment in page],
            "next": "{!r}_{}".format(*_place(page[-1])) if len(found) > limit else None,
        }
    )


def _place(environment: Environment) -> tuple[float, str]:
    """Where it is in every list: nothing that comes later takes a place before it."""
    return environment.created_at, environment.id


def _cursor(after: str) -> tuple[float, str]:
    at, _, environment_id = after.partition("_")
    try:
        return float(at), environment_id
    except ValueError:
        raise InvalidRequest("parameter 'after' is not the 'next' of another page") from None


async def inspect(call: Call, environment_id: str) -> Response:
    info = call.manager.find(call.caller, environment_id).info.to_dict()
    info["enforced"] = [row.to_dict() for row in call.manager.enforced(call.caller, environment_id)]
    return reply({**info, "usage": (await call.manager.usage(call.caller, environment_id)).to_dict()})


async def delete(call: Call, environment_id: str) -> Response:
    environment = await call.manager.delete(call.caller, environment_id)
    return reply({"environment_id": environment.id, "deleted": True})


async def heartbeat(call: Call, environment_id: str, body: Heartbeat) -> Response:
    return reply({"expires_at": await call.manager.heartbeat(call.caller, environment_id, body.lifetime)})


async def usage(call: Call, environment_id: str) -> Response:
    return reply((await call.manager.usage(call.caller, environment_id)).to_dict())


USAGE_EXAMPLE = {
    "cpu_seconds": 1.25,
    "memory_bytes": 20971520,
    "memory_peak_bytes": 41943040,
    "pids": 3,
    "io_read_bytes": 0,
    "io_write_bytes": 4096,
    "oom_kills": 0,
}
DETAILS_EXAMPLE = {
    "environment_id": "k3v9x1m2p7qa",
    "state": "running",
    "image": "host",
    "image_digest": "sha256:5e0c3f",
    "isolation": "namespace",
    "backend": "namespace",
    "created_at": 1767225600.0,
    "expires_at": 1767229200.0,
    "lifetime": 3600.0,
    "idle": 900.0,
    "name": "web",
    "profile": "default",
    "network": "none",
    "workspace": "disk",
    "limits": {
        "cpus": 1.0,
        "memory": 536870912,
        "pids": 256,
        "fds": 1024,
        "disk": 2147483648,
        "inodes": 131072,
        "connections": 1024,
        "traffic": 107374182400,
    },
    "enforced": [{"name": "memory", "enforced": True, "value": "536870912", "by": "cgroup v2 memory.max"}],
    "ended_reason": "",
    "usage": USAGE_EXAMPLE,
}
EXAMPLE = {key: value for key, value in DETAILS_EXAMPLE.items() if key != "usage"} | {"enforced": []}

OPERATIONS = (
    Operation(
        name="create_environment",
        method="POST",
        path="/environments",
        tag="environments",
        verb="create",
        summary="Create an environment",
        text="Answers when it runs. Omitted fields have safe defaults. It lives until it is deleted, its "
        "`lifetime` is over, or it was `idle` for too long.",
        handler=create,
        body=Create,
        body_example={"name": "web", "memory": "512m", "cpus": 1, "lifetime": 3600},
        headers=(
            Parameter(
                "Idempotency-Key",
                "string",
                "Any text that only this request has. Repeated with it, within a day, the request makes no second "
                "environment: the answer is the first one, or a conflict once that has ended.",
            ),
        ),
        status=201,
        answer=schemas.Environment,
        answer_example=EXAMPLE,
        errors=(
            Conflict,
            ImageNotFound,
            EnvironmentEnded,
            IsolationUnavailable,
            LaunchFailed,
            GuestFailed,
            DiskFull,
            QuotaExceeded,
            Busy,
            RegistryUnavailable,
            DaemonUnavailable,
            StoreUnavailable,
        ),
    ),
    Operation(
        name="list_environments",
        method="GET",
        path="/environments",
        tag="environments",
        verb="read",
        summary="List environments",
        text="Oldest first, in pages: give the `next` of an answer as `after` to get what follows.",
        handler=list_environments,
        query=(
            Parameter("all", "boolean", "Include environments that ended in the last day.", default=False),
            Parameter(
                "state",
                "string",
                "Only those in this state.",
                default="",
                choices=tuple(map(str, State)),
                example="running",
            ),
            Parameter("name", "string", "Only those of this name.", default="", example="web"),
            Parameter("image", "string", "Only those of this image: its name or its digest.", default=""),
            Parameter(
                "limit", "integer", "How many at most.", default=PAGE_MAX, least=1, most=PAGE_MAX, example=10
            ),
            Parameter("after", "string", "The `next` of the page before.", default=""),
        ),
        answer=schemas.Environments,
        answer_example={"environments": [EXAMPLE], "next": None},
    ),
    Operation(
        name="get_environment",
        method="GET",
        path="/environments/{environment_id}",
        tag="environments",
        verb="read",
        summary="Inspect an environment",
        text="With what it uses, and every limit as the kernel really has it. One that has ended is still known for "
        "a day, with the reason why.",
        handler=inspect,
        answer=schemas.EnvironmentDetails,
        answer_example=DETAILS_EXAMPLE,
        errors=(EnvironmentNotFound,),
    ),
    Operation(
        name="delete_environment",
        method="DELETE",
        path="/environments/{environment_id}",
        tag="environments",
        verb="delete",
        summary="Delete an environment",
        text="Kills its processes and removes its files. Deleting an ended environment succeeds.",
        handler=delete,
        answer=schemas.Deleted,
        answer_example={"environment_id": "k3v9x1m2p7qa", "deleted": True},
        errors=(EnvironmentNotFound, StoreUnavailable),
    ),
    Operation(
        name="heartbeat",
        method="POST",
        path="/environments/{environment_id}/heartbeat",
        tag="environments",
        verb="execute",
        summary="Renew the lease of an environment",
        handler=heartbeat,
        body=Heartbeat,
        body_example={"lifetime": 3600},
        answer=schemas.Lease,
        answer_example={"expires_at": 1767229200.0},
        errors=IN_ENVIRONMENT,
    ),
    Operation(
        name="get_usage",
        method="GET",
        path="/environments/{environment_id}/usage",
        tag="environments",
        verb="read",
        summary="Show resource usage of an environment",
        text="As the kernel counted, for one that has ended until then; null for what this machine cannot tell.",
        handler=usage,
        answer=Usage,
        answer_example=USAGE_EXAMPLE,
        errors=(EnvironmentNotFound,),
    ),
)
