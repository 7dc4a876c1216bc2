"""Ranges of host user ids, one for each environment that root starts.

Claims are names in one directory of the host, so that daemons with different homes never use the same range. A
claim whose process is gone is void: it is taken over by whoever meets it. A claim is a symlink to "pid start-time":
it appears whole or not at all, and takes no block of a disk.
"""

from __future__ import annotations

import contextlib
import os
import random

from skerry.errors import LimitReached
from skerry.host.processes import start_time

FIRST = 2_000_000_000
SIZE = 65_536
COUNT = 30_000
DIRECTORY = "/run/skerry-uids"


def claim() -> int:
    """The first host id of a range that nobody uses. Root only. Raises LimitReached."""
    for _ in range(1000):
        base = FIRST + random.randrange(COUNT) * SIZE  # noqa: S311 - spread, not secrecy
        if not _alive(base) and _write(base, os.getpid()):
            return base
    raise LimitReached("no user id range is free on this host")


def settle(base: int, pid: int) -> None:
    """Tie the claim to the environment's own process, so that it outlives the daemon and not the environment."""
    _write(base, pid)


def release(base: int) -> None:
    """Give a range back. Unknown ones are fine."""
    with contextlib.suppress(OSError):  # others have claims there, or it is gone already
        os.unlink(_path(base))
        os.rmdir(DIRECTORY)


def _path(base: int) -> str:
    return f"{DIRECTORY}/{(base - FIRST) // SIZE}"


def _write(base: int, pid: int) -> bool:
    """False when somebody else claimed it in the meantime."""
    path, value = _path(base), f"{pid} {start_time(pid)}"
    mine = _owner(base) == os.getpid()
    with contextlib.suppress(FileNotFoundError):
        if mine or not _alive(base):
            os.unlink(path)
    os.makedirs(DIRECTORY, mode=0o700, exist_ok=True)
    try:
        os.symlink(value, path)
    except FileExistsError:
        return False
    return True


def _owner(base: int) -> int:
    try:
        pid, started = map(int, os.readlink(_path(base)).split())
    except (OSError, ValueError):
        return 0
    return pid if start_time(pid) == started else 0


def _alive(base: int) -> bool:
    return _owner(base) != 0
