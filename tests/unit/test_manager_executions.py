"""Executions: order, limits, how they end, and what becomes of their output."""

from __future__ import annotations

import asyncio
import base64
import time
from typing import Any, cast

import pytest

from skerry.errors import Busy, Conflict, ExecutionNotFound, GuestFailed, InvalidRequest
from skerry.manager.caller import Caller
from skerry.manager.capacity import SharedCapacity
from skerry.manager.clock import since_boot
from skerry.manager.environments.environment import Environment
from skerry.manager.environments.manager import EnvironmentManager
from skerry.manager.environments.request import CreateRequest
from skerry.manager.executions import execution as one
from skerry.manager.executions import registry as module
from skerry.manager.executions.commands import OUTPUT_LIMIT, OUTPUT_LIMIT_MAX, Command
from skerry.manager.executions.output import RecentOutput
from skerry.manager.executions.queue import WAITING_MAX
from skerry.manager.executions.registry import Executions
from skerry.models import ExecutionResult, Outcome, State
from skerry.store.executions import ExecutionRecord
from tests.unit.stubs import (
    CALLER,
    POLICY,
    StubBackend,
    StubChannel,
    StubProcess,
    asynchronous,
    make_manager,
    until,
)

Setup = tuple[StubBackend, EnvironmentManager, Environment, Executions, StubChannel]


async def setup() -> Setup:
    backend = StubBackend()
    manager = make_manager(backend)
    environment = await manager.create(CALLER, CreateRequest(policy=POLICY, env={"A": "1"}))
    assert environment.executions is not None
    return backend, manager, environment, environment.executions, backend.channels[environment.id]


def shell(text: str = "x", **more: object) -> Command:
    return Command(text=text, shell="main", **more)  # type: ignore[arg-type]


@asynchronous
async def test_output_code_and_usage_come_back() -> None:
    backend, _, environment, executions, channel = await setup()
    running = asyncio.create_task(executions.prepare(CALLER, Command(argv=["a", "b c"])).run())
    process = await channel.nth(1)
    (execution,) = executions.list()
    assert execution.info.command == "a 'b c'"
    assert execution.info.state == "running"
    assert execution.info.pid == 42
    assert environment.busy()
    process.emit(b"out\xff")
    process.emit(b"err", 2)
    backend.cpu_seconds += 1.5
    process.end(3)
    result = await running
    assert (result.stdout_bytes, result.stderr_bytes, result.exit_code) == (b"out\xff", b"err", 3)
    assert result.outcome is Outcome.FAILED
    assert result.usage.cpu_seconds == 1.5
    assert result.usage.memory_peak_bytes == 2
    assert base64.b64decode(result.to_dict()["stdout"]) == b"out\xff"
    assert executions.list() == []
    assert not environment.busy()


@pytest.mark.parametrize(
    ("code", "signal", "outcome"),
    [(0, None, Outcome.COMPLETED), (1, None, Outcome.FAILED), (139, 11, Outcome.SIGNALED)],
)
@asynchronous
async def test_outcomes(code: int, signal: int | None, outcome: Outcome) -> None:
    _, _, _, executions, channel = await setup()
    running = asyncio.create_task(executions.prepare(CALLER, Command(argv=["x"])).run())
    (await channel.nth(1)).end(code, signal)
    result = await running
    assert (result.outcome, result.exit_code) == (outcome, code)


@asynchronous
async def test_commands_of_one_shell_run_in_the_order_in_which_they_came() -> None:
    _, _, _, executions, channel = await setup()
    tasks = [
        asyncio.create_task(executions.prepare(CALLER, shell(str(number))).run()) for number in range(10)
    ]
    beside = asyncio.create_task(executions.prepare(CALLER, Command(text="beside", shell="other")).run())
    for number in range(10):
        await channel.nth(number + 2)
        mine = [process for process in channel.started if process.start.shell == "main"]
        assert [process.start.command for process in mine] == [str(n) for n in range(number + 1)]
        mine[-1].end()
    await asyncio.gather(*tasks)
    next(process for process in channel.started if process.start.shell == "other").end()
    await beside
    assert executions.runtime._queues == {}


@asynchronous
async def test_too_many_waiting_for_a_shell_and_too_many_at_once() -> None:
    _, _, environment, executions, channel = await setup()
    tasks = [asyncio.create_task(executions.prepare(CALLER, shell()).run()) for _ in range(1 + WAITING_MAX)]
    await channel.nth(1)
    with pytest.raises(Busy, match="64 commands are waiting"):
        await executions.prepare(CALLER, shell()).run()
    assert len(executions.running) == 1 + WAITING_MAX
    more = [
        executions.prepare(CALLER, Command(argv=["x"]))
        for _ in range(module.RUNNING_MAX - len(executions.running))
    ]
    with pytest.raises(Busy, match="256 executions"):
        executions.prepare(CALLER, Command(argv=["x"]))
    tasks += [asyncio.create_task(execution.run()) for execution in more]
    await until(lambda: len(channel.started) == 1 + len(more))
    await environment.backend.stop(environment.id)
    channel.break_down("gone")
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, GuestFailed) or (
            isinstance(result, ExecutionResult) and result.exit_code == 125
        )
    await until(lambda: environment.state is State.ENDED)


@asynchronous
async def test_one_that_leaves_the_line_is_not_run_and_holds_up_nobody() -> None:
    _, _, _, executions, channel = await setup()
    prepared = [executions.prepare(CALLER, shell(str(number))) for number in range(3)]
    tasks = [asyncio.create_task(execution.run()) for execution in prepared]
    first = await channel.nth(1)
    prepared[1].stop(Outcome.CANCELED, "killed on request")
    result = await tasks[1]
    assert (result.outcome, result.exit_code, result.message) == (Outcome.CANCELED, 137, "killed on request")
    first.end()
    third = await channel.nth(2)
    assert third.start.command == "2"
    third.end()
    assert (await tasks[2]).ok


@asynchronous
async def test_a_timeout_kills() -> None:
    _, _, _, executions, channel = await setup()
    result = await executions.prepare(CALLER, shell(timeout=0.01)).run()
    assert channel.started[0].killed
    assert (result.outcome, result.exit_code, result.message) == (
        Outcome.TIMED_OUT,
        124,
        "killed after 0.01 s",
    )
    follower = asyncio.create_task(executions.prepare(CALLER, shell()).run())
    (await channel.nth(2)).end()
    assert (await follower).ok


@pytest.mark.parametrize("jump", [-100_000.0, 100_000.0])
@asynchronous
async def test_timeout_of_an_adopted_execution_ignores_jumps_of_the_clock(
    monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    limits: list[float] = []
    monkeypatch.setattr(one.Execution, "_limit", lambda _self, seconds, _message: limits.append(seconds))
    _, _, environment, executions, channel = await setup()
    running = asyncio.create_task(executions.prepare(CALLER, Command(argv=["a"])).run())
    process = await channel.nth(1)
    detail = {
        "stdin": False,
        "pty": None,
        "user": "appuser",
        "timeout": 60.0,
        "began": since_boot() - 50,
        "caller": {"token": "", "peer": "", "request_id": "", "traceparent": ""},
    }
    record = ExecutionRecord(
        id="adopted",
        environment_id=environment.id,
        command="a",
        started_at=time.time() - 50 + jump,
        detail=detail,
    )
    one.Execution.adopted(executions.runtime, record, cast(Any, process), RecentOutput(1000), lambda _: None)
    assert 5 < limits[-1] <= 10
    process.end()
    await running


@asynchronous
async def test_stop_while_it_is_being_started_kills_what_was_started() -> None:
    _, _, _, executions, channel = await setup()
    execution = executions.prepare(CALLER, Command(argv=["x"]))
    running = asyncio.create_task(execution.run())
    await asyncio.sleep(0)
    execution.stop(Outcome.CANCELED, "the client went away")
    assert channel.started == []
    assert (await running).outcome is Outcome.CANCELED
    assert channel.started[0].killed


@asynchronous
async def test_a_guest_that_does_not_kill_is_not_trusted_any_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one, "KILL_GRACE", 0.02)
    backend, _, environment, executions, channel = await setup()
    channel.obeys = False
    result = await executions.prepare(CALLER, Command(argv=["x"], timeout=0.01)).run()
    assert result.outcome is Outcome.TIMED_OUT
    await until(lambda: environment.state is State.ENDED)
    assert environment.reason == "the guest did not kill what it was told to"
    assert backend.living == set()


@asynchronous
async def test_an_oom_kill_is_told_by_the_kernels_count_and_not_by_the_guest() -> None:
    backend, _, _, executions, channel = await setup()

    async def run(kills: int, code: int, signal: int | None) -> tuple[Outcome, int]:
        number = len(channel.started) + 1
        running = asyncio.create_task(executions.prepare(CALLER, Command(argv=["x"])).run())
        process = await channel.nth(number)
        backend.oom_kills += kills
        process.end(code, signal)
        result = await running
        assert result.usage.oom_kills == kills
        return result.outcome, result.exit_code

    assert await run(1, 137, 9) == (Outcome.OOM_KILLED, 137)
    assert await run(1, 1, None) == (Outcome.OOM_KILLED, 137)
    assert await run(1, 0, None) == (Outcome.COMPLETED, 0)
    assert await run(0, 137, 9) == (Outcome.SIGNALED, 137)


@asynchronous
async def test_the_peak_is_measured_anew_only_when_nothing_else_runs() -> None:
    backend, _, _, executions, channel = await setup()
    first = asyncio.create_task(executions.prepare(CALLER, Command(argv=["x"])).run())
    await channel.nth(1)
    second = asyncio.create_task(executions.prepare(CALLER, Command(argv=["x"])).run())
    await channel.nth(2)
    assert backend.resets == 1
    for process in channel.started:
        process.end()
    await asyncio.gather(first, second)


@asynchronous
async def test_a_guest_that_goes_away_gives_an_internal_outcome_with_what_it_wrote_before() -> None:
    _, _, environment, executions, channel = await setup()
    running = asyncio.create_task(executions.prepare(CALLER, Command(argv=["x"])).run())
    (await channel.nth(1)).emit(b"half")
    channel.break_down("reset")
    result = await running
    assert (result.outcome, result.exit_code, result.stdout) == (Outcome.INTERNAL, 125, "half")
    assert "reset" in result.message
    await until(lambda: environment.state is State.ENDED)


@asynchronous
async def test_execute_against_delete_always_gives_an_answer() -> None:
    backend, manager, environment, executions, channel = await setup()
    tasks = [asyncio.create_task(executions.prepare(CALLER, shell()).run()) for _ in range(20)]
    tasks += [asyncio.create_task(executions.prepare(CALLER, Command(argv=["x"])).run()) for _ in range(20)]
    background = await executions.start(CALLER, Command(argv=["x"]))
    executions.follow(background)
    await channel.nth(5)
    await manager.delete(CALLER, environment.id)
    for result in await asyncio.gather(*tasks):
        assert result.outcome is Outcome.CANCELED
        assert result.message == "the environment ended: deleted"
    assert background.result is not None
    assert not executions.running
    assert backend.living == set()
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


@asynchronous
async def test_output_beyond_the_limit_is_cut_even_if_the_guest_does_not() -> None:
    _, _, _, executions, channel = await setup()
    running = asyncio.create_task(executions.prepare(CALLER, Command(argv=["x"], output_limit=10)).run())
    process = await channel.nth(1)
    assert process.start.output_limit == 10
    process.emit(b"0123456")
    process.emit(b"789abc")
    process.emit(b"err", 2)
    process.end(0, stdout_size=5000)
    result = await running
    assert (result.stdout, result.stderr) == ("0123456789", "err")
    assert (result.stdout_size, result.stdout_truncated) == (5000, True)
    assert (result.stderr_size, result.stderr_truncated) == (3, False)


@asynchronous
async def test_stdin_is_fed_and_closed() -> None:
    _, _, _, executions, channel = await setup()
    running = asyncio.create_task(executions.prepare(CALLER, Command(argv=["cat"], stdin=True)).run(b"data"))
    process = await channel.nth(1)
    await until(lambda: process.stdin_closed)
    assert process.stdin == b"data"
    process.end()
    await running


@asynchronous
async def test_a_start_that_fails_frees_its_place() -> None:
    _, _, _, executions, channel = await setup()
    channel.start_error = InvalidRequest("no user 0 here")
    for _ in range(3):
        with pytest.raises(InvalidRequest):
            await executions.prepare(CALLER, shell()).run()
        with pytest.raises(InvalidRequest):
            await executions.start(CALLER, Command(argv=["x"]))
    assert not executions.running
    channel.start_error = None
    running = asyncio.create_task(executions.prepare(CALLER, shell()).run())
    (await channel.nth(1)).end()
    assert (await running).ok


@asynchronous
async def test_background_executions_are_remembered_with_their_recent_output() -> None:
    _, _, _, executions, channel = await setup()
    execution = await executions.start(CALLER, Command(text="loop"))
    executions.follow(execution)
    assert executions.find(execution.id) is execution
    process = channel.started[0]
    assert process.start.argv == ["/bin/sh", "-c", "loop"]
    process.emit(b"a" * module.RECENT_LIMIT)
    process.emit(b"b" * 10)
    process.end(7)
    await execution.over()
    result = execution.result
    assert result is not None
    assert (result.stdout, result.exit_code) == ("b" * 10, 7)
    assert result.stdout_truncated
    assert execution.info.state == "ended"
    assert execution.info.outcome == "failed"
    for number in range(module.REMEMBERED_MAX):
        other = await executions.start(CALLER, Command(argv=["x"]))
        executions.follow(other)
        channel.started[number + 1].end()
        await other.over()
    with pytest.raises(ExecutionNotFound):
        executions.find(execution.id)
    assert len(executions.list()) == module.REMEMBERED_MAX


@asynchronous
async def test_signals_stdin_and_sizes_reach_only_what_can_take_them() -> None:
    _, _, _, executions, channel = await setup()
    plain = await executions.start(CALLER, Command(argv=["x"]))
    terminal = await executions.start(CALLER, Command(argv=["x"], stdin=True, pty=(24, 80)))
    for execution in (plain, terminal):
        executions.follow(execution)
    plain.signal(2)
    terminal.resize(30, 100)
    await terminal.write(b"ls\n")
    first, second = channel.started
    assert (first.signals, second.sizes, second.stdin) == ([2], [(30, 100)], b"ls\n")
    assert second.start.env["TERM"] == "xterm-256color"
    for number in (0, 65, -9):
        with pytest.raises(InvalidRequest):
            plain.signal(number)
    with pytest.raises(InvalidRequest):
        terminal.resize(0, 80)
    with pytest.raises(Conflict, match="no terminal"):
        plain.resize(24, 80)
    with pytest.raises(Conflict, match="no stdin"):
        await plain.write(b"x")
    first.end()
    second.end()
    await asyncio.gather(plain.over(), terminal.over())
    with pytest.raises(Conflict, match="has ended"):
        plain.signal(2)


@asynchronous
async def test_a_tap_shows_recent_output_then_live_and_a_slow_one_stops_the_program() -> None:
    _, _, _, executions, channel = await setup()
    execution = await executions.start(CALLER, Command(argv=["yes"]))
    executions.follow(execution)
    process = channel.started[0]
    process.emit(b"before")
    await until(lambda: bool(list(execution.kept.entries())))
    tap = execution.tap()
    for _ in range(100):
        process.emit(b"y" * 65536)
    await until(lambda: process._queue.qsize() < 100)
    for _ in range(50):
        await asyncio.sleep(0)
    assert process._queue.qsize() >= 90
    process.end()
    assert b"".join([entry.data async for entry in tap]) == b"before" + b"y" * 65536 * 100
    assert b"".join([entry.data async for entry in execution.tap()]) == b"y" * 65536


@asynchronous
async def test_a_reader_that_goes_away_frees_the_program() -> None:
    _, _, _, executions, channel = await setup()
    execution = await executions.start(CALLER, Command(argv=["yes"]))
    executions.follow(execution)
    tap = execution.tap()
    for _ in range(20):
        channel.started[0].emit(b"y" * 65536)
    channel.started[0].end()
    for _ in range(50):
        await asyncio.sleep(0)
    assert execution.result is None
    execution.untap(tap)
    await execution.over()
    assert execution.result is not None


@asynchronous
async def test_a_killed_execution_ends_although_its_reader_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one, "READER_GRACE", 0.01)
    _, _, environment, executions, channel = await setup()
    execution = await executions.start(CALLER, Command(argv=["yes"], timeout=0.01))
    execution.tap()
    executions.follow(execution)
    for _ in range(20):
        channel.started[0].emit(b"y" * 65536)
    await execution.over()
    assert execution.result is not None
    assert execution.result.outcome is Outcome.TIMED_OUT
    assert environment.state is State.RUNNING


@asynchronous
async def test_the_log_holds_what_everything_wrote_and_drops_for_slow_followers() -> None:
    _, manager, environment, executions, channel = await setup()

    def program(process: StubProcess) -> None:
        process.emit(b"x" * 65536)
        process.end()

    channel._program = program
    slow = executions.runtime.log.read(follow=True)
    for _ in range(10):
        await executions.prepare(CALLER, Command(argv=["x"])).run()
    kept = [entry async for entry in executions.runtime.log.read(follow=False)]
    assert len(kept) == 4
    for _ in range(3):
        assert (await anext(slow)).data == b"x" * 65536
    await executions.prepare(CALLER, Command(argv=["x"])).run()
    await manager.delete(CALLER, environment.id)
    rest = [entry async for entry in slow]
    assert [entry.stream for entry in rest] == [1, 0, 1]
    assert b"393216 bytes were dropped" in rest[1].data


@asynchronous
async def test_large_outputs_share_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Executions, "_large", SharedCapacity(module.LARGE_MAX))  # of the whole process
    _, manager, environment, executions, _ = await setup()
    other = await manager.create(CALLER, CreateRequest(policy=POLICY))
    assert other.executions is not None
    large = Command(argv=["x"], output_limit=OUTPUT_LIMIT_MAX)
    each = 2 * (OUTPUT_LIMIT_MAX - OUTPUT_LIMIT)
    admitted = [executions.prepare(CALLER, large)]
    while 2 * (len(admitted) + 1) * each <= module.LARGE_MAX:
        admitted.append(executions.prepare(CALLER, large))
    assert len(admitted) == 4
    for home in (executions, other.executions):
        with pytest.raises(Busy):
            home.prepare(CALLER, large)
        home.prepare(CALLER, Command(argv=["x"]))  # the usual is always possible
    stranger = Caller(tenant="stranger", peer="test")
    theirs = await manager.create(stranger, CreateRequest(policy=POLICY))
    assert theirs.executions is not None
    theirs.executions.prepare(stranger, large)  # something is left for others
    admitted[0]._leave()
    admitted[1]._leave()
    other.executions.prepare(CALLER, large)
    await manager.delete(CALLER, environment.id)
    await manager.close()
