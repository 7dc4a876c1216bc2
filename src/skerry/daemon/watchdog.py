"""Notices when the event loop stands still: for how long, and in which function.

All tenants share one loop, so one slow step delays everybody. A timer of the loop sets a mark; a thread looks at the
mark and, when it is too old, at the stack of the loop's thread. While all is well that is one timer and one look in
TICK seconds.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from time import perf_counter
from types import FrameType

import structlog

from skerry.daemon.metrics import samples

TICK = 0.05
STALL = 0.1
"""Seconds without a turn of the loop that are worth a line in the log."""
LOGGED_EVERY = 1.0
"""Seconds between two lines: a loop that stalls all the time does not fill the log."""
PACKAGE = "skerry."

log = structlog.get_logger(component="daemon")


class Watchdog:
    """Of the running loop, from its making to `close()`."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self.stalls = 0
        self.longest = 0.0
        """Seconds."""
        self.where = ""
        """The function of ours that the loop was in, in the longest stall."""
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._mark = clock()
        self._seen: tuple[float, str] = (0.0, "")
        """The mark of the last stall that the thread saw, and where."""
        self._logged = float("-inf")
        self._stopped = threading.Event()
        self._timer = self._loop.call_later(TICK, self._beat)
        self._thread = threading.Thread(target=self._look, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._timer.cancel()
        self._stopped.set()
        self._thread.join()

    def lines(self) -> Iterator[str]:
        """For /metrics."""
        yield from samples(
            "skerry_loop_stalls_total",
            f"Turns of the event loop of {STALL} s and more.",
            "counter",
            (),
            {(): self.stalls},
        )
        yield from samples(
            "skerry_loop_longest_stall_seconds",
            "The longest since the start, and the function that the loop was in.",
            "gauge",
            ("where",),
            {(self.where,): self.longest},
        )

    def _beat(self) -> None:
        """In the loop."""
        now = self._clock()
        stalled = now - self._mark - TICK
        if stalled >= STALL:
            where = self._seen[1] if self._seen[0] == self._mark else ""
            self.stalls += 1
            if stalled > self.longest:
                self.longest, self.where = stalled, where
            if now - self._logged >= LOGGED_EVERY:
                self._logged = now
                log.warning("event loop stalled", seconds=round(stalled, 3), where=where, stalls=self.stalls)
        self._mark = now
        self._timer = self._loop.call_later(TICK, self._beat)

    def _look(self) -> None:
        """In the thread. One sample for each stall: where the loop is when it becomes one."""
        while not self._stopped.wait(TICK):
            mark = self._mark
            if self._clock() - mark - TICK >= STALL and self._seen[0] != mark:
                self._seen = mark, where(sys._current_frames().get(self._thread_id))


def where(frame: FrameType | None) -> str:
    """The innermost function of ours in a stack, and what it has called if that is not ours."""
    called = ""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        name = f"{module}.{frame.f_code.co_qualname}"
        if module.startswith(PACKAGE) and module != __name__:
            return f"{name} ({called})" if called else name
        called = called or name
        frame = frame.f_back
    return called
