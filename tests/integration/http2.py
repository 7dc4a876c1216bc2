"""A client of HTTP/2 that sends what no library would: calls that are half sent, and as many as fit."""

from __future__ import annotations

import select
import socket
import struct
from types import TracebackType
from typing import Self

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1
INITIAL_WINDOW = 4
FRAME_MAX = 16384
SECONDS = 20.0


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def message(size: int, data: bytes = b"", *, compressed: bool = False) -> bytes:
    """The prefix of gRPC for a message of this size, and what there is of it."""
    return bytes((compressed,)) + size.to_bytes(4, "big") + data


class Connection:
    """`ended` are the streams whose answer is complete."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._sock = socket.create_connection((host, int(port)), timeout=SECONDS)
        self._received = b""
        self._windows: dict[int, int] = {0: 65535}
        self._initial = 65535
        self._last = -1
        self.ended: set[int] = set()
        self._sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0))

    def __enter__(self) -> Self:
        self.receive()  # its settings
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sock.close()

    def call(self, path: str, **headers: str) -> int:
        """Begin a call; nothing of its message is sent."""
        self._last += 2
        pairs = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "localhost"}
        pairs |= {"te": "trailers", "content-type": "application/grpc"}
        pairs |= {name.replace("_", "-"): value for name, value in headers.items()}
        block = b"".join(b"\0" + _text(name) + _text(value) for name, value in pairs.items())
        self._sock.sendall(frame(HEADERS, END_HEADERS, self._last, block))
        self._windows[self._last] = self._initial
        return self._last

    def send(self, stream: int, data: bytes, *, last: bool = False) -> int:
        """As much as flow control allows; how much that was."""
        sent = 0
        while sent < len(data) and stream not in self.ended:
            size = min(self._windows[0], self._windows[stream], FRAME_MAX, len(data) - sent)
            if size <= 0:
                break
            end = END_STREAM if last and sent + size == len(data) else 0
            self._sock.sendall(frame(DATA, end, stream, data[sent : sent + size]))
            self._windows[0] -= size
            self._windows[stream] -= size
            sent += size
        return sent

    def pump(self, seconds: float) -> bool:
        """Take in what there is, or comes within `seconds`; False if nothing came."""
        came = False
        while select.select([self._sock], [], [], 0 if came else seconds)[0]:
            self.receive()
            came = True
        return came

    def wait(self, *streams: int) -> None:
        """Until all of these have ended."""
        while not self.ended.issuperset(streams):
            self.receive()

    def receive(self) -> None:
        data = self._sock.recv(1 << 16)
        if not data:
            raise ConnectionError("the server closed the connection")
        self._received += data
        while len(self._received) >= 9:
            size = int.from_bytes(self._received[:3], "big")
            if len(self._received) < 9 + size:
                return
            kind, flags = self._received[3], self._received[4]
            stream = int.from_bytes(self._received[5:9], "big")
            self._take(kind, flags, stream, self._received[9 : 9 + size])
            self._received = self._received[9 + size :]

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            for name, value in struct.iter_unpack(">HI", payload):
                if name == INITIAL_WINDOW:
                    for known in self._windows:
                        self._windows[known] += value - self._initial if known else 0
                    self._initial = value
            self._sock.sendall(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self._sock.sendall(frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE:
            self._windows[stream] = self._windows.get(stream, 0) + int.from_bytes(payload, "big")
        elif kind == GOAWAY:
            raise ConnectionError(f"the server goes away: {payload[8:]!r}")
        elif kind == RST_STREAM or (kind in (HEADERS, DATA) and flags & END_STREAM):
            self.ended.add(stream)


def _text(text: str) -> bytes:
    """A string of HPACK, without Huffman's code."""
    data = text.encode()
    left = len(data) - 127
    if left < 0:
        return bytes((len(data),)) + data
    length = bytearray((127,))
    while left >= 128:
        length.append(left & 127 | 128)
        left >>= 7
    length.append(left)
    return bytes(length) + data
