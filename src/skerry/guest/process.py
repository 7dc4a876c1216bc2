"""One execution in the guest: its output, its input, its end."""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from skerry.errors import SkerryError
from skerry.guest.errors import reported_error
from skerry.guest.frames import WINDOW, Frame, ProtocolError, Type

STDIN_WINDOW = 65536
REPLIES = 3
"""The stream of a program that was started with `replies`, beside 1 (stdout) and 2 (stderr)."""
RING = 65536
"""Bytes of each stream that a guest keeps, and sends again to who attaches."""
SMALL, PIECES_MAX = 4096, 64
"""Pieces of output below this size are put together while they wait: neighbours always; if more than so many pieces
wait, also those of one stream with others of the other in between."""

_T = TypeVar("_T")
_EXIT = struct.Struct("<iIQQQQQ")
_STARTED = struct.Struct("<IQQ")


class Exit(NamedTuple):
    """How an execution ended, in the guest's words."""

    code: int
    signal: int | None
    stdout_size: int
    stderr_size: int
    cpu_seconds: float
    max_rss: int


class Link(Protocol):
    """What an execution needs of the channel that it is reached through."""

    loop: asyncio.AbstractEventLoop

    def send(self, type_: int, id_: int, payload: bytes = b"") -> None: ...

    def check_open(self) -> None: ...

    def expect(self, answer: asyncio.Future[Any]) -> None: ...

    def adopt(self, process: GuestProcess) -> None: ...

    def drop(self, process_id: int) -> None: ...


class GuestProcess:
    """One execution, as seen through the channel that started it or attached to it."""

    def __init__(self, channel: Link, id_: int, *, attaching: bool = False, replies: bool = False) -> None:
        self.id = id_
        self.pid = 0
        self._channel = channel
        self._attaching = attaching
        """What comes before the answer to an attach is meant for somebody else."""
        loop = channel.loop
        self._started: asyncio.Future[None] = loop.create_future()
        self.exit: asyncio.Future[Exit] = loop.create_future()
        """How it ended, once it has."""
        self._killed: asyncio.Future[None] | None = None
        self._output: deque[tuple[int, bytes | bytearray]] = deque()
        self._tails: dict[int, bytearray] = {}
        """The last waiting piece of each stream, if it is a small one."""
        self._credit = {1: WINDOW, 2: WINDOW} | ({REPLIES: WINDOW} if replies else {})
        """What the guest may still send of each stream."""
        self._taken = dict.fromkeys(self._credit, 0)
        """What was taken since the guest was last given credit for it."""
        self._waiter: asyncio.Future[None] | None = None
        self._stdin_credit = STDIN_WINDOW
        self._stdin_waiter: asyncio.Future[None] | None = None
        self._stdin_turn = asyncio.Lock()
        if attaching:
            self._credit = dict.fromkeys((1, 2), WINDOW + RING)  # the output that is sent again comes on top
            self._stdin_credit = 0  # the guest says how much it takes
        for future in (self._started, self.exit):
            future.add_done_callback(retrieve)

    async def output(self) -> AsyncIterator[tuple[int, bytes]]:
        """(1, 2 or REPLIES, bytes) as they come. Taking them lets the guest send as much again."""
        while True:
            while self._output:
                stream, data = self._output.popleft()
                if self._tails.get(stream) is data:
                    del self._tails[stream]
                yield stream, bytes(data)
                self._taken[stream] += len(data)
                if self._taken[stream] >= WINDOW // 4 and not self.exit.done():
                    self._grant(stream)
            if self.exit.done():
                return
            self._waiter = self._channel.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _grant(self, stream: int) -> None:
        size, self._taken[stream] = self._taken[stream], 0
        self._credit[stream] += size
        self._channel.send(Type.CREDIT, self.id, struct.pack("<BI", stream, size))

    async def wait(self) -> Exit:
        """How it ended. Raises GuestFailed when the guest went away first."""
        return await asyncio.shield(self.exit)

    async def write(self, data: bytes | bytearray) -> None:
        """Send input; waits while the program does not take it. Input after its end is dropped."""
        view = memoryview(data)
        async with self._stdin_turn:
            while view and not self.exit.done():
                while self._stdin_credit <= 0 and not self.exit.done():
                    self._stdin_waiter = self._channel.loop.create_future()
                    await self._stdin_waiter
                piece = view[: min(self._stdin_credit, STDIN_WINDOW)]
                self._stdin_credit -= len(piece)
                self._channel.send(Type.STDIN, self.id, bytes(piece))
                view = view[len(piece) :]

    async def close_stdin(self) -> None:
        """Its end, after all that is being written."""
        async with self._stdin_turn:
            if not self.exit.done():
                self._channel.send(Type.STDIN, self.id)

    def signal(self, number: int) -> None:
        self._channel.send(Type.SIGNAL, self.id, struct.pack("<I", number))

    def resize(self, rows: int, cols: int) -> None:
        self._channel.send(Type.RESIZE, self.id, struct.pack("<HH", rows, cols))

    async def kill(self) -> None:
        """Kill it with everything that it started; returns when nothing of it lives. Raises GuestFailed."""
        if self._killed is None:
            self._channel.check_open()
            self.begin_kill()
        await asyncio.shield(cast("asyncio.Future[None]", self._killed))

    def begin_kill(self) -> None:
        """Kill it, also when nobody waits: a guest that does not confirm it in time is given up."""
        self._killed = self._channel.loop.create_future()
        self._killed.add_done_callback(retrieve)
        self._channel.expect(self._killed)
        self._channel.adopt(self)
        self._channel.send(Type.KILL, self.id)

    def forget(self) -> None:
        """Let the guest drop what it keeps of an ended execution."""
        self._channel.drop(self.id)

    # What the guest said; called by the channel.

    def on_frame(self, frame: Frame) -> bool:
        """Whether it was of any use."""
        if self._attaching and frame.type not in (Type.STARTED, Type.ERROR):
            return False
        if frame.type == Type.OUTPUT:
            return self._on_output(frame.payload)
        if frame.type == Type.STARTED:
            if len(frame.payload) != _STARTED.size:
                raise ProtocolError("STARTED of the wrong size")
            self.pid = _STARTED.unpack(frame.payload)[0]
            self._attaching = False
            return _resolve(self._started, None)
        if frame.type == Type.EXIT:
            return self._on_exit(frame.payload)
        if frame.type == Type.STDIN_CREDIT:
            if len(frame.payload) != 4:
                raise ProtocolError("STDIN_CREDIT of the wrong size")
            before, more = self._stdin_credit, struct.unpack("<I", frame.payload)[0]
            self._stdin_credit = min(STDIN_WINDOW, before + more)
            self._wake_stdin()
            return self._stdin_credit > before
        if frame.type == Type.KILLED:
            return self._killed is not None and _resolve(self._killed, None)
        if frame.type == Type.ERROR:
            self.fail(reported_error(frame.payload, "execution"))
            return True
        raise ProtocolError(f"a frame of type {frame.type} for an execution")

    def _on_exit(self, payload: bytes) -> bool:
        if len(payload) != _EXIT.size:
            raise ProtocolError("EXIT of the wrong size")
        code, signal, out, err, user, system, rss = _EXIT.unpack(payload)
        if not 0 <= code <= 255 or signal > 64:
            raise ProtocolError("EXIT with an impossible code")
        _resolve(self._started, None)
        end = Exit(code, signal or None, out, err, (user + system) / 1e6, rss * 1024)
        first = _resolve(self.exit, end)
        self._wake()
        return first

    def _on_output(self, payload: bytes) -> bool:
        stream, size = (payload[0] if payload else 0), len(payload) - 1
        if stream not in self._credit:
            raise ProtocolError("output of an unknown stream")
        self._credit[stream] -= size
        if self._credit[stream] < 0:
            raise ProtocolError("more output than was granted")
        if not size or self.exit.done():
            return False
        tail = self._tails.get(stream)
        if tail is not None and len(tail) < SMALL and self._may_extend(stream):
            tail += memoryview(payload)[1:]
        elif size < SMALL:
            self._tails[stream] = tail = bytearray(payload[1:])
            self._output.append((stream, tail))
        else:
            self._tails.pop(stream, None)
            self._output.append((stream, payload[1:]))
        if self._waiter is not None:
            _resolve(self._waiter, None)
        return True

    def _may_extend(self, stream: int) -> bool:
        """Whether more of this stream may go to its last waiting piece. A reply never overtakes output."""
        return self._output[-1][0] == stream or (len(self._output) >= PIECES_MAX and stream != REPLIES)

    def fail(self, error: SkerryError) -> None:
        for future in (self._started, self.exit, self._killed):
            if future is not None and not future.done():
                future.set_exception(error)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None:
            _resolve(self._waiter, None)
        self._wake_stdin()

    def _wake_stdin(self) -> None:
        if self._stdin_waiter is not None:
            _resolve(self._stdin_waiter, None)

    async def started(self) -> None:
        await self._started

    @property
    def exited(self) -> bool:
        return self.exit.done()

    @property
    def settled(self) -> bool:
        """Nothing more is expected from the guest about it."""
        return self.exit.done() and (self._killed is None or self._killed.done())


def _resolve(future: asyncio.Future[_T], value: _T) -> bool:
    """Whether it was still open."""
    if future.done():
        return False
    future.set_result(value)
    return True


def retrieve(future: asyncio.Future[Any]) -> None:
    """Mark an exception as seen: whoever awaited the future may have gone."""
    if not future.cancelled():
        future.exception()
