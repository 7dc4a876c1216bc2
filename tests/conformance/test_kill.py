"""Signals and kills: what is told to end ends, with all that it started, and nothing else does."""

from __future__ import annotations

import asyncio
import signal

import pytest

from skerry.guest.process import GuestProcess
from skerry.policy import Limits
from tests.conformance.harness import LIMITS, Box, Site, eventually, expect, finish, needs


async def up(box: Box, script: str) -> GuestProcess:
    """Start a script, and return when it says that it is up."""
    process = await box.start("sh", "-c", script)
    await expect(process, b"up")
    return process


async def killed(process: GuestProcess) -> None:
    await process.kill()
    exit = await process.wait()
    assert (exit.code, exit.signal) == (137, signal.SIGKILL)


async def test_a_killed_process_ends_by_the_signal(box: Box) -> None:
    await killed(await box.start("sleep", "1000"))


async def test_a_kill_takes_children_and_grandchildren(box: Box, nap: str) -> None:
    await killed(await up(box, f"sleep {nap} & sh -c 'sleep {nap} & sleep {nap}' & echo up; wait"))
    assert await box.alive(nap) == []


async def test_a_kill_takes_those_that_left_session_and_parent(box: Box, nap: str) -> None:
    daemon = f"setsid sh -c '(setsid sleep {nap} &) ; exec sleep {nap}' >/dev/null 2>&1"
    process = await up(box, f"({daemon} &); sleep {nap} & echo up; wait")

    async def all_three() -> bool:
        return len(await box.alive(nap)) == 3

    await eventually(all_three)
    await killed(process)
    assert await box.alive(nap) == []


async def test_a_kill_takes_what_ignores_signals_and_what_is_stopped(box: Box, nap: str) -> None:
    await killed(await up(box, f"trap '' TERM INT HUP; sleep {nap} & kill -STOP $!; echo up; wait"))
    assert await box.alive(nap) == []


async def test_after_a_kill_nothing_is_listed(box: Box, nap: str) -> None:
    await killed(await up(box, f"sleep {nap} & echo up; wait"))
    assert await box.channel.processes() == []


async def test_a_kill_spares_everything_else(box: Box, nap: str) -> None:
    spared = await box.start("sleep", nap)
    await box.shell(f"sleep {nap}1 &")
    await killed(await box.start("sleep", "1000"))
    await box.there(nap)
    await box.there(f"{nap}1")
    await killed(spared)


async def test_a_kill_after_the_end_takes_what_is_left_of_it(box: Box, nap: str) -> None:
    process = await up(box, f"sleep {nap} & echo up")
    assert (await process.wait()).code == 0
    await box.there(nap)
    await process.kill()
    assert await box.alive(nap) == []


async def test_a_kill_after_the_end_does_not_change_how_it_ended(box: Box) -> None:
    process = await box.start("sh", "-c", "exit 5")
    await process.wait()
    await process.kill()
    assert (await process.wait()).code == 5


async def test_killing_again_and_at_once_is_fine(box: Box) -> None:
    process = await box.start("sleep", "1000")
    await asyncio.gather(*(process.kill() for _ in range(5)))
    await process.kill()
    assert (await process.wait()).signal == signal.SIGKILL


async def test_many_kills_at_once(box: Box, nap: str) -> None:
    started = [await up(box, f"sleep {nap} & echo up; wait") for _ in range(30)]
    await asyncio.gather(*(killed(process) for process in started))
    assert await box.alive(nap) == []


async def test_a_killed_program_that_nobody_reads_from_ends_all_the_same(box: Box) -> None:
    process = await box.start("cat", "/dev/zero")
    await box.channel.ping()
    await killed(process)


async def test_a_kill_while_it_writes_delivers_no_more_than_it_wrote(box: Box) -> None:
    process = await box.start("yes")
    await expect(process, b"y\ny\n")
    killing = asyncio.ensure_future(process.kill())
    result = await finish(process)
    await killing
    assert set(result.stdout) <= set(b"y\n")


@needs("pids")
async def test_a_kill_ends_a_fork_bomb(site: Site) -> None:
    limits = Limits(cpus=LIMITS.cpus, memory=LIMITS.memory, disk=LIMITS.disk, pids=64)
    async with site.box(limits) as box:
        # A shell that cannot fork gives up; those that are left take its place.
        bomb = "b() { echo up; (b) & (b) & b; }; (b 2>/dev/null) & while :; do sleep 0.01; done"
        process = await box.start("sh", "-c", bomb)
        await expect(process, b"up\n" * 20)
        await process.kill()
        assert (await process.wait()).code in (2, 137)
        assert await box.channel.processes() == []
        assert (await box.run("echo", "alive")).stdout == b"alive\n"


async def test_a_signal_reaches_the_process_group(box: Box) -> None:
    child = "trap 'echo child; exit' USR1; echo up; while :; do sleep 0.01; done"
    script = 'trap "echo got; wait; exit 3" USR1; sh -c "$1" & while :; do sleep 0.01; done'
    process = await box.start("sh", "-c", script, "sh", child)
    await expect(process, b"up")
    process.signal(signal.SIGUSR1)
    result = await finish(process)
    assert result.code == 3
    assert sorted(result.stdout.split()) == [b"child", b"got"]


async def test_a_handler_for_termination_runs(box: Box) -> None:
    process = await up(box, "trap 'echo cleaned; exit 7' TERM; echo up; while :; do sleep 0.01; done")
    process.signal(signal.SIGTERM)
    result = await finish(process)
    assert (result.code, result.stdout) == (7, b"cleaned\n")


async def test_a_signal_without_a_handler_ends_it(box: Box) -> None:
    process = await box.start("sleep", "1000")
    process.signal(signal.SIGTERM)
    exit = await process.wait()
    assert (exit.code, exit.signal) == (143, signal.SIGTERM)


async def test_a_process_can_be_stopped_and_continued(box: Box) -> None:
    process = await box.start("sh", "-c", "echo $$; read x; echo on", stdin=True)
    pid = int(await expect(process, b"\n"))

    async def state(letter: str) -> bool:
        return (await box.sh(f"cut -d' ' -f3 /proc/{pid}/stat")).stdout.decode().strip() == letter

    process.signal(signal.SIGSTOP)
    await eventually(lambda: state("T"))
    process.signal(signal.SIGCONT)
    await process.write(b"\n")
    assert (await finish(process)).stdout == b"on\n"


async def test_signals_that_are_none_and_signals_after_the_end_do_nothing(box: Box) -> None:
    process = await box.start("cat", stdin=True)
    for number in (0, 65, 1 << 31, (1 << 32) - 1):
        process.signal(number)
    await process.close_stdin()
    assert (await process.wait()).code == 0
    process.signal(signal.SIGTERM)
    await box.channel.ping()


async def test_orphans_are_reaped(box: Box) -> None:
    # Each of the 500 is left by its parent, and ends on its own.
    result = await box.sh("i=0; while [ $i -lt 500 ]; do (sh -c 'echo $$' &); i=$((i+1)); done")
    pids = [int(line) for line in result.stdout.split()]
    later = await box.start("true")
    await later.wait()

    async def none_left() -> bool:
        return not await box.exists(*pids)

    await eventually(none_left)


async def test_all_orphans_of_a_program_that_waits_for_none_are_reaped_while_it_runs(box: Box) -> None:
    process = await box.start(
        "sh", "-c", "for i in 1 2 3 4 5 6 7 8 9; do (sh -c 'echo $$' &); done; echo up; exec sleep 1000"
    )
    pids = [int(line) for line in (await expect(process, b"up")).split() if line != b"up"]

    async def none_left() -> bool:
        return not await box.exists(*pids)

    await eventually(none_left)


@pytest.mark.parametrize("target", ["$PPID", "1"])
@needs("isolated", "protected")
async def test_the_guest_cannot_be_killed_from_inside(box: Box, target: str) -> None:
    await box.sh(f"kill -9 {target}; kill -STOP {target}; true")
    await box.channel.ping()
    assert (await box.run("echo", "alive")).stdout == b"alive\n"


async def test_a_program_whose_supervisor_was_killed_is_told_as_killed_and_nothing_of_it_lives(
    box: Box, nap: str
) -> None:
    process = await box.start(
        "sh", "-c", f"sleep {nap} & kill -9 $PPID 2>/dev/null || kill -9 $$; sleep {nap}"
    )
    exit = await process.wait()
    assert (exit.code, exit.signal) == (137, signal.SIGKILL)
    await process.kill()
    await box.gone(nap)
