"""Short pauses for environments in which a crowd of processes wants the CPU, so that kernel locks come free.

Some locks of the kernel are shared by all who use the same file: a process that maps a library, forks or ends takes
the lock of that library for a moment. If it loses the CPU in that moment, others line up for the lock, and each of them
needs its turn on the CPU before the next one can have it. Among hundreds of processes that want the CPU such a turn
takes 0.2 s, and a neighbour who wants the same lock waits for as many turns as there are processes before it: on two
cores, four fork bombs made a `true` of another tenant wait for 18 s.

While a cgroup is being frozen, its processes stop as soon as they are outside the kernel. Only those that hold a lock
or wait for one want the CPU then, and the line is gone within a few milliseconds. Programs do not notice a pause,
except that some calls may end with EINTR, as after SIGSTOP and SIGCONT (see signal(7)).
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import select
import threading
import time
from collections.abc import Iterator

from skerry.host.cgroup_places import read_text, write

TICK, IDLE_TICK = 0.25, 0.5
"""Seconds between two looks, while there is a crowd and while there is none."""
HOLD = 0.5
"""Seconds that a pause takes at most. It ends when everything has stopped."""
REST = 1
"""Times as long as a pause, at least, is what comes after it."""
CROWD = 48
"""Threads of one environment that run, or want to: from here on they are paused."""
BUSY = 24
"""The same for the whole machine, per core: below that, nothing is paused."""
SAMPLE = 32
"""Threads that are looked at to tell how many of an environment's want to run, or wait."""
LINE = 2
"""Threads in all samples together that wait in the kernel. Fork bombs without a line have 0 or 1 most of the time."""

_RUNNING = re.compile(r" (\d+)/")


class Crowds:
    """Looks at the environments whose cgroups (v2) are in `parent`. Does nothing where there is none to freeze."""

    def __init__(self, parent: str | None, *, proc: str = "/proc") -> None:
        self._parent = parent or ""
        self._proc = proc
        self.pauses = 0
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if self._parent:
            self._thaw(self._places())  # a daemon that was killed in a pause leaves them frozen
            self._thread = threading.Thread(target=self._watch, name="skerry-crowds", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        tick = IDLE_TICK
        while not self._stopped.wait(tick):
            crowds, waiting = self.look()
            tick = TICK if crowds else IDLE_TICK
            if waiting >= LINE:
                tick = max(TICK, REST * self._pause(crowds))

    def look(self) -> tuple[list[str], int]:
        """The cgroups that a crowd is in, and how many threads of their samples wait in the kernel."""
        running = _RUNNING.search(read_text(f"{self._proc}/loadavg"))
        if running is None or int(running[1]) < BUSY * (os.cpu_count() or 1):
            return [], 0
        found = [(place, *self._threads(place)) for place in self._places()]
        crowds = [(place, waiting) for place, wanting, waiting in found if wanting >= CROWD]
        return [place for place, _ in crowds], sum(waiting for _, waiting in crowds)

    def _places(self) -> Iterator[str]:
        with contextlib.suppress(OSError):  # the last environment is gone, and the parent with it
            for entry in os.scandir(self._parent):
                if entry.is_dir():
                    yield entry.path

    def _threads(self, place: str) -> tuple[float, int]:
        """About how many of its threads run, want to, or wait in the kernel; and how many of the sample wait."""
        threads = read_text(f"{place}/cgroup.threads").split()
        if len(threads) < CROWD:
            return 0.0, 0
        states = [self._state(thread) for thread in random.sample(threads, SAMPLE)]
        running, waiting = states.count("R"), states.count("D")
        return len(threads) * (running + waiting) / SAMPLE, waiting

    def _state(self, thread: str) -> str:
        return read_text(f"{self._proc}/{thread}/stat").rpartition(") ")[2][:1]

    def _pause(self, places: list[str]) -> float:
        """Freeze all at once: any left running would take the CPU from lock holders. Returns the seconds taken."""
        self.pauses += 1
        began = time.monotonic()
        deadline = began + HOLD
        try:
            for place in places:
                self._freeze(place, "1")
            for place in places:
                _await_frozen(place, deadline)
        finally:
            self._thaw(places)
        return time.monotonic() - began

    def _thaw(self, places: Iterator[str] | list[str]) -> None:
        for place in places:
            self._freeze(place, "0")

    def _freeze(self, place: str, value: str) -> None:
        with contextlib.suppress(OSError):  # it is gone
            write(f"{place}/cgroup.freeze", value)


def _await_frozen(place: str, deadline: float) -> None:
    with contextlib.suppress(OSError), open(f"{place}/cgroup.events", "rb", buffering=0) as events:
        changed = select.poll()
        changed.register(events, select.POLLPRI)
        while b"frozen 1" not in os.pread(events.fileno(), 4096, 0):
            left = deadline - time.monotonic()
            if left <= 0 or not changed.poll(left * 1000):
                return
