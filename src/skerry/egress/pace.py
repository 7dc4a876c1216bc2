"""Loop time of one environment's proxy: charged to one flow of the fair queue, see `skerry.fairness`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from skerry.fairness import Flow, Line, Timed

PER_PIECE, PER_BYTE = 40e-6, 0.6e-9
"""Seconds charged for relaying a piece, beside its task's steps: the kernel copies it twice, in callbacks."""
AT_A_TURN = 4
"""Waiting callbacks that one turn resumes."""

_T = TypeVar("_T")


class Pace(Line):
    """The queue of one proxy: its sockets and connections share one flow."""

    def __init__(self, flow: Flow) -> None:
        super().__init__(flow, AT_A_TURN)

    def passed_on(self, size: int) -> None:
        """Charge for a relayed piece."""
        self.flow.spend(PER_PIECE + size * PER_BYTE)

    async def metered(self, work: Callable[..., Coroutine[Any, Any, _T]], *arguments: Any) -> _T:
        """Await the work, charging the time of each step."""
        return await Timed(work(*arguments), self.flow)
