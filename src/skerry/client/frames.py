"""WebSocket frames (RFC 6455, client side, no extensions) as bytes. No I/O."""

from __future__ import annotations

import os

from skerry.client.http1 import Malformed

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
MESSAGE_MAX = 16 << 20

# The nonce protects from caching proxies that replay a handshake. There are none on a unix socket, on loopback or
# inside TLS, so a fixed pair (the RFC's example) is as good, without loading hashlib.
KEY = "dGhlIHNhbXBsZSBub25jZQ=="
ACCEPT = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="

HANDSHAKE = (
    ("upgrade", "websocket"),
    ("connection", "Upgrade"),
    ("sec-websocket-key", KEY),
    ("sec-websocket-version", "13"),
)


def frame(opcode: int, payload: bytes) -> bytes:
    """One final frame, masked as a client must."""
    size = len(payload)
    if size < 126:
        head = bytes((0x80 | opcode, 0x80 | size))
    elif size < 1 << 16:
        head = bytes((0x80 | opcode, 0xFE)) + size.to_bytes(2, "big")
    else:
        head = bytes((0x80 | opcode, 0xFF)) + size.to_bytes(8, "big")
    mask = os.urandom(4)
    key = int.from_bytes((mask * (size // 4 + 1))[:size], "little")
    return head + mask + (int.from_bytes(payload, "little") ^ key).to_bytes(size, "little")


def message(content: str | bytes) -> bytes:
    """A text message from str, a binary one from bytes."""
    if isinstance(content, str):
        return frame(TEXT, content.encode())
    return frame(BINARY, content)


class FrameParser:
    """Parses what the server sends into whole messages and control frames."""

    __slots__ = ("_buffer", "_opcode", "_parts", "_size")

    def __init__(self, data: bytes = b"") -> None:
        self._buffer = bytearray(data)
        self._opcode = 0
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> tuple[int, bytes] | None:
        """(opcode, payload) of the next message or control frame; None when more bytes are needed.

        Raises Malformed.
        """
        while True:
            got = self._next_frame()
            if got is None:
                return None
            final, opcode, payload = got
            if opcode >= CLOSE:
                return opcode, payload
            if (opcode == CONTINUATION) != bool(self._opcode):
                raise Malformed("the daemon sent message fragments out of order")
            self._opcode = self._opcode or opcode
            self._parts.append(payload)
            self._size += len(payload)
            if self._size > MESSAGE_MAX:
                raise Malformed(f"the daemon sent a message of more than {MESSAGE_MAX} bytes")
            if final:
                whole = self._opcode, payload if len(self._parts) == 1 else b"".join(self._parts)
                self._opcode, self._parts, self._size = 0, [], 0
                return whole

    def _next_frame(self) -> tuple[bool, int, bytes] | None:
        buffer = self._buffer
        if len(buffer) < 2:
            return None
        final, opcode, size, start = bool(buffer[0] & 0x80), buffer[0] & 0x0F, buffer[1], 2
        if buffer[0] & 0x70 or opcode not in (CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG):
            raise Malformed("the daemon sent a WebSocket frame of an unknown kind")
        if size & 0x80:
            raise Malformed("the daemon sent a masked WebSocket frame")
        if opcode >= CLOSE and (size > 125 or not final):
            raise Malformed("the daemon sent a control frame that is too long or in fragments")
        if size >= 126:
            start = 4 if size == 126 else 10
            if len(buffer) < start:
                return None
            size = int.from_bytes(buffer[2:start], "big")
        if size > MESSAGE_MAX:
            raise Malformed(f"the daemon sent a frame of more than {MESSAGE_MAX} bytes")
        if len(buffer) < start + size:
            return None
        payload = bytes(memoryview(buffer)[start : start + size])
        del buffer[: start + size]
        return final, opcode, payload
