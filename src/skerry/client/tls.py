"""TLS as bytes; the streams own the socket. Loaded only for https URLs."""

from __future__ import annotations

import ssl
from _thread import allocate_lock

from skerry.errors import InvalidRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

READ_SIZE = 64 << 10


def make_context(ca: str) -> ssl.SSLContext:
    """A context that trusts the certificates in the file `ca`, or the system's. Raises InvalidRequest."""
    try:
        context = ssl.create_default_context(cafile=ca or None)
    except OSError as error:  # an SSLError is one
        raise InvalidRequest(
            f"cannot read the CA certificates in {ca}: {error.strerror or 'no certificate in PEM form'}",
            hint="SKERRY_CA, or `ca` of a context, names a file of certificates",
        ) from error
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.options &= ~ssl.OP_IGNORE_UNEXPECTED_EOF
    return context


class Tls:
    """One TLS session. Thread-safe; only `handshake` blocks."""

    __slots__ = ("_incoming", "_lock", "_object", "_outgoing", "ended")

    def __init__(self, context: ssl.SSLContext, host: str) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        self._lock = allocate_lock()
        self.ended = False
        """The peer has ended the session: no more data follows."""

    def handshake(self, sock: socket.socket) -> None:
        """Raises OSError, of which ssl.SSLCertVerificationError is one."""
        while True:
            try:
                self._object.do_handshake()
            except ssl.SSLWantReadError:
                sock.sendall(self._outgoing.read())
                data = sock.recv(READ_SIZE)
                if not data:
                    raise ConnectionResetError("the connection was closed") from None
                self._incoming.write(data)
            else:
                sock.sendall(self._outgoing.read())
                return

    def seal(self, data: bytes) -> bytes:
        """The data as TLS records. Raises ConnectionError."""
        rest = memoryview(data)
        with self._lock:
            try:
                while rest:
                    rest = rest[self._object.write(rest) :]
            except ssl.SSLError as error:
                raise ConnectionAbortedError(f"TLS failed: {error.reason}") from error
            return self._outgoing.read()

    def unseal(self, data: bytes) -> bytes | None:
        """The decrypted data; None while no whole record is there, empty when the peer has ended the session.

        Empty `data` means the connection was closed. Raises ConnectionError, also if it was closed without an end
        of the session: the stream may have been truncated by an attacker.
        """
        parts: list[bytes] = []
        with self._lock:
            if data:
                self._incoming.write(data)
            else:
                self._incoming.write_eof()
            try:
                while part := self._object.read(READ_SIZE):
                    parts.append(part)
                self.ended = True
            except ssl.SSLWantReadError:
                return b"".join(parts) or None
            except ssl.SSLError as error:
                if not parts:
                    raise ConnectionResetError(f"TLS failed: {error.reason}") from error
            return b"".join(parts)
