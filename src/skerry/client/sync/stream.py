"""The blocking byte stream to the daemon, and what else is different between the two worlds."""

from __future__ import annotations

from _thread import allocate_lock

from skerry.client.wire import READ_SIZE, Wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator
    from typing import ParamSpec, TypeVar

    from skerry.client.endpoint import Endpoint
    from skerry.client.tls import Tls

    P = ParamSpec("P")
    T = TypeVar("T")


class Stream(Wire):
    """One connection. `send` may be called from several threads."""

    __slots__ = ("_lock",)

    def __init__(self, sock: socket.socket, tls: Tls | None = None) -> None:
        super().__init__(sock, tls)
        self._lock = allocate_lock()

    @classmethod
    def open(cls, endpoint: Endpoint, start: bool) -> Stream:
        return cls(*endpoint.connect(start))

    def recv(self, timeout: float | None = None) -> bytes:
        """What has arrived; empty at the end. Raises TimeoutError, ConnectionError."""
        if timeout is None:
            return self._recv()
        self.sock.settimeout(max(timeout, 1e-6))
        try:
            return self._recv()
        finally:
            self.sock.settimeout(None)

    def _recv(self) -> bytes:
        data = b"" if self.ended else None
        while data is None:
            data = self.unseal(self.sock.recv(READ_SIZE))
        return data

    def send(self, data: bytes) -> None:
        """Send it all. Raises ConnectionError."""
        with self._lock:
            data = self.seal(data)
            sent = self.sock.send(data)
            self.written += sent
            if sent < len(data):
                self.sock.sendall(memoryview(data)[sent:])


def blocking(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run something that waits for the disk."""
    return function(*args, **kwargs)


def blocking_iterator(iterator: Iterator[bytes]) -> Iterator[bytes]:
    """Iterate over something that waits for the disk."""
    return iterator
