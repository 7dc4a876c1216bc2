"""A guest that was taken over, at the other end of the daemon's channel.

Whatever the guest sends or does not send: the host's side ends in bounded time with bounded memory, says that the
guest failed, and leaves no task and no future behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from skerry.errors import GuestFailed, InvalidRequest
from skerry.fairness import SLICE
from skerry.guest import channel as channel_module
from skerry.guest import files, frames
from skerry.guest.channel import FILES_AT_ONCE, FRAMES_BETWEEN, Channel
from skerry.guest.frames import HEADER, WINDOW, Type
from skerry.guest.process import STDIN_WINDOW, GuestProcess
from skerry.guest.start import Start
from skerry.manager.environments.request import CreateRequest
from skerry.manager.executions.commands import Command
from skerry.models import Outcome
from skerry.policy import Policy
from tests.unit.stubs import CALLER, StubBackend, asynchronous, make_manager

pytestmark = pytest.mark.timeout(100)

HELLO = frames.encode(Type.HELLO_REPLY, 0, struct.pack("<I", frames.VERSION))
STARTED = struct.pack("<IQQ", 42, 0, 0)
SECONDS = 60.0
"""For what takes one or two on an idle machine."""


def ended(code: int = 0, signal: int = 0, size: int = 0) -> bytes:
    return struct.pack("<iIQQQQQ", code, signal, size, 0, 0, 0, 0)


class Guest:
    """The hostile one: the other end of the socket, in bytes."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._received = b""

    async def send(self, type_: int, id_: int, payload: bytes = b"") -> None:
        await self.raw(frames.encode(type_, id_, payload))

    async def raw(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def take(self, type_: int | None = None) -> tuple[int, int, bytes]:
        """The host's next frame of this type."""
        while True:
            while len(self._received) < 4 or len(self._received) < 4 + self._length:
                data = await asyncio.get_running_loop().sock_recv(self.sock, 65536)
                if not data:
                    raise EOFError
                self._received += data
            frame, self._received = self._received[: 4 + self._length], self._received[4 + self._length :]
            _, found, id_ = HEADER.unpack_from(frame)
            if type_ in (None, found):
                return found, id_, frame[9:]

    @property
    def _length(self) -> int:
        return int(struct.unpack_from("<I", self._received)[0])


@contextlib.asynccontextmanager
async def guest(greet: bool = True) -> AsyncIterator[tuple[Guest, Channel]]:
    """A hostile guest and the channel to it, which must be over at the end, with nothing left of it."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    hostile = Guest(theirs)
    before = asyncio.all_tasks()
    try:
        if greet:
            await hostile.raw(HELLO)
        async with asyncio.timeout(SECONDS):
            channel = await Channel.open(ours)
            yield hostile, channel
            await channel.close()
            assert channel.closed.done()
            await asyncio.sleep(0)
            assert not channel._processes
            assert not channel._requests
            assert asyncio.all_tasks() <= before | {asyncio.current_task()}
    finally:
        theirs.close()


async def running(hostile: Guest, channel: Channel, **options: Any) -> GuestProcess:
    """A process of the guest's that has been started."""
    starting = asyncio.ensure_future(channel.start(Start(argv=["x"], **options)))
    _, id_, _ = await hostile.take(Type.START)
    await hostile.send(Type.STARTED, id_, STARTED)
    return await starting


# ---- frames that make no sense ----

BROKEN = {
    "4 GiB": struct.pack("<IBI", 0xFFFFFFFF, Type.OUTPUT, 1),
    "2 GiB": struct.pack("<IBI", 0x80000000, Type.OUTPUT, 1),
    "one byte more than fits": struct.pack("<IBI", frames.PAYLOAD_MAX + 6, Type.OUTPUT, 1),
    "no length": struct.pack("<IBI", 0, Type.PONG, 99),
    "less than a header": struct.pack("<IBI", 4, Type.PONG, 99),
    "type 0": struct.pack("<IBI", 5, 0, 99),
    "type 255": struct.pack("<IBI", 5, 255, 99),
    "a request of the host's own": frames.encode(Type.START, 99, b"x"),
    "a second greeting": HELLO,
    "output without a stream": frames.encode(Type.OUTPUT, 1),
    "output of stream 0": frames.encode(Type.OUTPUT, 1, b"\0x"),
    "output of stream 3": frames.encode(Type.OUTPUT, 1, b"\3x"),
    "too much output at once": frames.encode(Type.OUTPUT, 1, b"\1" + bytes(65536)) * (WINDOW // 65536 + 1),
    "an end of the wrong size": frames.encode(Type.EXIT, 1, ended() + b"x"),
    "an end with code 256": frames.encode(Type.EXIT, 1, ended(256)),
    "an end with code -1": frames.encode(Type.EXIT, 1, ended(-1)),
    "an end by signal 65": frames.encode(Type.EXIT, 1, ended(0, 65)),
    "a start of the wrong size": frames.encode(Type.STARTED, 1, b"x"),
    "credit of the wrong size": frames.encode(Type.STDIN_CREDIT, 1, b"x"),
    "a result for an execution": frames.encode(Type.RESULT, 1, b"x"),
    "a pong for an execution": frames.encode(Type.PONG, 1),
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
@asynchronous
async def test_a_broken_frame_ends_the_channel(data: bytes) -> None:
    async with guest() as (hostile, channel):
        process = await running(hostile, channel)
        asking = asyncio.ensure_future(channel.ping())
        await hostile.raw(data)
        assert "broke the protocol" in await channel.closed
        for waiting in (
            process.wait(),
            asking,
            channel.ping(),
            channel.start(Start(argv=["x"])),
            process.kill(),
        ):
            with pytest.raises(GuestFailed):
                await waiting


@pytest.mark.parametrize(
    "greeting",
    [
        frames.encode(Type.HELLO_REPLY, 0, struct.pack("<I", frames.VERSION + 1)),
        frames.encode(Type.HELLO_REPLY, 7, struct.pack("<I", frames.VERSION)),
        frames.encode(Type.HELLO_REPLY, 0, b""),
        frames.encode(Type.PONG, 0),
        frames.encode(Type.STARTED, 1, STARTED),
        HELLO * 2,
        b"HTTP/1.1 200 OK\r\n\r\n",
    ],
)
@asynchronous
async def test_wrong_greetings(greeting: bytes) -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.send(greeting)

    async def greet() -> None:
        channel = await Channel.open(ours)
        raise GuestFailed(await channel.closed)  # of two, the second is the wrong one

    with theirs, pytest.raises(GuestFailed, match="broke the protocol"):
        await greet()


@asynchronous
async def test_a_guest_that_hangs_up() -> None:
    for last in (b"", HELLO[:3], frames.encode(Type.PONG, 1)[:8]):
        async with guest() as (hostile, channel):
            asking = asyncio.ensure_future(channel.ping())
            await hostile.take(Type.PING)
            await hostile.raw(last)
            hostile.sock.close()
            with pytest.raises(GuestFailed):
                await asking


@asynchronous
async def test_a_slow_drip_is_put_together() -> None:
    async with guest() as (hostile, channel):
        asking = asyncio.ensure_future(channel.read("a"))
        _, id_, _ = await hostile.take(Type.FILE_READ)
        for byte in frames.encode(Type.RESULT, id_, b"content"):
            await hostile.raw(bytes([byte]))
            await asyncio.sleep(0)
        assert await asking == b"content"
        await hostile.raw(frames.encode(Type.RESULT, id_, bytes(100))[:50])  # and the rest never
        assert not channel.closed.done()


# ---- a guest that does not answer ----

ASKED: dict[str, Callable[[Channel, GuestProcess], Awaitable[Any]]] = {
    "ping": lambda channel, _: channel.ping(),
    "read": lambda channel, _: channel.read("a"),
    "write": lambda channel, _: channel.write("a", b"x"),
    "list processes": lambda channel, _: channel.processes(),
    "start": lambda channel, _: channel.start(Start(argv=["x"])),
    "attach": lambda channel, _: channel.attach(5),
    "kill": lambda _, process: process.kill(),
    "list files": lambda channel, _: files.list_directory(channel, "."),
    "remove files": lambda channel, _: files.remove_tree(channel, "a"),
}


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_no_answer_is_awaited_for_ever(
    monkeypatch: pytest.MonkeyPatch, ask: Callable[[Channel, GuestProcess], Awaitable[Any]]
) -> None:
    monkeypatch.setattr(channel_module, "ANSWER_SECONDS", 0.05)

    @asynchronous
    async def test() -> None:
        async with guest() as (hostile, channel):
            process = await running(hostile, channel)
            with pytest.raises(GuestFailed, match="does not answer"):
                await ask(channel, process)
            assert channel.closed.done()
            with pytest.raises(GuestFailed):
                await process.wait()

    test()


@asynchronous
async def test_few_files_are_asked_for_at_once() -> None:
    """Answers that wait would fill a guest; it has one to give also when the caller has gone."""
    async with guest() as (hostile, channel):
        callers = [asyncio.ensure_future(channel.read(str(number))) for number in range(2 * FILES_AT_ONCE)]
        asked = [(await hostile.take(Type.FILE_READ))[1] for _ in range(FILES_AT_ONCE)]
        for caller in callers[:-1]:
            caller.cancel()
        await asyncio.gather(*callers[:-1], return_exceptions=True)
        ping = asyncio.ensure_future(channel.ping())
        type_, id_, _ = await hostile.take()
        assert type_ == Type.PING
        await hostile.send(Type.PONG, id_)
        await ping
        await hostile.send(Type.RESULT, asked[0], b"late")
        type_, id_, _ = await hostile.take()
        assert type_ == Type.FILE_READ
        await hostile.send(Type.RESULT, id_, b"content")
        assert await callers[-1] == b"content"


def test_a_caller_that_has_gone_owes_the_guest_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an answer for it, nobody would be served again."""
    monkeypatch.setattr(channel_module, "ANSWER_SECONDS", 0.05)

    @asynchronous
    async def test() -> None:
        async with guest() as (_, channel):
            for caller in [asyncio.ensure_future(channel.read("a")) for _ in range(FILES_AT_ONCE)]:
                await asyncio.sleep(0)
                caller.cancel()
            with pytest.raises(GuestFailed, match="does not answer"):
                await channel.read("a")

    test()


def test_a_guest_that_does_not_greet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "HANDSHAKE_SECONDS", 0.05)

    @asynchronous
    async def test() -> None:
        with pytest.raises(GuestFailed, match="greeting"):
            async with guest(greet=False):
                pass

    test()


def test_a_caller_that_leaves_an_applet_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed then, which a hostile guest does not confirm."""
    monkeypatch.setattr(channel_module, "ANSWER_SECONDS", 0.05)

    @asynchronous
    async def test() -> None:
        async with guest() as (hostile, channel):
            listing = asyncio.ensure_future(files.list_directory(channel, "."))
            _, id_, _ = await hostile.take(Type.START)
            await hostile.send(Type.STARTED, id_, STARTED)
            await asyncio.sleep(0.01)
            listing.cancel()
            with pytest.raises((asyncio.CancelledError, GuestFailed)):
                await listing

    test()


@pytest.mark.parametrize("canceled", ["start", "kill"])
def test_kill_whose_caller_has_gone_has_a_deadline(monkeypatch: pytest.MonkeyPatch, canceled: str) -> None:
    """Of a guest that never confirms it, the channel ends, and so the environment."""
    monkeypatch.setattr(channel_module, "ANSWER_SECONDS", 0.05)

    @asynchronous
    async def test() -> None:
        async with guest() as (hostile, channel):
            if canceled == "kill":
                process = await running(hostile, channel)
                call: asyncio.Future[Any] = asyncio.ensure_future(process.kill())
                await hostile.take(Type.KILL)
            else:
                call = asyncio.ensure_future(channel.start(Start(argv=["x"])))
                await hostile.take(Type.START)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            if canceled == "start":
                _, id_, _ = await hostile.take(Type.KILL)
                await hostile.send(Type.STARTED, id_, STARTED)
                await hostile.send(Type.EXIT, id_, ended(137, 9))
            async with asyncio.timeout(SECONDS / 2):
                assert await channel.closed == channel_module.NO_ANSWER

    test()


# ---- ids and order ----


@asynchronous
async def test_foreign_replayed_and_late_frames_change_nothing() -> None:
    async with guest() as (hostile, channel):
        first = await running(hostile, channel)
        await hostile.send(Type.EXIT, first.id, ended(7))
        assert (await first.wait()).code == 7
        second = await running(hostile, channel)
        for id_ in (first.id, 999, 0xFFFFFFFF, 0):
            await hostile.send(Type.EXIT, id_, ended(1))
            await hostile.send(Type.STARTED, id_, STARTED)
            await hostile.send(Type.OUTPUT, id_, b"\1forged")
            await hostile.send(Type.RESULT, id_, b"forged")
            await hostile.send(Type.ERROR, id_, struct.pack("<I", 1) + b"forged")
            await hostile.send(Type.KILLED, id_)
        await hostile.send(Type.KILLED, second.id)  # unasked
        await hostile.send(Type.STARTED, second.id, STARTED)  # again
        await hostile.send(Type.OUTPUT, second.id, b"\1true")
        await hostile.send(Type.EXIT, second.id, ended(3))
        await hostile.send(Type.EXIT, second.id, ended(4))
        await hostile.send(Type.STARTED, second.id, STARTED)
        await hostile.send(Type.OUTPUT, second.id, b"\1after its end")
        assert [data async for _, data in second.output()] == [b"true"]
        assert ((await second.wait()).code, (await first.wait()).code) == (3, 7)
        asking = asyncio.ensure_future(channel.ping())
        _, id_, _ = await hostile.take(Type.PING)
        await hostile.send(Type.PONG, id_)
        await asking
        assert not channel.closed.done()


@asynchronous
async def test_a_second_answer_ends_the_channel_but_a_late_one_does_not() -> None:
    async with guest() as (hostile, channel):
        asking = asyncio.ensure_future(channel.ping())
        _, id_, _ = await hostile.take(Type.PING)
        asking.cancel()
        channel.data_received(frames.encode(Type.PONG, id_))  # before the canceled task has had its turn
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        assert not channel.closed.done()
        asking = asyncio.ensure_future(channel.ping())
        _, id_, _ = await hostile.take(Type.PING)
        channel.data_received(frames.encode(Type.PONG, id_) * 2)
        await asking
        assert "a second answer" in await channel.closed


@asynchronous
async def test_unbounded_stdin_credit_does_not_unbind_us() -> None:
    async with guest() as (hostile, channel):
        process = await running(hostile, channel, stdin=True)
        for _ in range(100):
            await hostile.send(Type.STDIN_CREDIT, process.id, struct.pack("<I", 0xFFFFFFFF))
        await asyncio.sleep(0)
        writing = asyncio.ensure_future(process.write(bytes(4 << 20)))
        sent = 0
        for _ in range(64):
            _, _, data = await hostile.take(Type.STDIN)
            assert len(data) <= STDIN_WINDOW
            sent += len(data)
            assert not writing.done() or sent == 4 << 20
            await hostile.send(Type.STDIN_CREDIT, process.id, struct.pack("<I", 0xFFFFFFFF))
        assert sent == 4 << 20
        await writing


# ---- endless ones ----


async def flood(hostile: Guest, data: bytes, channel: Channel, most: int) -> int:
    """Send `data` again and again until the host hangs up, or `most` bytes were taken; returns how many."""
    sent = 0
    with contextlib.suppress(OSError):
        while sent < most and not channel.closed.done():
            await hostile.raw(data)
            sent += len(data)
    return sent


ENDLESS = {
    "output of nobody": frames.encode(Type.OUTPUT, 99, b"\1" + bytes(1000)),
    "empty output": frames.encode(Type.OUTPUT, 1, b"\1"),
    "starts": frames.encode(Type.STARTED, 1, STARTED),
    "kills": frames.encode(Type.KILLED, 1),
    "no credit": frames.encode(Type.STDIN_CREDIT, 1, bytes(4)),
    "more credit": frames.encode(Type.STDIN_CREDIT, 1, b"\xff" * 4),
    "errors for nobody": frames.encode(Type.ERROR, 77, bytes(100)),
    "pongs": frames.encode(Type.PONG, 0x80000000),
}


@pytest.mark.parametrize("frame", ENDLESS.values(), ids=ENDLESS)
def test_frames_that_nobody_waits_for_come_to_an_end(monkeypatch: pytest.MonkeyPatch, frame: bytes) -> None:
    monkeypatch.setattr(channel_module, "USELESS_MAX", 20_000)

    @asynchronous
    async def test() -> None:
        async with guest() as (hostile, channel):
            process = await running(hostile, channel)
            await flood(hostile, frame * 100, channel, 1 << 30)
            assert "nobody waits for" in await channel.closed
            with pytest.raises(GuestFailed):
                await process.wait()

    tracemalloc.start()
    try:
        test()
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("streams", [(1,), (1, 2)])
def test_single_bytes_cost_no_more_than_bytes(streams: tuple[int, ...]) -> None:
    """Output in frames of one byte each, of one stream or alternating, which nobody reads; then the same with a reader,
    and a guest that does not read what it is sent."""
    frame = b"".join(frames.encode(Type.OUTPUT, 1, bytes((stream, 120))) for stream in streams)

    @asynchronous
    async def test() -> None:
        async with guest() as (hostile, channel):
            process = await running(hostile, channel)
            await flood(hostile, frame * 1000, channel, len(frame) * WINDOW // 2)
            seen = 0
            sending = asyncio.ensure_future(flood(hostile, frame * 1000, channel, len(frame) * WINDOW))
            async for _, data in process.output():
                seen += len(data)
                if seen >= WINDOW:
                    break
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sending
            assert not channel.closed.done()

    tracemalloc.start()
    try:
        test()
        # A window of bytes, twice, and what was read at once; one object for each byte would be 30 MiB.
        assert tracemalloc.get_traced_memory()[1] < 6 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("seconds", "most"), [(0.0, FRAMES_BETWEEN), (60.0, 20_000)])
def test_a_flood_leaves_others_their_turn(monkeypatch: pytest.MonkeyPatch, seconds: float, most: int) -> None:
    """A slice of time between two turns of the loop. The control is a slice without an end."""
    monkeypatch.setattr(channel_module, "SLICE", seconds)
    steps: list[int] = []

    @asynchronous
    async def test() -> None:
        async with guest() as (_, channel):
            channel.data_received(frames.encode(Type.PONG, 5) * 20_000)
            steps.append(channel._useless)
            while channel._useless < 20_000:
                await asyncio.sleep(0)
                steps.append(channel._useless)

    test()
    largest = max(after - before for before, after in zip([0, *steps], steps, strict=False))
    assert largest == most


def test_a_guest_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "UNREAD_MAX", 1 << 20)

    @asynchronous
    async def test() -> None:
        async with guest() as (hostile, channel):
            process = await running(hostile, channel)
            for _ in range(1 << 20):
                process.signal(1)
                if channel.closed.done():
                    break
            assert "does not read" in await channel.closed

    test()


# ---- what it says ----


@asynchronous
async def test_words_of_the_guest_are_kept_short() -> None:
    async with guest() as (hostile, channel):
        asking = asyncio.ensure_future(channel.read("a"))
        _, id_, _ = await hostile.take(Type.FILE_READ)
        await hostile.send(Type.ERROR, id_, struct.pack("<I", 9999) + b"\x1b]0;" + b"x" * 100_000)
        with pytest.raises(GuestFailed) as caught:
            await asking
        assert len(caught.value.message) < 300


@pytest.mark.parametrize("payload", [b"x", bytes(23), struct.pack("<IIIiII", 1, 2, 0, 0, 1, 0xFFFFFFFF)])
@asynchronous
async def test_malformed_lists_of_processes(payload: bytes) -> None:
    async with guest() as (hostile, channel):
        asking = asyncio.ensure_future(channel.processes())
        _, id_, _ = await hostile.take(Type.LIST)
        await hostile.send(Type.RESULT, id_, payload)
        with pytest.raises(GuestFailed, match="malformed list"):
            await asking


@asynchronous
async def test_list_of_more_processes_than_a_guest_holds_is_refused() -> None:
    """Each would have to be ended, one answer after the other."""
    async with guest() as (hostile, channel):
        asking = asyncio.ensure_future(channel.processes())
        _, id_, _ = await hostile.take(Type.LIST)
        entries = (struct.pack("<IIIiII", number, 0, 0, 0, 1, 0) for number in range(1, 5000))
        await hostile.send(Type.RESULT, id_, b"".join(entries))
        with pytest.raises(GuestFailed, match="more executions than it can hold"):
            await asking


@pytest.mark.parametrize(
    "record",
    [
        struct.pack("<I", 3) + b"abc",
        struct.pack("<IBIIIQqHHB", 34, ord("f"), 0, 0, 0, 0, 0, 0, 0, 7),
        struct.pack("<I", 100),  # and then its end
        struct.pack("<IBIIIQqH", 36, ord("f"), 0, 0, 0, 0, 0, 500) + b"abc",
        struct.pack("<IBIIIQqHH", 33, ord("?"), 0, 0, 0, 0, 0, 0, 0),
    ],
)
@asynchronous
async def test_malformed_records_of_files(record: bytes) -> None:
    async with guest() as (hostile, channel):
        listing = asyncio.ensure_future(files.list_directory(channel, "."))
        _, id_, _ = await hostile.take(Type.START)
        await hostile.send(Type.STARTED, id_, STARTED)
        await hostile.send(Type.OUTPUT, id_, b"\1" + record)
        await hostile.send(Type.EXIT, id_, ended())
        with pytest.raises(GuestFailed):
            await listing


@pytest.mark.parametrize("length", [70_001, 0xFFFFFFFF])
@asynchronous
async def test_records_that_are_too_long_are_not_waited_for(length: int) -> None:
    async with guest() as (hostile, channel):
        listing = asyncio.ensure_future(files.list_directory(channel, "."))
        _, id_, _ = await hostile.take(Type.START)
        await hostile.send(Type.STARTED, id_, STARTED)
        await hostile.send(Type.OUTPUT, id_, b"\1" + struct.pack("<I", length))
        await hostile.take(Type.KILL)
        await hostile.send(Type.KILLED, id_)
        with pytest.raises(GuestFailed, match="too long"):
            await listing


def test_listings_are_bounded_by_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long names count, as well as many."""
    monkeypatch.setattr(files, "LIST_BYTES_MAX", 100_000)
    name = b"n" * 4000
    record = struct.pack("<BIIIQqH", ord("f"), 0o644, 0, 0, 0, 0, len(name)) + name + struct.pack("<H", 0)

    @asynchronous
    async def test() -> None:
        async with guest() as (hostile, channel):
            listing = asyncio.ensure_future(files.list_directory(channel, "."))
            _, id_, _ = await hostile.take(Type.START)
            await hostile.send(Type.STARTED, id_, STARTED)
            for _ in range(30):
                await hostile.send(Type.OUTPUT, id_, b"\1" + struct.pack("<I", len(record)) + record)
            await hostile.take(Type.KILL)
            await hostile.send(Type.KILLED, id_)
            with pytest.raises(InvalidRequest, match="too many entries"):
                await listing

    test()


@asynchronous
async def test_flood_of_file_events_leaves_others_their_turn() -> None:
    """However many come in one frame, others run after a slice of them."""
    record = struct.pack("<IBIH", 8, ord("c"), 0, 1) + b"x"
    count, seen, steps = 4000, 0, [0]

    async def others() -> None:
        while True:
            steps.append(seen)
            await asyncio.sleep(0)

    async with guest() as (hostile, channel):
        events = files.watch(channel, ".")
        first = asyncio.ensure_future(anext(events))
        _, id_, _ = await hostile.take(Type.START)
        await hostile.send(Type.STARTED, id_, STARTED)
        await hostile.send(Type.OUTPUT, id_, b"\1" + record * count)
        await first
        turning = asyncio.ensure_future(others())
        while seen < count - 1:
            await anext(events)
            seen += 1
        turning.cancel()
        closing = asyncio.ensure_future(events.aclose())
        await hostile.take(Type.KILL)
        await hostile.send(Type.KILLED, id_)
        await closing
    largest = max(after - before for before, after in itertools.pairwise([*steps, seen]))
    assert largest <= 3 * SLICE / files.EVENT_SECONDS


# ---- all the way up: what becomes of an execution ----


class HostileBackend(StubBackend):
    """Its environments' guests do what `script` says."""

    def __init__(self, script: Callable[[Guest], Awaitable[None]]) -> None:
        super().__init__()
        self._script = script
        self.tasks: list[asyncio.Task[None]] = []
        self._ends: list[socket.socket] = []

    async def connect(self, environment_id: str) -> socket.socket:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._ends.append(theirs)
        hostile = Guest(theirs)
        await hostile.raw(HELLO)
        self.tasks.append(asyncio.ensure_future(self._play(hostile)))
        return ours

    async def _play(self, hostile: Guest) -> None:
        with contextlib.suppress(OSError, EOFError):
            await self._script(hostile)

    async def open_channel(self, sock: socket.socket) -> Channel:
        return await Channel.open(sock)

    async def close(self) -> None:
        await super().close()
        for task in self.tasks:
            task.cancel()
        for end in self._ends:
            end.close()


def run_with(
    script: Callable[[Guest], Awaitable[None]], before: Callable[[HostileBackend], None] | None = None
) -> Any:
    """The result of a command in an environment whose guest is this."""
    results = []

    @asynchronous
    async def test() -> None:
        backend = HostileBackend(script)
        manager = make_manager(backend)
        try:
            async with asyncio.timeout(SECONDS):
                environment = await manager.create(CALLER, CreateRequest(policy=Policy()))
                assert environment.executions is not None
                if before is not None:
                    before(backend)
                execution = environment.executions.prepare(CALLER, Command(argv=["x"], timeout=0.3))
                results.append(await execution.run())
        finally:
            await manager.close()
        assert backend.living == set()

    test()
    return results[0]


def test_a_guest_that_never_starts_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "ANSWER_SECONDS", 0.1)

    async def script(hostile: Guest) -> None:
        await hostile.take(Type.SHUTDOWN)  # which never comes

    with pytest.raises(GuestFailed):
        run_with(script)


def test_a_guest_that_breaks_the_protocol_gives_an_internal_outcome() -> None:
    async def script(hostile: Guest) -> None:
        _, id_, _ = await hostile.take(Type.START)
        await hostile.send(Type.STARTED, id_, STARTED)
        await hostile.send(Type.OUTPUT, id_, b"\1before")
        await hostile.raw(b"\xff" * 100)

    result = run_with(script)
    assert (result.outcome, result.exit_code, result.stdout) == (Outcome.INTERNAL, 125, "before")
    assert "broke the protocol" in result.message


@pytest.mark.parametrize(
    ("oom_kills", "code", "signal", "outcome"),
    [
        (
            0,
            137,
            9,
            Outcome.SIGNALED,
        ),  # killed for want of memory, it would seem; the kernel knows nothing of it
        (1, 1, 0, Outcome.OOM_KILLED),
        (1, 137, 9, Outcome.OOM_KILLED),
        (0, 0, 0, Outcome.COMPLETED),
    ],
)
def test_a_guest_that_lies_about_its_end(oom_kills: int, code: int, signal: int, outcome: Outcome) -> None:
    """Exit codes are its word. What ended for want of memory, and what it used, the kernel counts."""
    backends: list[HostileBackend] = []

    async def script(hostile: Guest) -> None:
        _, id_, _ = await hostile.take(Type.START)
        await hostile.send(Type.STARTED, id_, STARTED)
        backends[0].oom_kills = oom_kills
        lies = [10**15] * 3  # CPU time and memory
        await hostile.send(Type.EXIT, id_, struct.pack("<iIQQQQQ", code, signal, 0, 0, *lies))

    result = run_with(script, backends.append)
    assert result.outcome is outcome
    assert result.usage.cpu_seconds == 0.0
    assert result.usage.memory_peak_bytes == 2


def test_a_guest_that_does_not_kill() -> None:
    """After its timeout the execution is over, and so is the environment."""

    async def script(hostile: Guest) -> None:
        _, id_, _ = await hostile.take(Type.START)
        await hostile.send(Type.STARTED, id_, STARTED)
        await hostile.take(Type.KILL)
        await hostile.raw(b"\0" * 9)

    result = run_with(script)
    assert result.outcome is Outcome.TIMED_OUT
