"""What programs wrote: kept for a while, and passed on to readers, always within a fixed amount of memory."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from skerry.errors import SkerryError
from skerry.fairness import budget

STDOUT, STDERR, DROPPED = 1, 2, 0
STREAM_NAMES = {STDOUT: "stdout", STDERR: "stderr", DROPPED: "dropped"}

TAP_LIMIT = 256 << 10
SMALL = 4096
RUN_MAX, SOURCES_MAX = 32, 8
BLOCK_COST, PART_COST = 256, 128
"""Bytes of memory, about, for a block and for each of its parts, beside the data."""
READER_SECONDS, READER_BYTE_SECONDS = 30e-6, 5e-9
"""Loop time, about, to encode a piece of output for one reader and to send it: for each piece, and for each byte."""
COST_MAX = 16384
"""Bytes of overhead that recent output may have, beside three times its limit."""


class Entry(NamedTuple):
    """One piece of output. A DROPPED one stands for what a slow reader of a log has missed."""

    at: float
    execution_id: str
    stream: int
    data: bytes


class Block:
    """One large piece, or many small ones, in order. A small piece costs one byte more than its data.

    The bytes of each source (an execution's stream) are one part. `runs` says in which order they were written: each
    of its bytes is the number of a source (3 bits) and a length less 1 (5 bits).
    """

    __slots__ = ("at", "parts", "runs", "size", "sources")

    def __init__(self, entry: Entry) -> None:
        self.at = entry.at
        self.sources = [(entry.execution_id, entry.stream)]
        self.size = len(entry.data)
        self.parts: list[bytes | bytearray] = [entry.data]
        self.runs = bytearray()
        if self.size < SMALL:
            self.parts[0] = bytearray(entry.data)
            self._run(0, self.size)

    def add(self, entry: Entry) -> bool:
        """False: it belongs into a new block."""
        source = entry.execution_id, entry.stream
        if not self.runs or len(entry.data) >= SMALL:
            return False
        if source in self.sources:
            number = self.sources.index(source)
        elif len(self.sources) < SOURCES_MAX:
            number = len(self.sources)
            self.sources.append(source)
            self.parts.append(bytearray())
        else:
            return False
        self.parts[number] += entry.data
        self.size += len(entry.data)
        self._run(number, len(entry.data))
        return True

    def _run(self, number: int, length: int) -> None:
        full, rest = divmod(length, RUN_MAX)
        if full:
            self.runs += bytes((number << 5 | RUN_MAX - 1,)) * full
        if rest:
            self.runs.append(number << 5 | rest - 1)

    @property
    def cost(self) -> int:
        return self.size + len(self.runs) + BLOCK_COST + PART_COST * len(self.parts)

    def copy(self) -> Block:
        """One that stays as this one is now."""
        copied = Block.__new__(Block)
        copied.at, copied.size, copied.runs = self.at, self.size, self.runs[:]
        copied.sources, copied.parts = self.sources[:], [part[:] for part in self.parts]
        return copied

    def entries(self) -> Iterator[Entry]:
        if not self.runs:
            yield Entry(self.at, *self.sources[0], bytes(self.parts[0]))
            return
        done = [0] * len(self.parts)
        for number, runs in itertools.groupby(self.runs, lambda run: run >> 5):
            begin = done[number]
            done[number] += sum((run & RUN_MAX - 1) + 1 for run in runs)
            yield Entry(self.at, *self.sources[number], bytes(self.parts[number][begin : done[number]]))


class Pieces:
    """Output in order, in memory that is at most about twice its size however small the pieces are."""

    __slots__ = ("_blocks", "_full", "cost", "size")

    def __init__(self, blocks: Iterable[Block] = (), full: int = SMALL) -> None:
        self._blocks = deque(blocks)
        self._full = full
        """Bytes, from which on a block takes no more."""
        self.size = sum(block.size for block in self._blocks)
        self.cost = sum(block.cost for block in self._blocks)

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def add(self, entry: Entry) -> None:
        last = self._blocks[-1] if self._blocks else None
        if last is None or last.size >= self._full:
            last = None
        else:
            before = last.cost
            if last.add(entry):
                self.cost += last.cost - before
            else:
                last = None
        if last is None:
            block = Block(entry)
            self._blocks.append(block)
            self.cost += block.cost
        self.size += len(entry.data)

    def take(self) -> Block:
        """The oldest, which is not here any more."""
        block = self._blocks.popleft()
        self.size -= block.size
        self.cost -= block.cost
        return block

    def entries(self) -> Iterator[Entry]:
        for block in self._blocks:
            yield from block.entries()

    def snapshot(self) -> list[Block]:
        """All that is here now. Only the last block may still change, so only that is copied."""
        blocks = list(self._blocks)
        if blocks:
            blocks[-1] = blocks[-1].copy()
        return blocks

    def joined(self, stream: int) -> bytes:
        """All of one stream, in order."""
        return b"".join(
            part
            for block in self._blocks
            for (_, source), part in zip(block.sources, block.parts, strict=True)
            if source == stream
        )


class Kept:
    """The part of an execution's output that is kept for its result and for those who attach."""

    __slots__ = ("_pieces",)

    def __init__(self, full: int = SMALL) -> None:
        self._pieces = Pieces(full=full)

    def add(self, entry: Entry) -> None:
        self._pieces.add(entry)

    @property
    def size(self) -> int:
        return self._pieces.size

    def entries(self) -> Iterator[Entry]:
        return self._pieces.entries()

    def blocks(self) -> list[Block]:
        """For a `Tap` that begins with what is kept."""
        return self._pieces.snapshot()

    def joined(self, stream: int) -> bytes:
        """All of one stream, in order."""
        return self._pieces.joined(stream)


class Head(Kept):
    """The first `limit` bytes of each stream."""

    __slots__ = ("_room",)

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._room = {STDOUT: limit, STDERR: limit}

    def add(self, entry: Entry) -> None:
        room = self._room[entry.stream]
        if len(entry.data) > room:
            # The guest cuts by itself; this is for one that does not.
            entry = entry._replace(data=entry.data[:room])
        if entry.data:
            self._room[entry.stream] = room - len(entry.data)
            super().add(entry)


class Recent(Kept):
    """The last `limit` bytes of all streams together; less, if pieces of many sources take turns."""

    __slots__ = ("_limit",)

    def __init__(self, limit: int) -> None:
        super().__init__(full=min(SMALL, limit // 16))
        self._limit = limit

    def add(self, entry: Entry) -> None:
        if len(entry.data) > self._limit:
            entry = entry._replace(data=entry.data[-self._limit :])
        super().add(entry)
        while self._pieces.size > self._limit or self._pieces.cost > COST_MAX + 3 * self._limit:
            self._pieces.take()


class Tap:
    """Output on its way to one reader, at most `limit` bytes of memory (and one block) of it.

    `put` waits while the reader is behind, which in the end stops the program that writes; `offer` drops and
    counts instead. Reading ends after `close()`, which either side may call, once everything queued was read. It takes
    loop time of the tenant's share: see `skerry.fairness`.
    """

    def __init__(self, replay: Iterable[Block] = (), *, tenant: str = "", limit: int = TAP_LIMIT) -> None:
        self._flow = budget().flow(tenant)
        self._queue = Pieces(replay)
        self._reading: Iterator[Entry] = iter(())
        self._limit = limit
        self._closed = False
        self._error: SkerryError | None = None
        self._released = False
        self._dropped = 0
        self._readable = asyncio.Event()
        self._writable = asyncio.Event()
        self._update()

    async def put(self, entry: Entry) -> None:
        while not self._writable.is_set():
            await self._writable.wait()
        self.offer(entry)

    def offer(self, entry: Entry) -> None:
        if self._closed:
            return
        if self._queue.cost >= self._limit:
            self._dropped += len(entry.data)
        else:
            if self._dropped:
                self._mark(entry)
            self._queue.add(entry)
        self._update()

    def release(self) -> None:
        """Never again make a writer wait, whatever the reader does."""
        self._released = True
        self._update()

    def close(self, error: SkerryError | None = None) -> None:
        """End it. With `error` its reader is told that more would have come."""
        if not self._closed:
            self._closed, self._error = True, error
            self._update()

    def __aiter__(self) -> Tap:
        return self

    async def __anext__(self) -> Entry:
        await self._flow.turn()  # before anything is taken, which a reader that gives up would lose
        while (entry := next(self._reading, None)) is None:
            if self._queue:
                self._reading = self._queue.take().entries()
                self._update()
            elif self._error is not None:
                raise self._error
            elif self._closed:
                raise StopAsyncIteration
            else:
                await self._readable.wait()
        self._flow.spend(READER_SECONDS + len(entry.data) * READER_BYTE_SECONDS)
        return entry

    def _mark(self, after: Entry) -> None:
        text = f"{self._dropped} bytes were dropped here: the reader was too slow"
        self._queue.add(Entry(after.at, "", DROPPED, text.encode()))
        self._dropped = 0

    def _update(self) -> None:
        _set(self._readable, bool(self._queue) or self._closed)
        _set(self._writable, self._queue.cost < self._limit or self._closed or self._released)


def _set(event: asyncio.Event, value: bool) -> None:
    if value:
        event.set()
    else:
        event.clear()


class Log:
    """The recent output of everything that ran in one environment, and those who follow it."""

    def __init__(self, limit: int = 256 << 10, *, tenant: str = "") -> None:
        self._tenant = tenant
        self._recent = Recent(limit)
        self._taps: set[Tap] = set()
        self._closed = False

    def add(self, entry: Entry) -> None:
        self._recent.add(entry)
        for tap in self._taps:
            tap.offer(entry)

    def read(self, *, follow: bool) -> Tap:
        """What is there, and with `follow` what comes; give it back to `leave()`."""
        tap = Tap(self._recent.blocks(), tenant=self._tenant)
        if follow and not self._closed:
            self._taps.add(tap)
        else:
            tap.close()
        return tap

    def leave(self, tap: Tap) -> None:
        self._taps.discard(tap)
        tap.close()

    def close(self, error: SkerryError | None = None) -> None:
        """Nothing more will come: followers read to the end, where `error` is raised to them."""
        self._closed = True
        for tap in self._taps:
            tap.close(error)
        self._taps.clear()
