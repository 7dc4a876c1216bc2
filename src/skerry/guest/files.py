"""File operations that take long or yield much.

All but `write` run as executions of the guest's applets: as the workload's user inside the environment's own view,
under its limits, with flow control, and a caller that goes away ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import re
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator

from skerry.errors import FileConflict, GuestFailed, InvalidRequest, SkerryError
from skerry.fairness import budget
from skerry.guest.channel import READ_MAX, WRITE_MAX, Channel
from skerry.guest.errors import file_error, path_bytes, printable
from skerry.guest.frames import Flag
from skerry.guest.process import GuestProcess
from skerry.guest.records import name_of, parse_stat
from skerry.guest.start import Start
from skerry.models import FileEvent, FileInfo

RECORD_MAX = 70_000
LIST_MAX = 200_000
LIST_BYTES_MAX = 48 << 20
"""Entries in one answer, and what they take; more than this is a job for a command inside."""
RUN = 1024
"""Entries that are sorted in one step."""
RECORD_COST = 48
"""Bytes that a record takes in memory beside its own."""
HELD_AT_ONCE = 8 << 10
WORDS_MAX = 8192
PARTIAL = 1
"""The exit status of an applet that has left something out."""
EVENT_SECONDS = 15e-6
"""Loop time, about, to decode a file event, to encode it and to send it."""

_ERRNO = re.compile(r"^errno=(\d+) ([^\n]*)", re.MULTILINE)
_EVENTS = {
    ord("r"): "ready",
    ord("c"): "created",
    ord("m"): "modified",
    ord("d"): "deleted",
    ord("f"): "moved_from",
    ord("t"): "moved_to",
    ord("a"): "attributes",
    ord("o"): "overflow",
}


class Reader:
    """Reads a file piece by piece. The guest keeps it open, so that all pieces are of one file, replaced or not.

    To be closed, unless a piece was shorter than asked for.
    """

    def __init__(self, channel: Channel, path: str) -> None:
        self._channel = channel
        self._path = path
        self._handle = 0
        self._open = False

    async def read(self, offset: int, length: int, *, more: bool = True) -> bytes:
        """At most READ_MAX bytes. With `more`, the file stays open if there may be any.

        Raises FileMissing, FileConflict, FileDenied, PathOutside, InvalidRequest, Busy, GuestFailed.
        """
        length = min(length, READ_MAX)
        first = self._handle == 0
        if first and more:
            self._handle = self._channel.new_handle()
            self._open = True
        try:
            data = await self._channel.read(self._path, offset, length, handle=self._handle, first=first)
        except SkerryError:  # the guest has closed it
            self._open = False
            raise
        if len(data) < length:
            self._open = False
        return data

    async def size(self) -> int:
        """Of the file that is open."""
        return (await self._channel.stat(self._path, handle=self._handle)).size

    def close(self) -> None:
        if self._open:
            self._open = False
            self._channel.drop_handle(self._path, self._handle)


async def write(channel: Channel, path: str, chunks: AsyncIterator[bytes], offset: int | None = None) -> None:
    """Replace a file's content by all chunks, or leave it as it was if not all of them come.

    With an offset, overwrite it from there on: what is not overwritten stays, also when not all chunks come.

    Content of one piece is one request. The pieces of larger content are kept by the guest, without a name, until the
    last one has come; a guest that loses its daemon drops them.
    """
    handle = sent = 0
    begin = Flag.PARENTS | (Flag.TRUNCATE if offset is None else Flag.KEEP)
    held = bytearray()
    try:
        async for chunk in chunks:
            held += chunk
            while len(held) > WRITE_MAX:
                flags = 0 if handle else begin
                handle = handle or channel.new_handle()
                at = (offset or 0) + sent
                await channel.write(path, bytes(held[:WRITE_MAX]), at, handle=handle, flags=flags)
                del held[:WRITE_MAX]
                sent += WRITE_MAX
        if handle:
            at = (offset or 0) + sent
            await channel.write(path, bytes(held), at, handle=handle, flags=Flag.COMMIT)
        else:
            await channel.write(path, bytes(held), offset)
    except BaseException:
        if handle:
            channel.drop_handle(path, handle)
        raise


class _Applet:
    """One run: its output as an iterator, its failure as an exception."""

    def __init__(self, path: str, process: GuestProcess) -> None:
        self._path = path
        self.process = process

    @classmethod
    async def start(
        cls, channel: Channel, name: str, path: str, *options: str, stdin: bool = False
    ) -> _Applet:
        path_bytes(path)
        return cls(path, await channel.start(Start(argv=[path, *options], applet=name, stdin=stdin)))

    async def output(self, partial: bool = False) -> AsyncGenerator[bytes, None]:
        """What it writes. Raises the error that it names; entries that it left out are a FileConflict at the end.

        `partial`: those are fine.
        """
        words = b""
        try:
            async for stream, data in self.process.output():
                if stream == 1:
                    yield data
                elif len(words) < WORDS_MAX:
                    words += data
            end = await self.process.wait()
        finally:
            if not self.process.exited:
                with contextlib.suppress(GuestFailed):
                    await self.process.kill()
        if (end.code or end.signal) and not (partial and end.code == PARTIAL and not end.signal):
            raise self._error(end.code, words.decode(errors="replace"))

    async def finish(self) -> None:
        async for _ in self.output():
            pass

    async def records(self) -> AsyncGenerator[bytes, None]:
        buffer = bytearray()
        async with contextlib.aclosing(self.output()) as output:
            async for data in output:
                buffer += data
                at = 0
                while len(buffer) - at >= 4:
                    (length,) = struct.unpack_from("<I", buffer, at)
                    if length > RECORD_MAX:
                        raise GuestFailed("the guest sent a record that is too long")
                    if len(buffer) - at < 4 + length:
                        break
                    yield bytes(buffer[at + 4 : at + 4 + length])
                    at += 4 + length
                del buffer[:at]
        if buffer:
            raise GuestFailed("the guest sent half a record")

    def _error(self, code: int, words: str) -> SkerryError:
        found = _ERRNO.findall(words)
        if code == PARTIAL:
            complaints = "; ".join(text for _, text in found[:3])
            return FileConflict(f"not all of {printable(self._path)} could be processed: {complaints}")
        if not found:
            return GuestFailed(f"the file operation ended with {code}: {words.strip()[:200]}")
        number, text = int(found[-1][0]), found[-1][1]
        error = InvalidRequest(text) if code == 2 else file_error(number, text)
        error.message = error.message.replace("{path}", printable(self._path))
        error.args = (error.message,)
        return error


class Listing:
    """The entries of a directory, by name. Kept as the guest sent them, which takes a tenth of what objects would, and
    sorted piece by piece: nobody waits for all of them."""

    def __init__(self) -> None:
        self.weight = 0
        """Bytes that it takes in memory."""
        self._runs: list[list[bytes]] = [[]]
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[FileInfo]:
        return map(parse_stat, heapq.merge(*self._runs, key=name_of))

    def add(self, record: bytes) -> None:
        """Raises GuestFailed."""
        parse_stat(record)
        self._runs[-1].append(record)
        self._count += 1
        self.weight += len(record) + RECORD_COST
        if len(self._runs[-1]) == RUN:
            self.close()
            self._runs.append([])

    def close(self) -> None:
        """Nothing more is added."""
        self._runs[-1].sort(key=name_of)


async def list_directory(
    channel: Channel,
    path: str,
    recursive: bool = False,
    hold: Callable[[int], bool] = lambda _: True,
    pause: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0),
) -> Listing | None:
    """The entries of a directory. `hold` says whether there is room for so many bytes more; None: there was not.

    Raises FileMissing, FileConflict, PathOutside, InvalidRequest.
    """
    applet = await _Applet.start(channel, "list", path, *(["-r"] if recursive else []))
    found = Listing()
    held = 0
    async with contextlib.aclosing(applet.records()) as records:
        async for record in records:
            found.add(record)
            if found.weight - held > HELD_AT_ONCE:
                if not hold(found.weight - held):
                    return None
                held = found.weight
                await pause()  # more may be there already, and others have waited
            if len(found) > LIST_MAX or found.weight > LIST_BYTES_MAX:
                raise InvalidRequest(
                    f"{printable(path)} has too many entries: more than {LIST_MAX}, or with very long names",
                    hint="list a subdirectory, or run find",
                )
    found.close()
    return found if hold(found.weight - held) else None


async def remove_tree(channel: Channel, path: str) -> None:
    """Remove a file or a directory with all that is in it; of /workspace and /tmp themselves, what is in them."""
    await (await _Applet.start(channel, "remove", path, "-r")).finish()


async def tar(
    channel: Channel, path: str, contents: bool = False, partial: bool = False
) -> AsyncGenerator[bytes, None]:
    """A tar archive of `path` by its last name, or of what is in it.

    What cannot be read is listed at the end of the archive (native/tar_write.c); unless `partial` it is also a
    FileConflict, once all else has been written.
    """
    applet = await _Applet.start(channel, "tar", path, *(["--contents"] if contents else []))
    async with contextlib.aclosing(applet.output(partial)) as output:
        async for data in output:
            yield data


async def untar(channel: Channel, path: str, archive: AsyncIterator[bytes]) -> None:
    """Unpack an archive below the directory `path`, which is made if missing."""
    applet = await _Applet.start(channel, "untar", path, stdin=True)
    ending = asyncio.ensure_future(applet.finish())
    try:
        async for data in archive:
            if applet.process.exited:
                break
            await applet.process.write(data)
        await applet.process.close_stdin()
        await asyncio.shield(ending)
    finally:
        if not ending.done():
            ending.cancel()
        with contextlib.suppress(asyncio.CancelledError, SkerryError):
            await ending


async def watch(channel: Channel, path: str, recursive: bool = True) -> AsyncGenerator[FileEvent, None]:
    """Changes as they happen; the first event is `ready`."""
    applet = await _Applet.start(channel, "watch", path, *(["-r"] if recursive else []))
    # Not the channel's own flow, which may be waiting for its turn to read.
    flow = budget().flow(channel.flow.group)
    async with contextlib.aclosing(applet.records()) as records:
        async for record in records:
            try:
                kind, cookie, length = struct.unpack_from("<BIH", record)
                if len(record) != 7 + length:
                    raise ValueError("a name that is not as long as it says")
                name = record[7:].decode("utf-8", "surrogateescape")
                event = FileEvent(kind=_EVENTS[kind], path=name, cookie=cookie)
            except (struct.error, KeyError, ValueError) as error:
                raise GuestFailed("the guest sent a malformed event") from error
            yield event
            if not flow.spend(EVENT_SECONDS):
                await flow.turn()
