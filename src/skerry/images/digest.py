"""The digest of a root filesystem: the same tree gives the same digest on every machine."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from skerry.host.trees import Step, open_child, walk


def tree_digest(top: Path) -> tuple[str, int]:
    """(hex digest, bytes on disk) of everything below `top`. Raises OSError.

    What counts: names, kinds, permissions, owners, symlink targets and contents. Times and extended
    attributes do not. Hard links count as the files they look like, once towards the size.
    """
    total = hashlib.sha256()
    linked: dict[int, str] = {}
    size = 0
    fd = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for visit in walk(fd):
            if visit.step is Step.LEAVE:
                total.update(b"leave\0")
                continue
            status = os.stat(visit.name, dir_fd=visit.dir_fd, follow_symlinks=False)
            content = ""
            if stat.S_ISREG(status.st_mode):
                if status.st_ino in linked:
                    content = linked[status.st_ino]
                else:
                    content = _content(visit.dir_fd, visit.name)
                    size += status.st_blocks * 512
                    if status.st_nlink > 1:
                        linked[status.st_ino] = content
            elif stat.S_ISLNK(status.st_mode):
                content = os.readlink(visit.name, dir_fd=visit.dir_fd)
            for value in (f"{status.st_mode:o}", str(status.st_uid), str(status.st_gid), visit.name, content):
                total.update(os.fsencode(value) + b"\0")
    finally:
        os.close(fd)
    return total.hexdigest(), size


def _content(dir_fd: int, name: str) -> str:
    with open(open_child(dir_fd, name, os.O_RDONLY), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
