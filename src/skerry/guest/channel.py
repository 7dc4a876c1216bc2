"""One connection to one guest: executions, their streams, short file operations.

The guest is hostile until proven otherwise, and it never is: every id, length and number it sends is checked, no
answer is awaited for ever, memory held for it is bounded by the credit that was granted, and the time that its
frames take is shared out. What it says about exit codes is all there is; what it says about resources is not used.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator
from time import perf_counter
from typing import Any, NamedTuple, TypeVar, cast

from skerry.errors import Conflict, GuestFailed, SkerryError
from skerry.fairness import SLICE, budget
from skerry.guest import frames
from skerry.guest.errors import path_bytes, printable, reported_error
from skerry.guest.frames import WINDOW, Flag, Frame, ProtocolError, Tag, Type
from skerry.guest.process import GuestProcess, retrieve
from skerry.guest.records import parse_stat
from skerry.guest.start import Start
from skerry.models import FileInfo

READ_MAX = frames.PAYLOAD_MAX
WRITE_MAX = 120 * 1024
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
FILES_AT_ONCE = 16
"""Requests for files that wait for their answers: a guest ends the connection when 64 answers of files wait in it."""
PROCESSES_MAX = 2049
"""More than a guest holds."""
REQUESTS = 1 << 31
"""Ids below this are executions', which an earlier connection may have given; those above are requests'."""

_T = TypeVar("_T")


class GuestProcessInfo(NamedTuple):
    id: int
    pid: int
    running: bool
    code: int
    processes: int
    """How many processes of it are alive, background ones included."""
    name: str


class Channel(asyncio.Protocol):
    """The connection. Made by `open()` or `begin()`; when it is gone, `closed` is done with the reason."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.closed: asyncio.Future[str] = loop.create_future()
        self._error: SkerryError | None = None
        """The reason, if it is not the guest's fault."""
        self._hello: asyncio.Future[None] = loop.create_future()
        self._hello.add_done_callback(retrieve)
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
        self._processes[process_id] = process
        self.send(Type.ATTACH, process_id, struct.pack("<I", WINDOW))
        try:
            await self.answer(process.started())
        except SkerryError:
            self._processes.pop(process_id, None)
            raise
        return process

    async def end(self, process_id: int) -> None:
        """Kill what an earlier connection has started. Raises GuestFailed."""
        process = GuestProcess(self, process_id)
        await process.kill()
        process.forget()

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
            retrieve(future)
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
            request.set_exception(reported_error(frame.payload, "file"))
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
