"""Calls that meet each other, in every order that a seeded scheduler can think of, checked as histories.

Whatever takes time (the store, the backend, the guest's programs, the clock) stands still until the scheduler moves it,
one thing at a time; so a seed is one exact interleaving, and the same one again.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from skerry.backends.base import Instance, InstanceSpec
from skerry.errors import Conflict, LaunchFailed, SkerryError, StoreUnavailable
from skerry.manager.environments.environment import Environment, Key
from skerry.manager.environments.manager import EnvironmentManager
from skerry.manager.environments.request import CreateRequest
from skerry.manager.executions.commands import Command
from skerry.models import State
from skerry.store import Written
from skerry.store.audit import Entry
from tests import histories
from tests.histories import History
from tests.unit.stubs import (
    CALLER,
    POLICY,
    StubBackend,
    StubClock,
    StubProcess,
    StubRecords,
    asynchronous,
    make_manager,
)

SEEDS = range(60)
STEPS = 120
WORD = b"word"
LONG: dict[str, Any] = {"lifetime": 1e6, "idle": 1e6}


class Scheduler:
    """Chooses what happens next."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.clock = StubClock()
        self.waiting: list[asyncio.Future[None]] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def pause(self) -> None:
        """Wait for the scheduler."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append(future)
        await future

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.create_task(work))

    async def turn(self) -> None:
        """One thing that waits goes on, or nothing does."""
        if self.waiting and self.random.random() < 0.7:
            future = self.waiting.pop(self.random.randrange(len(self.waiting)))
            if not future.done():
                future.set_result(None)
        for _ in range(self.random.randrange(4)):
            await asyncio.sleep(0)

    async def run(self, moves: list[Callable[[], None]], finish: Callable[[], None] = lambda: None) -> None:
        """So many moves, then everything to its end; what `finish` does is asked for again and again."""
        for _ in range(STEPS):
            self.random.choice(moves)()
            await self.turn()
        for _ in range(100 * STEPS):
            if all(task.done() for task in self.tasks) and not self.waiting:
                break
            finish()
            await self.turn()
        for task in self.tasks:
            assert task.done(), "a call never ended"
            task.result()


class SlowRecords(StubRecords):
    """A store whose commits come when the scheduler says so, in the order of the calls; some fail."""

    def __init__(self, scheduler: Scheduler, failing: float = 0.0) -> None:
        self._scheduler = scheduler
        self.failing = failing
        self._queue: deque[tuple[asyncio.Future[Any], Callable[[], Any]]] = deque()
        self._keys: dict[str, tuple[str, str]] = {}
        self._names: dict[str, str] = {}
        self.states: dict[str, str] = {}

    def created(self, environment: Environment, intent: Entry) -> Written[str | None]:
        def commit() -> str | None:
            key = environment.key
            if key is not None and key.text in self._keys:
                request, first = self._keys[key.text]
                if request != key.request:
                    raise Conflict("another request")
                return first
            if environment.name in self._names:
                raise Conflict("the name is taken")
            if key is not None:
                self._keys[key.text] = (key.request, environment.id)
            if environment.name:
                self._names[environment.name] = environment.id
            self.states[environment.id] = "running"
            return None

        return Written(self._submit(commit), self._done())

    def changed(
        self, environment: Environment, state: State, entry: Entry | None = None
    ) -> asyncio.Future[None]:
        def commit() -> None:
            if state is State.ENDED:
                self._names = {name: id for name, id in self._names.items() if id != environment.id}
            self.states[environment.id] = str(state)

        return self._submit(commit)

    def _done(self) -> asyncio.Future[None]:
        return self._submit(lambda: None)

    def _submit(self, commit: Callable[[], Any]) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._queue.append((future, commit))
        self._scheduler.begin(self._commit_next())
        return future

    async def _commit_next(self) -> None:
        await self._scheduler.pause()
        future, commit = self._queue.popleft()
        try:
            if self._scheduler.random.random() < self.failing:
                raise StoreUnavailable("the disk is full")
            value = commit()
        except SkerryError as error:
            if not future.done():
                future.set_exception(error)
                future.exception()
        else:
            if not future.done():
                future.set_result(value)


class SlowBackend(StubBackend):
    def __init__(self, scheduler: Scheduler, failing: float = 0.0) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._failing = failing

    async def start(self, spec: InstanceSpec) -> Instance:
        instance = await super().start(spec)
        await self._scheduler.pause()
        if self._scheduler.random.random() < self._failing:
            raise LaunchFailed("not today")
        return instance

    async def stop(self, environment_id: str) -> None:
        await self._scheduler.pause()
        await super().stop(environment_id)


class World:
    """A manager whose every call is written into a history."""

    def __init__(self, seed: int, *, failing: float = 0.0) -> None:
        self.seed = seed
        self.scheduler = Scheduler(seed)
        self.backend = SlowBackend(self.scheduler, failing)
        self.records = SlowRecords(self.scheduler, failing)
        self.manager: EnvironmentManager = make_manager(self.backend, self.scheduler.clock, self.records)
        moments = itertools.count()
        self.history = History(lambda: next(moments))
        self.made: list[str] = []

    def any(self) -> str:
        return self.scheduler.random.choice(self.made)

    async def create(self, *, body: str = "", key: str = "", **options: Any) -> None:
        with self.history.call("create", key=key, body=body, **options) as call:
            try:
                made = await self.manager.create(
                    CALLER, CreateRequest(policy=POLICY, key=Key(key, body) if key else None, **options)
                )
            except SkerryError as error:
                call.error = error.code
            else:
                call.answer = {"environment_id": made.id}
                self.made.append(made.id)

    async def delete(self, environment: str) -> None:
        with self.history.call("delete", environment=environment) as call:
            try:
                await self.manager.delete(CALLER, environment)
            except SkerryError as error:
                call.error = error.code
            else:
                assert environment not in self.backend.living, "deleted, and still there"

    async def heartbeat(self, environment: str, lifetime: float) -> None:
        with self.history.call("heartbeat", environment=environment, lifetime=lifetime) as call:
            try:
                await self.manager.heartbeat(CALLER, environment, lifetime)
            except SkerryError as error:
                call.error = error.code

    async def use(self, environment: str) -> None:
        with self.history.call("use", environment=environment) as call:
            try:
                async with self.manager.using(CALLER, environment, "file.stat", {}):
                    await self.scheduler.pause()
            except SkerryError as error:
                call.error = error.code

    async def execute(self, environment: str) -> None:
        with self.history.call("execute", environment=environment, word=WORD) as call:
            try:
                _, executions = await self.manager.running(CALLER, environment)
                result = await executions.prepare(CALLER, Command(argv=["work"])).run()
            except SkerryError as error:
                call.error = error.code
            else:
                call.answer = {"outcome": str(result.outcome), "stdout": result.stdout_bytes}

    def look(self) -> None:
        for environment in set(self.made):
            with self.history.call("look", environment=environment) as call:
                found = self.manager.find(CALLER, environment)
                call.answer = {"state": str(found.state), "reason": found.reason}


@pytest.mark.parametrize("seed", SEEDS)
@asynchronous
async def test_heartbeats_against_expiry(seed: int) -> None:
    world = World(seed)
    clock, chance = world.scheduler.clock, world.scheduler.random
    world.history = History(clock.time)
    for lifetime, idle in ((10, 1000), (1000, 10), (20, 20)):
        world.scheduler.begin(world.create(lifetime=lifetime, idle=idle))
    await world.scheduler.run([lambda: None])

    def beat() -> None:
        world.scheduler.begin(world.heartbeat(world.any(), chance.choice((1000, 1001, 2000))))

    def use() -> None:
        world.scheduler.begin(world.use(world.any()))

    def pass_time() -> None:
        clock.advance(chance.choice((0.1, 1, 3, 5, 9.9)))
        world.look()

    await world.scheduler.run([beat, use, pass_time, pass_time, world.look])
    world.look()
    histories.check(world.history, histories.leases, seed=seed)
    # And none of them outlives its lease.
    for _ in range(10):
        clock.advance(1000)
        await world.scheduler.run([lambda: None])
    assert world.backend.living == set()
    assert set(world.records.states.values()) == {"ended"}


@pytest.mark.parametrize("seed", SEEDS)
@asynchronous
async def test_executions_against_deletes(seed: int) -> None:
    world = World(seed)
    chance = world.scheduler.random
    processes: list[StubProcess] = []
    world.backend.program = processes.append

    def create() -> None:
        world.scheduler.begin(world.create())

    def execute() -> None:
        if world.made:
            world.scheduler.begin(world.execute(world.any()))

    def delete() -> None:
        if world.made:
            world.scheduler.begin(world.delete(world.any()))

    def work() -> None:
        """One program that runs has done its work."""
        if running := [process for process in processes if not process._exit.done()]:
            process = chance.choice(running)
            process.emit(WORD)
            process.end()

    await world.scheduler.run([create, execute, execute, delete, work, work], finish=work)
    histories.check(world.history, histories.executions, histories.deletes, seed=seed)
    deleted = {call.about["environment"] for call in world.history.of("delete")}
    assert world.backend.living == set(world.made) - deleted
    assert len(world.backend.stops) == len(set(world.backend.stops))
    ended = {id for id, state in world.records.states.items() if state == "ended"}
    assert ended == deleted


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("failing", [0.0, 0.2])
@asynchronous
async def test_names_and_keys_against_creates_and_deletes(seed: int, failing: float) -> None:
    world = World(seed, failing=failing)
    chance = world.scheduler.random

    def create() -> None:
        world.scheduler.begin(world.create(name=chance.choice(("", "one", "two")), **LONG))

    def repeat() -> None:
        key = chance.choice("ab")
        body = "" if chance.random() < 0.8 else "other"
        world.scheduler.begin(world.create(key=key, body=body, name=f"of-{key}", **LONG))

    def delete() -> None:
        if world.made:
            world.scheduler.begin(world.delete(world.any()))

    def try_again() -> None:
        world.scheduler.clock.advance(60)

    await world.scheduler.run([create, create, repeat, repeat, delete, try_again], finish=try_again)
    # A store that fails now and then keeps nobody from deleting.
    histories.check(world.history, histories.names, histories.keys, histories.deletes, seed=seed)
    # What could not be removed or written down was tried again: in the end all three agree.
    world.records.failing = 0.0
    world.scheduler.begin(world.manager.reconcile())
    await world.scheduler.run([try_again])
    live = {environment.id for environment in world.manager.environments(CALLER)}
    assert world.backend.living == live
    assert live == {id for id, state in world.records.states.items() if state == "running"}


@asynchronous
async def test_a_hundred_deletes_are_one_end() -> None:
    world = World(0)
    world.scheduler.begin(world.create())
    await world.scheduler.run([lambda: None])
    (environment,) = world.made
    for _ in range(100):
        world.scheduler.begin(world.delete(environment))
    await world.scheduler.run([world.look])
    histories.check(world.history, histories.deletes, seed=0)
    assert world.backend.stops == [environment]


def history(*calls: tuple[str, dict[str, Any], float, float, dict[str, Any] | str]) -> History:
    made = History(lambda: 0.0)
    for what, about, begun, done, told in calls:
        answer, error = (told, "") if isinstance(told, dict) else ({}, told)
        made.calls.append(histories.Call(what, about, begun, done, error, answer))
    return made


IN_E = {"environment": "e"}
MADE_E = (
    "create",
    {"name": "n", "lifetime": 10.0, "idle": 99.0, "key": "k", "body": "b"},
    0.0,
    1.0,
    {"environment_id": "e"},
)
BAD: dict[str, tuple[Callable[[History], list[str]], list[Any]]] = {
    "two of one name": (
        histories.names,
        [MADE_E, ("create", {"name": "n"}, 2, 3, {"environment_id": "f"}), ("delete", IN_E, 4, 5, {})],
    ),
    "a name that nobody has": (
        histories.names,
        [MADE_E, ("delete", IN_E, 2, 3, {}), ("create", {"name": "n"}, 4, 5, "conflict")],
    ),
    "two of one key": (
        histories.keys,
        [MADE_E, ("create", {"key": "k", "body": "b"}, 0, 9, {"environment_id": "f"})],
    ),
    "another request with the same key": (
        histories.keys,
        [MADE_E, ("create", {"key": "k", "body": "c"}, 0, 9, {"environment_id": "e"})],
    ),
    "a delete that fails": (histories.deletes, [("delete", IN_E, 0, 1, "environment_ended")]),
    "alive after its end": (
        histories.deletes,
        [("delete", IN_E, 0, 1, {}), ("look", IN_E, 2, 3, {"state": "deleting"})],
    ),
    "executed after the end": (
        histories.executions,
        [
            ("delete", IN_E, 0, 1, {}),
            ("execute", {**IN_E, "word": "w"}, 2, 3, {"outcome": "completed", "stdout": "w"}),
        ],
    ),
    "completed without its output": (
        histories.executions,
        [("execute", {**IN_E, "word": "w"}, 2, 3, {"outcome": "completed", "stdout": ""})],
    ),
    "canceled by nobody": (
        histories.executions,
        [
            ("execute", {**IN_E, "word": "w"}, 2, 3, {"outcome": "canceled", "stdout": ""}),
            ("delete", IN_E, 4, 5, {}),
        ],
    ),
    "refused too early": (
        histories.executions,
        [("execute", IN_E, 2, 3, "environment_ended"), ("delete", IN_E, 4, 5, {})],
    ),
    "expired in spite of a heartbeat": (
        histories.leases,
        [
            MADE_E,
            ("heartbeat", {**IN_E, "lifetime": 50}, 5, 6, {}),
            ("look", IN_E, 20, 21, {"state": "ended", "reason": "expired: lifetime of 10 s is over"}),
        ],
    ),
    "idle while it was used": (
        histories.leases,
        [
            ("create", {"lifetime": 99.0, "idle": 10.0}, 0, 1, {"environment_id": "e"}),
            ("use", IN_E, 5, 9, {}),
            ("look", IN_E, 15, 16, {"state": "ended", "reason": "expired: idle for 10 s"}),
        ],
    ),
    "a heartbeat refused too early": (
        histories.leases,
        [MADE_E, ("heartbeat", {**IN_E, "lifetime": 50}, 5, 6, "environment_ended")],
    ),
    "deleted by nobody": (
        histories.leases,
        [MADE_E, ("look", IN_E, 20, 21, {"state": "ended", "reason": "deleted"})],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_rule_that_is_broken_is_seen(name: str) -> None:
    rule, calls = BAD[name]
    assert len(rule(history(*calls))) == 1
