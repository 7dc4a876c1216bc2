"""The asynchronous byte stream to the daemon, and what else is different between the two worlds."""

from __future__ import annotations

import asyncio

from skerry.client.wire import READ_SIZE, Wire
from skerry.errors import DaemonUnavailable

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Callable, Iterator
    from typing import ParamSpec, TypeVar

    from skerry.client.endpoint import Endpoint
    from skerry.client.tls import Tls

    P = ParamSpec("P")
    T = TypeVar("T")


class AsyncStream(Wire):
    """One connection. `send` may be called from several tasks.

    It is a plain socket driven by whatever loop is running, so it outlives a loop and closes without one.
    """

    __slots__ = ("_lock",)

    def __init__(self, sock: socket.socket, tls: Tls | None = None) -> None:
        super().__init__(sock, tls)
        sock.setblocking(False)
        self._lock = asyncio.Lock()

    @classmethod
    async def open(cls, endpoint: Endpoint, start: bool) -> AsyncStream:
        if endpoint.home is not None:  # a unix socket answers at once; starting a daemon takes its time
            try:
                return cls(*endpoint.connect(False))
            except DaemonUnavailable:
                if not start:
                    raise
        connecting = asyncio.get_running_loop().run_in_executor(None, endpoint.connect, start)
        try:
            return cls(*await asyncio.shield(connecting))
        except asyncio.CancelledError:
            # The thread cannot be stopped: what it connects is closed when it comes.
            connecting.add_done_callback(_discard)
            raise

    async def recv(self, timeout: float | None = None) -> bytes:
        """What has arrived; empty at the end. Raises TimeoutError, ConnectionError."""
        if timeout is None:
            return await self._recv()
        async with asyncio.timeout(timeout):
            return await self._recv()

    async def _recv(self) -> bytes:
        loop = asyncio.get_running_loop()
        data = b"" if self.ended else None
        while data is None:
            data = self.unseal(await loop.sock_recv(self.sock, READ_SIZE))
        return data

    async def send(self, data: bytes) -> None:
        """Send it all. Raises ConnectionError. Canceled halfway it closes, for half a message is none."""
        async with self._lock:
            data = self.seal(data)
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


def _discard(connecting: asyncio.Future[tuple[socket.socket, Tls | None]]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result()[0].close()


async def blocking(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run something that waits for the disk, in a thread."""
    return await asyncio.to_thread(function, *args, **kwargs)


async def blocking_iterator(iterator: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Iterate, in a thread, over something that waits for the disk."""
    while (data := await asyncio.to_thread(next, iterator, None)) is not None:
        yield data
