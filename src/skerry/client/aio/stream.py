"""The asynchronous byte stream to the daemon, and what else is different between the two worlds."""

from __future__ import annotations

import asyncio
import socket

from skerry.client import autostart
from skerry.errors import DaemonUnavailable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from typing import ParamSpec, TypeVar

    from skerry.settings import Home

    P = ParamSpec("P")
    T = TypeVar("T")

READ_SIZE = 64 << 10


class AsyncStream:
    """One connection. Closed when it is dropped; `send` may be called from several tasks.

    It is a plain socket driven by whatever loop is running, so it outlives a loop and closes without one.
    """

    __slots__ = ("_lock", "sock", "written")

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.written = 0
        """Bytes that the kernel took: when a send fails, this tells whether anything went out."""
        self._lock = asyncio.Lock()

    @classmethod
    async def open(cls, home: Home, start: bool) -> AsyncStream:
        try:
            return cls(autostart.connect(home, start=False))
        except DaemonUnavailable:
            if not start:
                raise
        return cls(await asyncio.to_thread(autostart.connect, home))

    async def recv(self, timeout: float | None = None) -> bytes:
        """What has arrived; empty at the end. Raises TimeoutError, ConnectionError."""
        loop = asyncio.get_running_loop()
        if timeout is None:
            return await loop.sock_recv(self.sock, READ_SIZE)
        async with asyncio.timeout(timeout):
            return await loop.sock_recv(self.sock, READ_SIZE)

    async def send(self, data: bytes) -> None:
        """Send it all. Raises ConnectionError. Canceled halfway it closes, for half a message is none."""
        async with self._lock:
            try:
                sent = self.sock.send(data)
            except BlockingIOError:
                sent = 0
            self.written += sent
            if sent < len(data):
                try:
                    await asyncio.get_running_loop().sock_sendall(self.sock, memoryview(data)[sent:])
                except asyncio.CancelledError:
                    self.close()
                    raise

    def stale(self) -> bool:
        """Whether an idle connection has been closed by the other side (or got bytes nobody asked for)."""
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def shutdown(self) -> None:
        """End it for whoever is waiting in `recv`, who then closes it."""
        try:  # noqa: SIM105 (contextlib is not worth its time at the start of the CLI)
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        self.sock.close()

    def __del__(self) -> None:
        self.close()


async def blocking(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run something that waits for the disk, in a thread."""
    return await asyncio.to_thread(function, *args, **kwargs)


async def blocking_iterator(iterator: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Iterate, in a thread, over something that waits for the disk."""
    while (data := await asyncio.to_thread(next, iterator, None)) is not None:
        yield data
