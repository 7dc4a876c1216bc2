"""The files of one environment. Archive code is imported on first use, because that is slow."""

from __future__ import annotations

import os
import posixpath
from typing import TYPE_CHECKING, Any

from skerry.client.aio.stream import blocking, blocking_iterator
from skerry.errors import FileMissing, InvalidRequest, LimitReached
from skerry.models import FileEvent, FileInfo, LeftOut

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from os import PathLike
    from typing import Self

    from skerry.client.aio.transport import AsyncResponse, AsyncTransport
    from skerry.client.http1 import Query

    Copied = list[LeftOut]

READ_MAX = 256 << 20
"""Bytes that `read` and `read_bytes` hold in memory."""


class AsyncFiles:
    """Files as the environment's own user sees them. Relative paths start at the workspace.

    Names that are not UTF-8 are str with surrogate escapes. Every method raises
    FileMissing, FileDenied, FileConflict, PathOutside and InvalidRequest as they apply, and writing ones
    DiskFull.
    """

    def __init__(self, transport: AsyncTransport, path: str) -> None:
        self._transport = transport
        self._path = f"{path}/files"

    async def read_bytes(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """The content from `offset` on, at most `length` bytes of it.

        Raises LimitReached for more than READ_MAX (256 MiB): use `chunks`, or `download` it.
        """
        parts: list[bytes] = []
        size = 0
        async for part in self.chunks(path, offset, length):
            parts.append(part)
            size += len(part)
            if size > READ_MAX:
                raise LimitReached(
                    f"{path} has more than {READ_MAX} bytes", hint="iterate over chunks(), or download() it"
                )
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def chunks(self, path: str, offset: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        """As `read_bytes`, piece by piece, for files of any size."""
        query: Query = {"path": path, "offset": offset or None, "length": length}
        accept = "application/octet-stream"
        response = await self._transport.send("GET", f"{self._path}/read", query=query, accept=accept)
        try:
            async for data in response:
                yield data
        finally:
            response.close()

    async def read(self, path: str, offset: int = 0, length: int | None = None) -> str:
        """As `read_bytes`, for text. Raises InvalidRequest when it is not UTF-8."""
        content = await self.read_bytes(path, offset, length)
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise InvalidRequest(
                f"{path} is not UTF-8 text: {error.reason}", hint="use read_bytes()"
            ) from error

    async def write(self, path: str, content: str | bytes, offset: int | None = None) -> None:
        """Create or replace the file, with its parent directories; `offset` overwrites a part of it."""
        data = content.encode(errors="surrogateescape") if isinstance(content, str) else bytes(content)
        query: Query = {"path": path, "offset": offset}
        await self._transport.call("POST", f"{self._path}/write", query=query, body=data)

    async def stat(self, path: str) -> FileInfo:
        """Symlinks are not followed."""
        return FileInfo.from_dict(
            await self._transport.call("GET", f"{self._path}/stat", query={"path": path})
        )

    async def exists(self, path: str) -> bool:
        try:
            await self.stat(path)
        except FileMissing:
            return False
        return True

    async def list(self, path: str = ".", recursive: bool = False) -> list[FileInfo]:
        query: Query = {"path": path, "recursive": recursive}
        answer = await self._transport.call("GET", f"{self._path}/list", query=query)
        return [FileInfo.from_dict(raw) for raw in answer["entries"]]

    async def mkdir(self, path: str) -> None:
        """Create the directory and its parents; does nothing if it exists."""
        await self._transport.call("POST", f"{self._path}/mkdir", json={"path": path})

    async def rename(self, source: str, target: str) -> None:
        await self._transport.call("POST", f"{self._path}/rename", json={"source": source, "target": target})

    async def remove(self, path: str, recursive: bool = False) -> None:
        """Remove a file or an empty directory; with `recursive` a directory and all below it."""
        await self._transport.call("DELETE", self._path, query={"path": path, "recursive": recursive})

    async def upload(self, local_path: str | PathLike[str], path: str) -> Copied:
        """Copy a local file or directory so that it is `path` inside; a directory there is merged into.

        Returns what was left out: FIFOs, sockets and devices, and what cannot be read in a directory. Holes of files
        stay holes. Raises OSError when it cannot be read at all.
        """
        from skerry.client import archive

        local = os.fspath(local_path)
        await blocking(os.lstat, local)
        if await blocking(os.path.isdir, local):
            below, name = path, "."
        else:
            below, name = posixpath.split(path.rstrip("/"))
        if below:
            await self.mkdir(below)
        left_out = archive.Notes()
        body = blocking_iterator(archive.pack(local, name, left_out))
        await self._transport.call("PUT", f"{self._path}/archive", query={"path": below or "."}, body=body)
        return left_out.finished()

    async def download(
        self, path: str, local_path: str | PathLike[str], max_bytes: int | None = None
    ) -> Copied:
        """Copy a file or directory from inside so that it is `local_path` here; a directory is merged into.

        What is inside is not trusted: nothing is written through links or outside `local_path`. Returns what was left
        out, each with the reason: what the environment's user cannot read, FIFOs, sockets, devices, and links that
        lead out. Holes of files stay holes. Raises LimitReached for more than `max_bytes` without holes (64 GiB), or
        two million names, and OSError.
        """
        from tempfile import TemporaryFile

        from skerry.client import archive

        contents = archive.is_contents(path)
        most = archive.DOWNLOAD_MAX if max_bytes is None else max_bytes
        query: Query = {"path": path.rstrip("/") or "/", "contents": contents or None}
        response = await self._transport.send("GET", f"{self._path}/archive", query=query)
        with await blocking(TemporaryFile) as spool:
            async for data in response:
                most -= len(data)
                if most < 0:
                    response.close()
                    raise archive.too_large(path)
                await blocking(spool.write, data)
            spool.seek(0)
            return await blocking(archive.unpack, spool, os.fspath(local_path), contents)

    async def watch(self, path: str = ".", recursive: bool = True) -> AsyncWatch:
        """Watch for changes below `path`."""
        query: Query = {"path": path, "recursive": recursive}
        watch = AsyncWatch(await self._transport.send("GET", f"{self._path}/watch", query=query))
        await watch.ready()
        return watch


class AsyncWatch:
    """Changes as they happen: iterate over it. `close()` it, or use it in a `with` block."""

    def __init__(self, response: AsyncResponse) -> None:
        self._response = response
        self._lines: AsyncIterator[dict[str, Any]] = response.lines()

    async def ready(self) -> None:
        """Wait until the watch is active."""
        async for line in self._lines:
            if line["kind"] == "ready":
                return

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> FileEvent:
        return FileEvent.from_dict(await self._lines.__anext__())

    def close(self) -> None:
        self._response.close()
