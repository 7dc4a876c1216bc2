# Generated from aio/files.py by scripts/generate_sync.py. Change that file, not this one.
"""The files of one environment. Archive code is imported on first use, because that is slow."""

from __future__ import annotations

import os
import posixpath
from typing import TYPE_CHECKING, Any

from skerry.client.sync.stream import blocking, blocking_iterator
from skerry.errors import FileMissing, InvalidRequest, LimitReached
from skerry.models import FileEvent, FileInfo, LeftOut

if TYPE_CHECKING:
    from collections.abc import Iterator
    from os import PathLike
    from typing import Self

    from skerry.client.http1 import Query
    from skerry.client.sync.transport import Response, Transport

    Copied = list[LeftOut]

READ_MAX = 256 << 20
"""Bytes that `read` and `read_bytes` hold in memory."""


class Files:
    """Files as the environment's own user sees them. Relative paths start at the workspace.

    Names that are not UTF-8 are str with surrogate escapes. Every method raises
    FileMissing, FileDenied, FileConflict, PathOutside and InvalidRequest as they apply, and writing ones
    DiskFull.
    """

    def __init__(self, transport: Transport, path: str) -> None:
        self._transport = transport
        self._path = f"{path}/files"

    def read_bytes(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """The content from `offset` on, at most `length` bytes of it.

        Raises LimitReached for more than READ_MAX (256 MiB): use `chunks`, or `download` it.
        """
        parts: list[bytes] = []
        size = 0
        for part in self.chunks(path, offset, length):
            parts.append(part)
            size += len(part)
            if size > READ_MAX:
                raise LimitReached(
                    f"{path} has more than {READ_MAX} bytes", hint="iterate over chunks(), or download() it"
                )
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def chunks(self, path: str, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        """As `read_bytes`, piece by piece, for files of any size."""
        query: Query = {"path": path, "offset": offset or None, "length": length}
        accept = "application/octet-stream"
        response = self._transport.send("GET", f"{self._path}/read", query=query, accept=accept)
        try:
            for data in response:
                yield data
        finally:
            response.close()

    def read(self, path: str, offset: int = 0, length: int | None = None) -> str:
        """As `read_bytes`, for text. Raises InvalidRequest when it is not UTF-8."""
        content = self.read_bytes(path, offset, length)
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise InvalidRequest(
                f"{path} is not UTF-8 text: {error.reason}", hint="use read_bytes()"
            ) from error

    def write(self, path: str, content: str | bytes, offset: int | None = None) -> None:
        """Create or replace the file, with its parent directories; `offset` overwrites a part of it."""
        data = content.encode(errors="surrogateescape") if isinstance(content, str) else bytes(content)
        query: Query = {"path": path, "offset": offset}
        self._transport.call("POST", f"{self._path}/write", query=query, body=data)

    def stat(self, path: str) -> FileInfo:
        """Symlinks are not followed."""
        return FileInfo.from_dict(self._transport.call("GET", f"{self._path}/stat", query={"path": path}))

    def exists(self, path: str) -> bool:
        try:
            self.stat(path)
        except FileMissing:
            return False
        return True

    def list(self, path: str = ".", recursive: bool = False) -> list[FileInfo]:
        query: Query = {"path": path, "recursive": recursive}
        answer = self._transport.call("GET", f"{self._path}/list", query=query)
        return [FileInfo.from_dict(raw) for raw in answer["entries"]]

    def mkdir(self, path: str) -> None:
        """Create the directory and its parents; does nothing if it exists."""
        self._transport.call("POST", f"{self._path}/mkdir", json={"path": path})

    def rename(self, source: str, target: str) -> None:
        self._transport.call("POST", f"{self._path}/rename", json={"source": source, "target": target})

    def remove(self, path: str, recursive: bool = False) -> None:
        """Remove a file or an empty directory; with `recursive` a directory and all below it."""
        self._transport.call("DELETE", self._path, query={"path": path, "recursive": recursive})

    def upload(self, local_path: str | PathLike[str], path: str) -> Copied:
        """Copy a local file or directory so that it is `path` inside; a directory there is merged into.

        Returns what was left out: FIFOs, sockets and devices, and what cannot be read in a directory. Holes of files
        stay holes. Raises OSError when it cannot be read at all.
        """
        from skerry.client import archive

        local = os.fspath(local_path)
        blocking(os.lstat, local)
        if blocking(os.path.isdir, local):
            below, name = path, "."
        else:
            below, name = posixpath.split(path.rstrip("/"))
        if below:
            self.mkdir(below)
        left_out = archive.Notes()
        body = blocking_iterator(archive.pack(local, name, left_out))
        self._transport.call("PUT", f"{self._path}/archive", query={"path": below or "."}, body=body)
        return left_out.finished()

    def download(self, path: str, local_path: str | PathLike[str], max_bytes: int | None = None) -> Copied:
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
        response = self._transport.send("GET", f"{self._path}/archive", query=query)
        with blocking(TemporaryFile) as spool:
            for data in response:
                most -= len(data)
                if most < 0:
                    response.close()
                    raise archive.too_large(path)
                blocking(spool.write, data)
            spool.seek(0)
            return blocking(archive.unpack, spool, os.fspath(local_path), contents)

    def watch(self, path: str = ".", recursive: bool = True) -> Watch:
        """Watch for changes below `path`."""
        query: Query = {"path": path, "recursive": recursive}
        watch = Watch(self._transport.send("GET", f"{self._path}/watch", query=query))
        watch.ready()
        return watch


class Watch:
    """Changes as they happen: iterate over it. `close()` it, or use it in a `with` block."""

    def __init__(self, response: Response) -> None:
        self._response = response
        self._lines: Iterator[dict[str, Any]] = response.lines()

    def ready(self) -> None:
        """Wait until the watch is active."""
        for line in self._lines:
            if line["kind"] == "ready":
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> FileEvent:
        return FileEvent.from_dict(self._lines.__next__())

    def close(self) -> None:
        self._response.close()
