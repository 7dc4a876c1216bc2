"""Operations of files. Every path is resolved by the guest, inside the environment, as its user."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from starlette.responses import Response

from skerry.daemon.http import schemas
from skerry.daemon.http.answers import (
    AT_ONCE,
    Octets,
    Stream,
    begun,
    exhaust,
    followed,
    line,
    reply,
    unread,
)
from skerry.daemon.http.operations import (
    IN_ENVIRONMENT,
    JSON,
    NDJSON,
    OCTETS,
    TAR,
    Call,
    Operation,
    Parameter,
)
from skerry.daemon.http.requests import JSON_LIMIT, UPLOAD_LIMIT, Body, Content, Encoding, Text, decode
from skerry.errors import (
    DiskFull,
    FileConflict,
    FileDenied,
    FileMissing,
    InvalidRequest,
    LimitReached,
    PathOutside,
)
from skerry.guest import files
from skerry.guest.channel import READ_MAX, WRITE_MAX
from skerry.guest.files import Listing
from skerry.manager.audit.acts import Digest
from skerry.models import FileEvent, FileInfo, encode_bytes, encoding_of

ENTRIES_AT_ONCE = 50


class Write(Body):
    contents = ("content",)
    path: Text
    """Relative to the workspace. The directories above it are made."""
    content: Content
    encoding: Encoding = "utf-8"
    """`base64` for content that is no text."""


class Path(Body):
    path: Text


class Rename(Body):
    source: Text
    target: Text


async def read(call: Call, environment_id: str, path: str, offset: int, length: int | None) -> Response:
    if call.accepts(OCTETS):
        content = _read(call, environment_id, path, offset, length)
        first = await anext(content, b"")
        if len(first) == READ_MAX:
            return Stream(followed(first, content), OCTETS)
        await exhaust(content)
        return Response(first, media_type=OCTETS)
    found = bytearray()
    held = 0

    def expect(size: int) -> None:
        """Of readers of large files who come together, the last are refused before they take memory from the first."""
        nonlocal held
        if size > JSON_LIMIT:
            raise LimitReached(
                f"{path} has more than {JSON_LIMIT} bytes", hint=f"read a part, or accept {OCTETS}"
            )
        if not call.hold(max(0, size - held)):
            raise unread()
        held = max(held, size)

    async with contextlib.aclosing(_read(call, environment_id, path, offset, length, expect)) as content:
        async for chunk in content:
            expect(len(found) + len(chunk))
            found += chunk
    told = {"error": False, "size": len(found)}
    if len(found) <= AT_ONCE:
        text, encoding = encode_bytes(bytes(found))
        return reply({**told, "content": text, "encoding": encoding})
    encoding = encoding_of(found)
    await call.pause()
    return reply({**told, "content": Octets(found, encoding), "encoding": encoding})


async def write(
    call: Call, environment_id: str, path: str, offset: int | None, body: Write | None
) -> Response:
    if body is None:
        if not path:
            raise InvalidRequest("parameter 'path' is missing")
        chunks = call.chunks(UPLOAD_LIMIT)
    elif path or offset is not None:
        raise InvalidRequest("a JSON body names the path itself, and replaces the whole file")
    else:
        path, chunks = body.path, _pieces(await decode(body.content, body.encoding, "content"))
    async with call.using(environment_id, "file.write", path=path, offset=offset) as use:
        seen = Digest()
        await files.write(use.channel, path, _digested(seen, chunks), offset)
        use.told["content"] = seen.told()
    return reply({"error": False, "message": "File saved successfully.", "size": seen.size})


async def stat(call: Call, environment_id: str, path: str) -> Response:
    async with call.using(environment_id, "file.stat", path=path) as use:
        return reply((await use.channel.stat(path)).to_dict())


async def list_files(call: Call, environment_id: str, path: str, recursive: bool) -> Response:
    async with call.using(environment_id, "file.list", path=path, recursive=recursive) as use:
        found = await files.list_directory(use.channel, path, recursive, call.hold, call.pause)
        if found is None:
            raise unread()
    return Stream(_entries(found), JSON, weight=found.weight)


async def mkdir(call: Call, environment_id: str, body: Path) -> Response:
    async with call.using(environment_id, "file.mkdir", path=body.path) as use:
        await use.channel.mkdir(body.path)
    return reply({})


async def rename(call: Call, environment_id: str, body: Rename) -> Response:
    async with call.using(environment_id, "file.rename", path=body.source, target=body.target) as use:
        await use.channel.rename(body.source, body.target)
    return reply({})


async def remove(call: Call, environment_id: str, path: str, recursive: bool) -> Response:
    async with call.using(environment_id, "file.remove", path=path, recursive=recursive) as use:
        if recursive:
            await files.remove_tree(use.channel, path)
        else:
            await use.channel.remove(path)
    return reply({})


async def download(call: Call, environment_id: str, path: str, contents: bool) -> Response:
    return Stream(await begun(_archive(call, environment_id, path, contents)), TAR)


async def upload(call: Call, environment_id: str, path: str) -> Response:
    async with call.using(environment_id, "file.upload", path=path) as use:
        seen = Digest()
        await files.untar(use.channel, path, _digested(seen, call.chunks(UPLOAD_LIMIT)))
        use.told["content"] = seen.told()
    return reply({"message": "Archive unpacked."})


async def watch(call: Call, environment_id: str, path: str, recursive: bool) -> Response:
    return Stream(await begun(_watch(call, environment_id, path, recursive)), NDJSON)


async def _read(
    call: Call,
    environment_id: str,
    path: str,
    offset: int,
    length: int | None,
    expect: Callable[[int], None] | None = None,
) -> AsyncGenerator[bytes, None]:
    """`expect` is told the size of what has more than AT_ONCE, before more of it is read."""
    told = {"path": path, "offset": offset or None, "length": length}
    async with call.using(environment_id, "file.read", **told) as use:
        left = length if length is not None else 1 << 63
        seen = Digest()
        with contextlib.closing(files.Reader(use.channel, path)) as reader:
            while True:
                wanted = min(left, READ_MAX if expect is None else AT_ONCE)
                data = await reader.read(offset, wanted, more=left > wanted)
                seen.update(data)
                if data:
                    yield data
                offset += wanted
                left -= wanted
                if len(data) < wanted or left <= 0:
                    use.told["content"] = seen.told()
                    return
                if expect is not None:
                    expect(wanted + min(max(0, await reader.size() - offset), left))
                    expect = None


async def _digested(seen: Digest, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for chunk in chunks:
        seen.update(chunk)
        yield chunk


async def _pieces(data: bytes | bytearray) -> AsyncIterator[bytes]:
    for at in range(0, len(data), WRITE_MAX):
        yield bytes(data[at : at + WRITE_MAX])


async def _entries(found: Listing) -> AsyncGenerator[bytes, None]:
    """A listing as JSON, in pieces: the largest would keep everybody else waiting."""
    begin = b'{"entries":['
    entries = iter(found)
    while page := [line(entry.to_dict()) for entry in itertools.islice(entries, ENTRIES_AT_ONCE)]:
        yield begin + b",".join(page)
        begin = b","
    yield b"]}" if begin == b"," else begin + b"]}"


async def _archive(call: Call, environment_id: str, path: str, contents: bool) -> AsyncGenerator[bytes, None]:
    async with call.using(environment_id, "file.download", path=path) as use:
        seen = Digest()
        async with contextlib.aclosing(files.tar(use.channel, path, contents, partial=True)) as chunks:
            async for chunk in chunks:
                seen.update(chunk)
                yield chunk
        use.told["content"] = seen.told()


async def _watch(call: Call, environment_id: str, path: str, recursive: bool) -> AsyncGenerator[bytes, None]:
    async with call.using(environment_id, "file.watch", path=path, recursive=recursive) as use:
        async with contextlib.aclosing(files.watch(use.channel, path, recursive)) as events:
            async for event in events:
                yield line(event.to_dict())


PATH = Parameter("path", "string", "Relative to the workspace.", required=True, example="src/main.py")
RECURSIVE = Parameter("recursive", "boolean", "With everything below it.", default=False)
ERRORS = (*IN_ENVIRONMENT, PathOutside, FileMissing, FileDenied, FileConflict)
WRITE_ERRORS = (*ERRORS, DiskFull)
EXAMPLE = {
    "path": "src/main.py",
    "type": "file",
    "size": 14,
    "mode": 420,
    "modified_at": 1767225601.5,
    "uid": 1000,
    "gid": 1000,
    "target": "",
}

OPERATIONS = (
    Operation(
        name="write_file",
        method="POST",
        path="/environments/{environment_id}/files/write",
        tag="files",
        verb="write",
        summary="Write a file",
        text="As JSON, or as the bytes themselves with `path` (and `offset`) in the query. Without an `offset` the "
        "file has its old content or the new one, also when the upload breaks off; there must be room for both. "
        "Up to 120 KiB are written in place. Larger content becomes a new file with the old mode, unless the old "
        "one has further names (hard links) or another owner: that is written in place, and can be cut off.",
        handler=write,
        query=(
            Parameter("path", "string", "For a body of bytes: relative to the workspace.", default=""),
            Parameter("offset", "integer", "For a body of bytes: overwrite from here on; the rest stays."),
        ),
        body=Write,
        uploads=(OCTETS,),
        body_example={"path": "src/main.py", "content": "print('hello')\n"},
        answer=schemas.Saved,
        answer_example={"error": False, "message": "File saved successfully.", "size": 15},
        errors=WRITE_ERRORS,
    ),
    Operation(
        name="read_file",
        method="GET",
        path="/environments/{environment_id}/files/read",
        tag="files",
        verb="read",
        summary="Read a file",
        text=f"As JSON, up to {JSON_LIMIT} bytes; or as the bytes themselves, however many, for "
        f"`Accept: {OCTETS}`.",
        handler=read,
        query=(
            PATH,
            Parameter("offset", "integer", "Where to begin.", default=0),
            Parameter("length", "integer", "How many bytes at most."),
        ),
        headers=(Parameter("Accept", "string", f"`{OCTETS}` for the bytes themselves."),),
        answer=schemas.Content,
        media=(JSON, OCTETS),
        answer_example={"error": False, "content": "print('hello')\n", "encoding": "utf-8", "size": 15},
        errors=(*ERRORS, LimitReached),
    ),
    Operation(
        name="stat_file",
        method="GET",
        path="/environments/{environment_id}/files/stat",
        tag="files",
        verb="read",
        summary="Stat a path",
        text="Symlinks are not followed.",
        handler=stat,
        query=(PATH,),
        answer=FileInfo,
        answer_example=EXAMPLE,
        errors=ERRORS,
    ),
    Operation(
        name="list_files",
        method="GET",
        path="/environments/{environment_id}/files/list",
        tag="files",
        verb="read",
        summary="List a directory",
        handler=list_files,
        query=(
            Parameter("path", "string", "Relative to the workspace.", default=".", example="src"),
            RECURSIVE,
        ),
        answer=schemas.Entries,
        answer_example={"entries": [EXAMPLE]},
        errors=(*ERRORS, LimitReached),
    ),
    Operation(
        name="make_directory",
        method="POST",
        path="/environments/{environment_id}/files/mkdir",
        tag="files",
        verb="write",
        summary="Create a directory and its parents",
        text="An existing one is fine.",
        handler=mkdir,
        body=Path,
        body_example={"path": "src/data"},
        answer=schemas.Nothing,
        answer_example={},
        errors=WRITE_ERRORS,
    ),
    Operation(
        name="rename_file",
        method="POST",
        path="/environments/{environment_id}/files/rename",
        tag="files",
        verb="write",
        summary="Rename or move a file or directory",
        handler=rename,
        body=Rename,
        body_example={"source": "main.py", "target": "src/main.py"},
        answer=schemas.Nothing,
        answer_example={},
        errors=WRITE_ERRORS,
    ),
    Operation(
        name="remove_file",
        method="DELETE",
        path="/environments/{environment_id}/files",
        tag="files",
        verb="write",
        summary="Remove a file or a directory",
        handler=remove,
        query=(PATH, RECURSIVE),
        answer=schemas.Nothing,
        answer_example={},
        errors=ERRORS,
    ),
    Operation(
        name="download_archive",
        method="GET",
        path="/environments/{environment_id}/files/archive",
        tag="files",
        verb="read",
        summary="Download a file or a directory as a tar",
        text="Unreadable files, sockets, pipes and devices are left out and listed at the end of the archive: the"
        " directory comes once more, with a record `comment=SKERRY.skipped ERRNO PATH` for each in its extended header."
        " Files with holes are in GNU's sparse format 1.0.",
        handler=download,
        query=(
            PATH,
            Parameter(
                "contents", "boolean", "What is in the directory, without its own name.", default=False
            ),
        ),
        media=(TAR,),
        errors=ERRORS,
    ),
    Operation(
        name="upload_archive",
        method="PUT",
        path="/environments/{environment_id}/files/archive",
        tag="files",
        verb="write",
        summary="Unpack a tar into a directory",
        handler=upload,
        query=(PATH,),
        uploads=(TAR, OCTETS),
        body_example="@src.tar",
        answer=schemas.Unpacked,
        answer_example={"message": "Archive unpacked."},
        errors=WRITE_ERRORS,
    ),
    Operation(
        name="watch_files",
        method="GET",
        path="/environments/{environment_id}/files/watch",
        tag="files",
        verb="read",
        summary="Watch a directory for changes",
        text="One JSON object a line; the first is of the kind `ready`: from there on nothing is missed.",
        handler=watch,
        query=(
            PATH,
            Parameter("recursive", "boolean", "Also in the directories below it.", default=True),
        ),
        answer=FileEvent,
        media=(NDJSON,),
        answer_example={"kind": "modified", "path": "src/main.py", "cookie": 0},
        errors=ERRORS,
    ),
)
