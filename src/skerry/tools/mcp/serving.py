"""The two ways in: standard input and output, and streamable HTTP on this machine."""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from mcp.server.stdio import stdio_server
from mcp.server.transport_security import TransportSecuritySettings
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from skerry.errors import InvalidRequest
from skerry.tools.mcp.place import Place
from skerry.tools.mcp.server import make_server
from skerry.tools.mcp.sessions import Events, McpSessions

TOKEN = "SKERRY_MCP_TOKEN"  # noqa: S105 (a name)
SESSION_IDLE = 1800.0
SESSIONS_MAX = 100
_LOOPBACK = {"127.0.0.1": socket.AF_INET, "localhost": socket.AF_INET, "::1": socket.AF_INET6}


async def serve_stdio(place: Place) -> None:
    """Until the client closes our standard input, or a signal asks us to end."""
    leaving: list[asyncio.Task[None]] = []

    async def leave() -> None:
        try:
            await place.close()
        finally:
            os._exit(0)  # the thread that reads standard input could not be ended otherwise

    _on_signals(lambda: leaving.append(asyncio.ensure_future(leave())))
    server = make_server(place)
    try:
        async with stdio_server() as (reading, writing):
            await server.run(reading, writing, server.create_initialization_options())
    finally:
        await place.close()


async def serve_http(
    place: Place, listen: str, make: Callable[[], Place] | None = None, idle: float = SESSION_IDLE
) -> None:
    """Until a signal asks us to end. Clients need the token, which is said on standard error unless it was given.

    With `make`, each session has an environment of its own. A session ends `idle` seconds after its last request.
    Raises InvalidRequest for an address that others could reach, OSError for one that is taken.
    """
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    if host not in _LOOPBACK or not port.isdecimal():
        raise InvalidRequest(
            f"--listen {listen!r} is no address of this machine alone", hint="127.0.0.1:PORT; port 0 for any"
        )
    given = os.environ.get(TOKEN, "")
    token = given or secrets.token_urlsafe(32)
    with socket.create_server((host, int(port)), family=_LOOPBACK[host]) as listener:
        number = listener.getsockname()[1]
        names = [f"{name}:{number}" for name in ("127.0.0.1", "localhost", "[::1]")]
        security = TransportSecuritySettings(
            allowed_hosts=names, allowed_origins=[f"http://{name}" for name in names]
        )
        app = make_server(place).streamable_http_app(
            transport_security=security,
            event_store=Events(),
            session_idle_timeout=idle,
            max_sessions=SESSIONS_MAX,
        )
        sessions = McpSessions(app, idle, make)
        config = uvicorn.Config(
            _Guarded(sessions, token), log_level="warning", timeout_graceful_shutdown=3, ws="none"
        )
        server = _Server(config)
        _on_signals(server.leave)
        shown = f"[{host}]" if ":" in host else host
        _say(f"listening on http://{shown}:{number}/mcp")
        if not given:
            _say(f"clients send: Authorization: Bearer {token}")
        try:
            await server.serve(sockets=[listener])
        finally:
            await sessions.close()
            await place.close()


class _Guarded:
    """Lets in who knows the token: every user of this machine can connect to its loopback."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._token):
                refusal = PlainTextResponse("a token is needed", 401, {"www-authenticate": "Bearer"})
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _Server(uvicorn.Server):
    def leave(self) -> None:
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Uvicorn would repeat a signal after its end, and so kill us before the environment is deleted."""
        yield


def _on_signals(act: Callable[[], object]) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, act)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
