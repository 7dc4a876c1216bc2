"""What every root filesystem gets before it becomes an image.

Environments mount a root filesystem read-only as it is, so everything that is mounted over later must be
there already, and really there: a symlink in its place would lead the mount elsewhere.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from skerry.host.trees import open_child, open_file_in_root, open_in_root, remove_in

USER, USER_ID, HOME = "appuser", 1000, "/workspace"
HOSTNAME = "skerry"
HOSTS = "127.0.0.1 localhost\n::1 localhost\n"

_FRESH = {"proc": 0o555, "sys": 0o555, "dev": 0o755, "run": 0o755, "tmp": 0o1777}
"""Places of the running system: whatever an image has there is not part of it."""
_KEPT = {"etc": 0o755, "workspace": 0o755}
_ACCOUNTS_MAX = 1 << 20


def passwd(existing: str, shell: str) -> str:
    """An /etc/passwd with `appuser` as uid 1000 in place of whoever had the number or the name."""
    user = f"{USER}:x:{USER_ID}:{USER_ID}:{USER}:{HOME}:{shell}"
    return _with_account(existing, user, f"root:x:0:0:root:/root:{shell}")


def group(existing: str) -> str:
    """As `passwd`, for /etc/group."""
    return _with_account(existing, f"{USER}:x:{USER_ID}:", "root:x:0:")


def _with_account(existing: str, user: str, root: str) -> str:
    rows = [line.split(":") for line in existing.splitlines() if line]
    kept = [row for row in rows if row[0] != USER and row[2:3] != [str(USER_ID)]]
    lines = [":".join(row) for row in kept]
    if not any(row[2:3] == ["0"] for row in kept):
        lines.insert(0, root)
    return "\n".join([*lines, user, ""])


def normalize(rootfs: Path) -> None:
    """Give a root filesystem its mount points, accounts and files, following none of its symlinks.

    The network's files (hosts, hostname, resolv.conf) are replaced: they would be the builder's. Raises
    OSError.
    """
    root = os.open(rootfs, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fchmod(root, 0o755)
        for name, mode in _FRESH.items():
            _remove(root, name)
            os.close(_directory(root, name, mode))
        for name, mode in _KEPT.items():
            fd = _directory(root, name, mode)
            if name == "workspace" and os.geteuid() == 0:
                os.fchown(fd, USER_ID, USER_ID)
            os.close(fd)
        shell = "/bin/bash" if _has_program(root, b"bin/bash") else "/bin/sh"
        accounts = _read(root, b"etc/passwd"), _read(root, b"etc/group")
        etc = open_child(root, "etc", os.O_RDONLY | os.O_DIRECTORY)
        try:
            _write(etc, "passwd", passwd(accounts[0], shell))
            _write(etc, "group", group(accounts[1]))
            _write(etc, "hosts", HOSTS)
            _write(etc, "hostname", HOSTNAME + "\n")
            _write(etc, "resolv.conf", "")
        finally:
            os.close(etc)
    finally:
        os.close(root)


def _remove(dir_fd: int, name: str) -> None:
    try:
        remove_in(dir_fd, name)
    except FileNotFoundError:
        return


def _directory(dir_fd: int, name: str, mode: int) -> int:
    """A real directory of that name, open; anything else of the name gives way."""
    try:
        found = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        os.mkdir(name, dir_fd=dir_fd)
    else:
        if not stat.S_ISDIR(found.st_mode):
            os.unlink(name, dir_fd=dir_fd)
            os.mkdir(name, dir_fd=dir_fd)
    fd = open_child(dir_fd, name, os.O_RDONLY | os.O_DIRECTORY)
    os.fchmod(fd, mode)
    return fd


def _has_program(root: int, path: bytes) -> bool:
    try:
        fd = open_in_root(root, path, os.O_PATH)
    except OSError:
        return False
    try:
        return stat.S_ISREG(os.fstat(fd).st_mode)
    finally:
        os.close(fd)


def _read(root: int, path: bytes) -> str:
    """A small file as the image's own programs would see it, symlinks included; empty when there is none."""
    try:
        file = open_file_in_root(root, path)
    except OSError:
        return ""
    with file:
        return file.read(_ACCOUNTS_MAX).decode(errors="surrogateescape")


def _write(dir_fd: int, name: str, content: str) -> None:
    _remove(dir_fd, name)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(name, flags, 0o644, dir_fd=dir_fd), "wb") as file:
        os.fchmod(file.fileno(), 0o644)
        file.write(content.encode(errors="surrogateescape"))
