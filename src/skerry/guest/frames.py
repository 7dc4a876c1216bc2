"""The bytes of the guest protocol: native/skerry.h says the same in C.

A frame is a u32 length of what follows, a u8 type, a u32 id and a payload of at most PAYLOAD_MAX bytes; all
integers are little endian. Ids are chosen by the host: one for each execution and for each request. Requests
carry fields: u8 tag, u32 length, bytes.

What comes from the guest is hostile input: the parser takes nothing larger than it must, believes no length
before checking it, and raises ProtocolError on the first thing that makes no sense.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

VERSION = 1
PAYLOAD_MAX = 128 * 1024
HEADER = struct.Struct("<IBI")
WINDOW = 256 * 1024
"""Bytes of output of one stream that may be under way: what a slow reader can cost the daemon."""


class ProtocolError(Exception):
    """The other side broke the protocol; the stream cannot be used any further."""


class Type(IntEnum):
    HELLO = 1
    START = 2
    STDIN = 3
    CREDIT = 4
    SIGNAL = 5
    KILL = 6
    RESIZE = 7
    LIST = 8
    ATTACH = 9
    FORGET = 10
    PING = 11
    SHUTDOWN = 12
    NETWORK = 13
    STAY = 14
    FILE_READ = 20
    FILE_WRITE = 21
    FILE_STAT = 22
    FILE_MKDIR = 23
    FILE_RENAME = 24
    FILE_REMOVE = 25
    HELLO_REPLY = 101
    STARTED = 102
    OUTPUT = 103
    STDIN_CREDIT = 104
    EXIT = 105
    PONG = 106
    RESULT = 107
    ERROR = 108
    KILLED = 109


FROM_GUEST = frozenset(range(Type.HELLO_REPLY, Type.KILLED + 1))


class Tag(IntEnum):
    ARG = 1
    ENV = 2
    CWD = 3
    USER = 4
    FLAGS = 5
    WINSIZE = 6
    LIMIT = 7
    SHELL = 8
    COMMAND = 9
    APPLET = 10
    CREDIT = 12
    PROFILE = 13
    FILTER = 14
    ACCESS = 15
    RULE = 16
    PATH = 20
    PATH2 = 21
    OFFSET = 22
    LENGTH = 23
    DATA = 24
    HANDLE = 25


class Flag(IntEnum):
    STDIN = 1
    PTY = 2
    KEEP = 4
    TRUNCATE = 8
    PARENTS = 16
    REPLIES = 32
    COMMIT = 64
    ABORT = 128


class Frame(NamedTuple):
    type: int
    id: int
    payload: bytes


def encode(type_: int, id_: int, payload: bytes = b"") -> bytes:
    """One frame. Raises ProtocolError for a payload that does not fit."""
    if len(payload) > PAYLOAD_MAX:
        raise ProtocolError(f"a payload of {len(payload)} bytes does not fit into a frame")
    return HEADER.pack(len(payload) + 5, type_, id_) + payload


def field(tag: int, data: bytes) -> bytes:
    return struct.pack("<BI", tag, len(data)) + data


class Parser:
    """Frames out of a stream that arrives in pieces. Holds the last piece and at most one incomplete frame."""

    __slots__ = ("_buffer", "_wanted")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._wanted = 0
        """Bytes that the buffer must hold before it is worth a look."""

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that `data` completes, one by one; all of them are to be taken before the next call.

        Raises ProtocolError; the parser is useless afterwards.
        """
        buffer = self._buffer
        if buffer:
            buffer += data
            if len(buffer) < self._wanted:
                return
            data = bytes(buffer)
            buffer.clear()
        at, end = 0, len(data)
        self._wanted = HEADER.size
        while end - at >= HEADER.size:
            length, type_, id_ = HEADER.unpack_from(data, at)
            if not 5 <= length <= PAYLOAD_MAX + 5:
                raise ProtocolError(f"a frame of {length} bytes")
            if type_ not in FROM_GUEST:
                raise ProtocolError(f"a frame of type {type_}")
            if end - at < length + 4:
                self._wanted = length + 4
                break
            yield Frame(type_, id_, data[at + 9 : at + 4 + length])
            at += length + 4
        buffer += data[at:]
