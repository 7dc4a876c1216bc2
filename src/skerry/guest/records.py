"""Records that the guest's file operations send: see native/applets.h. Hostile input, like all of it."""

from __future__ import annotations

import struct

from skerry.errors import GuestFailed
from skerry.models import FileInfo

_STAT = struct.Struct("<BIIIQq")
_TYPES = {
    ord("f"): "file",
    ord("d"): "directory",
    ord("l"): "symlink",
    ord("p"): "fifo",
    ord("s"): "socket",
    ord("c"): "device",
    ord("b"): "device",
}


def parse_stat(data: bytes, path: str | None = None) -> FileInfo:
    """One file record; `path` replaces the name in it. Raises GuestFailed."""
    try:
        kind, mode, uid, gid, size, modified = _STAT.unpack_from(data)
        at = _STAT.size
        name, at = _counted(data, at)
        target, at = _counted(data, at)
        if at != len(data):
            raise ValueError("trailing bytes")
        return FileInfo(
            path=path if path is not None else name,
            type=_TYPES[kind],
            size=size,
            mode=mode & 0o7777,
            modified_at=modified / 1e9,
            uid=uid,
            gid=gid,
            target=target,
        )
    except (struct.error, ValueError, KeyError) as error:
        raise GuestFailed(f"the guest sent a malformed file record: {error}") from error


def name_of(data: bytes) -> bytes:
    """The name in a file record that `parse_stat` takes."""
    at = _STAT.size + 2
    return data[at : at + int.from_bytes(data[at - 2 : at], "little")]


def _counted(data: bytes, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<H", data, at)
    end = at + 2 + length
    if end > len(data):
        raise ValueError("a name that is longer than its record")
    return data[at + 2 : end].decode("utf-8", "surrogateescape"), end
