"""Ranges of host user ids, one for each environment that root starts.

Claims are names in one directory of the host, so that daemons with different homes never use the same range. A
claim whose process is gone is void: it is taken over by whoever meets it. A claim is a symlink to "pid start-time":
it appears whole or not at all, and takes no block of a disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
from collections.abc import Iterator

from skerry.errors import LimitReached
from skerry.host.processes import start_time

FIRST = 2_000_000_000
SIZE = 65_536
COUNT = 30_000
DIRECTORY = "/run/skerry-uids"


def claim() -> int:
    """The first host id of a range that nobody uses. Root only. Raises LimitReached."""
    with _locked():
        os.makedirs(DIRECTORY, mode=0o700, exist_ok=True)
        for _ in range(1000):
            base = FIRST + random.randrange(COUNT) * SIZE  # noqa: S311 - spread, not secrecy
            if not _alive(base):
                _write(base, os.getpid())
                return base
    raise LimitReached("no user id range is free on this host")


def settle(base: int, pid: int) -> None:
    """Tie the claim to the environment's own process, so that it outlives the daemon and not the environment."""
    with _locked():
        os.makedirs(DIRECTORY, mode=0o700, exist_ok=True)
        _write(base, pid)


def release(base: int) -> None:
    """Give a range back. Unknown ones are fine."""
    with _locked(), contextlib.suppress(OSError):  # others have claims there, or it is gone already
        os.unlink(_path(base))
        os.rmdir(DIRECTORY)


def sweep() -> None:
    """Remove the claims of processes that are gone: a daemon that was killed could not."""
    with _locked(), contextlib.suppress(OSError):  # there is none, or some are in use
        for name in os.listdir(DIRECTORY):
            if not _alive(FIRST + int(name) * SIZE):
                os.unlink(f"{DIRECTORY}/{name}")
        os.rmdir(DIRECTORY)


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """One daemon at a time, also while the directory comes and goes: what is locked is its parent."""
    fd = os.open(os.path.dirname(DIRECTORY), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _path(base: int) -> str:
    return f"{DIRECTORY}/{(base - FIRST) // SIZE}"


def _write(base: int, pid: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_path(base))
    os.symlink(f"{pid} {start_time(pid)}", _path(base))


def _alive(base: int) -> bool:
    try:
        pid, started = map(int, os.readlink(_path(base)).split())
    except (OSError, ValueError):
        return False
    return start_time(pid) == started
