"""What is kept of output, and what is on its way to readers: in order, and small whatever the pieces are."""

from __future__ import annotations

import asyncio
import itertools
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from skerry.fairness import SLICE
from skerry.manager.executions.output import (
    DROPPED,
    READER_SECONDS,
    SMALL,
    STDERR,
    STDOUT,
    Chunk,
    FirstOutput,
    Log,
    RecentOutput,
    Tap,
)
from tests.unit.stubs import asynchronous

COUNT = 1 << 15
"""Pieces; as an object each they would take about 5 MiB."""
MIB = 1 << 20


def pieces(count: int, executions: int = 1) -> Iterator[Chunk]:
    """Single bytes that alternate between the two streams, of each execution in turn."""
    for number in range(count):
        yield Chunk(
            number, f"e{number % executions}", STDERR if number & 1 else STDOUT, b"%c" % (number & 127)
        )


def grown(work: Callable[[], object]) -> int:
    """How many bytes are held by what `work` returns."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        held = work()
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held is not None
    return after - before


def test_single_bytes_that_alternate_cost_little() -> None:
    def keep() -> FirstOutput:
        head = FirstOutput(MIB)
        for entry in pieces(COUNT):
            head.add(entry)
        assert head.size == COUNT
        return head

    assert grown(keep) < 4 * COUNT


@pytest.mark.parametrize("executions", [1, 7, 200])
def test_log_of_single_bytes_keeps_to_its_memory(executions: int) -> None:
    def keep() -> Log:
        log = Log(16 << 10)
        for entry in pieces(COUNT, executions):
            log.add(entry)
        return log

    assert grown(keep) < MIB // 4


@asynchronous
async def test_reader_of_single_bytes_holds_a_bounded_amount() -> None:
    def offer() -> Tap:
        tap = Tap()
        for entry in pieces(COUNT, 200):
            tap.offer(entry)
        return tap

    assert grown(offer) < MIB


@asynchronous
async def test_readers_share_what_is_kept() -> None:
    head = FirstOutput(MIB)
    for entry in pieces(COUNT):
        head.add(entry)
    assert grown(lambda: [Tap(head.blocks()) for _ in range(20)]) < 8 * COUNT


@pytest.mark.parametrize("executions", [1, 3, 20])
@asynchronous
async def test_order_of_all_pieces_survives(executions: int) -> None:
    written = list(pieces(10_000, executions))
    written += [
        Chunk(0.0, "e0", STDOUT, b"x" * length) for length in (1, 31, 32, 33, SMALL - 1, SMALL, 5 * SMALL)
    ]
    head = FirstOutput(MIB)
    for entry in written:
        head.add(entry)
    tap = Tap(head.blocks())
    tap.close()
    expected = [
        (source, b"".join(entry.data for entry in run))
        for source, run in itertools.groupby(written, lambda entry: entry[1:3])
    ]
    for found in (list(head.entries()), [entry async for entry in tap]):
        runs = itertools.groupby(found, lambda entry: entry[1:3])
        assert [(source, b"".join(entry.data for entry in run)) for source, run in runs] == expected
    for stream in (STDOUT, STDERR) if executions == 1 else ():
        assert head.joined(stream) == b"".join(entry.data for entry in written if entry.stream == stream)


def test_head_keeps_the_first_bytes_of_each_stream() -> None:
    head = FirstOutput(5)
    for entry in pieces(20):
        head.add(entry)
    head.add(Chunk(0.0, "e0", STDOUT, b"late"))
    assert (head.joined(STDOUT), head.joined(STDERR)) == (bytes(range(0, 10, 2)), bytes(range(1, 11, 2)))


def test_recent_keeps_the_last_bytes() -> None:
    recent = RecentOutput(64)
    for number in range(100):
        recent.add(Chunk(0.0, "e0", STDOUT, b"%04d" % number))
    assert recent.joined(STDOUT) == b"".join(b"%04d" % number for number in range(84, 100))
    recent.add(Chunk(0.0, "e0", STDOUT, b"y" * 1000))
    assert recent.joined(STDOUT) == b"y" * 64


@asynchronous
async def test_replay_does_not_change_when_more_comes() -> None:
    head = FirstOutput(MIB)
    head.add(Chunk(0.0, "e0", STDOUT, b"before"))
    tap = Tap(head.blocks())
    head.add(Chunk(0.0, "e0", STDOUT, b" after"))
    tap.close()
    assert [entry.data async for entry in tap] == [b"before"]


@asynchronous
async def test_reader_of_single_bytes_leaves_others_their_turn() -> None:
    head = FirstOutput(MIB)
    for entry in pieces(4000):
        head.add(entry)
    tap = Tap(head.blocks())
    tap.close()
    seen, steps = 0, [0]

    async def others() -> None:
        while True:
            steps.append(seen)
            await asyncio.sleep(0)

    turning = asyncio.ensure_future(others())
    async for _ in tap:
        seen += 1
    turning.cancel()
    assert seen == 4000
    assert (
        max(after - before for before, after in itertools.pairwise([*steps, seen]))
        <= 3 * SLICE / READER_SECONDS
    )


@asynchronous
async def test_slow_reader_of_a_log_is_told_what_it_missed() -> None:
    tap = Tap(limit=2000)
    for entry in pieces(100_000):
        tap.offer(entry)
    assert (await anext(tap)).data == b"\0"
    tap.close()
    rest = [entry async for entry in tap]
    assert DROPPED not in {entry.stream for entry in rest}, "nothing was offered after the reader went on"
    assert 0 < len(rest) < 10_000
