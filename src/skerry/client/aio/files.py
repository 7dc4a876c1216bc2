"""The files of one environment. What makes archives is loaded when it is needed: it is slow to import."""

from __future__ import annotations

import os
import posixpath
from typing import TYPE_CHECKING, Any

from skerry.client.aio.stream import blocking, blocking_iterator
from skerry.errors import FileMissing, InvalidRequest
from skerry.models import FileEvent, FileInfo

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from os import PathLike
    from typing import Self

    from skerry.client.aio.transport import AsyncResponse, AsyncTransport
    from skerry.client.http1 import Query

    Names = list[str]


class AsyncFiles:
    """Files inside, as the environment's own user sees them. Relative paths begin at the workspace.

    Names that are not UTF-8 are str with surrogate escapes, as everywhere in Python. Every method raises
    FileMissing, FileDenied, FileConflict, PathOutside and InvalidRequest as they apply, and writing ones
    DiskFull.
    """

    def __init__(self, transport: AsyncTransport, path: str) -> None:
        self._transport = transport
        self._path = f"{path}/files"

    async def read_bytes(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """The content from `offset` on, at most `length` bytes of it."""
        query: Query = {"path": path, "offset": offset or None, "length": length}
        accept = "application/octet-stream"
        response = await self._transport.send("GET", f"{self._path}/read", query=query, accept=accept)
        return await response.read()

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
        """Make or replace the file, with the directories above it; `offset` overwrites a part of it."""
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
        """Make the directory and those above it; an existing one is fine."""
        await self._transport.call("POST", f"{self._path}/mkdir", json={"path": path})

    async def rename(self, source: str, target: str) -> None:
        await self._transport.call("POST", f"{self._path}/rename", json={"source": source, "target": target})

    async def remove(self, path: str, recursive: bool = False) -> None:
        """Remove a file or an empty directory; with `recursive` a directory and all below it."""
        await self._transport.call("DELETE", self._path, query={"path": path, "recursive": recursive})

    async def upload(self, local_path: str | PathLike[str], path: str) -> None:
        """Copy a local file or directory so that it is `path` inside; a directory there is merged into.

        Raises OSError when it cannot be read here.
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
        body = blocking_iterator(archive.pack(local, name))
        await self._transport.call("PUT", f"{self._path}/archive", query={"path": below or "."}, body=body)

    async def download(self, path: str, local_path: str | PathLike[str]) -> Names:
        """Copy a file or directory from inside so that it is `local_path` here; a directory is merged into.

        What is inside is not trusted: nothing is written through links or outside `local_path`. Returns the
        names that were left out: devices, and links that lead out. Raises OSError.
        """
        from tempfile import TemporaryFile

        from skerry.client import archive

        contents = archive.is_contents(path)
        query: Query = {"path": path.rstrip("/") or "/", "contents": contents or None}
        response = await self._transport.send("GET", f"{self._path}/archive", query=query)
        with await blocking(TemporaryFile) as spool:
            async for data in response:
                await blocking(spool.write, data)
            spool.seek(0)
            return await blocking(archive.unpack, spool, os.fspath(local_path), contents)

    async def watch(self, path: str = ".", recursive: bool = True) -> AsyncWatch:
        """Watch for changes below `path`, from now on."""
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
        """Wait until no later change can be missed."""
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
