"""Calls that meet ends, kills and each other at one exact moment, which each test chooses."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest

from skerry.errors import (
    Busy,
    Conflict,
    DaemonUnavailable,
    EnvironmentEnded,
    GuestFailed,
    LaunchFailed,
    SessionNotFound,
    StoreUnavailable,
)
from skerry.guest.process import REPLIES
from skerry.host.network import Sockets
from skerry.manager.clock import boot_id, since_boot
from skerry.manager.environments import recovery
from skerry.manager.environments.environment import Environment, Key
from skerry.manager.environments.lease import Lease, Reaper
from skerry.manager.environments.manager import EnvironmentManager
from skerry.manager.environments.networks import Networks
from skerry.manager.environments.records import NOT_STARTED
from skerry.manager.environments.request import CreateRequest
from skerry.manager.executions.commands import Command
from skerry.manager.pools.pool import PoolSettings
from skerry.manager.sessions.interpreter import Interpreter
from skerry.manager.sessions.registry import Sessions
from skerry.models import State
from skerry.store.audit import Entry
from skerry.store.environments import EnvironmentRecord
from skerry.store.executions import ExecutionRecord
from tests.unit.stubs import (
    CALLER,
    POLICY,
    StubBackend,
    StubChannel,
    StubClock,
    StubProcess,
    StubRecords,
    asynchronous,
    make_manager,
    until,
)

POOL = PoolSettings("default", "host", POLICY, 0, 2)


class Rows(StubRecords):
    """Rows as a store has them. While `held` is set, no change of a state is committed."""

    def __init__(self, *records: EnvironmentRecord) -> None:
        self.records = list(records)
        self.states: dict[str, list[State]] = {}
        self.held: list[asyncio.Future[None]] | None = None
        self.grace: dict[str, bool] = {}

    def changed(
        self, environment: Environment, state: State, entry: Entry | None = None
    ) -> asyncio.Future[None]:
        self.states.setdefault(environment.id, []).append(state)
        self.grace[environment.id] = environment.grace_used
        future = self._done()
        if self.held is not None:
            future = asyncio.get_running_loop().create_future()
            self.held.append(future)
        return future

    def commit(self) -> None:
        assert self.held
        for future in self.held:
            future.set_result(None)
        self.held = None

    async def live(self) -> list[EnvironmentRecord]:
        return self.records


def record(id: str = "aaaaaaaaaaaa", *, left: float = 1000.0, **more: Any) -> EnvironmentRecord:
    """The row of an environment that an earlier daemon has left, with so many seconds of its lease."""
    return EnvironmentRecord(
        id=id,
        tenant=CALLER.tenant,
        host="here",
        backend=StubBackend.name,
        state=more.pop("state", "running"),
        image="mine",
        image_digest="sha256:0",
        isolation="namespace",
        policy=POLICY.to_dict(),
        cpus=1.0,
        memory=1,
        lifetime=1000.0,
        idle=1e6,
        created_at=0.0,
        active_at=0.0,
        expires_at=0.0,
        boot_id=boot_id(),
        instance={"expires": since_boot() + left, **more},
    )


def next_daemon(
    monkeypatch: pytest.MonkeyPatch, backend: StubBackend, rows: Rows, clock: StubClock, **options: Any
) -> EnvironmentManager:
    """The manager of a daemon that finds these rows, with a guest behind each."""
    monkeypatch.setattr(recovery, "Channel", SimpleNamespace(open=backend.open_channel))
    backend.living |= {each.id for each in rows.records}
    return make_manager(backend, clock, rows, **options)


async def outcome(task: asyncio.Task[Any]) -> BaseException | None:
    await asyncio.wait((task,))
    return task.exception()


# ---- while the daemon stops ----


def sessions_of(environment: Environment) -> Sessions:
    assert environment.sessions is not None
    return environment.sessions


@asynchronous
async def test_calls_under_way_are_told_to_try_again_when_the_daemon_leaves_their_environment() -> None:
    backend = StubBackend()
    manager = make_manager(backend)
    environment = await manager.create(CALLER, CreateRequest(policy=POLICY))
    _, executions = await manager.running(CALLER, environment.id)
    channel = backend.channels[environment.id]
    waited = executions.prepare(CALLER, Command(argv=["sleep"]))
    runs = asyncio.create_task(waited.run())
    first = executions.prepare(CALLER, Command(text="sleep", shell="one"))
    second = executions.prepare(CALLER, Command(text="sleep", shell="one"))
    in_shell = [asyncio.create_task(each.run()) for each in (first, second)]
    background = await executions.start(CALLER, Command(argv=["server"]))
    executions.follow(background)
    joined = asyncio.create_task(background.over())
    followed = asyncio.create_task(anext(executions.runtime.log.read(follow=True)))
    await channel.nth(3)

    async def use() -> None:
        async with manager.using(CALLER, environment.id, "file.stat", {}):
            await channel.closed
            channel.check_open()

    used = asyncio.create_task(use())
    await until(lambda: environment.uses == 1)
    await manager.close(keep=True)
    for task in (runs, *in_shell, joined, followed, used):
        error = await outcome(task)
        assert isinstance(error, DaemonUnavailable), error
        assert error.retryable
    for call in (
        manager.running(CALLER, environment.id),
        manager.heartbeat(CALLER, environment.id),
        manager.set_network(CALLER, environment.id, network="public"),
        manager.delete(CALLER, environment.id),
        manager.create(CALLER, CreateRequest(policy=POLICY)),
    ):
        with pytest.raises(DaemonUnavailable):
            await call
    assert backend.living == {environment.id}
    assert environment.info.state == "running"


@asynchronous
async def test_a_lease_that_runs_out_while_the_daemon_stops_is_left_to_the_next_daemon() -> None:
    backend, clock, rows = StubBackend(), StubClock(), Rows()
    manager = make_manager(backend, clock, rows)
    environment = await manager.create(CALLER, CreateRequest(policy=POLICY, lifetime=10))
    await manager._lifecycle.let_go(environment)
    clock.advance(11)
    backend.died[environment.id].set()
    await manager.close(keep=True)
    assert backend.living == {environment.id}
    assert rows.states == {}


# ---- network changes ----


class OpenedLate(StubBackend):
    """Opens a network, with real sockets, when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[socket.socket] = []
        self.asked, self.may = asyncio.Event(), asyncio.Event()

    async def open_network(self, environment_id: str) -> Sockets:
        self.asked.set()
        await self.may.wait()
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            sock = socket.socket(socket.AF_INET, kind)
            sock.bind(("127.0.0.1", 0))
            sock.setblocking(False)
            self.opened.append(sock)
        self.opened[0].listen()
        return Sockets(self.opened[:1], self.opened[1:])


@asynchronous
async def test_a_network_that_is_opened_after_a_delete_is_closed_and_refused() -> None:
    backend, rows = OpenedLate(), Rows()
    manager = make_manager(backend, records=rows)
    environment = await manager.create(CALLER, CreateRequest(policy=POLICY))
    setting = asyncio.create_task(manager.set_network(CALLER, environment.id, network="public"))
    await backend.asked.wait()
    await manager.delete(CALLER, environment.id)
    backend.may.set()
    assert isinstance(await outcome(setting), EnvironmentEnded)
    assert [sock.fileno() for sock in backend.opened] == [-1, -1]
    assert rows.states[environment.id] == [State.DELETING, State.ENDED]
    assert environment.policy.network == "none"


@asynchronous
async def test_a_change_that_waits_for_another_sees_the_delete_that_came_between() -> None:
    backend, rows = OpenedLate(), Rows()
    manager = make_manager(backend, records=rows)
    environment = await manager.create(CALLER, CreateRequest(policy=POLICY))
    changes = [
        asyncio.create_task(manager.set_network(CALLER, environment.id, network="public")),
        asyncio.create_task(manager.change_network(CALLER, environment.id, add=["example.com"])),
    ]
    await backend.asked.wait()
    await manager.delete(CALLER, environment.id)
    backend.may.set()
    for change in changes:
        assert isinstance(await outcome(change), EnvironmentEnded)
    assert State.RUNNING not in rows.states[environment.id]


@asynchronous
async def test_a_network_that_is_opened_while_the_daemon_stops_is_closed() -> None:
    backend = OpenedLate()
    manager = make_manager(backend)
    environment = await manager.create(CALLER, CreateRequest(policy=POLICY))
    setting = asyncio.create_task(manager.set_network(CALLER, environment.id, network="public"))
    await backend.asked.wait()
    closing = asyncio.create_task(manager.close(keep=True))
    await until(lambda: environment.left)
    backend.may.set()
    assert isinstance(await outcome(setting), DaemonUnavailable)
    await closing
    assert [sock.fileno() for sock in backend.opened] == [-1, -1]
    assert backend.living == {environment.id}


@asynchronous
async def test_a_heartbeat_whose_row_is_behind_a_delete_is_refused() -> None:
    backend, rows = StubBackend(), Rows()
    manager = make_manager(backend, records=rows)
    environment = await manager.create(CALLER, CreateRequest(policy=POLICY))
    rows.held = []
    beating = asyncio.create_task(manager.heartbeat(CALLER, environment.id, 5000))
    await until(lambda: bool(rows.held))
    deleting = asyncio.create_task(manager.delete(CALLER, environment.id))
    await until(lambda: environment.state is State.DELETING)
    rows.commit()
    assert isinstance(await outcome(beating), EnvironmentEnded)
    await deleting


# ---- restarts of a session ----


def answer(process: StubProcess) -> None:
    """An interpreter that is ready at once."""
    process.emit(json.dumps({"ready": True}).encode() + b"\n", REPLIES)


@asynchronous
async def test_of_many_restarts_at_once_one_interpreter_is_left_and_none_after_a_close() -> None:
    backend = StubBackend()
    backend.program = answer
    manager = make_manager(backend)
    environment = await manager.create(CALLER, CreateRequest(policy=POLICY))
    sessions, channel = sessions_of(environment), backend.channels[environment.id]
    session = await sessions.open(CALLER, "python", "one")

    def alive() -> list[StubProcess]:
        return [process for process in channel.started if not process._exit.done()]

    await asyncio.gather(*(session.restart(CALLER) for _ in range(20)))
    assert session.info.state == "idle"
    assert len(alive()) == 1
    restarts = [asyncio.create_task(session.restart(CALLER)) for _ in range(5)]
    closing = asyncio.create_task(sessions.close(CALLER, "one"))
    again = asyncio.create_task(sessions.open(CALLER, "python", "one"))
    more = [asyncio.create_task(session.restart(CALLER)) for _ in range(5)]
    for process in channel.started:
        process.end()
    await until(lambda: channel.started[-1].stdin_closed)
    channel.started[-1].end()
    await closing
    for restart in (*restarts, *more):
        assert isinstance(await outcome(restart), SessionNotFound | None)
    assert isinstance(await outcome(more[-1]), SessionNotFound)
    assert (await again) is not session
    assert sessions.list() == [await again]
    assert len(alive()) == 1


@asynchronous
async def test_a_restart_that_is_cancelled_leaves_no_interpreter_that_is_not_listed() -> None:
    backend = StubBackend()
    backend.program = answer
    manager = make_manager(backend)
    environment = await manager.create(CALLER, CreateRequest(policy=POLICY))
    channel = backend.channels[environment.id]
    session = cast(Interpreter, await sessions_of(environment).open(CALLER, "python"))
    for turns in range(12):  # each moment of a restart
        restarting = asyncio.create_task(session.restart(CALLER))
        for _ in range(turns):
            await asyncio.sleep(0)
        restarting.cancel()
        await asyncio.wait((restarting,))
        await session.restart(CALLER)
        assert session.info.state == "idle"
        await until(lambda: sum(not process._exit.done() for process in channel.started) == 1)


@asynchronous
async def test_an_interpreter_starts_when_the_last_one_is_gone_though_its_restart_was_cancelled() -> None:
    backend = StubBackend()
    backend.program = answer
    manager = make_manager(backend)
    environment = await manager.create(CALLER, CreateRequest(policy=POLICY))
    channel = backend.channels[environment.id]
    session = await sessions_of(environment).open(CALLER, "python")
    channel.obeys = False
    first = asyncio.create_task(session.restart(CALLER))
    await until(lambda: channel.started[0].killed)
    first.cancel()
    second = asyncio.create_task(session.restart(CALLER))
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(channel.started) == 1
    channel.obeys = True
    channel.started[0].end()
    await second
    assert len(channel.started) == 2


@pytest.mark.parametrize("turns", range(0, 24, 3))
@asynchronous
async def test_a_restart_that_meets_the_end_of_the_daemon_is_told_to_try_again(turns: int) -> None:
    backend = StubBackend()
    manager = make_manager(backend)
    environment = await manager.create(CALLER, CreateRequest(policy=POLICY))
    opening = asyncio.create_task(sessions_of(environment).open(CALLER, "python"))
    for _ in range(turns):
        await asyncio.sleep(0)
    await manager.close(keep=True)
    error = await outcome(opening)
    assert isinstance(error, DaemonUnavailable), error


@asynchronous
async def test_a_call_in_a_session_has_no_result_when_the_daemon_stops() -> None:
    backend = StubBackend()
    backend.program = answer
    manager = make_manager(backend)
    environment = await manager.create(CALLER, CreateRequest(policy=POLICY))
    session = cast(Interpreter, await sessions_of(environment).open(CALLER, "python"))
    listings = [asyncio.create_task(session.variables(CALLER)) for _ in range(2)]
    await until(lambda: session.current is not None)
    await manager.close(keep=True)
    for listing in listings:
        error = await outcome(listing)
        assert isinstance(error, DaemonUnavailable), error


# ---- executions whose callers are cancelled ----


@asynchronous
async def test_one_that_is_cancelled_in_line_lets_nobody_run_beside_the_first() -> None:
    backend = StubBackend()
    manager = make_manager(backend)
    environment = await manager.create(CALLER, CreateRequest(policy=POLICY))
    _, executions = await manager.running(CALLER, environment.id)
    channel = backend.channels[environment.id]
    runs = [
        asyncio.create_task(executions.prepare(CALLER, Command(text=str(number), shell="one")).run())
        for number in range(3)
    ]
    await channel.nth(1)
    for _ in range(10):
        await asyncio.sleep(0)
    runs[1].cancel()
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(channel.started) == 1, "two commands in one shell"
    channel.started[0].end()
    (await channel.nth(2)).end()
    assert [(await runs[0]).exit_code, (await runs[2]).exit_code] == [0, 0]


@asynchronous
async def test_a_program_whose_caller_is_cancelled_is_killed() -> None:
    backend = StubBackend()
    manager = make_manager(backend)
    environment = await manager.create(CALLER, CreateRequest(policy=POLICY))
    _, executions = await manager.running(CALLER, environment.id)
    running = asyncio.create_task(executions.prepare(CALLER, Command(argv=["sleep"])).run())
    process = await backend.channels[environment.id].nth(1)
    for _ in range(10):
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait((running,))
    await until(lambda: process.killed)
    assert not executions.list()


# ---- ends, and when they are told ----


@asynchronous
async def test_an_end_is_told_when_it_is_durable() -> None:
    backend, clock, rows = StubBackend(), StubClock(), Rows()
    manager = make_manager(backend, clock, rows)
    environment = await manager.create(CALLER, CreateRequest(policy=POLICY, lifetime=10))
    rows.held = []
    clock.advance(11)
    await until(lambda: bool(rows.held))
    asked = asyncio.create_task(manager.running(CALLER, environment.id))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not asked.done()
    assert environment.info.state == "running"
    assert backend.living == {environment.id}
    rows.commit()
    error = await outcome(asked)
    assert isinstance(error, EnvironmentEnded)
    assert "expired" in error.message
    assert environment.info.state in ("deleting", "ended")


@pytest.mark.parametrize("deleted", [True, False])
@asynchronous
async def test_call_under_way_is_told_that_its_environment_was_deleted(deleted: bool) -> None:
    """And of a guest that failed only if it did."""
    manager = make_manager(StubBackend())
    environment = await manager.create(CALLER, CreateRequest(policy=POLICY))
    inside = asyncio.Event()

    async def call() -> None:
        async with manager.using(CALLER, environment.id, "file.write", {}) as use:
            inside.set()
            await use.channel.closed
            raise GuestFailed("closed")

    calling = asyncio.create_task(call())
    await inside.wait()
    if deleted:
        await manager.delete(CALLER, environment.id)
    else:
        assert environment.executions is not None
        environment.executions.runtime.channel.closed.set_result("it broke")
    with pytest.raises(EnvironmentEnded if deleted else GuestFailed):
        await calling
    await manager.close()


@asynchronous
async def test_an_end_is_told_without_the_store_when_nothing_is_left() -> None:
    class Full(Rows):
        def changed(
            self, environment: Environment, state: State, entry: Entry | None = None
        ) -> asyncio.Future[None]:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            future.set_exception(StoreUnavailable("the disk is full"))
            return future

    backend, clock = StubBackend(), StubClock()
    manager = make_manager(backend, clock, Full())
    environment = await manager.create(CALLER, CreateRequest(policy=POLICY, lifetime=10))
    clock.advance(11)
    with pytest.raises(EnvironmentEnded):
        await manager.running(CALLER, environment.id)
    assert backend.living == set()


@asynchronous
async def test_grace_after_a_restart_is_given_once_for_each_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watched(Rows):
        before: dict[str, bool] | None = None

        async def executions(self, environment_id: str) -> list[ExecutionRecord]:
            self.before = dict(self.grace)
            return []

    backend, clock = StubBackend(), StubClock()
    watched = Watched(record(left=-5.0))
    manager = next_daemon(monkeypatch, backend, watched, clock)
    await manager.recover()
    [environment] = manager.environments(CALLER)
    assert environment.lease.remaining == recovery.GRACE
    assert watched.before == {environment.id: True}, "not written down before it is used"
    await manager.heartbeat(CALLER, environment.id, 30)
    assert watched.grace == {environment.id: False}, "a new lease"
    await manager.close(keep=True)

    for left in (20.0, -5.0):
        clock, rows = StubClock(), Rows(record(left=left, grace=True))
        manager = next_daemon(monkeypatch, backend, rows, clock)
        await manager.recover()
        [environment] = manager.environments(CALLER)
        assert environment.lease.remaining <= left
        await manager.close(keep=True)
    clock, rows = StubClock(), Rows(record(left=-5.0, grace=True))
    manager = next_daemon(monkeypatch, backend, rows, clock)
    await manager.recover()
    clock.advance(0)
    with pytest.raises(EnvironmentEnded, match="expired"):
        await manager.running(CALLER, environment.id)


# ---- creates ----


@pytest.mark.parametrize("known_by", ["", "name", "key"])
@asynchronous
async def test_a_create_whose_caller_is_cancelled_is_swept_if_nobody_can_know_of_it(known_by: str) -> None:
    backend = StubBackend()
    manager = make_manager(backend, pools=[POOL])
    options: dict[str, Any] = {"name": "mine"} if known_by == "name" else {}
    if known_by == "key":
        options = {"key": Key("k", "r")}
    creating = asyncio.create_task(manager.create(CALLER, CreateRequest(policy=POLICY, **options)))
    await until(lambda: bool(backend.living))
    creating.cancel()
    await asyncio.wait((creating,))
    await until(lambda: not manager._settling)
    assert len(manager) == len(backend.living) == bool(known_by)
    assert manager.pools.find("default").stats.active == bool(known_by)


@asynchronous
async def test_a_create_that_fails_after_its_caller_was_cancelled_leaves_nothing() -> None:
    backend = StubBackend()
    manager = make_manager(backend, pools=[POOL])

    def fault(step: str, _: str) -> None:
        if step == "open":
            raise LaunchFailed("no")

    backend.fault = fault
    creating = asyncio.create_task(manager.create(CALLER, CreateRequest(policy=POLICY, name="mine")))
    await until(lambda: bool(backend.living))
    creating.cancel()
    await asyncio.wait((creating,))
    await until(lambda: not manager._settling)
    assert len(manager) == 0
    assert backend.living == set()
    assert manager.pools.find("default").stats.active == 0
    backend.fault = lambda step, _: None
    await manager.create(CALLER, CreateRequest(policy=POLICY, name="mine"))


@asynchronous
async def test_a_key_whose_environment_has_ended_is_used_up() -> None:
    class Keyed(Rows):
        first = ""

        def created(self, environment: Environment, intent: Entry) -> Any:
            written = super().created(environment, intent)
            if self.first:
                found: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
                found.set_result(self.first)
                return written._replace(committed=found)
            self.first = environment.id
            return written

    backend = StubBackend()
    manager = make_manager(backend, records=Keyed())
    key = Key("k", "r")
    first = await manager.create(CALLER, CreateRequest(policy=POLICY, key=key))
    assert (await manager.create(CALLER, CreateRequest(policy=POLICY, key=key))) is first
    await manager.delete(CALLER, first.id)
    with pytest.raises(Conflict, match=r"used up: .* deleted") as raised:
        await manager.create(CALLER, CreateRequest(policy=POLICY, key=key))
    assert "new key" in raised.value.hint
    # As a restart of the daemon in the middle of its create ends it, which releases the key.
    first.reason = NOT_STARTED
    with pytest.raises(Busy, match="broke off"):
        await manager.create(CALLER, CreateRequest(policy=POLICY, key=key))


@pytest.mark.parametrize("step", ["rules", "pool"])
@asynchronous
async def test_a_create_that_meets_the_end_of_the_daemon_makes_nothing(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = StubBackend()
    manager = make_manager(backend, pools=[PoolSettings("default", "host", POLICY, 0, 1)])
    asked, may = asyncio.Event(), asyncio.Event()
    kept: set[str] = set()
    understand = Networks.understand

    async def slowly(self: Networks, policy: Any) -> Any:
        asked.set()
        await may.wait()
        return await understand(self, policy)

    if step == "rules":
        monkeypatch.setattr(Networks, "understand", slowly)
        creating = asyncio.create_task(manager.create(CALLER, CreateRequest(policy=POLICY)))
        await asked.wait()
    else:
        first = await manager.create(CALLER, CreateRequest(policy=POLICY))
        creating = asyncio.create_task(manager.create(CALLER, CreateRequest(policy=POLICY)))
        pool = manager.pools.find("default")
        await until(lambda: bool(pool._queue))
        pool.released(first.id)  # its turn has come, and it has not noticed
        kept.add(first.id)
    manager.refuse()
    may.set()
    assert isinstance(await outcome(creating), DaemonUnavailable)
    await manager.close(keep=True)
    assert backend.living == kept
    assert manager.pools.find("default").stats.active == 0


@asynchronous
async def test_a_name_that_is_about_to_be_free_is_waited_for() -> None:
    backend, rows = StubBackend(), Rows()
    manager = make_manager(backend, records=rows)
    first = await manager.create(CALLER, CreateRequest(policy=POLICY, name="mine"))
    rows.held = []
    deleting = asyncio.create_task(manager.delete(CALLER, first.id))
    await until(lambda: bool(rows.held))
    creating = asyncio.create_task(manager.create(CALLER, CreateRequest(policy=POLICY, name="mine")))
    await asyncio.sleep(0)
    rows.commit()
    assert (await creating).id != first.id
    await deleting


@asynchronous
async def test_what_is_being_created_is_waited_for() -> None:
    backend = StubBackend()
    manager = make_manager(backend)
    creating = asyncio.create_task(manager.create(CALLER, CreateRequest(policy=POLICY, name="mine")))
    await until(lambda: bool(backend.living))
    assert manager.find(CALLER, "mine").state is State.CREATING
    beats = [asyncio.create_task(manager.heartbeat(CALLER, "mine")) for _ in range(5)]
    environment, _ = await manager.running(CALLER, "mine")
    assert environment is await creating
    await asyncio.gather(*beats)

    def fault(step: str, _: str) -> None:
        if step == "open":
            raise LaunchFailed("no")

    backend.fault = fault
    failing = asyncio.create_task(manager.create(CALLER, CreateRequest(policy=POLICY, name="other")))
    await until(lambda: len(backend.living) == 2)
    with pytest.raises(EnvironmentEnded, match="could not be started"):
        await manager.running(CALLER, "other")
    assert isinstance(await outcome(failing), LaunchFailed)


# ---- adoption ----


@asynchronous
async def test_a_guest_that_dies_while_it_is_taken_over_leaves_no_slot_and_stops_no_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def processes(self: StubChannel) -> list[Any]:
        if self is backend.channels["dying"]:  # it dies behind its last answer
            self.break_down("killed")
            await until(lambda: "dying" not in backend.living)
        return []

    monkeypatch.setattr(StubChannel, "processes", processes)
    backend, clock = StubBackend(), StubClock()
    rows = Rows(record("dying", left=100), record("living", left=200))
    monkeypatch.setattr(StubBackend, "fixed", lambda self, policy: ())
    manager = next_daemon(
        monkeypatch, backend, rows, clock, pools=[PoolSettings("default", "mine", POLICY, 0, 5)]
    )
    monkeypatch.setattr(manager._images, "get", lambda ref: SimpleNamespace(name="mine", digest=ref, env={}))
    await manager.recover()
    await until(lambda: [each.id for each in manager.environments(CALLER)] == ["living"])
    assert manager.pools.find("default").stats.active == 1
    assert rows.states["dying"] == [State.DELETING, State.ENDED]
    clock.advance(100)
    clock.advance(101)
    await until(lambda: not manager.environments(CALLER))
    assert manager.pools.find("default").stats.active == 0


def test_a_lease_that_cannot_be_ended_does_not_stop_the_reaper() -> None:
    clock, ended = StubClock(), []

    def expire(key: str, _: str) -> None:
        if key == "broken":
            raise KeyError(key)
        ended.append(key)

    reaper = Reaper(clock, expire)
    reaper.watch("broken", Lease(clock, 10, 1000, lambda: False))
    reaper.watch("fine", Lease(clock, 20, 1000, lambda: False))
    with suppress(KeyError):
        clock.advance(10)
    clock.advance(10)
    assert ended == ["fine"]


# ---- pools ----


@asynchronous
async def test_a_pool_that_is_closed_makes_nothing_for_a_health_check() -> None:
    backend = StubBackend()
    manager = make_manager(backend, pools=[POOL])
    pool = manager.pools.find("default")
    async with pool._turn:  # somebody makes an entry
        waiting = asyncio.create_task(pool.health())
        closing = asyncio.create_task(manager.close())
        await until(lambda: pool._closed)
    assert isinstance(await outcome(waiting), DaemonUnavailable)
    await closing
    for call in (pool.health(), pool.warmup(1)):
        with pytest.raises(DaemonUnavailable):
            await call
    assert backend.channels == {}
    assert backend.stops == []


@asynchronous
async def test_the_end_of_a_pool_waits_for_a_health_check_also_if_its_caller_has_gone() -> None:
    class SlowToStop(StubBackend):
        asked, may = asyncio.Event(), asyncio.Event()

        async def stop(self, environment_id: str) -> None:
            self.asked.set()
            await self.may.wait()
            await super().stop(environment_id)

    backend = SlowToStop()
    manager = make_manager(backend, pools=[POOL])
    checking = asyncio.create_task(manager.pools.find("default").health())
    await backend.asked.wait()
    checking.cancel()
    closing = asyncio.create_task(manager.close())
    for _ in range(50):
        await asyncio.sleep(0)
    assert not backend.closed, "what is being removed needs it"
    backend.may.set()
    await closing
    assert backend.living == set()
