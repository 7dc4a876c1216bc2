"""The blocking byte stream to the daemon, and what else is different between the two worlds."""

from __future__ import annotations

import socket
from _thread import allocate_lock

from skerry.client import autostart

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import ParamSpec, TypeVar

    from skerry.settings import Home

    P = ParamSpec("P")
    T = TypeVar("T")

READ_SIZE = 64 << 10


class Stream:
    """One connection. Closed when it is dropped; `send` may be called from several threads."""

    __slots__ = ("_lock", "sock", "written")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.written = 0
        """Bytes that the kernel took: when a send fails, this tells whether anything went out."""
        self._lock = allocate_lock()

    @classmethod
    def open(cls, home: Home, start: bool) -> Stream:
        return cls(autostart.connect(home, start=start))

    def recv(self, timeout: float | None = None) -> bytes:
        """What has arrived; empty at the end. Raises TimeoutError, ConnectionError."""
        if timeout is None:
            return self.sock.recv(READ_SIZE)
        self.sock.settimeout(max(timeout, 1e-6))
        try:
            return self.sock.recv(READ_SIZE)
        finally:
            self.sock.settimeout(None)

    def send(self, data: bytes) -> None:
        """Send it all. Raises ConnectionError."""
        with self._lock:
            sent = self.sock.send(data)
            self.written += sent
            if sent < len(data):
                self.sock.sendall(memoryview(data)[sent:])

    def stale(self) -> bool:
        """Whether an idle connection has been closed by the other side (or got bytes nobody asked for)."""
        try:
            self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
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


def blocking(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run something that waits for the disk."""
    return function(*args, **kwargs)


def blocking_iterator(iterator: Iterator[bytes]) -> Iterator[bytes]:
    """Iterate over something that waits for the disk."""
    return iterator
