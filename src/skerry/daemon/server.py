"""The server of a home, behind its doors: one daemon, however many try."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Sequence

import structlog
from starlette.types import ASGIApp

from skerry.daemon.doors import Door, Listener
from skerry.daemon.http1.protocol import Activity, Admission, HttpProtocol, Timeouts
from skerry.errors import Conflict, PlatformError
from skerry.settings import Home

LOCK_SECONDS = 20.0
GRACE_SECONDS = 5.0
CANCEL_SECONDS = 1.0

log = structlog.get_logger(component="daemon")


class Server:
    """Serves an application at its doors, from `start()` to `stop()`."""

    def __init__(self, app: ASGIApp, doors: Sequence[Door], timeouts: Timeouts | None = None) -> None:
        self._app = app
        self._doors = doors
        self._timeouts = timeouts or Timeouts()
        self._listeners: list[Listener] = []
        self.activity = Activity()

    @property
    def busy(self) -> bool:
        """True while a request or a stream is under way."""
        return bool(self.activity.tasks)

    @property
    def served(self) -> int:
        """Responses that were completed."""
        return self.activity.served

    def start(self) -> None:
        self._listeners = [Listener(door, self._connection, self._timeouts) for door in self._doors]

    def close_doors(self) -> None:
        """Take no more connections. Requests on those that are open are answered until `stop()`."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    async def stop(self) -> None:
        """Close idle connections, wait GRACE_SECONDS for requests under way, then cancel them."""
        self.close_doors()
        for connection in list(self.activity.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_SECONDS):
                while self.activity.connections or self.activity.tasks:
                    self.activity.ended.clear()
                    await self.activity.ended.wait()
        for connection in list(self.activity.connections):
            connection.transport.abort()
        if tasks := tuple(self.activity.tasks):
            log.warning("requests are canceled: the daemon stops", requests=len(tasks))
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=CANCEL_SECONDS)

    def _connection(self, admission: Admission) -> HttpProtocol:
        return HttpProtocol(self._app, admission, self._timeouts, self.activity)


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
