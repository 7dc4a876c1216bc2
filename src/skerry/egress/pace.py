"""Loop time of one environment's proxy: charged to one flow of the fair queue, see `skerry.fairness`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from skerry.fairness import Flow, Timed

PER_PIECE, PER_BYTE = 40e-6, 0.6e-9
"""Seconds charged for relaying a piece, beside its task's steps: the kernel copies it twice, in callbacks."""
AT_A_TURN = 4
"""Waiting callbacks that one turn resumes."""

_T = TypeVar("_T")


class Pace:
    """Shares one flow among all sockets and connections of a proxy, first come, first served."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._waiting: deque[Callable[[], None]] = deque()

    def spend(self, seconds: float) -> bool:
        """Charge work that was done. False: stop, and continue with `later()`."""
        return self._flow.spend(seconds) and not self._waiting

    def later(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` at this environment's turn, after those already waiting."""
        self._waiting.append(go_on)
        if len(self._waiting) == 1:
            self._flow.wait(self._go_on)

    async def turn(self) -> None:
        """Return at once within the allowance, else at the next turn."""
        if self.spend(0.0):
            return
        turn = asyncio.Event()
        self.later(turn.set)
        await turn.wait()

    def passed_on(self, size: int) -> None:
        """Charge for a relayed piece."""
        self._flow.spend(PER_PIECE + size * PER_BYTE)

    async def metered(self, work: Callable[..., Coroutine[Any, Any, _T]], *arguments: Any) -> _T:
        """Await the work, charging the time of each step."""
        return await Timed(work(*arguments), self._flow)

    def close(self) -> None:
        self._waiting.clear()
        self._flow.close()

    def _go_on(self) -> None:
        for _ in range(min(AT_A_TURN, len(self._waiting))):
            self._waiting.popleft()()
        if self._waiting:
            self._flow.wait(self._go_on)
