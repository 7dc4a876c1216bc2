"""Programs that run once: what must hold whoever goes away, and whenever."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from skerry.errors import (
    DaemonUnavailable,
    DiskFull,
    LanguageNotFound,
    LaunchFailed,
    PlatformError,
    QuotaExceeded,
)
from skerry.images.store import ImageStore
from skerry.manager.code import programs as code
from skerry.manager.code import toolchains
from skerry.manager.code.program import Program
from skerry.manager.code.programs import Programs
from skerry.manager.code.toolchains import Toolchains
from skerry.manager.environments.environment import Environment
from skerry.models import Outcome
from skerry.store import Written
from skerry.store.audit import Entry
from tests.unit.stubs import (
    CALLER,
    StubBackend,
    StubImages,
    StubProcess,
    StubRecords,
    asynchronous,
    make_manager,
    until,
)

PROGRAM = Program("python", "print(1)", files={"a/b": "2"})


class World:
    """Interpreters tell their version; a program ends when the test says so."""

    def __init__(self, home: Path, records: StubRecords | None = None) -> None:
        self.backend = StubBackend()
        self.backend.program = self._program
        self.manager = make_manager(self.backend, records=records)
        self.code = Programs(self.manager, cast(ImageStore, StubImages()), str(home))
        self.programs: list[StubProcess] = []
        self.versions = 0
        self.missing = False

    def _program(self, process: StubProcess) -> None:
        if process.start.argv not in (["python3", "--version"], ["go", "version"]):
            self.programs.append(process)
            return
        self.versions += 1
        process.emit(b"Python 3.11.2\n")
        process.end(127 if self.missing else 0)

    async def run(self, program: Program = PROGRAM) -> tuple[Outcome, str]:
        async with self.code.ready(CALLER, program) as ready:
            result = await ready.execution.run(program.stdin)
        return result.outcome, ready.version

    async def begun(self, number: int = 1) -> StubProcess:
        await until(lambda: len(self.programs) >= number)
        return self.programs[number - 1]


@asynchronous
async def test_a_program_has_an_environment_of_its_own_that_is_gone_afterwards(tmp_path: Path) -> None:
    world = World(tmp_path)
    runs = [asyncio.create_task(world.run()) for _ in range(2)]
    for process in (await world.begun(1), await world.begun(2)):
        assert process.start.argv == ["python3", "main.py"]
        assert process.start.env["HOME"] == process.start.env["TMPDIR"] == "/tmp"
    tree = {"main.py": b"print(1)", "a/b": b"2"}
    assert [world.backend.delivered[each] for each in world.backend.living] == [tree, tree]
    for process in world.programs:
        process.end()
    assert await asyncio.gather(*runs) == [(Outcome.COMPLETED, "3.11.2")] * 2
    await world.code.settle()
    assert world.backend.living == set()
    assert world.versions == 1
    await world.code.close()


@asynchronous
async def test_the_answer_does_not_wait_for_the_removal(tmp_path: Path) -> None:
    world = World(tmp_path)
    running = asyncio.create_task(world.run())
    process = await world.begun()
    stopping = asyncio.Event()
    stop = world.backend.stop

    async def slow(environment_id: str) -> None:
        await stopping.wait()
        await stop(environment_id)

    world.backend.stop = slow  # type: ignore[method-assign]
    process.end()
    await running
    assert len(world.backend.living) == 1
    closing = asyncio.create_task(world.code.close())
    await asyncio.sleep(0)
    assert not closing.done()
    stopping.set()
    await closing
    assert world.backend.living == set()


@asynchronous
async def test_removals_that_are_behind_hold_up_the_next_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "REMOVING_MAX", 2)
    world = World(tmp_path)
    may_stop = asyncio.Event()
    may_stop.set()
    stop = world.backend.stop

    async def slow(environment_id: str) -> None:
        await may_stop.wait()
        await stop(environment_id)

    world.backend.stop = slow  # type: ignore[method-assign]
    for number in (1, 2):
        running = asyncio.create_task(world.run())
        process = await world.begun(number)
        may_stop.clear()
        process.end()
        await running
    third = asyncio.create_task(world.run())
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(world.backend.living) == 2
    may_stop.set()
    (await world.begun(3)).end()
    await third
    await world.code.close()


@asynchronous
async def test_what_fails_on_the_way_leaves_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)

    async def broken(environment_id: str, files: object, links: object) -> None:
        raise LaunchFailed("no room")

    world.backend.deliver = broken  # type: ignore[method-assign]
    with pytest.raises(LaunchFailed):
        await world.run()
    await world.code.close()
    assert world.backend.living == set()


@asynchronous
async def test_a_caller_that_is_canceled_leaves_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    running = asyncio.create_task(world.run())
    await world.begun()
    running.cancel()
    await asyncio.wait((running,))
    await world.code.close()
    assert world.backend.living == set()


@asynchronous
async def test_a_daemon_that_stops_ends_programs_and_takes_no_more(tmp_path: Path) -> None:
    world = World(tmp_path)
    running = asyncio.create_task(world.run())
    await world.begun()
    await world.code.close()
    assert (await running)[0] is Outcome.CANCELED
    assert world.backend.living == set()
    with pytest.raises(DaemonUnavailable):
        await world.run()


@asynchronous
async def test_a_daemon_that_stops_does_not_wait_for_what_is_being_found_out(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.backend.program = None  # nothing ever ends
    running = asyncio.create_task(world.run())
    await until(lambda: any(channel.started for channel in world.backend.channels.values()))
    await world.code.close()
    with pytest.raises(DaemonUnavailable):
        await running
    assert world.backend.living == set()


@asynchronous
async def test_an_image_without_the_language(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.missing = True
    for _ in range(2):
        with pytest.raises(LanguageNotFound, match="'host' cannot run python: it has no python3") as caught:
            await world.run()
        assert "install python3" in caught.value.hint
    assert world.versions == 1
    await world.code.close()
    assert world.backend.living == set()


@asynchronous
async def test_a_version_that_cannot_be_found_out_now_is_no_missing_language(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.backend.program = None
    running = asyncio.create_task(world.run())
    await until(lambda: any(channel.started for channel in world.backend.channels.values()))
    next(iter(world.backend.channels.values())).break_down("the guest is gone")
    with pytest.raises(PlatformError, match="cannot be found out"):
        await running
    world.backend.program = world._program
    again = asyncio.create_task(world.run())
    (await world.begun()).end()
    assert (await again)[0] is Outcome.COMPLETED
    await world.code.close()


@pytest.mark.parametrize("error", [DiskFull("no room"), OSError(28, "No space left on device")])
@asynchronous
async def test_a_cache_for_which_there_is_no_room_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def full(*_: object) -> None:
        raise error

    monkeypatch.setattr(Toolchains, "_fill", full)
    world = World(tmp_path)
    running = asyncio.create_task(world.run(Program("go", "package main")))
    process = await world.begun()
    assert process.start.argv == ["go", "run", "main.go"]
    assert "GOCACHE" not in process.start.env
    process.end()
    await running
    await world.code.close()


@asynchronous
async def test_an_archive_of_a_cache_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = 0

    async def tar(*_: object, **__: object) -> AsyncIterator[bytes]:
        nonlocal taken
        while True:
            taken += 1
            yield bytes(1000)

    class Manager:
        @contextlib.asynccontextmanager
        async def using(self, *_: object) -> AsyncIterator[Any]:
            yield SimpleNamespace(channel=None)

    async def run(*_: object) -> Any:
        return SimpleNamespace(ok=True)

    monkeypatch.setattr("skerry.manager.code.toolchains.files.tar", tar)
    monkeypatch.setattr(toolchains, "ARCHIVE_MAX", 5000)
    made = Toolchains(cast(Any, Manager()), tmp_path / "caches")
    monkeypatch.setattr(made, "_run", run)
    environment: Any = SimpleNamespace(id="e1", instance=SimpleNamespace(tmp_path="/tmp"))
    cache: Any = SimpleNamespace(command=["go"], variable="GOCACHE")
    async with asyncio.timeout(10):
        with pytest.raises(PlatformError, match="more than 5000 bytes"):
            await made._fill(environment, cache, tmp_path / "caches" / "go")
    assert taken == 6
    assert list((tmp_path / "caches").iterdir()) == []


class Full(StubRecords):
    """Room for one environment; a removed one makes room."""

    def __init__(self) -> None:
        self.room = 1
        self.made: set[str] = set()
        self.refused = asyncio.Event()

    def created(self, environment: Environment, intent: Entry) -> Written[str | None]:
        if self.room == 0:
            self.refused.set()
            raise QuotaExceeded("full")
        self.room -= 1
        self.made.add(environment.id)
        return super().created(environment, intent)


@pytest.mark.parametrize("when", ["after the refusal", "while the refused one is taken away"])
@asynchronous
async def test_room_that_a_program_before_still_takes_is_waited_for(tmp_path: Path, when: str) -> None:
    records = Full()
    world = World(tmp_path, records)
    stop = world.backend.stop
    slowly = False
    gone = asyncio.Event()

    async def freeing(environment_id: str) -> None:
        mine = environment_id in records.made
        event = records.refused if mine else gone if when != "after the refusal" else None
        if slowly and event is not None:
            await event.wait()
            for _ in range(100):
                await asyncio.sleep(0)
        await stop(environment_id)
        records.room += mine
        if mine:
            gone.set()

    world.backend.stop = freeing  # type: ignore[method-assign]
    first = asyncio.create_task(world.run())
    process = await world.begun(1)
    slowly = True
    process.end()
    await first
    second = asyncio.create_task(world.run())
    process = await world.begun(2)
    assert records.refused.is_set()
    with pytest.raises(QuotaExceeded):  # that one runs
        await world.run()
    process.end()
    await second
    await world.code.close()
