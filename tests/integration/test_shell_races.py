"""A kill or a signal that meets the end of a shell's command: the shell keeps its state, and the next command runs.

The guest is stopped while both come, so that it finds them in the order that does harm: first the kill, then the word
of the fork that has run the command and is about to become the shell.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from skerry.backends.fake import FakeBackend
from skerry.guest.process import GuestProcess
from tests import support
from tests.conformance.harness import Box, Site, eventually, expect, finish
from tests.conformance.kinds import KINDS
from tests.unit.stubs import asynchronous

COMMANDS = "0x8"
"""The descriptor that a shell reads its commands from, as /proc/PID/syscall shows it."""


@contextlib.asynccontextmanager
async def ending(box: Box) -> AsyncIterator[GuestProcess]:
    """A command of the shell `main` that ends after the block, which runs while the guest is stopped."""
    assert isinstance(box.backend, FakeBackend)
    guest = box.backend._live[box.id].handle.pid
    await box.shell("kept=before; [ -p go ] || mkfifo go")
    process = await box.start_shell("echo $BASHPID; read line < go; kept=during")
    fork = int(await expect(process, b"\n"))
    os.kill(guest, signal.SIGSTOP)
    try:
        await eventually(lambda: told(state(guest) == "T"))
        yield process
        await asyncio.to_thread(Path(box.path("go")).write_text, "\n")
        await eventually(lambda: told(reads_from(fork) == [COMMANDS]))
    finally:
        os.kill(guest, signal.SIGCONT)


def status(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def state(pid: int) -> str:
    return status(pid)[0]


def parent(pid: int) -> int:
    return int(status(pid)[1])


def reads_from(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/syscall").read_text().split()[1:2]


async def told(value: bool) -> bool:
    return value


@contextlib.asynccontextmanager
async def fake_box() -> AsyncIterator[Box]:
    """An environment whose processes are seen from here as they are inside."""
    with support.temporary_home() as home:
        backend = FakeBackend(str(home))
        try:
            async with Site(KINDS[0], home, backend).box() as box:
                yield box
        finally:
            await backend.close()


FREEZER = Path("/sys/fs/cgroup/freezer")


@contextlib.contextmanager
def starved(pid: int) -> Iterator[None]:
    """The process gets no CPU, and is not stopped: as the cgroups v1 freezer has it, it waits in the kernel."""
    frozen = FREEZER / f"skerry-test-{pid}"
    frozen.mkdir()
    try:
        (frozen / "tasks").write_text(str(pid))
        (frozen / "freezer.state").write_text("FROZEN")
        yield
    finally:
        (frozen / "freezer.state").write_text("THAWED")
        with contextlib.suppress(ProcessLookupError):
            (FREEZER / "tasks").write_text(str(pid))
        frozen.rmdir()


@pytest.mark.root
@asynchronous
async def test_shell_that_waits_for_the_cpu_while_its_command_is_killed_keeps_its_state() -> None:
    if not (FREEZER / "tasks").exists():
        pytest.skip("no freezer of cgroups v1 here")
    async with fake_box() as box:
        await box.shell("kept=before")
        process = await box.start_shell("kept=during; echo $BASHPID; sleep 1000")
        fork = int(await expect(process, b"\n"))
        with starved(parent(fork)):
            killing = asyncio.ensure_future(process.kill())
            done, _ = await asyncio.wait((killing,), timeout=6)  # longer than an idle shell is given
            assert not done
        await killing
        assert (await process.wait()).code == 137
        assert await box.said("echo $kept") == "before"


@asynchronous
async def test_kill_that_meets_the_end_of_a_command_spares_the_shell() -> None:
    async with fake_box() as box:
        for _ in range(5):
            async with ending(box) as process:
                killing = asyncio.ensure_future(process.kill())
                await asyncio.sleep(0)  # it is sent
            await killing
            result = await box.shell("echo $kept")
            # If the guest has found the end first after all, the command was complete.
            assert result.stdout in (b"before\n", b"during\n")
            assert (result.code, result.exit.signal) == (0, None)


@asynchronous
async def test_signal_that_meets_the_end_of_a_command_spares_the_shell() -> None:
    async with fake_box() as box:
        for number in (signal.SIGTERM, signal.SIGKILL):
            async with ending(box) as process:
                process.signal(number)
            result = await finish(process)
            assert (result.code, result.exit.signal) == (0, None)
            assert await box.said("echo $kept") == "during"
