"""Standard streams: every byte, in order, at the pace of whoever reads."""

from __future__ import annotations

import asyncio
import random

import pytest

from skerry.guest.frames import WINDOW
from skerry.guest.process import REPLIES
from tests.conformance.harness import BIG, Box, eventually, expect, feed, finish

ALL_BYTES = bytes(range(256))


async def test_the_two_streams_stay_apart(box: Box) -> None:
    result = await box.sh("echo out; echo err >&2; echo more; echo worse >&2")
    assert (result.stdout, result.stderr) == (b"out\nmore\n", b"err\nworse\n")
    assert (result.exit.stdout_size, result.exit.stderr_size) == (9, 10)


async def test_every_byte_value_passes_both_ways(box: Box) -> None:
    result = await box.sh("tee /dev/stderr", stdin=ALL_BYTES * 3)
    assert (result.stdout, result.stderr) == (ALL_BYTES * 3, ALL_BYTES * 3)


async def test_much_data_passes_both_ways_unharmed(box: Box) -> None:
    data = random.Random(1).randbytes(BIG)
    result = await box.run("cat", stdin=data)
    assert result.stdout == data
    assert result.exit.stdout_size == len(data)


async def test_much_on_both_streams_at_once_keeps_its_order(box: Box) -> None:
    script = "i=0; while [ $i -lt 20000 ]; do echo out $i; echo err $i >&2; i=$((i+1)); done"
    result = await box.sh(script)
    assert result.stdout == b"".join(b"out %d\n" % n for n in range(20000))
    assert result.stderr == b"".join(b"err %d\n" % n for n in range(20000))


async def test_output_comes_while_the_program_runs(box: Box) -> None:
    process = await box.start("sh", "-c", "echo first; read x; echo second; read x", stdin=True)
    assert await expect(process, b"\n") == b"first\n"
    await process.write(b"\n")
    assert await expect(process, b"\n") == b"second\n"
    await process.close_stdin()
    await process.wait()


async def test_without_input_stdin_is_empty(box: Box) -> None:
    assert (await box.sh("cat; readlink /proc/self/fd/0")).stdout == b"/dev/null\n"


async def test_closing_stdin_is_the_end_of_it(box: Box) -> None:
    assert (await box.run("cat", stdin=b"")).stdout == b""
    assert (await box.run("wc", "-c", stdin=b"12345")).stdout == b"5\n"


async def test_input_arrives_piece_by_piece(box: Box) -> None:
    process = await box.start("cat", stdin=True)
    for piece in (b"a", b"bc", b"def"):
        await process.write(piece)
        assert await expect(process, piece) == piece
    await process.close_stdin()
    assert (await process.wait()).code == 0


async def test_input_from_several_writers_at_once_arrives_whole(box: Box) -> None:
    process = await box.start("sh", "-c", "sleep 0.05; exec wc -c", stdin=True)
    await asyncio.gather(*(process.write(b"x" * 300_000) for _ in range(4)))
    await process.close_stdin()
    assert (await finish(process)).stdout == b"1200000\n"


async def test_input_that_nobody_wants_is_dropped(box: Box) -> None:
    result = await box.run("head", "-c1", stdin=b"y" * BIG)
    assert (result.code, result.stdout) == (0, b"y")


async def test_input_for_a_program_that_closed_its_stdin_is_dropped(box: Box) -> None:
    process = await box.start("sh", "-c", "exec <&-; echo closed; exec sleep 1000", stdin=True)
    await expect(process, b"closed")
    await feed(process, b"y" * BIG)
    await process.kill()


async def test_input_after_the_end_is_dropped(box: Box) -> None:
    process = await box.start("true", stdin=True)
    await process.wait()
    await feed(process, b"late" * 100_000)


async def test_input_waits_for_a_program_that_does_not_read(box: Box) -> None:
    process = await box.start("sh", "-c", "read go; echo going; wc -c", stdin=True)
    feeding = asyncio.ensure_future(feed(process, b"go\n" + b"z" * BIG))
    assert b"%d\n" % BIG in (await finish(process)).stdout
    await feeding
    idle = await box.start("sleep", "1000", stdin=True)
    waiting = asyncio.ensure_future(idle.write(b"z" * BIG))
    await box.channel.ping()
    await box.channel.ping()
    assert not waiting.done()
    await idle.kill()
    await waiting


@pytest.mark.parametrize("limit", [0, 1, 1000, 65536, 100_000, 1_000_000])
async def test_output_beyond_the_limit_is_counted_and_not_delivered(box: Box, limit: int) -> None:
    result = await box.sh(
        "head -c 300000 /dev/zero | tr '\\0' o; head -c 200000 /dev/zero | tr '\\0' e >&2", output_limit=limit
    )
    assert result.stdout == b"o" * min(limit, 300_000)
    assert result.stderr == b"e" * min(limit, 200_000)
    assert (result.exit.stdout_size, result.exit.stderr_size) == (300_000, 200_000)
    assert result.code == 0


async def test_the_limit_holds_for_what_the_guest_itself_has_to_say(box: Box) -> None:
    result = await box.run("no-such-program", output_limit=3)
    assert len(result.stderr) == 3
    assert result.exit.stderr_size > 3


async def test_a_program_far_beyond_its_limit_is_not_held_up(box: Box) -> None:
    process = await box.start("sh", "-c", f"head -c {20 * BIG} /dev/zero; echo done >&2", output_limit=10)
    # Nothing is taken before the end: it must come all the same.
    exit = await process.wait()
    assert (exit.code, exit.stdout_size) == (0, 20 * BIG)


async def test_a_reader_that_does_not_read_stops_the_program(box: Box) -> None:
    block = 65536
    script = f"i=0; while [ $i -lt {BIG // block} ]; do head -c {block} /dev/zero; i=$((i+1)); echo $i >count; done"
    process = await box.start("sh", "-c", script)
    last = 0

    async def still() -> bool:
        nonlocal last
        before, last = last, int(await box.written("count"))
        await asyncio.sleep(0.1)
        return last == before > 0

    await eventually(still)
    # What is under way: the window, a pipe, and one block that is being written.
    assert last * block <= WINDOW + 3 * block
    assert not process.exited
    result = await finish(process)
    assert result.stdout == bytes(BIG)
    assert await box.content("count") == b"%d\n" % (BIG // block)


async def test_one_that_does_not_read_does_not_hold_up_the_others(box: Box) -> None:
    stalled = [await box.start("sh", "-c", "exec cat /dev/zero") for _ in range(10)]
    assert (await box.run("cat", stdin=b"x" * BIG)).stdout == b"x" * BIG
    await asyncio.gather(*(process.kill() for process in stalled))


async def test_a_stalled_stdout_does_not_hold_up_stderr(box: Box) -> None:
    process = await box.start("sh", "-c", f"head -c {BIG} /dev/zero & echo here >&2; wait")
    streams = {1: 0, 2: 0}
    async for stream, data in process.output():
        streams[stream] += len(data)
    assert streams == {1: BIG, 2: 5}


async def test_a_background_child_that_keeps_stdout_open_does_not_delay_the_end(box: Box) -> None:
    result = await box.sh("sleep 1000 & echo bye")
    assert (result.code, result.stdout) == (0, b"bye\n")


async def test_all_that_was_written_before_the_end_is_delivered_though_a_child_keeps_stdout_open(
    box: Box,
) -> None:
    result = await box.sh("sleep 1000 & head -c 60000 /dev/zero; head -c 60000 /dev/zero >&2")
    assert (len(result.stdout), len(result.stderr)) == (60000, 60000)


async def test_a_background_writer_lives_on_after_the_end(box: Box) -> None:
    script = "(read go <go; head -c 1000000 /dev/zero; echo $? >status) & echo bye"
    await box.sh("mkfifo go")
    assert (await box.sh(script)).stdout == b"bye\n"
    await box.sh("echo >go")
    assert await box.written("status") == b"0\n"


async def test_what_was_told_of_a_dead_writer_is_told_of_the_program(box: Box) -> None:
    assert (await box.sh("yes | head -n1; echo end")).stdout == b"y\nend\n"


async def test_a_reader_may_stop_and_go_on(box: Box) -> None:
    process = await box.start("seq", "200000")
    seen = b""
    async for _, data in process.output():
        seen += data
        if len(seen) < 10_000:
            continue
        break
    await box.channel.ping()
    seen += (await finish(process)).stdout
    assert seen == b"".join(b"%d\n" % n for n in range(1, 200_001))


@pytest.mark.parametrize("descriptor", [1, 2])
async def test_a_reply_comes_behind_the_output_that_was_written_before_it(box: Box, descriptor: int) -> None:
    size = WINDOW + 30_000  # more than the host has given credit for, and all of it is in pipes
    script = f"head -c {size} /dev/zero >&{descriptor}; echo reply >&9; echo > replied; read x; echo last >&9"
    process = await box.start("sh", "-c", script, stdin=True, replies=True)
    await box.written("replied")
    seen: list[tuple[int, int]] = []
    async for stream, data in process.output():
        seen.append((stream, len(data)))
        if stream == REPLIES:
            break
    assert sum(length for stream, length in seen if stream == descriptor) == size
    assert seen[-1] == (REPLIES, len("reply\n"))
    await process.write(b"\n")
    assert [(stream, data) async for stream, data in process.output()] == [(REPLIES, b"last\n")]
    assert (await process.wait()).code == 0
    await box.channel.remove("replied")


async def test_without_being_asked_for_there_is_no_third_stream(box: Box) -> None:
    result = await box.sh("echo x >&9")
    assert (result.stdout, result.code != 0) == (b"", True)
