"""The loop time of a proxy: charged step by step, and waited for in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from skerry.egress.pace import Pace
from skerry.fairness import SLICE, Budget


class Clock:
    """Goes on by itself a little with every look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-9
        return self.now


def paced(test: Callable[[Budget, Pace], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        async def main() -> None:
            budget = Budget(clock=Clock())
            async with asyncio.timeout(10):
                await test(budget, Pace(budget.flow("tenant")))

        asyncio.run(main())

    run.__name__ = test.__name__
    return run


@paced
async def test_within_the_allowance_nobody_waits(budget: Budget, pace: Pace) -> None:
    await pace.turn()
    assert pace.spend(0.0)


@paced
async def test_those_that_wait_go_on_in_order(budget: Budget, pace: Pace) -> None:
    pace.spend(2 * SLICE)
    order: list[int] = []

    async def one(number: int) -> None:
        await pace.turn()
        order.append(number)

    await asyncio.gather(*(one(number) for number in range(20)))
    assert order == list(range(20))


@paced
async def test_every_step_of_the_work_is_charged(budget: Budget, pace: Pace) -> None:
    spent: list[tuple[str, float]] = []
    budget.charged = lambda group, seconds: spent.append((group, seconds))

    async def work(result: str) -> str:
        for _ in range(3):
            await asyncio.sleep(0)
        return result

    assert await pace.metered(work, "done") == "done"
    assert [group for group, _ in spent] == ["tenant"] * 4


@paced
async def test_work_is_told_of_its_cancellation(budget: Budget, pace: Pace) -> None:
    seen: list[str] = []
    begun = asyncio.Event()

    async def work() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("canceled")
            await asyncio.sleep(0)
            seen.append("cleaned up")
            raise

    task = asyncio.create_task(pace.metered(work))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["canceled", "cleaned up"]
    with pytest.raises(ZeroDivisionError):
        await pace.metered(_failing)


async def _failing() -> None:
    await asyncio.sleep(0)
    raise ZeroDivisionError


@paced
async def test_a_closed_pace_lets_nobody_go_on(budget: Budget, pace: Pace) -> None:
    pace.spend(2 * SLICE)
    waiting = asyncio.create_task(pace.turn())
    await asyncio.sleep(0)
    pace.close()
    assert budget.waiting == 0
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
