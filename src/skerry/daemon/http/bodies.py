"""JSON bodies that may be large: parsed piece by piece, so that none holds up the event loop.

`json.loads` keeps the interpreter's lock until it is done, in a thread as well. So long strings are taken out while the
body comes in, decoded one piece at a time; what is left is small, and has few elements.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection
from secrets import token_hex
from typing import Any

from skerry.errors import InvalidRequest, LimitReached
from skerry.guest.start import START_MAX

PIECE = 16 << 10
"""Bytes that are parsed in one step."""
SMALL = 64 << 10
"""A body of at most this many bytes is parsed in one step: it cannot have many elements."""
ITEMS_MAX = 1 << 16
"""Strings, commas, lists and objects: more than what fits into one command."""
TEXT_MAX = START_MAX
"""Bytes of a string that is no content: nothing longer can be run, set or found."""
STRUCTURE_MAX = 1 << 20
"""Bytes of everything that is no content, escapes included."""

_ESCAPED = re.compile(r'(?:[^"\\]++|\\[^u]|\\u.{4})*+', re.DOTALL)


class LongText:
    """A long text in the pieces that it came in: to put them together would take as much memory again, and time."""

    __slots__ = ("pieces",)

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def __len__(self) -> int:
        return sum(map(len, self.pieces))

    def __str__(self) -> str:
        return "".join(self.pieces)


def load(text: bytes | bytearray | str) -> Any:
    """The value of a small JSON text; none is {}. Raises ValueError, RecursionError, InvalidRequest for a repeated
    name."""
    if not isinstance(text, str):
        text = text.decode()
    return json.loads(text or "{}", object_pairs_hook=_unique)


class JsonBody:
    """One JSON text that comes in pieces: `feed()` it, then `finish()`.

    `contents` are the fields that may hold long strings.
    """

    def __init__(self, contents: Collection[str]) -> None:
        self._contents = contents
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._outside: list[str] = []
        """The text, with a name of ours in place of each long string."""
        self._size = self._items = 0
        self._taken: dict[str, LongText] = {}
        """The long strings by these names, which nobody can guess."""
        self._secret = token_hex(8)
        self._inside: list[str] | None = None
        """The pieces of the long string that has begun."""
        self._length = 0
        self._rest = ""
        """The beginning of an escape."""

    def feed(self, data: bytes) -> None:
        """At most PIECE bytes more. Raises LimitReached, InvalidRequest, ValueError."""
        text, self._rest = self._rest + self._decode(data), ""
        at = 0
        while at < len(text):
            if self._inside is None:
                at = self._structure(text, at)
                continue
            end, closed = _end(text, at)
            self._take(text[at:end])
            at = end + 1
            if closed:
                self._close()
            else:
                self._rest = text[end:]
                return

    def finish(self) -> Any:
        """The value, with a LongText for each content that is long.

        Raises LimitReached, ValueError, RecursionError, InvalidRequest for a repeated name.
        """
        self._decode(b"", True)
        if self._inside is not None:
            raise ValueError("a string does not end")
        found = load("".join(self._outside))
        if not self._taken:
            return found
        if not isinstance(found, dict):
            return self._filled(found, "the body")
        named = [(self._filled(name, "a name"), value) for name, value in found.items()]
        return _unique([(name, self._content(name, value)) for name, value in named])

    def _content(self, name: str, value: Any) -> Any:
        if name not in self._contents:
            return self._filled(value, name)
        if isinstance(value, str):
            return self._taken.get(value, value)
        return self._filled(value, "")

    def _structure(self, text: str, at: int) -> int:
        """Take what is not in a string, and the next string if it is short. Returns where to go on."""
        quote = text.find('"', at)
        if quote < 0:
            self._keep(text[at:])
            return len(text)
        end, closed = _end(text, quote + 1)
        if closed:
            self._keep(text[at : end + 1], text[at:quote])
            return end + 1
        self._keep(text[at:quote])
        self._inside, self._length = [], 0
        return quote + 1

    def _keep(self, text: str, outside: str | None = None) -> None:
        counted = text if outside is None else outside
        self._items += 1 + counted.count(",") + counted.count("[") + counted.count("{")
        self._size += len(text)
        if self._items > ITEMS_MAX:
            raise LimitReached(f"the body has more than {ITEMS_MAX} elements", hint="send fewer at once")
        self._check_size()
        self._outside.append(text)

    def _take(self, text: str) -> None:
        assert self._inside is not None
        found = json.loads(f'"{text}"')
        if self._inside and found[:1] >= "\udc00" and (last := self._inside[-1])[-1] >= "\ud800":
            # Two escapes that make one character may have come in two pieces.
            pair = (last[-1] + found[0]).encode("utf-16-le", "surrogatepass")
            self._inside[-1], found = last[:-1] + pair.decode("utf-16-le", "surrogatepass"), found[1:]
        if found:
            self._inside.append(found)
        self._length += len(found)
        if self._length > TEXT_MAX and not self._contents:
            raise _too_long("a text")

    def _close(self) -> None:
        assert self._inside is not None
        name = f"{self._secret}-{len(self._taken)}"
        self._taken[name] = LongText(self._inside)
        self._inside = None
        self._keep(f'"{name}"')

    def _filled(self, value: Any, where: str) -> Any:
        """The value with its long strings. `where` names a field that is no content."""
        if isinstance(value, str):
            found = self._taken.get(value)
            if found is None:
                return value
            if where:
                if len(found) > TEXT_MAX:
                    raise _too_long(where)
                self._size += len(found)
                self._check_size()
            return str(found)
        if isinstance(value, list):
            return [self._filled(item, where) for item in value]
        if isinstance(value, dict):
            pairs = [
                (self._filled(name, "a name"), self._filled(item, where)) for name, item in value.items()
            ]
            return _unique(pairs)
        return value

    def _check_size(self) -> None:
        if self._size > STRUCTURE_MAX:
            raise LimitReached(
                f"the body has more than {STRUCTURE_MAX} bytes that are no content",
                hint="write long scripts or data to a file first",
            )


def _end(text: str, at: int) -> tuple[int, bool]:
    """Where the string that goes on at `at` ends, and whether it does: else what follows is part of an escape."""
    quote = text.find('"', at)
    escape = text.find("\\", at, quote if quote >= 0 else len(text))
    if escape < 0:
        return (quote, True) if quote >= 0 else (len(text), False)
    found = _ESCAPED.match(text, escape)
    assert found is not None
    return found.end(), text[found.end() : found.end() + 1] == '"'


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise InvalidRequest(f"{twice[:100]!r} is given twice")
    return found


def _too_long(what: str) -> InvalidRequest:
    return InvalidRequest(
        f"{what[:100]} is longer than {TEXT_MAX} bytes", hint="write long scripts or data to a file first"
    )
