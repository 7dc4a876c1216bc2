"""Concurrent requests for the same thing share one task."""

from __future__ import annotations

import asyncio

import pytest

from skerry.errors import DaemonUnavailable, PlatformError
from skerry.singleflight import SingleFlight
from tests.unit.stubs import asynchronous


@asynchronous
async def test_concurrent_callers_share_one_task() -> None:
    flights, begun, gate = SingleFlight[str, int](), [0], asyncio.Event()

    async def work() -> int:
        begun[0] += 1
        await gate.wait()
        return begun[0]

    callers = [asyncio.create_task(flights.run("key", work)) for _ in range(5)]
    other = asyncio.create_task(flights.run("other", work))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gate.set()
    assert await asyncio.gather(*callers) == [2] * 5  # one for each key
    assert await other == 2
    assert await flights.run("key", work) == 3  # nothing is cached


@asynchronous
async def test_cancelled_caller_does_not_cancel_the_others() -> None:
    flights, gate = SingleFlight[str, int](), asyncio.Event()

    async def work() -> int:
        await gate.wait()
        return 1

    first, second = (asyncio.create_task(flights.run("key", work)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    gate.set()
    assert await second == 1


@asynchronous
async def test_failure_reaches_every_caller_and_is_not_kept() -> None:
    flights = SingleFlight[str, int]()

    async def fail() -> int:
        await asyncio.sleep(0)
        raise PlatformError("broken")

    async def work() -> int:
        return 1

    results = await asyncio.gather(*(flights.run("key", fail) for _ in range(3)), return_exceptions=True)
    assert [type(result) for result in results] == [PlatformError] * 3
    assert await flights.run("key", work) == 1


@asynchronous
async def test_close_cancels_tasks_and_refuses_new_ones() -> None:
    flights = SingleFlight[str, None]()

    async def forever() -> None:
        await asyncio.Event().wait()

    waiting = asyncio.create_task(flights.run("key", forever))
    await asyncio.sleep(0)
    await flights.close()
    with pytest.raises(DaemonUnavailable):
        await waiting
    with pytest.raises(DaemonUnavailable):
        await flights.run("other", forever)
