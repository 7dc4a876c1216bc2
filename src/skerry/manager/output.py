"""What programs wrote: kept for a while, and passed on to readers, always within a fixed amount of memory."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, Protocol

STDOUT, STDERR, DROPPED = 1, 2, 0
STREAM_NAMES = {STDOUT: "stdout", STDERR: "stderr", DROPPED: "dropped"}

TAP_LIMIT = 256 << 10
SMALL = 4096


class Entry(NamedTuple):
    """One piece of output. A DROPPED one stands for what a slow reader of a log has missed."""

    at: float
    execution_id: str
    stream: int
    data: bytes


def _append(entries: deque[Entry] | list[Entry], entry: Entry) -> None:
    """Small pieces are put together: a program that writes single bytes shall not cost a hundred times as many."""
    last = entries[-1] if entries else None
    if last is not None and len(last.data) < SMALL and last[1:3] == entry[1:3]:
        entries[-1] = last._replace(data=last.data + entry.data)
    else:
        entries.append(entry)


class Kept(Protocol):
    """The part of an execution's output that is kept for its result and for those who attach."""

    def add(self, entry: Entry) -> None: ...

    def entries(self) -> Iterable[Entry]: ...


class Head:
    """The first `limit` bytes of each stream."""

    __slots__ = ("_entries", "_room")

    def __init__(self, limit: int) -> None:
        self._room = {STDOUT: limit, STDERR: limit}
        self._entries: list[Entry] = []

    def add(self, entry: Entry) -> None:
        room = self._room[entry.stream]
        if len(entry.data) > room:
            # The guest cuts by itself; this is for one that does not.
            entry = entry._replace(data=entry.data[:room])
        if entry.data:
            self._room[entry.stream] = room - len(entry.data)
            _append(self._entries, entry)

    def entries(self) -> Iterable[Entry]:
        return self._entries


class Recent:
    """The last `limit` bytes of all streams together."""

    __slots__ = ("_entries", "_limit", "_size")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 0
        self._entries: deque[Entry] = deque()

    def add(self, entry: Entry) -> None:
        if len(entry.data) > self._limit:
            entry = entry._replace(data=entry.data[-self._limit :])
        _append(self._entries, entry)
        self._size += len(entry.data)
        while self._size > self._limit:
            self._size -= len(self._entries.popleft().data)

    def entries(self) -> Iterable[Entry]:
        return tuple(self._entries)


def joined(entries: Iterable[Entry], stream: int) -> bytes:
    """All of one stream, in order."""
    return b"".join([entry.data for entry in entries if entry.stream == stream])


class Tap:
    """Output on its way to one reader, at most `limit` bytes (and one piece) of it.

    `put` waits while the reader is behind, which in the end stops the program that writes; `offer` drops and
    counts instead. Reading ends after `close()`, which either side may call, once everything queued was read.
    """

    def __init__(self, replay: Iterable[Entry] = (), *, limit: int = TAP_LIMIT) -> None:
        self._queue = deque(replay)
        self._size = sum(len(entry.data) for entry in self._queue)
        self._limit = limit
        self._closed = False
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
        if self._size >= self._limit:
            self._dropped += len(entry.data)
        else:
            if self._dropped:
                self._mark(entry)
            self._push(entry)
        self._update()

    def release(self) -> None:
        """Never again make a writer wait, whatever the reader does."""
        self._released = True
        self._update()

    def close(self) -> None:
        self._closed = True
        self._update()

    def __aiter__(self) -> Tap:
        return self

    async def __anext__(self) -> Entry:
        while not self._queue:
            if self._closed:
                raise StopAsyncIteration
            await self._readable.wait()
        entry = self._queue.popleft()
        self._size -= len(entry.data)
        self._update()
        return entry

    def _push(self, entry: Entry) -> None:
        _append(self._queue, entry)
        self._size += len(entry.data)

    def _mark(self, after: Entry) -> None:
        text = f"{self._dropped} bytes were dropped here: the reader was too slow"
        self._push(Entry(after.at, "", DROPPED, text.encode()))
        self._dropped = 0

    def _update(self) -> None:
        _set(self._readable, bool(self._queue) or self._closed)
        _set(self._writable, self._size < self._limit or self._closed or self._released)


def _set(event: asyncio.Event, value: bool) -> None:
    if value:
        event.set()
    else:
        event.clear()


class Log:
    """The recent output of everything that ran in one environment, and those who follow it."""

    def __init__(self, limit: int = 256 << 10) -> None:
        self._recent = Recent(limit)
        self._taps: set[Tap] = set()
        self._closed = False

    def add(self, entry: Entry) -> None:
        self._recent.add(entry)
        for tap in self._taps:
            tap.offer(entry)

    def read(self, *, follow: bool) -> Tap:
        """What is there, and with `follow` what comes; give it back to `leave()`."""
        tap = Tap(self._recent.entries())
        if follow and not self._closed:
            self._taps.add(tap)
        else:
            tap.close()
        return tap

    def leave(self, tap: Tap) -> None:
        self._taps.discard(tap)
        tap.close()

    def close(self) -> None:
        """Nothing more will come: followers read to the end."""
        self._closed = True
        for tap in self._taps:
            tap.close()
        self._taps.clear()
