"""Arbitrary bytes, frames and records from the guest: nothing but the errors that are meant for them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import struct
from collections.abc import AsyncIterator, Iterable
from typing import Any, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from skerry.errors import GuestFailed, SkerryError
from skerry.fairness import Budget
from skerry.guest import files, frames
from skerry.guest.channel import Channel
from skerry.guest.errors import reported_error
from skerry.guest.frames import PAYLOAD_MAX, WINDOW, Frame, Parser, ProtocolError, Type
from skerry.guest.process import Exit, GuestProcess
from skerry.guest.records import parse_stat
from skerry.guest.start import Start
from skerry.models import FileInfo

words = st.sampled_from([0, 1, 2, 5, 255, 256, 65536, PAYLOAD_MAX, 1 << 31, 0xFFFFFFFF]) | st.integers(
    0, 0xFFFFFFFF
)
from_guest = st.sampled_from(sorted(frames.FROM_GUEST))
payloads = st.binary(max_size=64) | st.integers(0, PAYLOAD_MAX).map(bytes)
some_frames = st.lists(st.builds(Frame, from_guest, words, payloads), max_size=8)


def pieces(data: bytes, cuts: Iterable[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


# ---- frames ----


@given(some_frames, st.lists(st.integers(0, 1 << 20), max_size=12))
def test_frames_survive_any_cutting(sent: list[Frame], cuts: list[int]) -> None:
    parser = Parser()
    data = b"".join(frames.encode(*frame) for frame in sent)
    assert [frame for piece in pieces(data, cuts) for frame in parser.feed(piece)] == sent


@given(
    st.lists(
        st.binary(max_size=300) | st.builds(struct.Struct("<IBI").pack, words, st.integers(0, 255), words)
    )
)
@example([b"\xff" * 9])
@example([struct.pack("<IBI", 0, Type.PONG, 0)])
def test_arbitrary_bytes(chunks: list[bytes]) -> None:
    parser = Parser()
    with contextlib.suppress(ProtocolError):
        for chunk in chunks:
            for frame in parser.feed(chunk):
                assert frame.type in frames.FROM_GUEST
                assert len(frame.payload) <= PAYLOAD_MAX
            assert len(parser._buffer) <= PAYLOAD_MAX + 9


@given(words.filter(lambda length: not 5 <= length <= PAYLOAD_MAX + 5), from_guest, words)
def test_impossible_lengths_are_not_waited_for(length: int, type_: int, id_: int) -> None:
    with pytest.raises(ProtocolError):
        list(Parser().feed(struct.pack("<IBI", length, type_, id_)))


# ---- the channel ----


class Sink(asyncio.Transport):
    """Takes what the channel writes and forgets it."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = self.aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def is_closing(self) -> bool:
        return self.aborted

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        self.aborted = True

    def pause_reading(self) -> None:
        assert not self.paused
        self.paused = True

    def resume_reading(self) -> None:
        assert self.paused
        self.paused = False


REQUEST = 1 << 31 | 1
ids = st.sampled_from([1, 1, 1, 2, 3, REQUEST, REQUEST + 1]) | words
ends = st.builds(struct.Struct("<iIQQQQQ").pack, st.integers(-2, 300), st.integers(0, 70), *[st.just(0)] * 5)
sound = st.one_of(
    st.tuples(st.just(Type.STARTED), st.just(struct.pack("<IQQ", 1, 0, 0))),
    st.tuples(st.just(Type.EXIT), ends),
    st.tuples(st.just(Type.OUTPUT), st.integers(0, 3).map(lambda stream: bytes([stream]) + b"words")),
    st.tuples(st.just(Type.OUTPUT), st.integers(0, PAYLOAD_MAX - 1).map(lambda size: b"\1" + bytes(size))),
    st.tuples(st.just(Type.STDIN_CREDIT), st.builds(struct.Struct("<I").pack, words)),
    st.tuples(st.just(Type.ERROR), st.builds(struct.Struct("<I").pack, words)),
    st.tuples(st.sampled_from([Type.KILLED, Type.PONG, Type.RESULT]), st.binary(max_size=30)),
)
said = st.builds(
    lambda id_, frame: ("say", frames.encode(frame[0], id_, frame[1])),
    ids,
    sound | st.tuples(from_guest, st.binary(max_size=70)),
)
acts = st.sampled_from(
    ["start", "shell", "ping", "stat", "list", "attach", "kill", "read", "write", "cancel", "turn"]
)
junk = st.binary(max_size=30).map(lambda data: ("say", data))
script = st.lists(said | said | acts.map(lambda act: (act, b"")) | junk, max_size=40)
BEGUN = [
    ("start", b""),
    ("turn", b""),
    ("say", frames.encode(Type.STARTED, 1, struct.pack("<IQQ", 1, 0, 0))),
    ("turn", b""),
]
FULL = ("say", frames.encode(Type.OUTPUT, 1, b"\1" + bytes(65535)))


async def play(acts: list[tuple[str, bytes]]) -> None:
    channel, transport = Channel(asyncio.get_running_loop()), Sink()
    channel.connection_made(transport)
    channel.data_received(frames.encode(Type.HELLO_REPLY, 0, struct.pack("<I", frames.VERSION)))
    tasks: list[asyncio.Task[Any]] = []
    known: list[GuestProcess] = []

    async def begin(start: Start) -> None:
        known.append(await channel.start(start))

    async def drain(process: GuestProcess) -> None:
        async for _ in process.output():
            pass
        await process.wait()

    for act, data in acts:
        last = known[-1] if known else None
        if act == "say":
            if not transport.aborted:
                channel.data_received(data)
        elif act == "start":
            tasks.append(asyncio.ensure_future(begin(Start(argv=["x"], stdin=True))))
        elif act == "shell":
            tasks.append(asyncio.ensure_future(begin(Start(command="x", shell="s"))))
        elif act == "ping":
            tasks.append(asyncio.ensure_future(channel.ping()))
        elif act == "stat":
            tasks.append(asyncio.ensure_future(channel.stat("a")))
        elif act == "list":
            tasks.append(asyncio.ensure_future(channel.processes()))
        elif act == "attach":
            tasks.append(asyncio.ensure_future(channel.attach(3)))
        elif act == "kill" and last is not None:
            tasks.append(asyncio.ensure_future(last.kill()))
        elif act == "read" and last is not None:
            tasks.append(asyncio.ensure_future(drain(last)))
        elif act == "write" and last is not None:
            tasks.append(asyncio.ensure_future(last.write(bytes(200_000))))
        elif act == "cancel" and tasks:
            tasks[len(tasks) // 2].cancel()
        elif act == "turn":
            await asyncio.sleep(0)
        for process in {*known, *channel._processes.values()}:
            held = sum(len(piece) for _, piece in process._output)
            assert held <= 2 * (WINDOW + 65536)
    await channel.close()
    done, waiting = await asyncio.wait(tasks, timeout=5) if tasks else (set(), set())
    assert not waiting
    for task in done:
        if not task.cancelled() and (error := task.exception()) is not None:
            assert isinstance(error, SkerryError)
    assert not channel._processes
    assert not channel._requests


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([[], BEGUN]), script)
@example(BEGUN, [FULL] * 12)
@example(BEGUN, [("say", frames.encode(Type.EXIT, 1, b"short"))])
@example([], [("ping", b""), ("turn", b""), ("say", frames.encode(Type.PONG, REQUEST) * 2)])
@example([], [("ping", b""), ("turn", b""), ("cancel", b""), ("say", frames.encode(Type.PONG, REQUEST))])
def test_arbitrary_frames_at_arbitrary_moments(
    first: list[tuple[str, bytes]], then: list[tuple[str, bytes]]
) -> None:
    """Nothing escapes from `data_received`, and once the channel is closed nobody waits any longer."""
    unhandled: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        await play([*first, *then])

    asyncio.run(main())
    assert not unhandled


@given(st.binary(max_size=300), st.sampled_from(["file", "execution"]))
def test_errors_are_errors(payload: bytes, what: str) -> None:
    error = reported_error(payload, what)
    assert isinstance(error, SkerryError)
    assert len(error.message) < 1000


# ---- records ----

names = st.binary(max_size=40)
records = st.builds(
    lambda kind, name, target: (
        struct.pack("<BIIIQqH", kind, 0o644, 1, 2, 3, 4, len(name))
        + name
        + struct.pack("<H", len(target))
        + target
    ),
    st.sampled_from(b"fdlpscb"),
    names,
    names,
)


@given(records)
def test_sound_records(record: bytes) -> None:
    info = parse_stat(record)
    assert (info.uid, info.gid, info.size, info.mode) == (1, 2, 3, 0o644)


@given(
    st.binary(max_size=200)
    | records.flatmap(lambda record: st.integers(0, len(record)).map(lambda at: record[:at]))
)
@example(b"")
def test_arbitrary_records(data: bytes) -> None:
    with contextlib.suppress(GuestFailed):
        assert isinstance(parse_stat(data), FileInfo)


class Program:
    """An applet's process that writes these pieces and ends well."""

    exited = True

    def __init__(self, written: list[bytes]) -> None:
        self._written = written

    async def output(self) -> AsyncIterator[tuple[int, bytes]]:
        for data in self._written:
            yield 1, data

    async def wait(self) -> Exit:
        return Exit(0, None, 0, 0, 0.0, 0)


def read(written: list[bytes]) -> list[bytes]:
    async def collect() -> list[bytes]:
        applet = files._Applet("a", cast(GuestProcess, Program(written)))
        return [record async for record in applet.records()]

    return asyncio.run(collect())


@settings(deadline=None)
@given(st.lists(records, max_size=10), st.lists(st.integers(0, 1 << 16), max_size=8))
def test_records_survive_any_cutting(sent: list[bytes], cuts: list[int]) -> None:
    data = b"".join(struct.pack("<I", len(record)) + record for record in sent)
    assert read(pieces(data, cuts)) == sent


@settings(deadline=None)
@given(st.lists(st.binary(max_size=100)))
def test_arbitrary_streams_of_records(written: list[bytes]) -> None:
    with contextlib.suppress(GuestFailed):
        assert sum(4 + len(record) for record in read(written)) == sum(map(len, written))


class Watching(Channel):
    """Starts nothing but such a program."""

    def __init__(self, written: list[bytes]) -> None:
        self._program = Program(written)
        self.flow = Budget().flow()

    async def start(self, start: Start) -> GuestProcess:
        return cast(GuestProcess, self._program)


@settings(deadline=None)
@given(
    st.binary(max_size=30)
    | st.builds(lambda kind, name: struct.pack("<BIH", kind, 0, len(name)) + name, st.integers(0, 255), names)
)
@example(struct.pack("<BIH", ord("c"), 0, 500) + b"short")
def test_arbitrary_events(event: bytes) -> None:
    async def collect() -> list[str]:
        channel = Watching([struct.pack("<I", len(event)) + event])
        return [found.path async for found in files.watch(channel, ".")]

    sound = (
        len(event) >= 7
        and len(event) == 7 + struct.unpack_from("<H", event, 5)[0]
        and event[0] in files._EVENTS
    )
    if sound:
        assert len(asyncio.run(collect())) == 1
    else:
        with pytest.raises(GuestFailed):
            asyncio.run(collect())
