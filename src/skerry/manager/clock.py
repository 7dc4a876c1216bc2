"""Clocks: timers of the event loop, and time since the host was booted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    """A monotonic clock with timers; an event loop is one."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[..., Any], /) -> Timer: ...


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def since_boot() -> float:
    """Seconds since the host was booted. A jump of the wall clock does not change it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
