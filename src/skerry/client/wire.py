"""One connection to a daemon: a socket, with or without TLS. The sync and async streams derive from it."""

from __future__ import annotations

import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from skerry.client.tls import Tls

READ_SIZE = 64 << 10


class Wire:
    """Closes its socket when garbage-collected."""

    __slots__ = ("sock", "tls", "written")

    def __init__(self, sock: socket.socket, tls: Tls | None = None) -> None:
        self.sock = sock
        self.tls = tls
        self.written = 0
        """Bytes that the kernel accepted: after a failed send, shows whether anything was sent."""

    def seal(self, data: bytes) -> bytes:
        """Encrypt, if TLS is used. Raises ConnectionError."""
        return data if self.tls is None else self.tls.seal(data)

    def unseal(self, data: bytes) -> bytes | None:
        """Decrypt, if TLS is used: None while no whole record is there, empty at the end. Raises ConnectionError."""
        return data if self.tls is None else self.tls.unseal(data)

    @property
    def ended(self) -> bool:
        """True if the peer ended the TLS session: no more data follows, though the socket stays silent."""
        return self.tls is not None and self.tls.ended

    def stale(self) -> bool:
        """Whether an idle connection was closed by the peer, or received unexpected bytes."""
        try:
            if self.tls is None:
                self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
                return True
            if self.tls.ended:
                return True
            # TLS session tickets may arrive at any time; they do not make it stale.
            while self.tls.unseal(self.sock.recv(READ_SIZE, socket.MSG_DONTWAIT)) is None:
                pass
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def shutdown(self) -> None:
        """Wake up the thread that waits in `recv`, which then closes the connection."""
        try:  # noqa: SIM105 (contextlib is not worth its time at the start of the CLI)
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        self.sock.close()

    def __del__(self) -> None:
        self.close()
