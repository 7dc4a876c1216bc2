"""What an operation of the API is: one row of the table that routing, checks and documentation are made from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.types import Receive, Scope

from skerry.daemon.auth import Authenticator
from skerry.daemon.http.readiness import Readiness
from skerry.daemon.http.requests import Body, read_raw
from skerry.daemon.metrics import Metrics
from skerry.errors import (
    Conflict,
    EnvironmentEnded,
    EnvironmentNotFound,
    ExecutionNotFound,
    GuestFailed,
    InstallFailed,
    LimitReached,
    RegistryUnavailable,
    SkerryError,
    StoreUnavailable,
)
from skerry.images.store import ImageStore
from skerry.manager.audit.trail import AuditTrail
from skerry.manager.caller import Caller
from skerry.manager.code.programs import Programs
from skerry.manager.environments.manager import EnvironmentManager, Use
from skerry.manager.executions.registry import Executions
from skerry.manager.sessions.registry import Sessions
from skerry.manager.tenants.quotas import Quotas
from skerry.manager.tenants.tokens import Tokens
from skerry.settings import Home

JSON = "application/json"
NDJSON = "application/x-ndjson"
EVENTS = "text/event-stream"
OCTETS = "application/octet-stream"
TAR = "application/x-tar"

IN_ENVIRONMENT = (EnvironmentNotFound, EnvironmentEnded, Conflict, GuestFailed, StoreUnavailable)
"""What everything that happens inside an environment can fail with."""
INSTALLING = (InstallFailed, RegistryUnavailable, LimitReached)
"""What installing packages can fail with, beside the environment for it."""
IN_EXECUTION = (*IN_ENVIRONMENT, ExecutionNotFound)


@dataclass(frozen=True, slots=True)
class Engine:
    """The parts of the daemon that operations use. `stop` ends the daemon after the response is sent."""

    manager: EnvironmentManager
    code: Programs
    images: ImageStore
    tokens: Tokens
    quotas: Quotas
    audit: AuditTrail
    authenticator: Authenticator
    home: Home
    readiness: Readiness
    metrics: Metrics
    stop: Callable[[], None]


class Call:
    """One request on its way through its handler."""

    __slots__ = ("_hold", "caller", "engine", "held", "pause", "receive", "scope")

    def __init__(
        self,
        engine: Engine,
        caller: Caller,
        scope: Scope,
        receive: Receive,
        hold: Callable[[int], bool] = lambda _: True,
        pause: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0),
    ) -> None:
        self.engine = engine
        self.caller = caller
        self.scope = scope
        self.receive = receive
        self.pause = pause
        """To be awaited between pieces of work that keep the event loop busy."""
        self.held = 0
        """Bytes of the answer that are accounted for."""
        self._hold = hold

    def hold(self, size: int) -> bool:
        """Reserve memory for more bytes of the answer until it is sent. False if there is none left."""
        if not self._hold(size):
            return False
        self.held += size
        return True

    @property
    def manager(self) -> EnvironmentManager:
        return self.engine.manager

    async def sessions(self, environment_id: str) -> Sessions:
        """Raises what `EnvironmentManager.running` does."""
        environment, _ = await self.manager.running(self.caller, environment_id)
        assert environment.sessions is not None
        return environment.sessions

    async def executions(self, ref: str) -> Executions:
        """What runs in an environment; see EnvironmentManager.running()."""
        return (await self.engine.manager.running(self.caller, ref))[1]

    def using(self, ref: str, action: str, **detail: Any) -> AbstractAsyncContextManager[Use]:
        """See EnvironmentManager."""
        return self.engine.manager.using(self.caller, ref, action, detail)

    def using_early(self, ref: str, action: str, **detail: Any) -> AbstractAsyncContextManager[Use]:
        return self.engine.manager.using(self.caller, ref, action, detail, early=True)

    def header(self, name: bytes) -> str:
        """The value of a header (its name in lower case), or ""."""
        for key, value in self.scope["headers"]:
            if key == name:
                return str(value, "latin-1")
        return ""

    def media_type(self) -> str:
        """What the body is said to be; "" when nothing is said."""
        return self.header(b"content-type").partition(";")[0].strip().lower()

    def accepts(self, media_type: str) -> bool:
        """Whether the caller asks for this media type by name."""
        return media_type in self.header(b"accept").lower()

    def chunks(self, limit: int) -> AsyncIterator[bytes]:
        """The body as it comes. Raises LimitReached, ClientDisconnect."""
        return read_raw(self.receive, limit)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter in the query string, or a header. One that is not given has its default."""

    name: str
    kind: Literal["string", "integer", "boolean"]
    text: str
    required: bool = False
    default: Any = None
    least: int = 0
    most: int = 1 << 53
    choices: tuple[str, ...] = ()
    example: Any = None


Handler = Callable[..., Coroutine[Any, Any, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method on one path.

    The handler is called with a Call and returns a Response; that of a WebSocket is called with a Call and the
    WebSocket, and returns nothing. By name it is given what stands in the path, every parameter of the query,
    and `body`: the validated model, or None for an upload. What it raises must be in `errors`, but for what every
    operation of its kind can fail with.
    """

    name: str
    method: str
    path: str
    """With the names of its variable parts in braces; each is one segment."""
    tag: str
    verb: str
    """What the caller must be allowed to; "" for what everybody may ask, without a token."""
    summary: str
    handler: Handler
    and_verb: str = ""
    """What the caller must be allowed to as well."""
    text: str = ""
    query: tuple[Parameter, ...] = ()
    headers: tuple[Parameter, ...] = ()
    body: type[Body] | None = None
    uploads: tuple[str, ...] = ()
    """Media types of bodies that are taken as they are."""
    body_example: Any = None
    status: int = 200
    answer: Any = None
    """The type of the JSON answer (of each line of NDJSON, of each event); None: bytes."""
    media: tuple[str, ...] = (JSON,)
    answer_example: Any = None
    also: dict[int, str] = field(default_factory=dict)
    """Other statuses of success, without a body, and what they mean."""
    errors: tuple[type[SkerryError], ...] = ()
    websocket: bool = False
    defaults: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        defaults = {parameter.name: parameter.default for parameter in self.query}
        object.__setattr__(self, "defaults", defaults)

    @property
    def verbs(self) -> tuple[str, ...]:
        return tuple(verb for verb in (self.verb, self.and_verb) if verb)
