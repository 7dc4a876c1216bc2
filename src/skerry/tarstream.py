"""A reader of tar archives that come from strangers: one pass, bounded memory, names as bytes.

The standard library's reader keeps every member, takes extended headers of any size into memory and looks
through them with patterns that some inputs make quadratic. This one reads ustar, GNU (long names, sparse
files, large numbers) and pax (with the sparse formats 0.0, 0.1 and 1.0), and refuses what is inconsistent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from skerry.errors import InvalidRequest

BLOCK = 512
CHUNK = 1 << 20
EXTENDED_MAX = 1 << 20
"""Bytes of one extended header; a path has 4 KiB, a set of extended attributes 64 KiB."""
SEGMENTS_MAX = 1 << 18
"""Pieces of one sparse file."""
SKIPPED_MAX = 10_000
"""Entries of the list of what a guest has left out: see native/tar_write.c."""
_KNOWN = frozenset(
    b"path linkpath size uid gid mtime"
    b" GNU.sparse.name GNU.sparse.realsize GNU.sparse.size GNU.sparse.major GNU.sparse.map".split()
)
"""Keys of extended headers; others are not kept, so that a global header costs nothing for each member."""
_ZEROS = bytes(BLOCK)
_NO_ARCHIVE = "this is not a tar archive"
_WRONG_HEADER = "the archive is damaged: a wrong header checksum"


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class Kind(Enum):
    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    HARDLINK = "hardlink"
    SPECIAL = "special"
    """A device or a FIFO."""


_KINDS = {
    b"0": Kind.FILE,
    b"\0": Kind.FILE,
    b"7": Kind.FILE,
    b"S": Kind.FILE,
    b"1": Kind.HARDLINK,
    b"2": Kind.SYMLINK,
    b"3": Kind.SPECIAL,
    b"4": Kind.SPECIAL,
    b"5": Kind.DIRECTORY,
    b"6": Kind.SPECIAL,
}


@dataclass(slots=True)
class Entry:
    """One member. Its content can be read until the next one is asked for."""

    kind: Kind
    name: bytes
    link: bytes
    """Where a symlink or a hard link points."""
    mode: int
    uid: int
    gid: int
    mtime: float
    size: int
    """Of the file once unpacked, holes included."""
    segments: list[tuple[int, int]]
    """(offset, length) of what is not a hole, in order."""
    _reader: TarReader

    def chunks(self) -> Iterator[tuple[int, bytes]]:
        """The content as (offset, bytes), holes left out. Once only. Raises InvalidRequest when cut short."""
        for offset, length in self.segments:
            done = 0
            while done < length:
                data = self._reader.content(min(CHUNK, length - done))
                yield offset + done, data
                done += len(data)


@dataclass(slots=True)
class _Extended:
    """What headers of their own say about the next member."""

    values: dict[bytes, bytes] = field(default_factory=dict)
    sparse: list[tuple[int, int]] = field(default_factory=list)
    """The map of sparse format 0.0, whose keys repeat."""

    def number(self, key: bytes) -> int | None:
        return _decimal(self.values[key]) if key in self.values else None


class TarReader:
    """Iterate over it for the entries. Raises InvalidRequest for anything that is not a sound archive."""

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self._begun = False
        self._left = 0
        self._padding = 0
        self._global: dict[bytes, bytes] = {}
        self.skipped: list[tuple[bytes, int]] = []
        """Names that the guest has left out, each with its errno: complete once all entries have been read."""
        self.skipped_more = 0
        """How many more there are."""

    def __iter__(self) -> Iterator[Entry]:
        extended = _Extended(dict(self._global))
        while True:
            self._skip_content()
            header = self._read(BLOCK, may_end=self._begun)
            if not header or header == _ZEROS:
                return
            if not _is_header(header):
                raise InvalidRequest(_WRONG_HEADER if self._begun else _NO_ARCHIVE)
            self._begun = True
            kind = header[156:157]
            if kind in (b"x", b"X"):
                self._parse_pax(self._extended_content(header), extended)
            elif kind == b"g":
                found = _Extended()
                self._parse_pax(self._extended_content(header), found)
                self._global |= found.values
                extended.values = self._global | extended.values
            elif kind == b"L":
                extended.values[b"path"] = self._extended_content(header).partition(b"\0")[0]
            elif kind == b"K":
                extended.values[b"linkpath"] = self._extended_content(header).partition(b"\0")[0]
            elif kind == b"V":
                self._begin_content(_number(header[124:136]))
            else:
                yield self._entry(header, extended)
                extended = _Extended(dict(self._global))

    def content(self, size: int) -> bytes:
        """Exactly the next `size` bytes of the current member."""
        if size > self._left:
            raise InvalidRequest("the archive is damaged: a file claims more than its member holds")
        self._left -= size
        return self._read(size)

    def _read(self, size: int, may_end: bool = False) -> bytes:
        data = self._stream.read(size)
        if len(data) < size:
            parts = [data]
            missing = size - len(data)
            while missing and (data := self._stream.read(missing)):
                parts.append(data)
                missing -= len(data)
            data = b"".join(parts)
            if missing and not (may_end and not data):
                raise InvalidRequest("the archive is cut short" if self._begun else _NO_ARCHIVE)
        return data

    def _begin_content(self, size: int) -> None:
        if size < 0:
            raise InvalidRequest("the archive is damaged: a member of negative size")
        self._left, self._padding = size, -size % BLOCK

    def _skip_content(self) -> None:
        rest = self._left + self._padding
        while rest:
            rest -= len(self._read(min(CHUNK, rest)))
        self._left = self._padding = 0

    def _extended_content(self, header: bytes) -> bytes:
        size = _number(header[124:136])
        if size > EXTENDED_MAX:
            raise InvalidRequest(f"the archive has an extended header of {size} bytes")
        self._begin_content(size)
        return self.content(size)

    def _parse_pax(self, data: bytes, into: _Extended) -> None:
        position = 0
        while position < len(data) and data[position] != 0:
            space = data.find(b" ", position, position + 20)
            end = position + _decimal(data[position:space]) if space >= 0 else 0
            key, equals, value = data[space + 1 : end].partition(b"=")
            if not space < end <= len(data) or not equals or not value.endswith(b"\n"):
                raise InvalidRequest("the archive is damaged: an extended header that cannot be read")
            value = value[:-1]
            if key == b"GNU.sparse.offset":
                into.sparse.append((_decimal(value), 0))
            elif key == b"GNU.sparse.numbytes" and into.sparse:
                into.sparse[-1] = (into.sparse[-1][0], _decimal(value))
            elif key == b"comment" and value.startswith(b"SKERRY.skipped"):
                self._note_skipped(value)
            elif key not in _KNOWN:
                pass
            elif value:
                into.values[key] = value
            else:
                into.values.pop(key, None)
            position = end

    def _note_skipped(self, value: bytes) -> None:
        key, _, rest = value.partition(b" ")
        number, _, name = rest.partition(b" ")
        if key == b"SKERRY.skipped.more":
            self.skipped_more += _decimal(number)
        elif len(self.skipped) < SKIPPED_MAX:
            self.skipped.append((name, _decimal(number)))
        else:
            self.skipped_more += 1

    def _entry(self, header: bytes, extended: _Extended) -> Entry:
        kind = _KINDS.get(header[156:157])
        if kind is None:
            raise InvalidRequest(f"the archive has a member of unknown type {header[156:157]!r}")
        values = extended.values
        name = values.get(b"GNU.sparse.name") or values.get(b"path") or _ustar_name(header)
        if kind is Kind.FILE and name.endswith(b"/"):
            kind = Kind.DIRECTORY
        stored = extended.number(b"size")
        if stored is None:
            stored = _number(header[124:136])
        self._begin_content(stored if kind is Kind.FILE else 0)
        size, segments = self._layout(header, extended) if kind is Kind.FILE else (0, [])
        uid, gid = extended.number(b"uid"), extended.number(b"gid")
        return Entry(
            kind=kind,
            name=name,
            link=values.get(b"linkpath") or header[157:257].partition(b"\0")[0],
            mode=_number(header[100:108]) & 0o7777,
            uid=_number(header[108:116]) if uid is None else uid,
            gid=_number(header[116:124]) if gid is None else gid,
            mtime=_seconds(values[b"mtime"]) if b"mtime" in values else float(_number(header[136:148])),
            size=size,
            segments=segments,
            _reader=self,
        )

    def _layout(self, header: bytes, extended: _Extended) -> tuple[int, list[tuple[int, int]]]:
        """The size of a file and where its content goes."""
        values = extended.values
        size = extended.number(b"GNU.sparse.realsize")
        if size is None:
            size = extended.number(b"GNU.sparse.size")
        if header[156:157] == b"S":
            size, segments = _number(header[483:495]), self._gnu_map(header)
        elif values.get(b"GNU.sparse.major") == b"1":
            segments = self._map_in_content()
        elif b"GNU.sparse.map" in values:
            numbers = [_decimal(part) for part in values[b"GNU.sparse.map"].split(b",")]
            segments = list(zip(numbers[::2], numbers[1::2], strict=False))
        elif extended.sparse:
            segments = extended.sparse
        else:
            return self._left, [(0, self._left)]
        end = 0
        for offset, length in segments:
            if offset < end or length < 0:
                raise InvalidRequest("the archive is damaged: a sparse file whose pieces overlap")
            end = offset + length
        if size is None or end > size or sum(length for _, length in segments) != self._left:
            raise InvalidRequest("the archive is damaged: a sparse file whose map does not fit its content")
        return size, segments

    def _gnu_map(self, header: bytes) -> list[tuple[int, int]]:
        segments: list[tuple[int, int]] = []
        table, more = header[386:482], header[482]
        while True:
            for at in range(0, len(table) - 23, 24):
                if table[at] == 0:
                    break
                segments.append((_number(table[at : at + 12]), _number(table[at + 12 : at + 24])))
            if not more:
                return segments
            _check_segments(len(segments))
            block = self._read(BLOCK)
            table, more = block[:504], block[504]

    def _map_in_content(self) -> list[tuple[int, int]]:
        lines: list[bytes] = []
        wanted, rest = 1, b""
        while len(lines) < wanted:
            rest += self.content(BLOCK)
            *whole, rest = rest.split(b"\n")
            lines += whole
            if len(rest) > BLOCK:
                raise InvalidRequest("the archive is damaged: a sparse map without end")
            if wanted == 1 and lines:
                count = _decimal(lines[0])
                _check_segments(count)
                wanted = 1 + 2 * count
        numbers = [_decimal(line) for line in lines[1:wanted]]
        return list(zip(numbers[::2], numbers[1::2], strict=True))


def _is_header(block: bytes) -> bool:
    stored = block[148:156].strip(b" \0")
    if not stored or stored.strip(b"01234567"):
        return False
    rest = block[:148] + b" " * 8 + block[156:]
    excess = sum(rest) - int(stored, 8)
    return excess == 0 or excess == 256 * sum(byte > 127 for byte in rest)  # old programs summed signed bytes


def _check_segments(count: int) -> None:
    if count > SEGMENTS_MAX:
        raise InvalidRequest(f"the archive has a sparse file of more than {SEGMENTS_MAX} pieces")


def _ustar_name(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    # GNU's own magic ("ustar  ") keeps other things where POSIX keeps the prefix.
    prefix = header[345:500].partition(b"\0")[0] if header[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def _number(data: bytes) -> int:
    """A number of a header: octal text, or base 256 when the first bit is set."""
    if data[0] & 0x80:
        value = int.from_bytes(data, "big") & ((1 << (8 * len(data) - 1)) - 1)
        return value - (1 << (8 * len(data) - 1)) if data[0] & 0x40 else value
    text = data.partition(b"\0")[0].strip()
    if text.strip(b"01234567"):
        raise InvalidRequest("the archive is damaged: a header with a number that is none")
    return int(text or b"0", 8)


def _decimal(data: bytes) -> int:
    if not data.isdigit() or len(data) > 19:
        raise InvalidRequest("the archive is damaged: an extended header with a number that is none")
    return int(data)


def _seconds(data: bytes) -> float:
    text = data[:32]
    if text.lstrip(b"-").strip(b"0123456789."):
        raise InvalidRequest("the archive is damaged: an extended header with a time that is none")
    try:
        return float(text)
    except ValueError:
        raise InvalidRequest("the archive is damaged: an extended header with a time that is none") from None
