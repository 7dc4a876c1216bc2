"""The state of each HTTP session: events for clients that resume, and its environment if it has one of its own.

The protocol package numbers streams by request id, which repeats from session to session, and gives its event store
no session. So `McpSessions` wraps it as an ASGI app and keeps the session of each request in a context variable.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field

import mcp_types as types
from mcp.server.streamable_http import GET_STREAM_KEY, EventCallback, EventMessage, EventStore
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skerry.errors import SkerryError
from skerry.tools.mcp.place import Place

EVENTS_MAX = 1000
EVENTS_SIZE_MAX = 32 << 20
"""Characters of all events of a session; the oldest are dropped."""
GRACE_SECONDS = 2.0
"""How much later than the protocol package a session is forgotten here, so that no request meets half of one."""


@dataclass(slots=True, eq=False)
class _Session:
    place: Place | None
    events: deque[tuple[int, str, types.JSONRPCMessage | None, int]] = field(default_factory=deque)
    """Number, stream, message (None begins a stream) and size."""
    size: int = 0
    count: int = 0
    requests: int = 0
    """How many are under way."""
    ending: asyncio.TimerHandle | None = None
    stored: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and replaced, by every event."""

    def store(self, stream: str, message: types.JSONRPCMessage | None) -> str:
        self.count += 1
        size = len(message.model_dump_json(by_alias=True, exclude_unset=True)) if message is not None else 0
        self.events.append((self.count, stream, message, size))
        self.size += size
        while len(self.events) > EVENTS_MAX or (self.size > EVENTS_SIZE_MAX and len(self.events) > 1):
            self.size -= self.events.popleft()[3]
        self.stored.set()
        self.stored = asyncio.Event()
        return str(self.count)


_current: ContextVar[_Session] = ContextVar("session")


class Events(EventStore):
    """The events of the session to which the current request belongs."""

    async def store_event(self, stream_id: str, message: types.JSONRPCMessage | None) -> str:
        return _current.get().store(stream_id, message)

    async def replay_events_after(self, last_event_id: str, send_callback: EventCallback) -> str | None:
        """Send the later events of the same stream, up to its answer, also those that are still to come.

        Handing a request's stream back to the protocol package would lose an answer that arrives just then.
        """
        session = _current.get()
        after = int(last_event_id) if last_event_id.isdecimal() and len(last_event_id) < 16 else 0
        stream = next((event[1] for event in session.events if event[0] == after), None)
        if stream is None:
            return None
        while True:
            stored = session.stored
            for number, of, message, _ in list(session.events):
                if number > after and of == stream and message is not None:
                    await send_callback(EventMessage(message, str(number)))
                    after = number
                    if isinstance(message, types.JSONRPCResponse | types.JSONRPCError):
                        return None
            if stream == GET_STREAM_KEY:
                return stream
            await stored.wait()


class McpSessions:
    """Wraps the ASGI app `app` and keeps the state of its sessions.

    With `make`, each session has an environment of its own, which is deleted with it. The newest protocol version has
    no sessions; with `make` it is refused, and clients fall back. `idle` is in seconds.
    """

    def __init__(self, app: ASGIApp, idle: float, make: Callable[[], Place] | None) -> None:
        self._app = app
        self._idle = idle
        self._make = make
        self._open: dict[bytes, _Session] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        version = headers.get(b"mcp-protocol-version", b"").decode("latin-1")
        if self._make is not None and version and version not in HANDSHAKE_PROTOCOL_VERSIONS:
            await _unsupported(version)(scope, receive, send)
            return
        key = headers.get(b"mcp-session-id")
        known = self._open.get(key) if key is not None else None
        session = known or _Session(self._make() if self._make is not None and key is None else None)

        async def note(message: Message) -> None:
            nonlocal known
            if message["type"] == "http.response.start" and key is None and message["status"] < 400:
                given = dict(message.get("headers", ())).get(b"mcp-session-id")
                if given is not None:
                    self._open[given] = known = session
            await send(message)

        _current.set(session)
        session.requests += 1
        if session.ending is not None:
            session.ending.cancel()
        try:
            await self._app(scope, receive, note)
        finally:
            session.requests -= 1
            if known is None:
                self._end(session)
            elif scope["method"] == "DELETE" and key is not None:
                self._open.pop(key, None)
                self._end(session)
            elif not session.requests:
                wait = self._idle + GRACE_SECONDS
                session.ending = asyncio.get_running_loop().call_later(wait, self._expire, session)

    def _expire(self, session: _Session) -> None:
        self._open = {key: other for key, other in self._open.items() if other is not session}
        self._end(session)

    def _end(self, session: _Session) -> None:
        if session.place is not None:
            closing = asyncio.ensure_future(_close(session.place))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Delete the environments of all sessions."""
        for session in list(self._open.values()):
            if session.ending is not None:
                session.ending.cancel()
            self._end(session)
        self._open.clear()
        await asyncio.gather(*self._closing)


def current_place() -> Place | None:
    """The environment of the session to which the current request belongs, if it has its own."""
    session = _current.get(None)
    return session.place if session is not None else None


async def _close(place: Place) -> None:
    with suppress(SkerryError):  # its lease removes it later
        await place.close()


def _unsupported(version: str) -> JSONResponse:
    data = {"supported": list(HANDSHAKE_PROTOCOL_VERSIONS), "requested": version[:100]}
    error = {
        "code": types.UNSUPPORTED_PROTOCOL_VERSION,
        "message": "each session has an environment of its own here, and this protocol version has no sessions",
        "data": data,
    }
    return JSONResponse({"jsonrpc": "2.0", "id": None, "error": error}, 400)
