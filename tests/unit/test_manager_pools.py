"""Pools, where their entries die, fail and change at the wrong moment."""

from __future__ import annotations

from typing import Any

import pytest

from skerry.errors import LaunchFailed, QuotaExceeded
from skerry.manager import pools as module
from skerry.manager.lifecycle import ORPHAN_MIN
from skerry.manager.pools import Settings
from skerry.models import PoolStats
from tests.unit.stubs import CALLER, POLICY, StubBackend, StubRecords, asynchronous, make_manager, until


def settings(minimum: int = 1, maximum: int = 10) -> Settings:
    return Settings("default", "host", POLICY, minimum, maximum)


@asynchronous
async def test_an_entry_becomes_an_environment_and_stays_without_a_daemon() -> None:
    backend = StubBackend()
    manager = make_manager(backend, pools=[settings()])
    pool = manager.pools.find("default")
    await pool.warmup(1)
    [entry] = backend.living
    assert not manager.environments(CALLER)
    environment = await manager.create(CALLER, policy=POLICY)
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
    environment = await manager.create(CALLER, policy=POLICY)
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
    environment = await manager.create(CALLER, policy=POLICY)
    assert environment.info.state == "running"
    assert backend.stops == [environment.id]
    assert backend.living >= {environment.id}
    stats = manager.pools.stats[0]
    assert (stats.hits, stats.misses, stats.failures, stats.active, stats.error) == (0, 1, 1, 0, "no")
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
    environment = await manager.create(CALLER, policy=POLICY)
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
            await manager.create(CALLER, policy=POLICY)
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
