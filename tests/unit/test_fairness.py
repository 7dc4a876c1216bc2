"""The budget of loop time: who is delayed, for how long, and who never is. Time is virtual here."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from skerry.fairness import BURST, LINES_MAX, SLICE, STRANGERS, Budget, Flow, Line, Lines, Timed, timed

SECONDS = 10.0


class VirtualLoop:
    """Callbacks in the order of their times. Work advances the time, and so does waiting."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def call_soon(self, callback: Callable[[], None]) -> object:
        return self.call_later(0.0, callback)

    def call_later(self, delay: float, callback: Callable[[], None]) -> object:
        heapq.heappush(self._due, (self.now + delay, next(self._order), callback))
        return callback

    def run(self, until: float) -> None:
        while self._due and self._due[0][0] <= until:
            when, _, callback = heapq.heappop(self._due)
            self.now = max(self.now, when)
            callback()
        self.now = max(self.now, until)


class Flood:
    """A peer that has more work than it may do."""

    def __init__(self, loop: VirtualLoop, flow: Flow, piece: float = SLICE) -> None:
        self._loop, self._flow, self._piece = loop, flow, piece
        self.worked = 0.0
        self.work()

    def work(self) -> None:
        while True:
            self._loop.now += self._piece
            self.worked += self._piece
            if not self._flow.spend(self._piece):
                self._flow.wait(self.work)
                return


@pytest.fixture
def loop() -> VirtualLoop:
    return VirtualLoop()


@pytest.fixture
def budget(loop: VirtualLoop) -> Budget:
    return Budget(0.25, clock=lambda: loop.now, loop=cast(Any, loop))


def beside_little_work(loop: VirtualLoop, budget: Budget) -> None:
    """Let time go by, with a flow at work that needs little."""
    other = budget.flow("little")
    for step in range(1000):
        loop.run(step * SECONDS / 1000)
        assert other.spend(0.0001)


def test_floods_together_keep_to_the_share(loop: VirtualLoop, budget: Budget) -> None:
    floods = [
        Flood(loop, budget.flow(str(number)), piece) for piece in (SLICE, SLICE / 10) for number in range(8)
    ]
    beside_little_work(loop, budget)
    assert sum(flood.worked for flood in floods) <= 0.25 * SECONDS + BURST + 32 * SLICE
    assert sum(flood.worked for flood in floods) >= 0.2 * SECONDS


def test_floods_may_use_nearly_all_of_a_loop_that_nobody_else_needs(
    loop: VirtualLoop, budget: Budget
) -> None:
    floods = [Flood(loop, budget.flow(str(number))) for number in range(4)]
    loop.run(SECONDS)
    worked = [flood.worked for flood in floods]
    assert 0.7 * SECONDS < sum(worked) < 0.9 * SECONDS
    assert max(worked) < 1.2 * min(worked)


def test_many_flows_that_need_little_each_are_limited_together(loop: VirtualLoop, budget: Budget) -> None:
    flows, worked, waited = [budget.flow("many") for _ in range(20)], 0.0, set[int]()

    def work(number: int) -> None:
        nonlocal worked
        waited.discard(number)
        loop.now += 0.0005
        worked += 0.0005
        if not flows[number].spend(0.0005):
            waited.add(number)
            flows[number].wait(lambda: work(number))

    other = budget.flow("little")
    for step in range(1000):
        loop.run(step * 0.01)
        assert other.spend(0.0001)
        for number in set(range(20)) - waited:
            work(number)
    assert worked < 0.5 * SECONDS  # each alone would be within its share


def test_group_that_is_alone_may_use_all_of_the_loop(loop: VirtualLoop, budget: Budget) -> None:
    floods = [Flood(loop, budget.flow("alone")) for _ in range(4)]
    loop.run(SECONDS)
    assert sum(flood.worked for flood in floods) > 0.95 * SECONDS


def test_flows_of_one_group_get_equal_time(loop: VirtualLoop, budget: Budget) -> None:
    """However long the pieces are that each of them works in."""
    floods = [Flood(loop, budget.flow("a"), piece) for piece in (SLICE / 10, SLICE, 5 * SLICE)]
    loop.run(SECONDS)
    worked = [flood.worked for flood in floods]
    assert max(worked) < 1.2 * min(worked)


def test_groups_get_equal_time_whatever_number_of_flows_they_have(loop: VirtualLoop, budget: Budget) -> None:
    many = [Flood(loop, budget.flow("many")) for _ in range(20)]
    one = Flood(loop, budget.flow("one"))
    loop.run(SECONDS)
    assert sum(flood.worked for flood in many) < 1.2 * one.worked


def test_flow_that_needs_little_never_waits(loop: VirtualLoop, budget: Budget) -> None:
    for number in range(16):
        Flood(loop, budget.flow(str(number)))
    sparse = budget.flow("sparse")
    for step in range(1000):
        loop.run(step * 0.01)
        assert sparse.spend(0.0001)


def test_lone_flood_keeps_to_the_share_while_another_flow_works(loop: VirtualLoop, budget: Budget) -> None:
    flood = Flood(loop, budget.flow("a"), SLICE / 10)
    beside_little_work(loop, budget)
    assert flood.worked < 0.3 * SECONDS


def test_debt_delays_nobody_else(loop: VirtualLoop, budget: Budget) -> None:
    """One long piece of work of a flow is not paid by those who wait beside it."""
    debtor, other = budget.flow("a"), budget.flow("b")
    debtor.spend(1.0)
    debtor.wait(lambda: None)
    begun: list[float] = []
    assert not other.spend(1.5 * SLICE)
    other.wait(lambda: begun.append(loop.now))
    beside_little_work(loop, budget)
    assert begun[0] < 0.02


def test_work_done_elsewhere_is_paid_before_the_next_turn(loop: VirtualLoop, budget: Budget) -> None:
    """A task that works on what was read charges it: the flow that caused it gets that much less."""
    floods = [Flood(loop, budget.flow("a")), Flood(loop, debtor := budget.flow("b"))]
    debtor.spend(0.5)
    loop.run(SECONDS)
    assert floods[1].worked < floods[0].worked - 0.4


def test_closed_flow_is_not_called(loop: VirtualLoop, budget: Budget) -> None:
    flow, called = budget.flow("a"), []
    assert not flow.spend(1.0)
    flow.wait(lambda: called.append(1))
    flow.close()
    loop.run(SECONDS)
    assert (called, budget.waiting) == ([], 0)


def test_requests_of_a_tenant_take_turns(loop: VirtualLoop, budget: Budget) -> None:
    """In the order in which they came; one that has given up is left out."""
    served: list[int] = []

    async def request(line: Line, number: int) -> None:
        await line.turn()
        served.append(number)
        line.flow.spend(0.01)

    async def main() -> None:
        lines = Lines()
        line = lines.of("a")
        assert lines.of("a") is line
        assert lines.of("b") is not line
        waiting = [asyncio.create_task(request(line, number)) for number in range(5)]
        await asyncio.sleep(0)
        assert served == [0]
        assert line.busy
        waiting[2].cancel()
        await lines.of("b").turn()
        assert served == [0]
        await asyncio.wait(waiting)

    asyncio.run(main())
    assert served == [0, 1, 3, 4]


def test_strangers_are_one_group_whatever_number_of_addresses_they_have() -> None:
    async def main() -> None:
        lines = Lines()
        one, other = lines.of_stranger("192.0.2.1"), lines.of_stranger("192.0.2.2")
        assert one is not other
        assert one is lines.of_stranger("192.0.2.1")
        assert {one.flow.group, other.flow.group} == {STRANGERS}
        assert lines.of("192.0.2.1") is not one

    asyncio.run(main())


def test_lines_of_tenants_that_nobody_waits_in_are_forgotten() -> None:
    async def main() -> None:
        lines = Lines()
        first = lines.of("0")
        for number in range(2 * LINES_MAX):
            lines.of(str(number))
        assert lines.of("0") is not first

    asyncio.run(main())


def test_coroutine_waits_for_its_turn() -> None:
    async def work() -> bool:
        flow = Budget().flow("a")
        await flow.turn()
        flow.spend(2 * SLICE)
        await flow.turn()
        return flow.spend(0.0)

    assert asyncio.run(work())


def busy(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def test_steps_are_charged_and_waiting_is_not() -> None:
    spent = {"much": 0.0, "little": 0.0}

    def charged(group: str, seconds: float) -> None:
        spent[group] += seconds

    async def work(share: float) -> str:
        for _ in range(5):
            busy(share)
            await asyncio.sleep(0.02)
        return "done"

    async def main() -> list[str]:
        budget = Budget()
        budget.charged = charged
        much, little = timed(work(0.01), budget.flow("much")), timed(work(0.0), budget.flow("little"))
        return list(await asyncio.gather(much, little))

    assert asyncio.run(main()) == ["done", "done"]
    # Both take more than 150 ms from beginning to end: charged for their waits, they would be alike.
    assert spent["much"] >= 0.05
    assert spent["little"] < spent["much"] / 2


def test_errors_and_cancellation_go_through() -> None:
    seen: list[str] = []

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("mine")

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("canceled")
            raise
        finally:
            await asyncio.sleep(0)
            seen.append("closed")

    async def catches() -> str:
        event = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(event.set_exception, KeyError("theirs"))
        try:
            await event
        except KeyError:
            return "caught"
        return "not"

    async def main() -> None:
        with pytest.raises(ValueError, match="mine"):
            await Timed(fails(), Budget().flow())
        assert await Timed(catches(), Budget().flow()) == "caught"
        task = asyncio.ensure_future(timed(waits(), Budget().flow()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert seen == ["canceled", "closed"]

    asyncio.run(main())
