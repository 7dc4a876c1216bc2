"""Interpreters that wait at a pipe: whatever one does there, nobody else waits with it."""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import uvloop

from skerry.errors import LaunchFailed
from skerry.guest.process import Exit
from skerry.guest.start import Start
from skerry.manager.pools.interpreters import PrestartedInterpreter, prestart

START = Start(argv=["interpreter"])


def in_the_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Of the daemon's kind."""

    @wraps(test)
    def run(**given: Any) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(test(**given))

    return run


class Process:
    """One that ends at once."""

    async def wait(self) -> Exit:
        return Exit(127, None, 0, 0, 0.0, 0)

    async def close_stdin(self) -> None:
        pass


class Channel:
    async def start(self, start: Start) -> Process:
        return Process()


@pytest.fixture
def gate(tmp_path: Path) -> str:
    os.mkfifo(tmp_path / "gate")
    return str(tmp_path / "gate")


@pytest.mark.parametrize("size", [5_000, 1_000_000])
@in_the_loop
async def test_a_program_that_is_not_read(gate: str, size: int) -> None:
    """Ruby stops at `__END__`, say. A pipe of a user who has many is this small."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    reading = os.open(gate, os.O_RDONLY | os.O_NONBLOCK)
    writing = os.open(gate, os.O_WRONLY)
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    process: Any = Process()
    source = os.urandom(size)
    warm = PrestartedInterpreter(START, process, writing)
    assert await warm.run(source, stdin=False) is process
    async with asyncio.timeout(10):
        await asyncio.to_thread(os.set_blocking, reading, True)
        # When it reads on after all, it gets the rest, and the end.
        assert await asyncio.to_thread(_all, reading) == source
    warm.close()


@in_the_loop
async def test_an_interpreter_that_ends_before_anybody_waits_for_it(gate: str) -> None:
    """All threads were busy, and the one that opens the pipe comes late."""
    threads = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(threads)
    busy = threading.Event()
    threads.submit(busy.wait)
    channel: Any = Channel()
    warming = asyncio.create_task(prestart(channel, START, gate))
    for _ in range(20):
        await asyncio.sleep(0)
    busy.set()
    with pytest.raises(LaunchFailed):
        async with asyncio.timeout(10):
            await warming


def _all(descriptor: int) -> bytes:
    with open(descriptor, "rb") as file:
        return file.read()
