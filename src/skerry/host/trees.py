"""Directory trees with untrusted names: opened, walked and removed without leaving them.

Nothing here follows a symlink out of a tree, crosses a mount, or cares how deep the tree is: a walk holds two
descriptors at most and climbs back by `..`, checking that it arrives where it came from.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from enum import Enum
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

_SYS_OPENAT2 = 437  # the same number on every architecture but alpha
_NO_XDEV, _NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH, _IN_ROOT = 0x01, 0x02, 0x04, 0x08, 0x10
_CHILD = _NO_XDEV | _NO_SYMLINKS | _BENEATH
_CHROOTED = _NO_XDEV | _NO_MAGICLINKS | _IN_ROOT
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NOT_A_DIRECTORY = (errno.ENOTDIR, errno.ELOOP)

_libc = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def _openat2(dir_fd: int, path: bytes, flags: int, resolve: int) -> int:
    how = _OpenHow(flags | os.O_CLOEXEC, 0, resolve)
    while True:
        fd: int = _libc.syscall(_SYS_OPENAT2, dir_fd, path, ctypes.byref(how), ctypes.sizeof(how))
        if fd >= 0:
            return fd
        number = ctypes.get_errno()
        # EAGAIN: something was renamed while `..` was being resolved; the kernel asks to try again.
        if number not in (errno.EAGAIN, errno.EINTR):
            raise OSError(number, os.strerror(number), os.fsdecode(path))


def open_in_root(root_fd: int, path: bytes, flags: int, *, across_mounts: bool = False) -> int:
    """Open `path` as a process would whose root is `root_fd`: absolute symlinks and `..` stay inside.

    For what exists already; O_CREAT is not supported. Raises OSError: ENOENT, ELOOP (with O_NOFOLLOW, a
    symlink), EXDEV (a mount in the way, unless `across_mounts`), and whatever else open(2) gives.
    """
    return _openat2(root_fd, path or b".", flags, _CHROOTED & ~(_NO_XDEV if across_mounts else 0))


def open_file_in_root(root_fd: int, path: bytes) -> BufferedReader:
    """Open a regular file for reading, as `open_in_root` does.

    Raises OSError; for anything but a regular file too, and never waits for the other end of a FIFO.
    """
    fd = open_in_root(root_fd, path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", os.fsdecode(path))
    return open(fd, "rb")


def open_child(dir_fd: int, name: str | bytes, flags: int) -> int:
    """Open a name in a directory: never through a symlink, never across a mount. Raises OSError."""
    return _openat2(dir_fd, os.fsencode(name), flags, _CHILD)


def sync(fd: int) -> None:
    """Write the whole filesystem of `fd` to its disk. Raises OSError."""
    if _libc.syncfs(fd) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Step(Enum):
    """What a visit of a walk is."""

    ENTRY = "entry"
    """Anything but a directory."""
    ENTER = "enter"
    LEAVE = "leave"
    """The directory has been walked through."""


class Visit(NamedTuple):
    step: Step
    dir_fd: int
    """The directory that holds `name`; open until the next visit."""
    name: str


class _Level(NamedTuple):
    name: str
    identity: tuple[int, int]
    directories: list[str]


def walk(top_fd: int) -> Iterator[Visit]:
    """Everything below the directory `top_fd`, in an order that depends on names alone.

    What was just visited may be removed before the next visit. Raises OSError; EXDEV for a mount in the tree,
    ESTALE when a directory was moved away during the walk.
    """
    fd = os.open(".", _DIRECTORY, dir_fd=top_fd)
    try:
        entries, directories = _list(fd)
        levels = [_Level("", _identity(fd), directories)]
        while True:
            for name in entries:
                yield Visit(Step.ENTRY, fd, name)
            entries = []
            if not levels[-1].directories:
                left = levels.pop()
                if not levels:
                    return
                fd = _climb(fd, levels[-1].identity)
                yield Visit(Step.LEAVE, fd, left.name)
                continue
            name = levels[-1].directories.pop()
            yield Visit(Step.ENTER, fd, name)
            try:
                child = open_child(fd, name, _DIRECTORY)
            except OSError as error:
                if error.errno not in _NOT_A_DIRECTORY:
                    raise
                entries = [name]  # something else took its place since it was listed
                continue
            os.close(fd)
            fd = child
            entries, directories = _list(fd)
            levels.append(_Level(name, _identity(fd), directories))
    finally:
        os.close(fd)


def _list(fd: int) -> tuple[list[str], list[str]]:
    entries: list[str] = []
    directories: list[str] = []
    with os.scandir(fd) as found:
        for entry in found:
            (directories if entry.is_dir(follow_symlinks=False) else entries).append(entry.name)
    entries.sort(key=os.fsencode)
    directories.sort(key=os.fsencode, reverse=True)
    return entries, directories


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _climb(fd: int, expected: tuple[int, int]) -> int:
    parent = os.open("..", _DIRECTORY, dir_fd=fd)
    if _identity(parent) != expected:
        os.close(parent)
        raise OSError(errno.ESTALE, "a directory was moved away while its tree was walked")
    os.close(fd)
    return parent


def remove_tree(path: Path) -> None:
    """Remove `path` and everything below it; a symlink or a file is removed itself. Missing is fine.

    Raises OSError; what was mounted inside is never touched (EXDEV, EBUSY).
    """
    parent = os.open(path.parent, _DIRECTORY)
    try:
        remove_in(parent, path.name)
    except FileNotFoundError:
        return
    finally:
        os.close(parent)


def remove_in(dir_fd: int, name: str | bytes) -> None:
    """As `remove_tree`, for a name in an open directory. Raises OSError; FileNotFoundError when missing."""
    _make_accessible(dir_fd, name)
    try:
        top = open_child(dir_fd, name, _DIRECTORY)
    except OSError as error:
        if error.errno not in _NOT_A_DIRECTORY:
            raise
        os.unlink(name, dir_fd=dir_fd)
        return
    try:
        for visit in walk(top):
            if visit.step is Step.ENTRY:
                os.unlink(visit.name, dir_fd=visit.dir_fd)
            elif visit.step is Step.ENTER:
                _make_accessible(visit.dir_fd, visit.name)
            else:
                os.rmdir(visit.name, dir_fd=visit.dir_fd)
    finally:
        os.close(top)
    os.rmdir(name, dir_fd=dir_fd)


def _make_accessible(dir_fd: int, name: str | bytes) -> None:
    """Give the owner of a directory back what `chmod 0` took. Root needs none of it."""
    if os.geteuid() == 0:
        return
    fd = open_child(dir_fd, name, os.O_PATH | os.O_NOFOLLOW)
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode) and mode & stat.S_IRWXU != stat.S_IRWXU:
            os.chmod(f"/proc/self/fd/{fd}", stat.S_IRWXU)
    finally:
        os.close(fd)
