"""What is begun before the disk has its intent: nobody sees anything of it until then."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from skerry.errors import StoreUnavailable
from skerry.manager.caller import Caller
from skerry.manager.environments.environment import Environment
from skerry.manager.environments.request import CreateRequest
from skerry.manager.executions.commands import Command
from skerry.manager.executions.output import STDOUT, Log
from skerry.manager.executions.queue import RunQueue
from skerry.manager.executions.registry import Executions
from skerry.manager.sessions.calls import SessionCall
from skerry.models import Outcome, State, Usage
from skerry.store import Written
from skerry.store.audit import Entry
from tests.unit.stubs import (
    CALLER,
    POLICY,
    StubBackend,
    StubProcess,
    StubRecords,
    asynchronous,
    make_manager,
    until,
)

TOLD = "what was done is thrown away, because the audit of it may be lost: no such disk"
COMMAND = Command(argv=["x"])


class SlowDisk(StubRecords):
    """Writes at once; the disk has it when the test says so."""

    def __init__(self) -> None:
        self.disk: list[asyncio.Future[None]] = []
        self.results: list[str] = []

    def audit(self, tenant: str, entry: Entry, *, later: bool = False) -> asyncio.Future[None]:
        if entry.kind == "result":
            self.results.append(entry.outcome)
        return super().audit(tenant, entry, later=later)

    def audit_early(self, tenant: str, entry: Entry) -> Written[None]:
        self.disk.append(asyncio.get_running_loop().create_future())
        return Written(self._done(), self.disk[-1])


class World:
    def __init__(self) -> None:
        self.records = SlowDisk()
        self.backend = StubBackend()
        self.manager = make_manager(self.backend, records=self.records)

    async def create(self) -> tuple[Environment, Executions]:
        environment = await self.manager.create(CALLER, CreateRequest(policy=POLICY))
        assert environment.executions is not None
        return environment, environment.executions

    async def begun(self, environment: Environment) -> StubProcess:
        return await self.backend.channels[environment.id].nth(1)


@asynchronous
async def test_a_program_runs_but_nothing_of_it_is_told() -> None:
    world = World()
    environment, executions = await world.create()
    execution = executions.prepare(CALLER, COMMAND)
    tap, log = execution.tap(), executions.runtime.log.read(follow=True)
    running = asyncio.create_task(execution.run())
    process = await world.begun(environment)
    process.emit(b"out")
    process.end()
    for _ in range(100):
        await asyncio.sleep(0)
    assert not running.done()
    assert execution.result is None
    assert not list(execution.kept.entries())
    assert not tap._queue
    assert not log._queue
    world.records.disk[0].set_result(None)
    assert (await running).stdout == "out"


@asynchronous
async def test_what_the_disk_does_not_take_nobody_ever_sees() -> None:
    world = World()
    environment, executions = await world.create()
    running = asyncio.create_task(executions.prepare(CALLER, COMMAND).run())
    process = await world.begun(environment)
    process.emit(b"out")
    world.records.disk[0].set_exception(StoreUnavailable("no such disk"))
    with pytest.raises(StoreUnavailable, match=TOLD):
        await running
    await until(lambda: environment.state is State.ENDED)
    assert environment.outcome is Outcome.INTERNAL
    assert "may be lost" in environment.reason
    assert world.records.results[-1] == StoreUnavailable.code
    assert world.backend.living == set()
    assert not executions.running


@pytest.mark.parametrize("way_out", ["network", "no isolation"])
@asynchronous
async def test_what_can_be_seen_otherwise_waits_for_the_disk(way_out: str) -> None:
    world = World()
    environment, executions = await world.create()
    network: Any = SimpleNamespace()
    environment.network = network if way_out == "network" else None
    environment.isolation = "none" if way_out == "no isolation" else environment.isolation
    running = asyncio.create_task(executions.prepare(CALLER, COMMAND).run())
    (await world.begun(environment)).end()
    assert (await running).outcome is Outcome.COMPLETED
    assert world.records.disk == [], "it was begun early"
    environment.network = None


@asynchronous
async def test_a_use_ends_when_the_disk_has_it() -> None:
    world = World()
    environment, _ = await world.create()
    done = asyncio.Event()

    async def use() -> None:
        async with world.manager.using(CALLER, environment.id, "session.run", {}, early=True):
            done.set()

    used = asyncio.create_task(use())
    await done.wait()
    for _ in range(100):
        await asyncio.sleep(0)
    assert not used.done()
    world.records.disk[0].set_exception(StoreUnavailable("no such disk"))
    with pytest.raises(StoreUnavailable, match=TOLD):
        await used
    await until(lambda: environment.state is State.ENDED)


@asynchronous
async def test_output_of_a_call_waits_for_the_disk() -> None:
    disk: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def on_disk() -> None:
        await asyncio.wait((disk,))
        disk.result()

    log = Log()
    session: Any = SimpleNamespace(runtime=SimpleNamespace(log=log, tenant="", charge=lambda _: None))
    for error in (None, StoreUnavailable("no such disk")):
        disk = asyncio.get_running_loop().create_future()
        call = SessionCall(session, {}, on_disk=on_disk)
        tap = call.tap()
        telling = asyncio.create_task(call.on_output(STDOUT, b"out"))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not telling.done()
        assert not tap._queue
        if error is None:
            disk.set_result(None)
        else:
            disk.set_exception(error)
        await telling
        assert bool(tap._queue) == (error is None)


@asynchronous
async def test_the_result_of_a_call_waits_for_the_disk() -> None:
    disk: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def on_disk() -> None:
        await asyncio.wait((disk,))
        disk.result()

    async def nothing(*_: object) -> tuple[Usage, bool]:
        return Usage(), False

    runtime = SimpleNamespace(executing=0, reset_peak=lambda: None, sample=lambda: None, usage_since=nothing)
    session: Any = SimpleNamespace(
        runtime=runtime, queue=RunQueue(), interrupted=False, end=lambda call: None
    )
    session.begin = lambda call: SimpleNamespace(write=nothing)
    for error in (None, StoreUnavailable("no such disk")):
        disk = asyncio.get_running_loop().create_future()
        call = SessionCall(session, {}, on_disk=on_disk)
        running = asyncio.create_task(call.run())
        await asyncio.sleep(0)
        call.on_reply({"token": call.id, "end": None}, b"")
        for _ in range(100):
            await asyncio.sleep(0)
        assert not running.done()
        if error is None:
            disk.set_result(None)
            assert (await running).outcome is Outcome.COMPLETED
        else:
            disk.set_exception(error)
            with pytest.raises(StoreUnavailable):
                await running


@asynchronous
async def test_a_caller_with_a_token_is_not_told_about_the_disk() -> None:
    world = World()
    environment, executions = await world.create()
    caller = Caller(tenant=CALLER.tenant, token="t", peer="p")
    running = asyncio.create_task(executions.prepare(caller, COMMAND).run())
    await world.begun(environment)
    world.records.disk[0].set_exception(StoreUnavailable("no such disk"))
    with pytest.raises(StoreUnavailable) as caught:
        await running
    assert "no such disk" not in str(caught.value)
