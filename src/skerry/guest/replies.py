"""What the interpreter of a session replies: a JSON object a line, and behind it as many bytes as its `size` says.

The user's code can write there as well. Nothing is larger than it must be, nothing is believed that was not checked,
and a reply counts only for the call whose token it has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from skerry.guest.frames import ProtocolError

HEAD_MAX = 128 << 10
PIECE_MAX = 4 << 20
"""Bytes of one form of one value."""
CALL_MAX = 10 << 20
"""Bytes of all replies from one call to the next."""
REPLIES_MAX = 2000
"""How many those may be: each takes time to understand, however small it is."""


class Parser:
    """Replies out of a stream that arrives in pieces."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._head: dict[str, Any] | None = None
        self._size = 0
        self._left, self._replies = CALL_MAX, REPLIES_MAX

    def renew(self) -> None:
        """Another call begins."""
        self._left, self._replies = CALL_MAX, REPLIES_MAX

    def feed(self, data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        """The replies that `data` completes. Raises ProtocolError; the parser is useless afterwards."""
        self._left -= len(data)
        if self._left < 0:
            raise _too_many()
        self._buffer += data
        while True:
            if self._head is None:
                end = self._buffer.find(b"\n")
                if max(end, len(self._buffer) if end < 0 else 0) > HEAD_MAX:
                    raise ProtocolError("a reply without an end")
                if end < 0:
                    return
                self._replies -= 1
                if self._replies < 0:
                    raise _too_many()
                self._head, self._size = _head(bytes(self._buffer[:end]))
                del self._buffer[: end + 1]
            if len(self._buffer) < self._size:
                return
            head, self._head = self._head, None
            yield head, bytes(self._buffer[: self._size])
            del self._buffer[: self._size]


def _too_many() -> ProtocolError:
    return ProtocolError("more replies than one call can have")


def _head(line: bytes) -> tuple[dict[str, Any], int]:
    try:
        head = json.loads(line)
    except (ValueError, RecursionError):
        raise ProtocolError("a reply that is not JSON") from None
    size = head.get("size", 0) if isinstance(head, dict) else None
    if type(size) is not int or not 0 <= size <= PIECE_MAX:
        raise ProtocolError("a reply that makes no sense")
    return head, size
