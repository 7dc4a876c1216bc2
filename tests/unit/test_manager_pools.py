"""Pools, where their entries die, fail and change at the wrong moment."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from skerry.errors import Busy, DaemonUnavailable, LaunchFailed, QuotaExceeded
from skerry.manager.environments.lifecycle import ORPHAN_MIN
from skerry.manager.environments.request import CreateRequest
from skerry.manager.pools import pool as module
from skerry.manager.pools.pool import PoolSettings
from skerry.models import PoolStats
from tests.unit.stubs import (
    CALLER,
    POLICY,
    StubBackend,
    StubClock,
    StubRecords,
    asynchronous,
    make_manager,
    until,
)


def settings(minimum: int = 1, maximum: int = 10, **more: Any) -> PoolSettings:
    return PoolSettings("default", "host", POLICY, minimum, maximum, **more)


async def a_while() -> None:
    """Long enough for whatever is not waiting for anybody."""
    for _ in range(100):
        await asyncio.sleep(0)


@asynchronous
async def test_an_entry_becomes_an_environment_and_stays_without_a_daemon() -> None:
    backend = StubBackend()
    manager = make_manager(backend, pools=[settings()])
    pool = manager.pools.find("default")
    await pool.warmup(1)
    [entry] = backend.living
    assert not manager.environments(CALLER)
    environment = await manager.create(CALLER, CreateRequest(policy=POLICY))
    assert environment.id == entry
    assert backend.channels[entry].stays == ORPHAN_MIN
    await manager.close()
    assert backend.living == set()


@asynchronous
async def test_one_that_has_died_is_not_handed_out_though_nobody_has_noticed() -> None:
    backend = StubBackend()
    manager = make_manager(backend, pools=[settings()])
    await manager.pools.find("default").warmup(1)
    [entry] = backend.living
    backend.living.discard(entry)
    environment = await manager.create(CALLER, CreateRequest(policy=POLICY))
    assert environment.id != entry
    assert entry in backend.stops
    stats = manager.pools.stats[0]
    assert (stats.hits, stats.misses) == (0, 1)
    await manager.close()


@asynchronous
async def test_one_that_cannot_take_its_limits_is_replaced_by_a_cold_start() -> None:
    backend = StubBackend()
    manager = make_manager(backend, pools=[settings()])
    await manager.pools.find("default").warmup(1)

    def fault(step: str, _: str) -> None:
        if step == "settle":
            raise LaunchFailed("no")

    backend.fault = fault
    environment = await manager.create(CALLER, CreateRequest(policy=POLICY))
    assert environment.info.state == "running"
    assert backend.stops == [environment.id]
    assert backend.living >= {environment.id}
    stats = manager.pools.stats[0]
    assert (stats.hits, stats.misses, stats.failures, stats.active, stats.error) == (0, 1, 1, 1, "no")
    await manager.close()


@asynchronous
async def test_one_of_another_image_is_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name points to another image now."""
    backend = StubBackend()
    manager = make_manager(backend, pools=[settings()])
    await manager.pools.find("default").warmup(1)
    [old] = backend.living
    image = type(manager._images.get("host"))
    monkeypatch.setattr(image, "digest", "sha256:another", raising=False)
    environment = await manager.create(CALLER, CreateRequest(policy=POLICY))
    assert environment.id != old
    await until(lambda: old not in backend.living)
    await manager.close()


@asynchronous
async def test_what_fails_is_tried_again_later_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_MIN", 0.0)
    backend = StubBackend()
    failures = iter("123")

    def fault(step: str, _: str) -> None:
        if step == "started" and next(failures, None):
            raise LaunchFailed("not today")

    backend.fault = fault
    manager = make_manager(backend, pools=[settings(minimum=2)])
    manager.pools.begin()
    stats: list[PoolStats] = []

    def done() -> bool:
        stats.append(manager.pools.stats[0])
        return stats[-1].available == 2

    await until(done)
    assert stats[-1].failures == 3
    assert "not today" in {each.error for each in stats}
    assert stats[-1].error == ""
    assert len(backend.living) == 2
    await manager.close()
    assert backend.living == set()


@asynchronous
async def test_a_dead_entry_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_MIN", 0.0)
    backend = StubBackend()
    manager = make_manager(backend, pools=[settings()])
    await manager.pools.find("default").warmup(1)
    [dead] = backend.living
    backend.channels[dead].break_down("killed")
    await until(lambda: manager.pools.stats[0].available == 1 and dead not in backend.living)
    assert "killed" not in manager.pools.stats[0].error  # the next one is fine
    await manager.close()


@asynchronous
async def test_who_has_no_room_in_its_quota_does_not_drain_a_pool() -> None:
    class Full(StubRecords):
        def created(self, environment: Any, intent: Any) -> Any:
            raise QuotaExceeded("no room")

    backend = StubBackend()
    manager = make_manager(backend, records=Full(), pools=[settings(minimum=3)])
    await manager.pools.find("default").warmup(3)
    for _ in range(5):
        with pytest.raises(QuotaExceeded):
            await manager.create(CALLER, CreateRequest(policy=POLICY))
    assert manager.pools.stats[0].hits == 1
    await manager.close()


@asynchronous
async def test_the_sweeper_leaves_entries_alone() -> None:
    backend = StubBackend()
    manager = make_manager(backend, pools=[settings(minimum=2)])
    await manager.pools.find("default").warmup(2)
    backend.living.add("leftover0000")
    await manager.reconcile()
    assert len(backend.living) == 2
    assert "leftover0000" not in backend.living
    await manager.close()


@asynchronous
async def test_who_comes_when_all_are_in_use_waits_in_line() -> None:
    backend = StubBackend()
    manager = make_manager(backend, pools=[settings(minimum=1, maximum=2)])
    first, second = [await manager.create(CALLER, CreateRequest(policy=POLICY)) for _ in range(2)]
    third, fourth = (
        asyncio.create_task(manager.create(CALLER, CreateRequest(policy=POLICY))) for _ in range(2)
    )
    await a_while()
    assert not third.done()
    assert len(backend.living) == 2
    await manager.delete(CALLER, first.id)
    assert (await third).info.state == "running"
    await a_while()
    assert not fourth.done()
    assert len(backend.living) == 2
    await manager.delete(CALLER, second.id)
    await fourth
    stats = manager.pools.stats[0]
    assert (stats.active, stats.available, stats.misses) == (2, 0, 4)
    assert stats.wait_max_seconds > stats.wait_p50_seconds
    await manager.close()


@asynchronous
async def test_who_waits_too_long_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = StubBackend()
    manager = make_manager(backend, pools=[settings(minimum=0, maximum=1)])
    first = await manager.create(CALLER, CreateRequest(policy=POLICY))
    monkeypatch.setattr(module, "WAIT_MAX", 0.0)
    with pytest.raises(Busy, match="all 1 environments of the pool 'default' are in use") as refused:
        await manager.create(CALLER, CreateRequest(policy=POLICY))
    assert "`maximum` in pools.toml" in refused.value.hint
    await manager.delete(CALLER, first.id)
    await manager.create(CALLER, CreateRequest(policy=POLICY))
    await manager.close()


@asynchronous
async def test_who_leaves_the_line_is_not_waited_for() -> None:
    backend = StubBackend()
    manager = make_manager(backend, pools=[settings(minimum=0, maximum=1)])
    first = await manager.create(CALLER, CreateRequest(policy=POLICY))
    gone, next_ = (
        asyncio.create_task(manager.create(CALLER, CreateRequest(policy=POLICY))) for _ in range(2)
    )
    await a_while()
    manager.pools.find("default").released(first.id)  # it is its turn, and it leaves before it has noticed
    gone.cancel()
    await next_
    assert gone.cancelled()
    await manager.close()


@asynchronous
async def test_nobody_waits_for_a_daemon_that_stops() -> None:
    manager = make_manager(StubBackend(), pools=[settings(minimum=0, maximum=1)])
    await manager.create(CALLER, CreateRequest(policy=POLICY))
    waiting = asyncio.create_task(manager.create(CALLER, CreateRequest(policy=POLICY)))
    await a_while()
    await manager.close()
    with pytest.raises(DaemonUnavailable):
        await waiting


@asynchronous
async def test_what_a_use_has_warmed_up_goes_when_no_other_comes() -> None:
    backend, clock = StubBackend(), StubClock()
    manager = make_manager(backend, clock, pools=[settings(minimum=0, after_use=2, idle=60)])
    environment = await manager.create(CALLER, CreateRequest(policy=POLICY, lifetime=10_000, idle=10_000))
    await until(lambda: manager.pools.stats[0].available == 2)
    clock.advance(59)
    await manager.reconcile()
    assert manager.pools.stats[0].available == 2
    clock.advance(1)
    await manager.reconcile()
    await until(lambda: backend.living == {environment.id})
    assert manager.pools.stats[0].minimum == 0
    await manager.create(CALLER, CreateRequest(policy=POLICY))
    await until(lambda: manager.pools.stats[0].available == 2)
    await manager.close()


@asynchronous
async def test_what_nobody_needs_is_replaced_when_it_is_old() -> None:
    """Not all at once."""
    backend, clock = StubBackend(), StubClock()
    manager = make_manager(backend, clock, pools=[settings(minimum=5, age=100)])
    pool = manager.pools.find("default")
    await pool.warmup(5)
    old = set(backend.living)
    clock.advance(99)
    await manager.reconcile()
    assert pool.ids == old
    clock.advance(1)
    while pool.ids & old:
        before = len(pool.ids & old)
        await manager.reconcile()
        assert before - len(pool.ids & old) == -(-before // 4)
        await until(lambda: pool.stats.available == 5)
    await until(lambda: not backend.living & old)
    await manager.close()


@asynchronous
async def test_nothing_is_made_ready_while_somebody_waits() -> None:
    manager = make_manager(StubBackend(), pools=[settings(minimum=0, maximum=1)])
    pool = manager.pools.find("default")
    first = await manager.create(CALLER, CreateRequest(policy=POLICY))
    waiting = asyncio.create_task(manager.create(CALLER, CreateRequest(policy=POLICY)))
    await a_while()
    warming = asyncio.create_task(pool.warmup(1))  # which comes before who waits has noticed its turn
    pool.released(first.id)
    await asyncio.gather(waiting, warming)
    stats = pool.stats
    assert (stats.active, stats.available, stats.creating) == (1, 0, 0)
    await manager.close()
