"""Failures that the guest reports, as Skerry's exceptions; and paths, as they go to it and into messages."""

from __future__ import annotations

import errno
import os
import struct

from skerry.errors import (
    Busy,
    Conflict,
    DiskFull,
    ExecutionNotFound,
    FileConflict,
    FileDenied,
    FileMissing,
    GuestFailed,
    InvalidRequest,
    IsolationUnavailable,
    LimitReached,
    PathOutside,
    SkerryError,
)


def path_bytes(path: str) -> bytes:
    """A caller's path for the wire. Raises InvalidRequest for what no path can be."""
    data = path.encode("utf-8", "surrogateescape")
    if not data:
        raise InvalidRequest("the path is empty", hint="use '.' for the workspace itself")
    if b"\0" in data:
        raise InvalidRequest(f"the path {printable(path)} holds a NUL byte")
    if len(data) > 4095:
        raise InvalidRequest(f"the path is {len(data)} bytes long", hint="paths have at most 4095 bytes")
    return data


def printable(path: str) -> str:
    """A path for messages: quoted, with control characters and odd bytes escaped."""
    return ascii(path) if any(not c.isprintable() for c in path) else f"'{path}'"


_FILE_ERRORS: dict[int, tuple[type[SkerryError], str, str]] = {
    errno.ENOENT: (FileMissing, "{path} does not exist", ""),
    errno.ENOTDIR: (FileConflict, "a part of {path} is not a directory", ""),
    errno.EISDIR: (FileConflict, "{path} is a directory", ""),
    errno.EEXIST: (FileConflict, "{path} exists already", ""),
    errno.ENOTEMPTY: (FileConflict, "{path} is not empty", "ask for a recursive removal"),
    errno.EBUSY: (FileConflict, "{path} cannot be replaced or removed", ""),
    errno.ENXIO: (
        FileConflict,
        "{path} is not a regular file",
        "pipes, sockets and devices are not read or written",
    ),
    errno.ENOTSUP: (
        FileConflict,
        "{path} cannot be moved to another file system",
        "copy it, and remove the original",
    ),
    errno.EXDEV: (PathOutside, "{path} leads outside of /workspace and /tmp", "use a path below /workspace"),
    errno.ELOOP: (FileConflict, "{path} has too many symlinks", ""),
    errno.EACCES: (FileDenied, "{path}: permission denied", ""),
    errno.EPERM: (FileDenied, "{path}: not permitted", ""),
    errno.EROFS: (FileDenied, "{path} is read-only", "write below /workspace or /tmp"),
    errno.ENOSPC: (
        DiskFull,
        "no space left for {path}",
        "remove files, or create the environment with more disk",
    ),
    errno.EDQUOT: (
        DiskFull,
        "no space left for {path}",
        "remove files, or create the environment with more disk",
    ),
    errno.EMFILE: (
        Busy,
        "{path}: too many files are being read and written in this environment",
        "try again later",
    ),
    errno.EFBIG: (DiskFull, "{path} would be larger than the disk limit", ""),
    errno.ENAMETOOLONG: (InvalidRequest, "a name in {path} is too long", "names have at most 255 bytes"),
    errno.EINVAL: (InvalidRequest, "{path} is not a valid path", ""),
}


def file_error(number: int, text: str) -> SkerryError:
    """The exception for a failed file operation; '{path}' in its message stands for the path."""
    cls, message, hint = _FILE_ERRORS.get(number, (GuestFailed, "{path}: " + text, ""))
    return cls(message, hint=hint)


def reported_error(payload: bytes, what: str) -> SkerryError:
    if len(payload) < 4:
        return GuestFailed("the guest sent a malformed error")
    number = struct.unpack_from("<I", payload)[0]
    text = payload[4:204].decode(errors="replace")
    if what == "file":
        return file_error(number, text)
    reason = os.strerror(number) if number < 4096 else str(number)
    if number == errno.EBUSY:
        return Busy("the shell is running another command")
    if number == errno.ESRCH:
        return ExecutionNotFound("no such execution runs in this environment")
    if number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC):
        return LimitReached(
            f"the environment cannot start another process: {text}: {reason}",
            hint="end something in it, or create it with higher limits (pids, memory)",
        )
    if text == "working directory":
        return InvalidRequest(f"the working directory cannot be used: {reason}")
    if text == "user":
        return InvalidRequest(
            f"this user cannot be used here: {reason}",
            hint="without root on the host there is only 'appuser'",
        )
    if text == "profile":
        return IsolationUnavailable(
            f"the execution profile cannot be put in force here: {reason}",
            hint="rules on paths need Linux 6.2 (Landlock ABI 3); the command did not run",
        )
    if number == errno.ENAMETOOLONG:
        return InvalidRequest("the shell's name is too long", hint="at most 31 bytes")
    if number == errno.EEXIST:
        return Conflict(text)
    return GuestFailed(f"the guest could not start it: {text}: {reason}")
