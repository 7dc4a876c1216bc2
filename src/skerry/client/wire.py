"""One connection to a daemon: a socket, and the TLS on it if there is any. Both worlds build their stream on it."""

from __future__ import annotations

import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from skerry.client.tls import Tls

READ_SIZE = 64 << 10


class Wire:
    """Closed when it is dropped."""

    __slots__ = ("sock", "tls", "written")

    def __init__(self, sock: socket.socket, tls: Tls | None = None) -> None:
        self.sock = sock
        self.tls = tls
        self.written = 0
        """Bytes that the kernel took: when a send fails, this tells whether anything went out."""

    def seal(self, data: bytes) -> bytes:
        """What must go over the socket for this to be said. Raises ConnectionError."""
        return data if self.tls is None else self.tls.seal(data)

    def unseal(self, data: bytes) -> bytes | None:
        """What has been said with the bytes that came over the socket: None when they are no whole record yet,
        empty at the end. Raises ConnectionError.
        """
        return data if self.tls is None else self.tls.unseal(data)

    @property
    def ended(self) -> bool:
        """Nothing more will come, and nothing that the socket does will tell."""
        return self.tls is not None and self.tls.ended

    def stale(self) -> bool:
        """Whether an idle connection has been closed by the other side (or got bytes nobody asked for)."""
        try:
            if self.tls is None:
                self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
                return True
            if self.tls.ended:
                return True
            # TLS has things of its own to say (tickets for the next session), which end nothing.
            while self.tls.unseal(self.sock.recv(READ_SIZE, socket.MSG_DONTWAIT)) is None:
                pass
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
