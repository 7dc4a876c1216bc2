"""Programs on a terminal."""

from __future__ import annotations

import asyncio
import signal

import pytest

from skerry.guest.frames import WINDOW
from skerry.guest.process import GuestProcess
from tests.conformance.harness import Box, eventually, expect, finish, needs

SIZE = (24, 80)


async def on_terminal(box: Box, script: str, size: tuple[int, int] = SIZE) -> GuestProcess:
    return await box.start("sh", "-c", script, pty=size, stdin=True)


async def test_the_three_streams_are_one_terminal(box: Box) -> None:
    result = await finish(
        await on_terminal(box, "test -t 0 && test -t 1 && test -t 2 && echo yes; echo err >&2")
    )
    assert (result.stdout, result.stderr) == (b"yes\r\nerr\r\n", b"")


@needs("terminals")
async def test_it_is_the_controlling_terminal(box: Box) -> None:
    result = await finish(await on_terminal(box, "echo to the terminal >/dev/tty"))
    assert result.stdout == b"to the terminal\r\n"


async def test_without_one_there_is_no_terminal(box: Box) -> None:
    result = await box.sh(
        "test -t 0 || test -t 1 || test -t 2 || echo none; (: </dev/tty) 2>/dev/null || echo none"
    )
    assert result.stdout == b"none\nnone\n"


async def test_it_has_the_size_that_was_asked_for(box: Box) -> None:
    assert (await finish(await on_terminal(box, "stty size", (40, 132)))).stdout == b"40 132\r\n"


async def test_a_new_size_is_seen_and_signalled(box: Box) -> None:
    process = await on_terminal(box, "trap 'stty size; exit' WINCH; echo up; while :; do sleep 0.01; done")
    await expect(process, b"up")
    process.resize(50, 100)
    assert (await finish(process)).stdout.endswith(b"50 100\r\n")


async def test_input_is_echoed(box: Box) -> None:
    process = await on_terminal(box, "read line; echo [$line]")
    await process.write(b"typed\r")
    assert (await finish(process)).stdout == b"typed\r\n[typed]\r\n"


async def test_control_c_interrupts_the_foreground(box: Box, nap: str) -> None:
    process = await on_terminal(box, f"trap 'echo interrupted' INT; sleep {nap}; echo after")
    await box.there(nap)
    await process.write(b"\x03")
    result = await finish(process)
    assert b"interrupted" in result.stdout
    assert b"after" in result.stdout


async def test_control_c_ends_a_program_without_a_handler(box: Box) -> None:
    process = await box.start("sleep", "1000", pty=SIZE, stdin=True)
    await process.write(b"\x03")
    exit = await process.wait()
    assert (exit.code, exit.signal) == (130, signal.SIGINT)


async def test_control_d_is_the_end_of_input(box: Box) -> None:
    process = await on_terminal(box, "cat >/dev/null; echo ended")
    await process.write(b"line\r\x04")
    assert b"ended" in (await finish(process)).stdout


async def test_closing_stdin_is_the_end_of_input(box: Box) -> None:
    process = await on_terminal(box, "cat >/dev/null; echo ended")
    await process.close_stdin()
    assert b"ended" in (await finish(process)).stdout


async def test_the_exit_code_is_told(box: Box) -> None:
    result = await finish(await on_terminal(box, "exit 42"))
    assert (result.code, result.exit.signal) == (42, None)


async def test_no_output_is_lost_at_the_end(box: Box) -> None:
    async def once(n: int) -> bytes:
        return (await box.run("echo", str(n), pty=SIZE)).stdout

    for start in range(0, 1000, 20):
        outputs = await asyncio.gather(*(once(n) for n in range(start, start + 20)))
        assert outputs == [b"%d\r\n" % n for n in range(start, start + 20)]


async def test_much_output_passes_through_unharmed(box: Box) -> None:
    result = await box.run("seq", "100000", pty=SIZE)
    assert result.stdout == b"".join(b"%d\r\n" % n for n in range(1, 100_001))


async def test_the_end_waits_for_a_reader_that_is_slow(box: Box) -> None:
    # The window is used up, the rest stays in the terminal, and the program ends.
    script = f"stty -opost; head -c {WINDOW} /dev/zero; head -c 100 /dev/zero"
    process = await box.start("sh", "-c", script, pty=SIZE)

    async def ended() -> bool:
        return [info.running for info in await box.channel.processes()] == [False]

    await eventually(ended)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(process.wait(), 0.5)
    assert (await finish(process)).stdout == bytes(WINDOW + 100)


async def test_a_background_child_on_the_terminal_does_not_delay_the_end(box: Box) -> None:
    result = await finish(await on_terminal(box, "trap '' HUP; sleep 1000 & echo bye"))
    assert (result.code, result.stdout) == (0, b"bye\r\n")


async def test_a_kill_ends_everything_on_it(box: Box, nap: str) -> None:
    process = await on_terminal(box, f"trap '' HUP INT TERM; sleep {nap} & echo up; wait")
    await expect(process, b"up")
    await process.kill()
    assert (await process.wait()).signal == signal.SIGKILL
    assert await box.alive(nap) == []


async def test_a_program_that_is_not_there_ends_with_127(box: Box) -> None:
    assert (await box.run("no-such-program", pty=SIZE)).code == 127


@needs("terminals")
async def test_bytes_pass_as_they_are_on_a_raw_terminal(box: Box) -> None:
    data = bytes(range(256)) * 64
    process = await on_terminal(box, f"stty raw -echo; echo up; head -c {len(data)}")
    await expect(process, b"up")
    await process.write(data)
    result = await finish(process)
    assert result.stdout.lstrip(b"\r\n")[:1] == b"\x00"
    assert result.stdout.endswith(data)
