"""One connection to one guest: executions, their streams, short file operations.

The guest is hostile until proven otherwise, and it never is: every id, length and number it sends is checked, no
answer is awaited for ever, memory held for it is bounded by the credit that was granted, and the time that its
frames take is shared out. What it says about exit codes is all there is; what it says about resources is not used.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple, TypeVar, cast

from skerry.errors import (
    Busy,
    Conflict,
    DiskFull,
    ExecutionNotFound,
    FileConflict,
    FileDenied,
    FileMissing,
    GuestFailed,
    InvalidRequest,
    LimitReached,
    PathOutside,
    SkerryError,
)
from skerry.fairness import SLICE, budget
from skerry.guest import frames
from skerry.guest.frames import Flag, Frame, ProtocolError, Tag, Type
from skerry.guest.records import parse_stat
from skerry.guest.shells import with_context
from skerry.models import FileInfo

WINDOW = 256 * 1024
"""Bytes of output of one stream that may be under way: what a slow reader can cost the daemon."""
STDIN_WINDOW = 65536
REPLIES = 3
"""The stream of a program that was started with `replies`, beside 1 (stdout) and 2 (stderr)."""
READ_MAX = frames.PAYLOAD_MAX
WRITE_MAX = 120 * 1024
START_MAX = frames.PAYLOAD_MAX
HANDSHAKE_SECONDS = 20.0
ANSWER_SECONDS = 60.0
"""However busy its environment is, a guest that has not answered by then is broken."""
NO_ANSWER = "the guest does not answer"
RECEIVED_BYTE_SECONDS = 1e-9
"""Loop time, about, to receive a byte, beside what is done with it."""
FRAMES_BETWEEN = 16
"""Frames of one guest that are handled between two looks at the clock: see `skerry.fairness`."""
USELESS_MAX = 100_000
"""Frames that nobody waits for, from one request of ours to the next. A few are normal when callers go away."""
UNREAD_MAX = 32 << 20
"""Bytes on their way to a guest: one that lets more pile up does not read."""
SMALL, PIECES_MAX = 4096, 64
"""Pieces of output below this size are put together while they wait: neighbours always; if more than so many pieces
wait, also those of one stream with others of the other in between."""
FILES_AT_ONCE = 16
"""Requests for files that wait for their answers: a guest ends the connection when 64 answers of files wait in it."""
PROCESSES_MAX = 2049
"""More than a guest holds."""
REQUESTS = 1 << 31
"""Ids below this are executions', which an earlier connection may have given; those above are requests'."""

_T = TypeVar("_T")
_EXIT = struct.Struct("<iIQQQQQ")
_STARTED = struct.Struct("<IQQ")


@dataclass(slots=True)
class Start:
    """What to run: an argv, a command for a stateful shell, or one of the guest's applets."""

    argv: list[str] | None = None
    command: str | None = None
    shell: str = ""
    applet: str | None = None
    cwd: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    """The whole environment of a program; of a shell, when this is its first command."""
    exports: dict[str, str] = field(default_factory=dict)
    """For a shell's command: exported before it, and from then on."""
    uid: int | None = None
    """None: the environment's own user."""
    stdin: bool = False
    pty: tuple[int, int] | None = None
    output_limit: int | None = None
    keep: bool = False
    replies: bool = False
    """Whether its descriptor 9 is a third stream, of which a piece comes behind all output that was written before."""

    def encode(self) -> bytes:
        """The payload of START. Raises InvalidRequest when it is too large or holds a NUL."""
        if self.shell and self.command is not None:
            command = with_context(self.command, self.cwd, self.exports)
            parts = [(Tag.SHELL, self.shell), (Tag.COMMAND, command)]
        else:
            parts = [(Tag.ARG, argument) for argument in self.argv or []]
            if self.cwd is not None:
                parts.append((Tag.CWD, self.cwd))
        if self.applet is not None:
            parts.append((Tag.APPLET, self.applet))
        parts += [(Tag.ENV, f"{name}={value}") for name, value in self.env.items()]
        pieces = []
        for tag, text in parts:
            data = text.encode("utf-8", "surrogateescape")
            if b"\0" in data:
                raise InvalidRequest("a command, its arguments and its environment cannot hold a NUL byte")
            pieces.append(frames.field(tag, data))
        flags = Flag.STDIN * self.stdin | Flag.PTY * (self.pty is not None) | Flag.KEEP * self.keep
        flags |= Flag.REPLIES * self.replies
        pieces.append(frames.field(Tag.FLAGS, struct.pack("<I", flags)))
        if self.uid is not None:
            pieces.append(frames.field(Tag.USER, struct.pack("<II", self.uid, self.uid)))
        pieces.append(frames.field(Tag.CREDIT, struct.pack("<I", WINDOW)))
        if self.pty is not None:
            pieces.append(frames.field(Tag.WINSIZE, struct.pack("<HH", *self.pty)))
        if self.output_limit is not None:
            pieces.append(frames.field(Tag.LIMIT, struct.pack("<Q", self.output_limit)))
        payload = b"".join(pieces)
        if len(payload) > START_MAX:
            raise InvalidRequest(
                f"the command with its environment takes {len(payload)} bytes, more than {START_MAX}",
                hint="write long scripts or data to a file first and run that",
            )
        return payload


class Exit(NamedTuple):
    """How an execution ended, in the guest's words."""

    code: int
    signal: int | None
    stdout_size: int
    stderr_size: int
    cpu_seconds: float
    max_rss: int


class GuestProcessInfo(NamedTuple):
    id: int
    pid: int
    running: bool
    code: int
    processes: int
    """How many processes of it are alive, background ones included."""
    name: str


class GuestProcess:
    """One execution, as seen through the channel that started it or attached to it."""

    def __init__(self, channel: Channel, id_: int, *, attaching: bool = False, replies: bool = False) -> None:
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
        for future in (self._started, self.exit):
            future.add_done_callback(_retrieve)

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
        self._killed.add_done_callback(_retrieve)
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
            self.fail(_error(frame.payload, "execution"))
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


class Channel(asyncio.Protocol):
    """The connection. Made by `open()` or `begin()`; when it is gone, `closed` is done with the reason."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.closed: asyncio.Future[str] = loop.create_future()
        self._error: SkerryError | None = None
        """The reason, if it is not the guest's fault."""
        self._hello: asyncio.Future[None] = loop.create_future()
        self._hello.add_done_callback(_retrieve)
        self._transport: asyncio.Transport | None = None
        self._parser = frames.Parser()
        self._incoming: Iterator[Frame] = iter(())
        self._paused = False
        self.flow = budget(loop).flow()
        """What this guest makes of work for the loop. Its group is the tenant."""
        self._useless = 0
        self._last_process = 0
        self._last_request = REQUESTS
        self._last_handle = 0
        self._processes: dict[int, GuestProcess] = {}
        self._requests: dict[int, asyncio.Future[bytes]] = {}
        self._files = asyncio.Semaphore(FILES_AT_ONCE)

    @classmethod
    async def begin(cls, sock: socket.socket) -> Channel:
        """Greet the guest at the other end of `sock`, which the channel owns from now on.

        It can be used at once: what is asked of the guest comes after the greeting, and fails if that does.
        """
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_connection(lambda: cls(loop), sock=sock)
        channel.send(Type.HELLO, 0, struct.pack("<I", frames.VERSION))
        patience = loop.call_later(HANDSHAKE_SECONDS, channel._end, "the guest did not answer the greeting")
        channel._hello.add_done_callback(lambda _: patience.cancel())
        return channel

    @classmethod
    async def open(cls, sock: socket.socket) -> Channel:
        """As `begin`, and wait for the answer. Raises GuestFailed."""
        channel = await cls.begin(sock)
        try:
            await channel._hello
        except BaseException:
            channel._end("nobody waits for the greeting any more")
            raise
        return channel

    async def close(self, error: SkerryError | None = None) -> None:
        """End the connection. Pending calls raise `error`, or GuestFailed."""
        self._error = error
        self._end("closed")

    # Executions.

    async def start(self, start: Start) -> GuestProcess:
        """Start an execution. A program that does not exist is one that ends with 127.

        Raises InvalidRequest (a working directory that is not there, a user that is not allowed), Busy (the shell
        runs another command), LimitReached, GuestFailed.
        """
        payload = start.encode()
        for _ in range(PROCESSES_MAX):
            self.check_open()
            self._last_process = self._last_process % (REQUESTS - 1) + 1
            if self._last_process in self._processes:  # it was attached to
                continue
            process = GuestProcess(self, self._last_process, replies=start.replies)
            self._processes[process.id] = process
            self._useless = 0
            self.send(Type.START, process.id, payload)
            try:
                await self.answer(process.started())
            except asyncio.CancelledError:
                if not self.closed.done():
                    process.begin_kill()
                raise
            except Conflict:  # something that an earlier connection started has this id
                self._processes.pop(process.id, None)
                continue
            except SkerryError:
                self._processes.pop(process.id, None)
                raise
            return process
        raise GuestFailed("the guest says that every id is in use")

    async def attach(self, process_id: int) -> GuestProcess:
        """Take over an execution and see its recent output again; whoever had it before on this channel loses it.

        Raises ExecutionNotFound, GuestFailed.
        """
        self.check_open()
        if (before := self._processes.get(process_id)) is not None:
            before.fail(GuestFailed("somebody else has attached to the execution"))
        process = GuestProcess(self, process_id, attaching=True)
        # The replay comes on top of the fresh window.
        process._credit = {1: WINDOW + 65536, 2: WINDOW + 65536}
        process._stdin_credit = 0  # the guest says how much it takes
        self._processes[process_id] = process
        self.send(Type.ATTACH, process_id, struct.pack("<I", WINDOW))
        try:
            await self.answer(process.started())
        except SkerryError:
            self._processes.pop(process_id, None)
            raise
        return process

    async def processes(self) -> list[GuestProcessInfo]:
        """Raises GuestFailed, also for more than a guest can hold."""
        data, found, at = await self._request(Type.LIST), list[GuestProcessInfo](), 0
        while at < len(data):
            if len(found) == PROCESSES_MAX:
                raise GuestFailed("the guest lists more executions than it can hold")
            if len(data) < at + 24:
                raise GuestFailed("the guest sent a malformed list")
            id_, pid, exited, code, count, size = struct.unpack_from("<IIIiII", data, at)
            at += 24 + size
            if len(data) < at:
                raise GuestFailed("the guest sent a malformed list")
            name = data[at - size : at].decode(errors="replace")
            found.append(GuestProcessInfo(id_, pid, not exited, code, count, name))
        return found

    def adopt(self, process: GuestProcess) -> None:
        self._processes[process.id] = process

    def drop(self, process_id: int) -> None:
        self._processes.pop(process_id, None)
        self.send(Type.FORGET, process_id)

    # Files: one short operation each. Paths are relative to the workspace, or absolute below it or /tmp.

    async def read(
        self, path: str, offset: int = 0, length: int = READ_MAX, *, handle: int = 0, first: bool = False
    ) -> bytes:
        """At most READ_MAX bytes; empty at the end of the file.

        With a handle, the file that was opened for the `first` piece stays open until a piece is shorter than asked
        for: see `guest.files.Reader`.
        """
        fields = frames.field(Tag.OFFSET, struct.pack("<Q", offset))
        fields += frames.field(Tag.LENGTH, struct.pack("<I", min(length, READ_MAX)))
        if handle:
            fields += _handle(handle, Flag.KEEP * first)
        return await self._file(Type.FILE_READ, path, fields)

    async def write(
        self, path: str, data: bytes, offset: int | None = None, *, handle: int = 0, flags: int = 0
    ) -> None:
        """Write at most WRITE_MAX bytes; without an offset they become the whole content.

        With a handle they are one piece of many: TRUNCATE among the `flags` begins new content, which replaces the old
        one with the piece that has COMMIT; KEEP begins to write to the file itself. See `guest.files.write()`.
        """
        if not handle:
            flags = Flag.PARENTS | (Flag.TRUNCATE if offset is None else 0)
        fields = _handle(handle, flags)
        fields += frames.field(Tag.OFFSET, struct.pack("<Q", offset or 0)) + frames.field(Tag.DATA, data)
        await self._file(Type.FILE_WRITE, path, fields)

    def new_handle(self) -> int:
        self._last_handle = self._last_handle % 0xFFFF_FFFF + 1
        return self._last_handle

    def drop_handle(self, path: str, handle: int) -> None:
        """Have the guest close it; new content that is not complete is gone. Nobody waits for the answer."""
        payload = frames.field(Tag.PATH, path_bytes(path)) + _handle(handle, Flag.ABORT)
        self.send(Type.FILE_WRITE, REQUESTS, payload)

    async def stat(self, path: str, *, handle: int = 0) -> FileInfo:
        """Symlinks are not followed. With a handle: the file that is open under it."""
        return parse_stat(await self._file(Type.FILE_STAT, path, _handle(handle) if handle else b""), path)

    async def mkdir(self, path: str) -> None:
        await self._file(Type.FILE_MKDIR, path)

    async def rename(self, source: str, target: str) -> None:
        await self._file(Type.FILE_RENAME, source, frames.field(Tag.PATH2, path_bytes(target)))

    async def remove(self, path: str) -> None:
        """A file, a symlink or an empty directory."""
        await self._file(Type.FILE_REMOVE, path)

    async def ping(self) -> None:
        await self._request(Type.PING)

    def stay(self, seconds: float) -> None:
        """Have the guest live for so long, from now on, when it is without a daemon."""
        self.send(Type.STAY, 0, struct.pack("<Q", int(seconds * 1000)))

    async def _file(self, type_: Type, path: str, fields: bytes = b"") -> bytes:
        payload = frames.field(Tag.PATH, path_bytes(path)) + fields
        await self._files.acquire()
        try:
            return await self._request(type_, payload, self._files.release)
        except SkerryError as error:
            error.detail.setdefault("path", path.encode("utf-8", "replace").decode())
            error.message = error.message.replace("{path}", printable(path))
            error.args = (error.message,)
            raise

    # The stream.

    def check_open(self) -> None:
        """Raises GuestFailed, or what `close()` was given."""
        if self.closed.done():
            raise self._failure(f"the guest is gone: {self.closed.result()}")

    def _failure(self, reason: str) -> SkerryError:
        """A new one each time: every waiter adds its own traceback."""
        if self._error is None:
            return GuestFailed(reason)
        return type(self._error)(self._error.message, hint=self._error.hint)

    def send(self, type_: int, id_: int, payload: bytes = b"") -> None:
        """Queue a frame; on a closed channel it goes nowhere, and whoever waits for an answer has been told."""
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(frames.encode(type_, id_, payload))
        if self._transport.get_write_buffer_size() > UNREAD_MAX:
            self._end("the guest does not read what it is sent")

    async def answer(self, awaited: Awaitable[_T]) -> _T:
        """What the guest owes us; without it in time, it is given up. Raises GuestFailed."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await awaited
        except TimeoutError as error:
            self._end(NO_ANSWER)
            raise GuestFailed(NO_ANSWER) from error

    def expect(self, answer: asyncio.Future[Any]) -> None:
        """Give the guest up unless `answer` is done in time, whether or not somebody still waits for it."""
        patience = self.loop.call_later(ANSWER_SECONDS, self._end, NO_ANSWER)
        answer.add_done_callback(lambda _: patience.cancel())

    async def _request(
        self, type_: Type, payload: bytes = b"", answered: Callable[[], None] = lambda: None
    ) -> bytes:
        """`answered` is called once, also when the caller has gone before: until then the guest is at work on it."""
        if self.closed.done():
            answered()
        self.check_open()
        self._last_request = id_ = REQUESTS | (self._last_request + 1) % REQUESTS
        future: asyncio.Future[bytes] = self.loop.create_future()

        def done(_: asyncio.Future[bytes]) -> None:
            _retrieve(future)
            del self._requests[id_]
            answered()

        future.add_done_callback(done)
        self.expect(future)
        self._requests[id_] = future
        self._useless = 0
        self.send(type_, id_, payload)
        return await asyncio.shield(future)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not say so

    def data_received(self, data: bytes) -> None:
        self.flow.spend(len(data) * RECEIVED_BYTE_SECONDS)
        self._incoming = self._parser.feed(data)
        self._look()

    def _look(self) -> None:
        """Handle the frames that have come, for a slice of time; the rest when it is this guest's turn again."""
        if self.closed.done() or self._transport is None:
            return
        began = perf_counter()
        more = True
        try:
            while more:
                seen = 0
                for frame in itertools.islice(self._incoming, FRAMES_BETWEEN):
                    seen += 1
                    if not self._on_frame(frame):
                        self._useless += 1
                more = seen == FRAMES_BETWEEN
                if perf_counter() - began >= SLICE:
                    break
            if self._useless > USELESS_MAX:
                raise ProtocolError("frames that nobody waits for")
        except ProtocolError as error:
            self._end(f"the guest broke the protocol: {error}")
            return
        wait = not self.flow.spend(perf_counter() - began) or more
        if wait:
            self.flow.wait(self._look)
        if self._paused != wait:
            self._paused = wait
            (self._transport.pause_reading if wait else self._transport.resume_reading)()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"the connection to the guest ended{f': {exc}' if exc else ''}")

    def _on_frame(self, frame: Frame) -> bool:
        """Whether it was of any use."""
        if frame.type == Type.HELLO_REPLY:
            if frame.id or self._hello.done() or frame.payload != struct.pack("<I", frames.VERSION):
                raise ProtocolError("an unexpected greeting")
            self._hello.set_result(None)
            return True
        if not self._hello.done():
            raise ProtocolError("something before the greeting")
        process = self._processes.get(frame.id)
        if process is not None:
            useful = process.on_frame(frame)
            if process.settled:
                self._processes.pop(frame.id, None)
            return useful
        request = self._requests.get(frame.id)
        if request is None or request.cancelled():
            return False  # an answer to somebody who has gone; ids are not used again
        if request.done():
            raise ProtocolError("a second answer")
        if frame.type in (Type.RESULT, Type.PONG):
            request.set_result(frame.payload)
        elif frame.type == Type.ERROR:
            request.set_exception(_error(frame.payload, "file"))
        else:
            raise ProtocolError(f"an answer of type {frame.type}")
        return True

    def _end(self, reason: str) -> None:
        if self.closed.done():
            return
        self.closed.set_result(reason)
        if not self._hello.done():
            self._hello.set_exception(self._failure(reason))
        for process in list(self._processes.values()):
            process.fail(self._failure(reason))
        for future in self._requests.values():
            if not future.done():
                future.set_exception(self._failure(reason))
        self._processes.clear()
        self._incoming = iter(())
        self.flow.close()
        if self._transport is not None:
            self._transport.abort()


def _handle(number: int, flags: int = 0) -> bytes:
    fields = frames.field(Tag.FLAGS, struct.pack("<I", flags))
    return fields + frames.field(Tag.HANDLE, struct.pack("<I", number)) if number else fields


def path_bytes(path: str) -> bytes:
    """A caller's path for the wire. Raises InvalidRequest for what no path can be."""
    data = path.encode("utf-8", "surrogateescape")
    if not data:
        raise InvalidRequest("the path is empty", hint="use '.' for the workspace itself")
    if b"\0" in data:
        raise InvalidRequest(f"the path {printable(path)} holds a NUL byte")
    if len(data) > 4095:
        raise InvalidRequest(f"the path is {len(data)} bytes long", hint="paths have at most 4095 bytes")
    return data


def printable(path: str) -> str:
    """A path for messages: quoted, with control characters and odd bytes escaped."""
    return ascii(path) if any(not c.isprintable() for c in path) else f"'{path}'"


def _resolve(future: asyncio.Future[_T], value: _T) -> bool:
    """Whether it was still open."""
    if future.done():
        return False
    future.set_result(value)
    return True


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Mark an exception as seen: whoever awaited the future may have gone."""
    if not future.cancelled():
        future.exception()


_FILE_ERRORS: dict[int, tuple[type[SkerryError], str, str]] = {
    errno.ENOENT: (FileMissing, "{path} does not exist", ""),
    errno.ENOTDIR: (FileConflict, "a part of {path} is not a directory", ""),
    errno.EISDIR: (FileConflict, "{path} is a directory", ""),
    errno.EEXIST: (FileConflict, "{path} exists already", ""),
    errno.ENOTEMPTY: (FileConflict, "{path} is not empty", "ask for a recursive removal"),
    errno.EBUSY: (FileConflict, "{path} cannot be replaced or removed", ""),
    errno.ENXIO: (
        FileConflict,
        "{path} is not a regular file",
        "pipes, sockets and devices are not read or written",
    ),
    errno.ENOTSUP: (
        FileConflict,
        "{path} cannot be moved to another file system",
        "copy it, and remove the original",
    ),
    errno.EXDEV: (PathOutside, "{path} leads outside of /workspace and /tmp", "use a path below /workspace"),
    errno.ELOOP: (FileConflict, "{path} has too many symlinks", ""),
    errno.EACCES: (FileDenied, "{path}: permission denied", ""),
    errno.EPERM: (FileDenied, "{path}: not permitted", ""),
    errno.EROFS: (FileDenied, "{path} is read-only", "write below /workspace or /tmp"),
    errno.ENOSPC: (
        DiskFull,
        "no space left for {path}",
        "remove files, or create the environment with more disk",
    ),
    errno.EDQUOT: (
        DiskFull,
        "no space left for {path}",
        "remove files, or create the environment with more disk",
    ),
    errno.EMFILE: (
        Busy,
        "{path}: too many files are being read and written in this environment",
        "try again later",
    ),
    errno.EFBIG: (DiskFull, "{path} would be larger than the disk limit", ""),
    errno.ENAMETOOLONG: (InvalidRequest, "a name in {path} is too long", "names have at most 255 bytes"),
    errno.EINVAL: (InvalidRequest, "{path} is not a valid path", ""),
}


def file_error(number: int, text: str) -> SkerryError:
    """The exception for a failed file operation; '{path}' in its message stands for the path."""
    cls, message, hint = _FILE_ERRORS.get(number, (GuestFailed, "{path}: " + text, ""))
    return cls(message, hint=hint)


def _error(payload: bytes, what: str) -> SkerryError:
    if len(payload) < 4:
        return GuestFailed("the guest sent a malformed error")
    number = struct.unpack_from("<I", payload)[0]
    text = payload[4:204].decode(errors="replace")
    if what == "file":
        return file_error(number, text)
    reason = os.strerror(number) if number < 4096 else str(number)
    if number == errno.EBUSY:
        return Busy("the shell is running another command")
    if number == errno.ESRCH:
        return ExecutionNotFound("no such execution runs in this environment")
    if number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC):
        return LimitReached(
            f"the environment cannot start another process: {text}: {reason}",
            hint="end something in it, or create it with higher limits (pids, memory)",
        )
    if text == "working directory":
        return InvalidRequest(f"the working directory cannot be used: {reason}")
    if text == "user":
        return InvalidRequest(
            f"this user cannot be used here: {reason}",
            hint="without root on the host there is only 'appuser'",
        )
    if number == errno.ENAMETOOLONG:
        return InvalidRequest("the shell's name is too long", hint="at most 31 bytes")
    if number == errno.EEXIST:
        return Conflict(text)
    return GuestFailed(f"the guest could not start it: {text}: {reason}")
