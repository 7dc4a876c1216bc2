"""Ranges of host user ids, one for each environment that root starts.

Claims are names in one directory of the host, so that daemons with different homes never use the same range. A
claim whose process is gone is void: it is taken over by whoever meets it. A claim is a symlink to "pid start-time":
it appears whole or not at all, and takes no block of a disk.

Taking a void claim over needs a lock. It is a file that only root can open, so no other user can hold it, and nobody
blocks on it: all of this is called on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import random
import time

from skerry.errors import LimitReached, PlatformError
from skerry.host.processes import start_time

FIRST = 2_000_000_000
SIZE = 65_536
COUNT = 30_000
OWNERS = FIRST - COUNT
"""The first of the ids that create user namespaces, one for each range."""
DIRECTORY = "/run/skerry-uids"
LOCK_SECONDS, LOCK_RETRY = 10.0, 0.005


async def claim() -> int:
    """Claim a free range and return its first host id. Root only. Raises LimitReached, PlatformError."""
    deadline = time.monotonic() + LOCK_SECONDS
    while (lock := _lock()) is None:
        if time.monotonic() > deadline:
            raise PlatformError(
                f"another daemon has held {DIRECTORY}.lock for {LOCK_SECONDS:g} s", hint="end that daemon"
            )
        await asyncio.sleep(LOCK_RETRY)
    try:
        os.makedirs(DIRECTORY, mode=0o700, exist_ok=True)
        for _ in range(1000):
            base = FIRST + random.randrange(COUNT) * SIZE  # noqa: S311 - spread, not secrecy
            if not _alive(base):
                _write(base, os.getpid())
                return base
    finally:
        os.close(lock)
    raise LimitReached("no user id range is free on this host")


def owner(base: int) -> int:
    """The host id that creates the user namespace of a range, so that what it uses is not charged to root.

    The owner of a user namespace has all capabilities in it, so this id is mapped into none: no process inside an
    environment can have it.
    """
    return OWNERS + (base - FIRST) // SIZE


def settle(base: int, pid: int) -> None:
    """Tie the claim to the environment's own process, so that it outlives the daemon and not the environment."""
    _write(base, pid)


def release(base: int) -> None:
    """Give a range back, best effort: a claim that stays is void as soon as its process is gone."""
    with contextlib.suppress(OSError):
        os.unlink(_path(base))


def sweep() -> None:
    """Remove the claims of processes that are gone: a daemon that was killed could not. Skips it if another does."""
    if (lock := _lock()) is None:
        return
    try:
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(DIRECTORY):
                range_, _, writer = name.partition(".")
                if not (os.path.exists(f"/proc/{writer}") if writer else _alive(FIRST + int(range_) * SIZE)):
                    os.unlink(f"{DIRECTORY}/{name}")
    finally:
        os.close(lock)


def _lock() -> int | None:
    """A descriptor that holds the lock until it is closed; None while another daemon holds it."""
    fd = os.open(f"{DIRECTORY}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _path(base: int) -> str:
    return f"{DIRECTORY}/{(base - FIRST) // SIZE}"


def _write(base: int, pid: int) -> None:
    """Atomic, so that no other process sees the range free in between."""
    new = f"{_path(base)}.{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
    os.symlink(f"{pid} {start_time(pid)}", new)
    os.rename(new, _path(base))


def _alive(base: int) -> bool:
    try:
        pid, started = map(int, os.readlink(_path(base)).split())
    except (OSError, ValueError):
        return False
    return start_time(pid) == started
