"""Detached mounts and loop devices: the few kernel calls that the standard library does not have.

Everything returns plain descriptors (close-on-exec) and raises OSError, whose `strerror` carries the kernel's
own words where it has some.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import struct

from skerry.host.trees import open_in_root

# The numbers are the same on every architecture that CPython runs on: calls this new share one table.
_OPEN_TREE, _FSOPEN, _FSCONFIG, _FSMOUNT, _FSPICK = 428, 430, 431, 432, 433
_MOUNT_SETATTR = 442
_SET_FLAG, _SET_STRING, _CMD_CREATE, _CMD_RECONFIGURE = 0, 1, 6, 7
_FSOPEN_CLOEXEC = _FSMOUNT_CLOEXEC = _FSPICK_CLOEXEC = 1
_FSPICK_EMPTY_PATH = 8

_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE, _TREE_CLONE = -100, 0x1000, 0x8000, 1
_IDMAP, _PRIVATE = 0x100000, 1 << 18
_MOUNT_ATTR = struct.Struct("=4Q")

RDONLY, NOSUID, NODEV, NOEXEC, NOATIME = 0x1, 0x2, 0x4, 0x8, 0x10

_LOOP_SET_DIRECT_IO = 0x4C08
_LOOP_CONFIGURE, _LOOP_CTL_REMOVE, _LOOP_CTL_GET_FREE = 0x4C0A, 0x4C81, 0x4C82
_BLKGETDISKSEQ = 0x80081280
_LO_FLAGS_AUTOCLEAR = 4
# struct loop_config: fd, block_size, struct loop_info64 (of which only the flags matter here), reserved
_LOOP_CONFIG = struct.Struct("=II 5Q 3I I 64s 64s 32s 2Q 8Q")
_ATTEMPTS = 64

_libc = ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: int | bytes | None) -> int:
    converted = [ctypes.c_long(a) if isinstance(a, int) else ctypes.c_char_p(a) for a in arguments]
    result: int = _libc.syscall(ctypes.c_long(number), *converted)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def mount_detached(kind: str, source: str, options: dict[str, str | None], attributes: int) -> int:
    """Create a detached mount of a new file system: closing the descriptor unmounts it.

    An option whose value is None is a flag. `attributes` are NOSUID, NODEV, NOATIME.
    """
    context = _call(_FSOPEN, kind.encode(), _FSOPEN_CLOEXEC)
    try:
        _call(_FSCONFIG, context, _SET_STRING, b"source", os.fsencode(source), 0)
        for key, value in options.items():
            if value is None:
                _call(_FSCONFIG, context, _SET_FLAG, key.encode(), None, 0)
            else:
                _call(_FSCONFIG, context, _SET_STRING, key.encode(), value.encode(), 0)
        _call(_FSCONFIG, context, _CMD_CREATE, None, None, 0)
        return _call(_FSMOUNT, context, _FSMOUNT_CLOEXEC, attributes)
    except OSError as error:
        error.strerror = f"{error.strerror}{_messages(context)}"
        raise
    finally:
        os.close(context)


def copy_tree(path: str, attributes: int, *, recursive: bool) -> int:
    """A detached copy of the mount at `path`. Later mounts below it do not propagate."""
    below = _AT_RECURSIVE if recursive else 0
    fd = _call(_OPEN_TREE, _AT_FDCWD, os.fsencode(path), _TREE_CLONE | os.O_CLOEXEC | below)
    try:
        _set_attributes(fd, below, attributes, _PRIVATE, 0)
    except OSError:
        os.close(fd)
        raise
    return fd


def resize_tmpfs(root: int, path: str, size: int) -> None:
    """Set the size of the tmpfs mounted at `path` inside the directory `root`. Raises OSError.

    Symlinks resolve inside `root`, also absolute ones.
    """
    mount = open_in_root(root, os.fsencode(path), os.O_PATH, across_mounts=True)
    try:
        context = _call(_FSPICK, mount, b"", _FSPICK_EMPTY_PATH | _FSPICK_CLOEXEC)
    finally:
        os.close(mount)
    try:
        _call(_FSCONFIG, context, _SET_STRING, b"size", b"%d" % size, 0)
        _call(_FSCONFIG, context, _CMD_RECONFIGURE, None, None, 0)
    finally:
        os.close(context)


def map_ids(mount: int, user_namespace: int) -> None:
    """Let the files of a detached copy belong to the users of that namespace. Raises OSError where it cannot."""
    _set_attributes(mount, 0, _IDMAP, 0, user_namespace)


def _set_attributes(fd: int, flags: int, attributes: int, propagation: int, user_namespace: int) -> None:
    wanted = _MOUNT_ATTR.pack(attributes, 0, propagation, user_namespace)
    _call(_MOUNT_SETATTR, fd, b"", _AT_EMPTY_PATH | flags, wanted, len(wanted))


def _messages(context: int) -> str:
    """What the kernel had to say about a failed mount, as `: this; that`."""
    found = []
    with contextlib.suppress(OSError):  # ENODATA ends the list
        while True:
            found.append(os.read(context, 4096).decode(errors="replace").strip().removeprefix("e "))
    return ": " + "; ".join(found) if found else ""


class Loop:
    """A loop device on an open file. It detaches by itself when neither this nor a mount uses it any more."""

    def __init__(self, file: int, block_size: int) -> None:
        config = _LOOP_CONFIG.pack(file, block_size, *[0] * 8, _LO_FLAGS_AUTOCLEAR, b"", b"", b"", *[0] * 10)
        control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
        try:
            for _ in range(_ATTEMPTS):
                self.number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
                self.path = f"/dev/loop{self.number}"
                self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    fcntl.ioctl(self._fd, _LOOP_CONFIGURE, config)
                    return
                except OSError as error:
                    os.close(self._fd)
                    if error.errno != errno.EBUSY:
                        raise
            raise OSError(errno.EBUSY, "others took every free loop device first")
        finally:
            os.close(control)

    def close(self) -> None:
        os.close(self._fd)


def remove_loop(number: int) -> None:
    """Take an unused loop device away. Raises OSError: EBUSY while something uses it."""
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(control, _LOOP_CTL_REMOVE, number)
    finally:
        os.close(control)


def set_direct_io(path: str, sequence: int, direct: bool) -> None:
    """Have a loop device read and write its file directly, or through the page cache.

    `sequence` is its `diskseq`: a device that was detached and attached to another file since is left alone. Waits
    until dirty pages of the file are on disk. Raises OSError.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # while it is open the device stays attached
    try:
        found = struct.unpack("=Q", fcntl.ioctl(fd, _BLKGETDISKSEQ, bytes(8)))[0]
        if found == sequence:
            fcntl.ioctl(fd, _LOOP_SET_DIRECT_IO, int(direct))
    finally:
        os.close(fd)
