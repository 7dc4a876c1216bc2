"""Ranges of host user ids, one for each environment that root starts.

Claims are files in one directory of the host, so that daemons with different homes never use the same range. A
claim whose process is gone is void: it is taken over by whoever meets it.
"""

from __future__ import annotations

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
    os.makedirs(DIRECTORY, mode=0o700, exist_ok=True)
    for _ in range(1000):
        slot = random.randrange(COUNT)  # noqa: S311 - spread, not secrecy
        path = f"{DIRECTORY}/{slot}"
        try:
            _write(path, os.getpid())
        except FileExistsError:
            if _alive(path):
                continue
            _write(path, os.getpid(), replace=True)
        except FileNotFoundError:  # somebody removed the empty directory
            os.makedirs(DIRECTORY, mode=0o700, exist_ok=True)
            continue
        return FIRST + slot * SIZE
    raise LimitReached("no user id range is free on this host")


def settle(base: int, pid: int) -> None:
    """Tie the claim to the environment's own process, so that it outlives the daemon and not the environment."""
    _write(_path(base), pid, replace=True)


def release(base: int) -> None:
    """Give a range back. Unknown ones are fine."""
    try:
        os.unlink(_path(base))
        os.rmdir(DIRECTORY)
    except OSError:
        pass  # others have claims, or it is gone already


def _path(base: int) -> str:
    return f"{DIRECTORY}/{(base - FIRST) // SIZE}"


def _write(path: str, pid: int, replace: bool = False) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if replace else os.O_EXCL)
    fd = os.open(path, flags, 0o600)
    try:
        os.write(fd, f"{pid} {start_time(pid)}".encode())
    finally:
        os.close(fd)


def _alive(path: str) -> bool:
    try:
        with open(path) as file:
            pid, started = file.read().split()
        return start_time(int(pid)) == int(started)
    except (OSError, ValueError):
        return False
