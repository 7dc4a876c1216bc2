"""The server of a home, behind its doors: one daemon, however many try."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import uvicorn

from skerry.daemon.connections import Http, Patience, Porter, WebSocket
from skerry.daemon.doors import Door, Listener
from skerry.errors import Conflict, PlatformError
from skerry.settings import Home

LOCK_SECONDS = 20.0
GRACE_SECONDS = 5


class Server(uvicorn.Server):
    """uvicorn with doors of our own, without its signal handlers and tick.

    `ready` is called when it serves; `stop()` ends it, and closes the doors.
    """

    def __init__(
        self, app: Any, doors: Sequence[Door], ready: Callable[[], None], patience: Patience | None = None
    ) -> None:
        self._patience = patience or Patience()
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
                timeout_keep_alive=self._patience.idle,  # type: ignore[arg-type]
                timeout_graceful_shutdown=GRACE_SECONDS,
                # A peer that died is noticed by the failing write; one that reads slowly may take its time.
                ws_ping_interval=5.0,
                ws_ping_timeout=None,
                ws_per_message_deflate=False,
            )
        )
        self._doors = doors
        self._listeners: list[Listener] = []
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

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.servers = []
        self._listeners = [Listener(door, self._connection, self._patience) for door in self._doors]
        self.started = True

    def close_doors(self) -> None:
        """Take no more connections. Those that are open stay until the end: what comes there is answered."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.close_doors()
        await super().shutdown(sockets)

    def _connection(self, porter: Porter) -> Http:
        loop = asyncio.get_running_loop()
        return Http(porter, self._patience, self.config, self.server_state, loop)

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
    try:
        # The name gets the mode that the socket has. A umask would be the whole process's, whose threads make files.
        os.fchmod(sock.fileno(), 0o600)
        sock.bind(home.socket)
    except BaseException:
        sock.close()
        raise
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
