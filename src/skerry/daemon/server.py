"""The server on its unix socket: one daemon a home, and no strangers."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import struct
import time
from asyncio import BaseTransport, Transport
from collections.abc import Callable, Iterator
from typing import Any, cast

import structlog
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from skerry.daemon.http.answers import problem
from skerry.daemon.http.attach import LOST
from skerry.daemon.peers import CUT, PEER, Peer
from skerry.errors import Conflict, Denied, InvalidRequest, PlatformError
from skerry.settings import Home

LOCK_SECONDS = 20.0
KEEP_ALIVE = 300
GRACE_SECONDS = 5

log = structlog.get_logger(component="daemon")


class Http(HttpToolsProtocol):
    """Serves processes of our own user and of root; all others get 403 for whatever they ask."""

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(cast(Transport, transport))
        uid = peer_uid(self.transport)
        self.app_state = {
            **self.app_state,
            PEER: Peer(f"uid {uid}", trusted=True),
            CUT: self.transport.abort,
        }
        if uid not in (os.geteuid(), 0):
            log.warning("foreign peer refused", uid=uid)
            self.app = _refuse
            self.ws_protocol_class = None

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is answered as every other mistake."""
        answer = problem(InvalidRequest(msg))
        head = b"".join(b"%s: %s\r\n" % pair for pair in answer.raw_headers)
        self.transport.write(
            b"HTTP/1.1 400 Bad Request\r\n" + head + b"connection: close\r\n\r\n" + answer.body
        )
        self.transport.close()


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    error = Denied("this daemon belongs to another user", hint="set SKERRY_HOME to your own")
    answer = problem(error)
    answer.headers["connection"] = "close"
    await answer(scope, receive, send)


class WebSocket(WebSocketsSansIOProtocol):
    """Tells the application when the connection is lost, even while the application does not read from it."""

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)
        self._lost: asyncio.Future[None] = self.loop.create_future()
        self.app_state = {**self.app_state, LOST: self._lost}

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if not self._lost.done():
            self._lost.set_result(None)


def peer_uid(transport: Transport) -> int:
    """The user at the other end, as the kernel knows it."""
    credentials = transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, uid, _ = struct.unpack("3i", credentials)
    return int(uid)


class Server(uvicorn.Server):
    """uvicorn without its signal handlers and tick. `ready` is called when it serves; `stop()` ends it."""

    def __init__(self, app: Any, ready: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Http,
                ws=WebSocket,
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=GRACE_SECONDS,
                # A peer that died is noticed by the failing write; one that reads slowly may take its time.
                ws_ping_interval=5.0,
                ws_ping_timeout=None,
                ws_per_message_deflate=False,
            )
        )
        self._ready = ready
        self._stopping = asyncio.Event()

    @property
    def busy(self) -> bool:
        """Whether a request or a stream is under way."""
        return bool(self.server_state.tasks)

    @property
    def served(self) -> int:
        return self.server_state.total_requests

    def stop(self) -> None:
        self._stopping.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        self._ready()
        await self._stopping.wait()


def take_lock(home: Home) -> int:
    """Become the daemon of this home, for as long as the descriptor is open.

    An earlier one that is on its way out is waited for. Raises Conflict when one is at work, PlatformError.
    """
    fd = os.open(f"{home.path}/daemon.pid", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(fd, 32, 0).decode(errors="replace").strip()
            if _answers(home.socket):
                os.close(fd)
                raise Conflict(f"a daemon is running for {home.path} already (pid {pid})") from None
            if time.monotonic() > deadline:
                os.close(fd)
                raise PlatformError(f"the daemon with pid {pid} neither serves nor ends") from None
            time.sleep(0.02)
        else:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            return fd


def listen(home: Home) -> socket.socket:
    """The listening socket, for our own user alone. To be called with the lock in hand. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(home.socket)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    mask = os.umask(0o177)
    try:
        sock.bind(home.socket)
    except BaseException:
        sock.close()
        raise
    finally:
        os.umask(mask)
    sock.listen(1024)
    return sock


def unlisten(home: Home) -> None:
    """From here on clients find no daemon and start the next, which waits for our lock."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(home.socket)


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
        return True
