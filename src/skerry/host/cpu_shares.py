"""CPU time, where it is short, shared equally by groups of environments: tenants.

The kernel shares it by environment, so that a tenant with sixteen that compute would get sixteen times what a neighbour
gets with one, and the neighbour would wait for sixteen turns. So the environments of a group divide between them the
weight that one alone has. A thread looks how many of a group are busy; all of the group weigh the same, also those that
are not busy now and might begin at any moment.

Where all environments are one group's, nothing is to be done.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
from time import monotonic
from typing import Protocol

from skerry.errors import PlatformError
from skerry.host.cgroup_places import read_text

TICK, IDLE_TICK = 0.25, 0.5
"""Seconds between two looks, while CPU is short and while it is not."""
LOOK_MAX = 0.05
"""Of the time, at most, is spent on looking: with very many environments looks are less frequent."""
BUSY = 0.01
"""Of a core: an environment that uses as much is busy."""
PARTS_MAX = 64
"""Of a weight. Those of a group that has more busy ones than this weigh more than one, together."""

_RUNNING = re.compile(r" (\d+)/")


class Weighed(Protocol):
    """An environment's cgroup. Both are called from a thread of their own."""

    def cpu_time(self) -> float | None:
        """CPU seconds so far; None if unknown."""

    def weigh(self, parts: int) -> None:
        """Set the CPU weight to the default divided by `parts`. Raises PlatformError."""


class _Environment:
    __slots__ = ("cgroup", "parts", "seconds")

    def __init__(self, cgroup: Weighed) -> None:
        self.cgroup = cgroup
        self.parts = 1
        self.seconds: float | None = None
        """CPU time at the last look."""


class CpuShares:
    def __init__(self, *, proc: str = "/proc", cores: int = 0) -> None:
        self._loadavg = f"{proc}/loadavg"
        self._cores = cores or os.cpu_count() or 1
        self._groups: dict[str, dict[str, _Environment]] = {}
        self._parts: dict[str, int] = {}
        """That the weight of a group is divided into, if not one."""
        self._group_of: dict[str, str] = {}
        self._looked = monotonic()
        self._changed = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        """Runs while there are several groups."""

    def add(self, group: str, environment_id: str, cgroup: Weighed) -> None:
        """Count an environment, which has the usual weight, to a group."""
        with self._changed:
            self._group_of[environment_id] = group
            environment = self._groups.setdefault(group, {})[environment_id] = _Environment(cgroup)
            _weigh(environment, self._parts.get(group, 1))
            if len(self._groups) > 1 and self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="skerry-cpu-shares", daemon=True)
                self._thread.start()

    def remove(self, environment_id: str) -> None:
        with self._changed:
            if (group := self._group_of.pop(environment_id, None)) is None:
                return
            del self._groups[group][environment_id]
            if not self._groups[group]:
                del self._groups[group]
                self._parts.pop(group, None)

    def close(self) -> None:
        """End the thread. Weights stay as they are."""
        self._stopped.set()
        if (thread := self._thread) is not None:
            thread.join()

    def _watch(self) -> None:
        tick = IDLE_TICK
        while not self._stopped.wait(tick):
            began = monotonic()
            short = self.look()
            tick = max(TICK if short else IDLE_TICK, (monotonic() - began) / LOOK_MAX)
            with self._changed:
                if len(self._groups) < 2:
                    self._thread = None
                    return

    def look(self) -> bool:
        """Divide the weights anew. False, and nothing is done, if there is CPU enough for all."""
        running = _RUNNING.search(read_text(self._loadavg))
        if running is None or int(running[1]) <= self._cores:
            return False
        now = monotonic()
        much = BUSY * (now - self._looked)
        self._looked = now
        with self._changed:
            groups = {group: list(environments.values()) for group, environments in self._groups.items()}
        for group, environments in groups.items():
            parts = _parts(sum([_used(environment) > much for environment in environments]))
            with self._changed:
                if group in self._groups:
                    self._parts[group] = parts
            for environment in environments:
                _weigh(environment, parts)
        return True


def _weigh(environment: _Environment, parts: int) -> None:
    if environment.parts != parts:
        environment.parts = parts
        with contextlib.suppress(PlatformError):  # it is about to go
            environment.cgroup.weigh(parts)


def _used(environment: _Environment) -> float:
    """Seconds of CPU time since the last look."""
    before, environment.seconds = environment.seconds, environment.cgroup.cpu_time()
    if before is None or environment.seconds is None:
        return 0.0
    return environment.seconds - before


def _parts(busy: int) -> int:
    """The power of two next to it, so that weights are not written whenever one more is busy or less."""
    return min(PARTS_MAX, 1 << round(math.log2(max(1, busy))))
