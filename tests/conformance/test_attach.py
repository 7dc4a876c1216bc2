"""Connections come and go; what runs stays, and its recent output can be seen again."""

from __future__ import annotations

import asyncio

import pytest

from skerry.errors import ExecutionNotFound, GuestFailed
from skerry.guest.channel import Channel
from skerry.guest.frames import WINDOW
from tests.conformance.harness import BIG, Box, expect, finish

KEPT = 65536
"""Bytes of each stream that the guest keeps of an execution."""


async def exchange(box: Box) -> Channel:
    """Replace the connection of `box`; returns the one from before, which has ended."""
    old, box.channel = box.channel, await box.reconnect()
    await old.closed
    return old


async def test_a_guest_answers_a_ping(box: Box) -> None:
    await asyncio.gather(*(box.channel.ping() for _ in range(100)))


async def test_a_new_connection_replaces_the_old_one(box: Box) -> None:
    old = await exchange(box)
    with pytest.raises(GuestFailed):
        await old.ping()
    await box.channel.ping()


async def test_what_runs_survives_the_connection_that_started_it(box: Box) -> None:
    await box.sh("mkfifo fifo")
    process = await box.start("sh", "-c", "echo begun; read x <fifo; echo over >outcome", keep=True)
    await exchange(box)
    with pytest.raises(GuestFailed):
        await process.wait()
    assert [info.id for info in await box.channel.processes() if info.running] == [process.id]
    await box.sh("echo >fifo")
    assert await box.written("outcome") == b"over\n"


async def test_a_shell_survives_the_connection_that_started_it(box: Box) -> None:
    await box.shell("variable=kept; cd /")
    await exchange(box)
    assert await box.said("echo $variable $PWD") == "kept /"


async def test_a_session_that_an_earlier_connection_started_is_ended(box: Box) -> None:
    process = await box.start("sh", "-c", "while echo reply >&9; do :; done", replies=True)
    await exchange(box)
    await box.channel.end(process.id)
    assert await box.channel.processes() == []
    await box.channel.end(process.id)
    assert await box.said("echo there") == "there"


async def test_a_new_connection_gives_out_no_id_that_is_in_use(box: Box) -> None:
    old = [await box.start("sleep", "1000", keep=True) for _ in range(5)]
    await exchange(box)
    new = [await box.start("sleep", "1000") for _ in range(5)]
    shell = await box.start_shell("sleep 1000")
    ids = [process.id for process in (*old, *new, shell)]
    assert len(set(ids)) == len(ids)
    assert {info.id for info in await box.channel.processes()} == set(ids)


async def test_attaching_shows_recent_output_and_then_what_follows(box: Box) -> None:
    script = "echo before; echo error >&2; read x; echo after; read x; exit 4"
    process = await box.start("sh", "-c", script, stdin=True, keep=True)
    await expect(process, b"before")
    await expect(process, b"error", 2)
    await exchange(box)
    again = await box.channel.attach(process.id)
    assert (again.id, again.pid) == (process.id, process.pid)
    await again.write(b"\n")
    assert await expect(again, b"after") == b"before\nafter\n"
    await again.write(b"\n")
    assert (await again.wait()).code == 4
    again.forget()


async def test_what_is_started_after_attaching_takes_no_id_from_it(box: Box) -> None:
    process = await box.start("sh", "-c", "read x; exit 4", stdin=True, keep=True)
    await exchange(box)
    again = await box.channel.attach(process.id)
    for _ in range(process.id + 1):
        await (await box.start("true")).wait()
    await again.write(b"\n")
    assert (await asyncio.wait_for(again.wait(), 60)).code == 4
    again.forget()


async def test_attaching_on_the_same_connection_takes_over(box: Box) -> None:
    process = await box.start("sh", "-c", "echo one; read x; echo two", stdin=True, keep=True)
    await expect(process, b"one")
    again = await box.channel.attach(process.id)
    await again.write(b"\n")
    assert (await finish(again)).stdout == b"one\ntwo\n"
    with pytest.raises(GuestFailed):
        await asyncio.wait_for(process.wait(), 10)


async def test_attaching_in_the_middle_of_much_output_shows_it_without_a_seam(box: Box) -> None:
    process = await box.start("seq", "-f", "%09.0f", "1000000", keep=True)
    for _ in range(5):
        seen = b""
        async for _, data in process.output():
            seen += data
            if len(seen) > 3 * WINDOW:
                break
        process = await box.channel.attach(process.id)
    rest = (await finish(process)).stdout
    # It may begin in the middle of a line; from there on nothing is missing, and nothing comes twice.
    lines = rest[rest.index(b"\n") + 1 :].split()
    assert lines == [b"%09d" % n for n in range(1_000_001 - len(lines), 1_000_001)]
    process.forget()


async def test_output_while_nobody_listens_is_kept_and_the_program_goes_on(box: Box) -> None:
    process = await box.start(
        "sh", "-c", f"read go; head -c {BIG} /dev/zero; echo last; echo >finished", stdin=True, keep=True
    )
    await process.write(b"\n")
    await exchange(box)
    await box.written("finished")
    again = await box.channel.attach(process.id)
    result = await finish(again)
    assert result.stdout == bytes(KEPT - 5) + b"last\n"
    assert (result.code, result.exit.stdout_size) == (0, BIG + 5)
    again.forget()


async def test_attaching_after_the_end_gives_output_and_end(box: Box) -> None:
    process = await box.start("sh", "-c", "echo out; echo err >&2; exit 9", keep=True)
    await process.wait()
    for _ in range(2):
        again = await box.channel.attach(process.id)
        result = await finish(again)
        assert (result.code, result.stdout, result.stderr) == (9, b"out\n", b"err\n")
        await exchange(box)
    assert [(info.running, info.code) for info in await box.channel.processes()] == [(False, 9)]


async def test_input_that_was_not_taken_yet_counts_after_attaching(box: Box) -> None:
    await box.sh("mkfifo taking")
    process = await box.start("sh", "-c", "read go <taking; exec wc -c", stdin=True, keep=True)
    first = asyncio.ensure_future(process.write(b"a" * BIG))
    await box.channel.ping()
    for _ in range(3):
        await exchange(box)
        again = await box.channel.attach(process.id)
        second = asyncio.ensure_future(again.write(b"b" * 100_000))
        await box.channel.ping()
        assert not second.done()
    await first
    await box.sh("echo >taking")
    await second
    await again.close_stdin()
    result = await finish(again)
    # What the first connection could send before it ended, and all of the last one's.
    assert 100_000 <= int(result.stdout) <= 100_000 + 2 * 65536 + 65536
    again.forget()


async def test_attaching_to_what_never_was_fails(box: Box) -> None:
    with pytest.raises(ExecutionNotFound):
        await box.channel.attach(123456)
    await box.channel.ping()


async def test_what_is_not_kept_is_gone_after_its_end(box: Box) -> None:
    process = await box.start("true")
    await process.wait()
    await box.idle()
    with pytest.raises(ExecutionNotFound):
        await box.channel.attach(process.id)


async def test_what_was_forgotten_is_gone(box: Box) -> None:
    process = await box.start("true", keep=True)
    await process.wait()
    process.forget()
    await box.idle()
    with pytest.raises(ExecutionNotFound):
        await box.channel.attach(process.id)


async def test_a_slow_reader_that_reattaches_gets_the_flow_going_again(box: Box) -> None:
    process = await box.start("sh", "-c", f"head -c {4 * WINDOW} /dev/zero; echo end", keep=True)
    await box.channel.ping()
    await exchange(box)
    again = await box.channel.attach(process.id)
    result = await finish(again)
    assert result.stdout.endswith(b"end\n")
    assert result.exit.stdout_size == 4 * WINDOW + 4


async def test_a_terminal_survives_the_connection_too(box: Box) -> None:
    process = await box.start(
        "sh", "-c", "echo ready; read line; echo got $line", pty=(24, 80), keep=True, stdin=True
    )
    await expect(process, b"ready")
    await exchange(box)
    again = await box.channel.attach(process.id)
    await again.write(b"input\n")
    result = await finish(again)
    assert b"ready" in result.stdout
    assert b"got input" in result.stdout
    again.forget()


async def test_a_connection_that_ends_leaves_running_shell_commands_alone(box: Box) -> None:
    await box.sh("mkfifo gate")
    process = await box.start_shell(f"read x <{box.path('gate')}; state=$x", keep=True)
    await exchange(box)
    await box.sh("echo passed >gate")
    again = await box.channel.attach(process.id)
    await again.wait()
    again.forget()
    assert await box.said("echo $state") == "passed"


async def test_processes_that_nobody_kept_are_drained_and_reaped_when_the_connection_ends(box: Box) -> None:
    await box.start("sh", "-c", f"head -c {BIG} /dev/zero; echo x >drained")
    await exchange(box)
    await box.written("drained")
    await box.idle()
