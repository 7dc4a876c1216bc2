"""File operations that take long or yield much: each runs as an execution of one of the guest's applets.

So they run as the workload's user inside the environment's own view, under its limits, with flow control, and a
caller that goes away ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import struct
from collections.abc import AsyncGenerator, AsyncIterator

from skerry.errors import FileConflict, GuestFailed, InvalidRequest, SkerryError
from skerry.guest.channel import Channel, GuestProcess, Start, file_error, path_bytes, printable
from skerry.guest.records import parse_stat
from skerry.models import FileEvent, FileInfo

RECORD_MAX = 70_000
LIST_MAX = 200_000
LIST_BYTES_MAX = 32 << 20
"""Entries in one answer, and what they take; more than this is a job for a command inside."""
WORDS_MAX = 8192

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

    async def output(self) -> AsyncGenerator[bytes, None]:
        """What it writes. Raises the error that it names; entries that it left out are a FileConflict at the end."""
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
        if end.code or end.signal:
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
        if code == 1:
            complaints = "; ".join(text for _, text in found[:3])
            return FileConflict(f"not all of {printable(self._path)} could be processed: {complaints}")
        if not found:
            return GuestFailed(f"the file operation ended with {code}: {words.strip()[:200]}")
        number, text = int(found[-1][0]), found[-1][1]
        error = InvalidRequest(text) if code == 2 else file_error(number, text)
        error.message = error.message.replace("{path}", printable(self._path))
        error.args = (error.message,)
        return error


async def list_directory(channel: Channel, path: str, recursive: bool = False) -> list[FileInfo]:
    """The entries of a directory, by name. Raises FileMissing, FileConflict, PathOutside, InvalidRequest."""
    applet = await _Applet.start(channel, "list", path, *(["-r"] if recursive else []))
    found: list[FileInfo] = []
    size = 0
    async with contextlib.aclosing(applet.records()) as records:
        async for record in records:
            found.append(parse_stat(record))
            size += len(record)
            if len(found) > LIST_MAX or size > LIST_BYTES_MAX:
                raise InvalidRequest(
                    f"{printable(path)} has too many entries: more than {LIST_MAX}, or with very long names",
                    hint="list a subdirectory, or run find",
                )
    return sorted(found, key=lambda entry: entry.path)


async def remove_tree(channel: Channel, path: str) -> None:
    """Remove a file or a directory with all that is in it; of /workspace and /tmp themselves, what is in them."""
    await (await _Applet.start(channel, "remove", path, "-r")).finish()


async def tar(channel: Channel, path: str, contents: bool = False) -> AsyncGenerator[bytes, None]:
    """A tar archive of `path` by its last name, or of what is in it."""
    applet = await _Applet.start(channel, "tar", path, *(["--contents"] if contents else []))
    async with contextlib.aclosing(applet.output()) as output:
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
