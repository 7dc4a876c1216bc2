"""The loop time of one environment's proxy: what it uses, and when it has to wait for others."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from skerry.fairness import Flow, Timed

PER_PIECE, PER_BYTE = 40e-6, 0.6e-9
"""Seconds that passing on a piece takes beside the steps of its task: the kernel copies it twice, in callbacks."""
AT_A_TURN = 4
"""Of those that wait, that go on at one turn."""

_T = TypeVar("_T")


class Pace:
    """All sockets and connections of one proxy share one flow of the budget."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._waiting: deque[Callable[[], None]] = deque()

    def spend(self, seconds: float) -> bool:
        """Charge work that was done. False: stop, and go on `later()`."""
        return self._flow.spend(seconds) and not self._waiting

    def later(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` when it is this environment's turn, after all that wait already."""
        self._waiting.append(go_on)
        if len(self._waiting) == 1:
            self._flow.wait(self._go_on)

    async def turn(self) -> None:
        """Return at once while within the allowance, else when it is our turn."""
        if self.spend(0.0):
            return
        turn = asyncio.Event()
        self.later(turn.set)
        await turn.wait()

    def passed_on(self, size: int) -> None:
        """Charge a piece that was received and sent."""
        self._flow.spend(PER_PIECE + size * PER_BYTE)

    async def metered(self, work: Callable[..., Coroutine[Any, Any, _T]], *arguments: Any) -> _T:
        """Do the work, and charge the time of every step of it."""
        return await Timed(work(*arguments), self._flow)

    def close(self) -> None:
        self._waiting.clear()
        self._flow.close()

    def _go_on(self) -> None:
        for _ in range(min(AT_A_TURN, len(self._waiting))):
            self._waiting.popleft()()
        if self._waiting:
            self._flow.wait(self._go_on)
