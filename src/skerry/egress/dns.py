"""DNS messages: questions as they come from an environment, and the few answers that they get (RFC 1035, 8914)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from ipaddress import IPv4Address

A, OPT = 1, 41
NO_ERROR, FORMAT_ERROR, SERVER_FAILURE, NO_SUCH_NAME, NOT_IMPLEMENTED = range(5)
TTL = 10
"""Seconds for which an answer may be kept: what is allowed can change."""
BLOCKED = 15
TEXT_MAX = 200
"""With the longest name the answer has at most 512 bytes, which everybody takes."""
_NAME_MAX = 255

_INTERNET = 1
_HEADER = struct.Struct(">HHHHHH")


@dataclass(frozen=True, slots=True)
class Question:
    id: int
    flags: int
    raw: bytes
    """As it was asked."""
    name: str
    kind: int
    extended: bool
    """Whether the asker understands EDNS, and so the reason of a refusal."""


def parse(packet: bytes) -> Question | None:
    """None for what is no question, or none that anybody would ask: see `broken()`."""
    if len(packet) < _HEADER.size:
        return None
    id, flags, questions, answers, authorities, additional = _HEADER.unpack_from(packet)
    if flags & 0xF800 or questions != 1 or answers or authorities or additional > 1:
        return None
    labels: list[str] = []
    at = _HEADER.size
    while True:
        if at >= len(packet) or packet[at] > 63 or at >= _HEADER.size + _NAME_MAX:
            return None  # a pointer has nothing to point to in a question
        length = packet[at]
        label = packet[at + 1 : at + 1 + length]
        at += 1 + length
        if not length:
            break
        if len(label) < length or b"." in label or not label.isascii():
            return None
        labels.append(label.decode("ascii"))
    if len(packet) < at + 4:
        return None
    kind, of = struct.unpack_from(">HH", packet, at)
    if of != _INTERNET:
        return None
    at += 4
    extended = additional == 1 and packet[at : at + 3] == struct.pack(">BH", 0, OPT)
    return Question(id, flags, packet[_HEADER.size : at], ".".join(labels), kind, extended)


def broken(packet: bytes) -> bytes | None:
    """The answer to what `parse()` does not take; None when there must be none."""
    if len(packet) < _HEADER.size:
        return None
    id, flags = _HEADER.unpack_from(packet)[:2]
    if flags & 0x8000:
        return None  # answers to answers would have no end
    code = NOT_IMPLEMENTED if flags & 0x7800 else FORMAT_ERROR
    return _HEADER.pack(id, 0x8080 | flags & 0x7900 | code, 0, 0, 0, 0)


def answer(question: Question, code: int, address: IPv4Address | None = None, reason: str = "") -> bytes:
    """The answer to a question: an address, nothing, or a refusal and its reason."""
    parts = [question.raw]
    if address is not None:
        parts.append(struct.pack(">HHHIH", 0xC00C, A, _INTERNET, TTL, 4) + address.packed)
    if question.extended:
        option = b""
        if reason:
            text = struct.pack(">H", BLOCKED) + reason.encode()[:TEXT_MAX]
            option = struct.pack(">HH", 15, len(text)) + text
        parts.append(struct.pack(">BHHIH", 0, OPT, 1232, 0, len(option)) + option)
    # An answer, of one that recurses; what was desired of recursion is repeated.
    flags = 0x8080 | question.flags & 0x0100 | code
    counts = (1, int(address is not None), 0, int(question.extended))
    return _HEADER.pack(question.id, flags, *counts) + b"".join(parts)
