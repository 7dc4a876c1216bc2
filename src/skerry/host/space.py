"""Free space of the home's file system: a reserve that no tenant can use, and what workspaces were promised.

Workspaces are sparse files: they take space as they are filled. What they were promised and have not written yet is
at most `overcommit` times the space that is free beyond the reserve, and a single workspace always fits into that.
With an overcommit of 1 every workspace can be filled to its limit; above that, workspaces that are filled at the same
time may find the disk full.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

from skerry.errors import DiskFull, InvalidRequest
from skerry.policy import GIB, MIB, format_size, parse_size

RESERVE, OVERCOMMIT = "SKERRY_DISK_RESERVE", "SKERRY_DISK_OVERCOMMIT"
IOPS, BANDWIDTH = "SKERRY_DISK_IOPS", "SKERRY_DISK_BANDWIDTH"
_IOPS, _BANDWIDTH = 4000, 128 * MIB
LOOK_EVERY = 16 * MIB
"""Bytes after which those who write much look at the free space again."""
_OVERCOMMIT = 20.0
"""By default. Most workspaces stay nearly empty: 500 of the default size fit beside 50 GiB of free space."""


def reserve(total: int) -> int:
    """Bytes that stay free on a file system of this size: 5% of it, at least 512 MiB, at most 10 GiB.

    `SKERRY_DISK_RESERVE` replaces that. Raises InvalidRequest if it is not a size.
    """
    given = os.environ.get(RESERVE)
    return parse_size(given, RESERVE) if given else max(512 * MIB, min(total // 20, 10 * GIB))


def overcommit() -> float:
    """Raises InvalidRequest if `SKERRY_DISK_OVERCOMMIT` is not a number of at least 1."""
    given = os.environ.get(OVERCOMMIT)
    try:
        ratio = float(given) if given else _OVERCOMMIT
    except ValueError:
        ratio = math.nan
    if not 1 <= ratio < math.inf:
        raise InvalidRequest(f"{OVERCOMMIT} must be a number of at least 1, not {given!r}")
    return ratio


def io_limits() -> tuple[int, int]:
    """Operations, and bytes, a second that an environment may read, and write, on its workspace; 0 for no limit.

    Raises InvalidRequest if `SKERRY_DISK_IOPS` or `SKERRY_DISK_BANDWIDTH` is not a number, or a size.
    """
    operations, bandwidth = os.environ.get(IOPS) or str(_IOPS), os.environ.get(BANDWIDTH) or str(_BANDWIDTH)
    if not operations.isdecimal() or len(operations) > 9:
        raise InvalidRequest(f"{IOPS} must be a number, 0 for no limit, not {operations!r}")
    return int(operations), 0 if bandwidth == "0" else parse_size(bandwidth, BANDWIDTH)


def check_settings() -> None:
    """Raises InvalidRequest for a setting that cannot be."""
    reserve(0)
    overcommit()
    io_limits()


def check_space(place: str | int, needed: int = 0) -> None:
    """Raises DiskFull unless `needed` bytes fit beside the reserve. `place` is a path or an open directory."""
    free, kept = _room(place)
    if free - needed < kept:
        wanted = f", {format_size(needed)} are needed" if needed else ""
        raise DiskFull(
            f"the disk of the daemon's home has {format_size(free)} free{wanted},"
            f" and {format_size(kept)} of it are kept in reserve",
            hint=f"free space on it; {RESERVE} sets the reserve",
            detail={"free": free, "needed": needed, "reserve": kept},
        )


class Promises:
    """Bytes of disk that workspaces may still fill. For one thread."""

    def __init__(self, directory: str) -> None:
        """`directory` is on the file system that they are promised of."""
        self._directory = directory
        self._sizes: dict[str, int] = {}
        self._total = 0

    def make(self, name: str, size: int, written: Callable[[], int]) -> None:
        """Promise `size` bytes to a new workspace. Raises DiskFull.

        `written` returns what all workspaces have stored; it is called only when the sum of all promises is too much.
        """
        free, kept = _room(self._directory)
        available = max(0, free - kept)
        detail = {"free": free, "reserve": kept, "asked": size, "promised": self._total}
        if size > available:
            raise DiskFull(
                f"a workspace of {format_size(size)} cannot be stored: {format_size(free)} are free on the disk of"
                f" the daemon's home, {format_size(kept)} of it kept in reserve",
                hint=f"ask for a `disk` of at most {format_size(available)}, or for a workspace in memory",
                detail=detail,
            )
        most = overcommit() * available
        if self._total + size > most and self._total - written() + size > most:
            raise DiskFull(
                f"a workspace of {format_size(size)} cannot be promised: other workspaces may still fill"
                f" {format_size(self._total)}, and {format_size(available)} are free beyond the reserve",
                hint=f"delete environments, ask for a smaller `disk`, or raise {OVERCOMMIT} (now {overcommit():g})",
                detail={**detail, "overcommit": overcommit()},
            )
        self.keep(name, size)

    def keep(self, name: str, size: int) -> None:
        """Count a promise that was made before, by an earlier daemon perhaps."""
        self.drop(name)
        self._sizes[name] = size
        self._total += size

    def drop(self, name: str) -> None:
        """Forget a promise; fine if there is none."""
        self._total -= self._sizes.pop(name, 0)


def _room(place: str | int) -> tuple[int, int]:
    """(free, reserve) in bytes."""
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize, reserve(found.f_blocks * found.f_frsize)
