"""Environments: their states, and what must hold however calls, faults and deaths interleave."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from skerry.errors import (
    Conflict,
    DaemonUnavailable,
    EnvironmentEnded,
    EnvironmentNotFound,
    ImageNotFound,
    InvalidRequest,
    LaunchFailed,
    PlatformError,
    QuotaExceeded,
    SkerryError,
)
from skerry.manager.caller import Caller
from skerry.manager.environments import catalogue, lifecycle
from skerry.manager.environments.environment import Environment
from skerry.manager.environments.request import CreateRequest
from skerry.manager.executions.commands import Command
from skerry.models import Outcome, State
from skerry.store import Written
from skerry.store.audit import Entry
from skerry.store.environments import EnvironmentRecord
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

STEPS = ("start", "started", "connect", "open")


@asynchronous
async def test_a_created_environment_runs_and_is_found_by_id_name_and_prefix() -> None:
    backend = StubBackend()
    manager = make_manager(backend)
    environment = await manager.create(CALLER, CreateRequest(policy=POLICY, name="mine"))
    assert environment.info.state == "running"
    assert environment.id.isalnum()
    assert environment.id[0].isalpha()
    assert len(environment.id) == 12
    assert backend.living == {environment.id}
    for ref in (environment.id, "mine", environment.id[:3], environment.id[:11]):
        assert manager.find(CALLER, ref) is environment
    for ref in ("", environment.id[:2], "other", environment.id + "x"):
        with pytest.raises(EnvironmentNotFound):
            manager.find(CALLER, ref)


@asynchronous
async def test_an_ambiguous_prefix_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = iter(["abcdef000001", "abcdef000002"])
    backend = StubBackend()
    monkeypatch.setattr(backend, "reserve", lambda: next(ids))
    manager = make_manager(backend)
    first = await manager.create(CALLER, CreateRequest(policy=POLICY))
    second = await manager.create(CALLER, CreateRequest(policy=POLICY))
    assert (first.id, second.id) == ("abcdef000001", "abcdef000002")
    with pytest.raises(InvalidRequest, match="2 ids"):
        manager.find(CALLER, "abcdef")
    await manager.delete(CALLER, first.id)
    assert manager.find(CALLER, "abcdef") is second


@asynchronous
async def test_names_are_unique_among_the_living_only() -> None:
    manager = make_manager(StubBackend())
    first = await manager.create(CALLER, CreateRequest(policy=POLICY, name="mine"))
    with pytest.raises(Conflict, match="mine"):
        await manager.create(CALLER, CreateRequest(policy=POLICY, name="mine"))
    await manager.delete(CALLER, "mine")
    assert manager.find(CALLER, "mine") is first
    second = await manager.create(CALLER, CreateRequest(policy=POLICY, name="mine"))
    assert manager.find(CALLER, "mine") is second
    for name in ("-x", "a/b", "a" * 64, "a\n"):
        with pytest.raises(InvalidRequest):
            await manager.create(CALLER, CreateRequest(policy=POLICY, name=name))


@asynchronous
async def test_two_creates_of_one_name_at_once_make_one() -> None:
    manager = make_manager(StubBackend())
    made = await asyncio.gather(
        *(manager.create(CALLER, CreateRequest(policy=POLICY, name="mine")) for _ in range(10)),
        return_exceptions=True,
    )
    assert sum(isinstance(result, Conflict) for result in made) == 9
    assert len(manager) == 1


@asynchronous
async def test_a_create_that_is_wrong_starts_nothing() -> None:
    backend = StubBackend()
    manager = make_manager(backend)
    with pytest.raises(ImageNotFound):
        await manager.create(CALLER, CreateRequest(policy=POLICY, image="none"))
    for lifetime in (0, -1, float("inf"), float("nan")):
        with pytest.raises(InvalidRequest):
            await manager.create(CALLER, CreateRequest(policy=POLICY, lifetime=lifetime))
    for env in ({"A=B": ""}, {"": ""}, {"A": "\0"}, {"\0": "x"}, {"A": "\ud800"}):
        with pytest.raises(InvalidRequest):
            await manager.create(CALLER, CreateRequest(policy=POLICY, env=env))
    assert len(manager) == 0
    assert backend.stops == []


@pytest.mark.parametrize("step", STEPS)
@asynchronous
async def test_a_create_that_fails_leaves_nothing(step: str) -> None:
    backend = StubBackend()
    manager = make_manager(backend)

    def fault(at: str, _: str) -> None:
        if at == step:
            raise LaunchFailed(f"{step} failed")

    backend.fault = fault
    with pytest.raises(LaunchFailed, match=step):
        await manager.create(CALLER, CreateRequest(policy=POLICY, name="mine"))
    assert backend.living == set()
    assert manager.environments(CALLER, ended=True) == []
    backend.fault = lambda at, _: None
    await manager.create(CALLER, CreateRequest(policy=POLICY, name="mine"))


@asynchronous
async def test_two_hundred_creates_with_faults_everywhere_leave_only_the_good_ones() -> None:
    backend = StubBackend()
    manager = make_manager(backend)
    plans = itertools.cycle([*STEPS, "none"])
    plan: dict[str, str] = {}

    def fault(at: str, id: str) -> None:
        if at == "start":
            plan[id] = next(plans)
        if plan.get(id) == at:
            raise LaunchFailed(at) if at != "open" else RuntimeError(at)

    backend.fault = fault
    made = await asyncio.gather(
        *(manager.create(CALLER, CreateRequest(policy=POLICY)) for _ in range(200)), return_exceptions=True
    )
    good = {result.id for result in made if not isinstance(result, BaseException)}
    assert len(good) == 40
    assert backend.living == good
    assert {environment.id for environment in manager.environments(CALLER, ended=True)} == good
    await manager.delete_all("over")
    assert backend.living == set()


@asynchronous
async def test_a_start_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "START_TIMEOUT", 0.01)
    backend = StubBackend()
    manager = make_manager(backend)

    async def hang(_: str) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(backend, "connect", hang)
    with pytest.raises(LaunchFailed, match="did not start"):
        await manager.create(CALLER, CreateRequest(policy=POLICY))
    assert backend.living == set()


@asynchronous
async def test_a_hundred_deletes_at_once_remove_once() -> None:
    backend = StubBackend()
    manager = make_manager(backend)
    environment = await manager.create(CALLER, CreateRequest(policy=POLICY))
    assert all(await asyncio.gather(*(manager.delete(CALLER, environment.id) for _ in range(100))))
    assert backend.stops == [environment.id]
    assert backend.living == set()
    assert environment.info.state == "ended"
    assert environment.info.ended_reason == "deleted"
    assert await manager.delete(CALLER, environment.id) is environment
    with pytest.raises(EnvironmentEnded, match="deleted"):
        await manager.running(CALLER, environment.id)


@asynchronous
async def test_a_caller_that_is_cancelled_does_not_stop_the_removal() -> None:
    backend = StubBackend()
    manager = make_manager(backend)
    environment = await manager.create(CALLER, CreateRequest(policy=POLICY))
    task = asyncio.create_task(manager.delete(CALLER, environment.id))
    await until(lambda: environment.state is State.DELETING)
    task.cancel()
    await asyncio.wait((task,))
    await until(lambda: environment.state is State.ENDED)
    assert backend.living == set()


@asynchronous
async def test_delete_while_it_is_being_created() -> None:
    backend = StubBackend()
    manager = make_manager(backend)
    creating = asyncio.create_task(manager.create(CALLER, CreateRequest(policy=POLICY, name="mine")))
    await until(lambda: bool(backend.living))
    await manager.delete(CALLER, "mine")
    with pytest.raises(EnvironmentEnded):
        await creating
    assert backend.living == set()
    assert len(manager) == 0


@asynchronous
async def test_a_removal_that_fails_is_told_and_tried_again() -> None:
    backend, clock = StubBackend(), StubClock()
    manager = make_manager(backend, clock)
    environment = await manager.create(CALLER, CreateRequest(policy=POLICY, name="mine"))

    def fault(at: str, _: str) -> None:
        if at == "stop":
            raise PlatformError("busy mount")

    backend.fault = fault
    with pytest.raises(PlatformError, match="busy mount"):
        await manager.delete(CALLER, "mine")
    assert environment.state is State.DELETING
    with pytest.raises(EnvironmentEnded):
        await manager.running(CALLER, "mine")
    clock.advance(lifecycle.RETRY_AFTER)
    await until(lambda: len(backend.stops) == 2)
    backend.fault = lambda at, _: None
    clock.advance(lifecycle.RETRY_AFTER)
    await until(lambda: environment.state is State.ENDED)
    assert environment.reason == "deleted"
    assert backend.living == set()


@asynchronous
async def test_lifetime_ends_even_what_is_busy_and_idle_time_only_what_is_not() -> None:
    backend, clock = StubBackend(), StubClock()
    manager = make_manager(backend, clock)
    busy = await manager.create(CALLER, CreateRequest(policy=POLICY, lifetime=100, idle=10))
    idle = await manager.create(CALLER, CreateRequest(policy=POLICY, lifetime=100, idle=10))
    assert busy.executions is not None
    running = asyncio.create_task(busy.executions.prepare(CALLER, Command(argv=["sleep"])).run())
    await backend.channels[busy.id].nth(1)
    clock.advance(9.9)
    assert idle.info.state == "running"
    clock.advance(0.1)
    assert idle.state is State.DELETING
    clock.advance(89.9)
    assert busy.info.state == "running"
    clock.advance(0.2)
    result = await running
    assert result.outcome is Outcome.CANCELED
    await until(lambda: not backend.living)
    assert idle.info.ended_reason == "expired: idle for 10 s"
    assert busy.info.ended_reason == "expired: lifetime of 100 s is over"
    assert "lifetime of 100 s" in result.message


@asynchronous
async def test_idle_time_counts_from_the_end_of_the_last_use() -> None:
    backend, clock = StubBackend(), StubClock()
    manager = make_manager(backend, clock)
    environment = await manager.create(CALLER, CreateRequest(policy=POLICY, lifetime=1000, idle=10))
    assert environment.executions is not None
    running = asyncio.create_task(environment.executions.prepare(CALLER, Command(argv=["sleep"])).run())
    process = await backend.channels[environment.id].nth(1)
    clock.advance(25)
    process.end()
    await running
    clock.advance(9)
    async with manager.using(CALLER, environment.id, "file.stat", {}):
        clock.advance(50)
    clock.advance(9)
    assert environment.info.state == "running"
    clock.advance(1)
    assert environment.state is State.DELETING


@asynchronous
async def test_a_heartbeat_before_the_end_keeps_it_and_one_after_is_too_late() -> None:
    backend, clock = StubBackend(), StubClock()
    manager = make_manager(backend, clock)
    environment = await manager.create(CALLER, CreateRequest(policy=POLICY, lifetime=100, idle=1000))
    for _ in range(5):
        clock.advance(99.9)
        await manager.heartbeat(CALLER, environment.id)
    assert environment.info.state == "running"
    clock.advance(100)
    with pytest.raises(EnvironmentEnded, match="lifetime"):
        await manager.heartbeat(CALLER, environment.id)
    await until(lambda: environment.state is State.ENDED)
    with pytest.raises(EnvironmentEnded, match="lifetime"):
        await manager.heartbeat(CALLER, environment.id)


@asynchronous
async def test_a_heartbeat_can_shorten_a_life() -> None:
    backend, clock = StubBackend(), StubClock()
    manager = make_manager(backend, clock)
    environment = await manager.create(CALLER, CreateRequest(policy=POLICY, lifetime=1000, idle=1000))
    await manager.heartbeat(CALLER, environment.id, 5)
    clock.advance(5)
    assert environment.state is State.DELETING
    with pytest.raises(InvalidRequest):
        await manager.heartbeat(CALLER, (await manager.create(CALLER, CreateRequest(policy=POLICY))).id, -1)


@asynchronous
async def test_heartbeats_leave_no_timers_behind() -> None:
    clock = StubClock()
    manager = make_manager(StubBackend(), clock)
    environment = await manager.create(CALLER, CreateRequest(policy=POLICY, lifetime=5000, idle=5000))
    for lifetime in range(2000, 1000, -1):
        await manager.heartbeat(CALLER, environment.id, lifetime)
    assert sum(not timer.canceled for timer in clock.timers) == 1


@pytest.mark.parametrize("by", ["wait", "channel"])
@asynchronous
async def test_a_guest_that_dies_is_noticed_and_removed(by: str) -> None:
    backend = StubBackend()
    manager = make_manager(backend)
    environment = await manager.create(CALLER, CreateRequest(policy=POLICY))
    if by == "wait":
        backend.died[environment.id].set()
    else:
        backend.channels[environment.id].break_down("a frame of 4 GiB")
    await until(lambda: environment.state is State.ENDED)
    assert backend.living == set()
    assert (
        environment.info.ended_reason
        == {"wait": "the guest died", "channel": "the guest: a frame of 4 GiB"}[by]
    )


@asynchronous
async def test_a_guest_that_died_for_want_of_memory() -> None:
    backend = StubBackend()
    manager = make_manager(backend)
    environment = await manager.create(CALLER, CreateRequest(policy=POLICY))
    assert environment.executions is not None
    running = asyncio.create_task(environment.executions.prepare(CALLER, Command(argv=["hog"])).run())
    await backend.channels[environment.id].nth(1)
    backend.oom_kills += 1
    backend.died[environment.id].set()
    result = await running
    assert result.outcome is Outcome.OOM_KILLED
    assert result.exit_code == 137
    await until(lambda: environment.state is State.ENDED)
    assert environment.info.ended_reason == "out of memory"


@asynchronous
async def test_the_dead_are_remembered_for_a_day_and_no_more_than_a_thousand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(catalogue, "REMEMBER_MAX", 3)
    clock = StubClock()
    manager = make_manager(StubBackend(), clock)
    made = [await manager.create(CALLER, CreateRequest(policy=POLICY)) for _ in range(5)]
    for environment in made:
        await manager.delete(CALLER, environment.id)
    assert manager.environments(CALLER) == []
    assert manager.environments(CALLER, ended=True) == made[2:]
    with pytest.raises(EnvironmentNotFound):
        manager.find(CALLER, made[0].id)
    clock.advance(86401)
    assert manager.environments(CALLER, ended=True) == []
    with pytest.raises(EnvironmentNotFound):
        await manager.delete(CALLER, made[4].id)


@asynchronous
async def test_closing_ends_all_and_takes_no_more() -> None:
    backend = StubBackend()
    manager = make_manager(backend)
    for _ in range(5):
        await manager.create(CALLER, CreateRequest(policy=POLICY))
    creating = asyncio.create_task(manager.create(CALLER, CreateRequest(policy=POLICY)))
    await until(lambda: len(manager) == 6)
    await manager.close()
    with pytest.raises(SkerryError):
        await creating
    assert backend.living == set()
    assert backend.closed
    with pytest.raises(DaemonUnavailable):
        await manager.create(CALLER, CreateRequest(policy=POLICY))


@asynchronous
async def test_what_an_earlier_daemon_left_without_a_record_is_removed() -> None:
    backend = StubBackend()
    backend.living = {"leftover0001", "leftover0002"}
    await make_manager(backend).recover()
    assert backend.living == set()


@asynchronous
async def test_what_nobody_knows_of_is_removed_while_the_daemon_runs_and_nothing_else() -> None:
    backend = StubBackend()
    manager = make_manager(backend)
    environment = await manager.create(CALLER, CreateRequest(policy=POLICY))
    creating = asyncio.create_task(manager.create(CALLER, CreateRequest(policy=POLICY)))
    await until(lambda: len(backend.living) == 2)
    backend.living.add("leftover0001")
    await manager.reconcile()
    assert backend.living == {environment.id, (await creating).id}


@asynchronous
async def test_what_cannot_be_understood_is_left_alone() -> None:
    """A row of another version, and one whose backend is not served now: neither stops a daemon, nor is swept away."""
    common: dict[str, Any] = {
        "tenant": "default",
        "host": "here",
        "state": "running",
        "image": "mine",
        "image_digest": "sha256:0",
        "isolation": "namespace",
        "cpus": 1.0,
        "memory": 1,
        "lifetime": 60.0,
        "idle": 60.0,
        "created_at": 0.0,
        "active_at": 0.0,
        "expires_at": 0.0,
    }
    rows = [
        EnvironmentRecord(id="broken", backend=StubBackend.name, policy={"limits": {"wings": 2}}, **common),
        EnvironmentRecord(id="foreign", backend="another", **common),
    ]

    class Records(StubRecords):
        async def live(self) -> list[EnvironmentRecord]:
            return rows

    backend = StubBackend()
    manager = make_manager(backend, records=Records())
    backend.living = {"broken", "foreign", "unknown"}
    await manager.recover()
    await manager.reconcile()
    assert len(manager) == 0
    assert backend.stops == ["unknown"]


@asynchronous
async def test_nothing_is_made_for_a_tenant_that_has_no_room() -> None:
    class Full(StubRecords):
        def created(self, environment: Environment, intent: Entry) -> Written[str | None]:
            future: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
            future.set_exception(QuotaExceeded("the quota is used up"))
            return Written(future, self._done())

    backend = StubBackend()
    started: list[str] = []
    backend.fault = lambda step, id: started.append(step)
    manager = make_manager(backend, records=Full())
    for _ in range(3):
        with pytest.raises(QuotaExceeded):
            await manager.create(CALLER, CreateRequest(policy=POLICY))
    assert started.count("start") == 1, "the first was not known to be refused"


@asynchronous
async def test_nobody_makes_the_ends_of_others_be_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "REMEMBER_MAX", 5)
    manager = make_manager(StubBackend())
    other = Caller(tenant="other", peer="uid 0")
    first = await manager.create(other, CreateRequest(policy=POLICY))
    await manager.delete(other, first.id)
    for _ in range(8):
        await manager.delete(CALLER, (await manager.create(CALLER, CreateRequest(policy=POLICY))).id)
    assert manager.find(other, first.id).reason == "deleted"
    assert len(manager.environments(CALLER, ended=True)) == 4
