"""Output of programs: kept for a while and passed on to readers, within a fixed amount of memory."""

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
"""Approximate bytes of overhead for a block, and for each of its parts."""
READER_SECONDS, READER_BYTE_SECONDS = 30e-6, 5e-9
"""Approximate loop time to encode and send output to one reader: for each chunk, and for each byte."""
COST_MAX = 16384
"""Bytes of overhead that recent output may have, besides three times its limit."""


class Chunk(NamedTuple):
    """One piece of output. A DROPPED one replaces output that a slow reader of a log has missed."""

    at: float
    execution_id: str
    stream: int
    data: bytes


class Block:
    """One large chunk, or many small ones, in order. A small chunk costs one byte more than its data.

    The bytes of each source (an execution's stream) are one part. `runs` records the order of writing: each of its
    bytes is the number of a source (3 bits) and a length minus 1 (5 bits).
    """

    __slots__ = ("at", "parts", "runs", "size", "sources")

    def __init__(self, entry: Chunk) -> None:
        self.at = entry.at
        self.sources = [(entry.execution_id, entry.stream)]
        self.size = len(entry.data)
        self.parts: list[bytes | bytearray] = [entry.data]
        self.runs = bytearray()
        if self.size < SMALL:
            self.parts[0] = bytearray(entry.data)
            self._run(0, self.size)

    def add(self, entry: Chunk) -> bool:
        """False if the chunk needs a new block."""
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
        """A snapshot."""
        copied = Block.__new__(Block)
        copied.at, copied.size, copied.runs = self.at, self.size, self.runs[:]
        copied.sources, copied.parts = self.sources[:], [part[:] for part in self.parts]
        return copied

    def entries(self) -> Iterator[Chunk]:
        if not self.runs:
            yield Chunk(self.at, *self.sources[0], bytes(self.parts[0]))
            return
        done = [0] * len(self.parts)
        for number, runs in itertools.groupby(self.runs, lambda run: run >> 5):
            begin = done[number]
            done[number] += sum((run & RUN_MAX - 1) + 1 for run in runs)
            yield Chunk(self.at, *self.sources[number], bytes(self.parts[number][begin : done[number]]))


class Pieces:
    """Output in order, in at most about twice its size of memory, however small the chunks are."""

    __slots__ = ("_blocks", "_full", "cost", "size")

    def __init__(self, blocks: Iterable[Block] = (), full: int = SMALL) -> None:
        self._blocks = deque(blocks)
        self._full = full
        """Bytes at which a block takes no more."""
        self.size = sum(block.size for block in self._blocks)
        self.cost = sum(block.cost for block in self._blocks)

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def add(self, entry: Chunk) -> None:
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
        """Remove and return the oldest block."""
        block = self._blocks.popleft()
        self.size -= block.size
        self.cost -= block.cost
        return block

    def entries(self) -> Iterator[Chunk]:
        for block in self._blocks:
            yield from block.entries()

    def snapshot(self) -> list[Block]:
        """The blocks as they are now. Only the last block may still change, so only that is copied."""
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


class KeptOutput:
    """The part of an execution's output that is kept for its result and for readers that attach."""

    __slots__ = ("_pieces",)

    def __init__(self, full: int = SMALL) -> None:
        self._pieces = Pieces(full=full)

    def add(self, entry: Chunk) -> None:
        self._pieces.add(entry)

    @property
    def size(self) -> int:
        return self._pieces.size

    def entries(self) -> Iterator[Chunk]:
        return self._pieces.entries()

    def blocks(self) -> list[Block]:
        """The kept output, for a `Tap` to begin with."""
        return self._pieces.snapshot()

    def joined(self, stream: int) -> bytes:
        """All of one stream, in order."""
        return self._pieces.joined(stream)


class FirstOutput(KeptOutput):
    """The first `limit` bytes of each stream."""

    __slots__ = ("_room",)

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._room = {STDOUT: limit, STDERR: limit}

    def add(self, entry: Chunk) -> None:
        room = self._room[entry.stream]
        if len(entry.data) > room:
            # The guest cuts by itself; this is against a guest that does not.
            entry = entry._replace(data=entry.data[:room])
        if entry.data:
            self._room[entry.stream] = room - len(entry.data)
            super().add(entry)


class RecentOutput(KeptOutput):
    """The last `limit` bytes of all streams together; less, if chunks of many sources alternate."""

    __slots__ = ("_limit",)

    def __init__(self, limit: int) -> None:
        super().__init__(full=min(SMALL, limit // 16))
        self._limit = limit

    def add(self, entry: Chunk) -> None:
        if len(entry.data) > self._limit:
            entry = entry._replace(data=entry.data[-self._limit :])
        super().add(entry)
        while self._pieces.size > self._limit or self._pieces.cost > COST_MAX + 3 * self._limit:
            self._pieces.take()


class Tap:
    """A queue of output to one reader, at most `limit` bytes of memory and one block.

    `put` waits while the reader is behind, which is backpressure on the program; `offer` drops and counts instead.
    Reading ends after `close()`, which either side may call, once everything queued was read. Reading takes loop time
    of the tenant's share: see `skerry.fairness`.
    """

    def __init__(self, replay: Iterable[Block] = (), *, tenant: str = "", limit: int = TAP_LIMIT) -> None:
        self._flow = budget().flow(tenant)
        self._queue = Pieces(replay)
        self._reading: Iterator[Chunk] = iter(())
        self._limit = limit
        self._closed = False
        self._error: SkerryError | None = None
        self._released = False
        self._dropped = 0
        self._readable = asyncio.Event()
        self._writable = asyncio.Event()
        self._update()

    async def put(self, entry: Chunk) -> None:
        while not self._writable.is_set():
            await self._writable.wait()
        self.offer(entry)

    def offer(self, entry: Chunk) -> None:
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
        """Never make a writer wait again."""
        self._released = True
        self._update()

    def close(self, error: SkerryError | None = None) -> None:
        """End it. With `error` the reader gets that error after the queued output."""
        if not self._closed:
            self._closed, self._error = True, error
            self._update()

    def __aiter__(self) -> Tap:
        return self

    async def __anext__(self) -> Chunk:
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

    def _mark(self, after: Chunk) -> None:
        text = f"{self._dropped} bytes were dropped here: the reader was too slow"
        self._queue.add(Chunk(after.at, "", DROPPED, text.encode()))
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
    """Recent output of everything that ran in one environment, and its followers."""

    def __init__(self, limit: int = 256 << 10, *, tenant: str = "") -> None:
        self._tenant = tenant
        self._recent = RecentOutput(limit)
        self._taps: set[Tap] = set()
        self._closed = False

    def add(self, entry: Chunk) -> None:
        self._recent.add(entry)
        for tap in self._taps:
            tap.offer(entry)

    def read(self, *, follow: bool) -> Tap:
        """A tap of the recent output and, with `follow`, of new output; end it with `leave()`."""
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
        """Followers read to the end, where `error` is raised."""
        self._closed = True
        for tap in self._taps:
            tap.close(error)
        self._taps.clear()
