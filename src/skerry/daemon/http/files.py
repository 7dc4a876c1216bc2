"""Routes of files. Every path is resolved by the guest, inside the environment, as its user."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Literal

from fastapi import APIRouter, Request, Response

from skerry.daemon.http.answers import Stream, begun, line, reply
from skerry.daemon.http.requests import (
    UPLOAD_LIMIT,
    Body,
    Text,
    flag,
    number,
    query,
    read_json,
    read_raw,
    required,
)
from skerry.errors import InvalidRequest
from skerry.guest import files
from skerry.guest.channel import READ_MAX, WRITE_MAX, Channel
from skerry.manager.environments import EnvironmentManager
from skerry.models import FileInfo

ENTRIES_AT_ONCE = 500


class Write(Body):
    path: Text
    content: Text
    encoding: Literal["utf-8", "base64"] = "utf-8"

    def data(self) -> bytes:
        try:
            if self.encoding == "base64":
                return base64.b64decode(self.content, validate=True)
            return self.content.encode("utf-8", "surrogateescape")
        except (binascii.Error, ValueError) as error:
            raise InvalidRequest(f"content is not {self.encoding}") from error


class Path(Body):
    path: Text


class Rename(Body):
    source: Text
    target: Text


def routes(manager: EnvironmentManager) -> APIRouter:
    router = APIRouter(prefix="/environments/{ref}/files")

    @router.get("/read")
    async def read(ref: str, request: Request) -> Response:
        parameters = query(request, "path", "offset", "length")
        path, offset = required(parameters, "path"), number(parameters, "offset") or 0
        chunks = await begun(_read(manager, ref, path, offset, number(parameters, "length")))
        return Stream(chunks, "application/octet-stream")

    @router.post("/write")
    async def write(ref: str, request: Request) -> Response:
        if request.headers.get("content-type", "").partition(";")[0].strip() == "application/octet-stream":
            parameters = query(request, "path", "offset")
            path, offset = required(parameters, "path"), number(parameters, "offset")
            chunks = read_raw(request, UPLOAD_LIMIT)
        else:
            query(request)
            body = await read_json(request, Write)
            path, offset, chunks = body.path, None, _once(body.data())
        with manager.using(ref) as channel:
            size = await _write(channel, path, offset, chunks)
        return reply({"error": False, "message": "File saved successfully.", "size": size})

    @router.get("/stat")
    async def stat(ref: str, request: Request) -> Response:
        path = required(query(request, "path"), "path")
        with manager.using(ref) as channel:
            return reply((await channel.stat(path)).to_dict())

    @router.get("/list")
    async def list_files(ref: str, request: Request) -> Response:
        parameters = query(request, "path", "recursive")
        with manager.using(ref) as channel:
            found = await files.list_directory(
                channel, parameters.get("path", "."), flag(parameters, "recursive")
            )
        return Stream(_entries(found), "application/json")

    @router.post("/mkdir")
    async def mkdir(ref: str, request: Request) -> Response:
        body = await read_json(request, Path)
        with manager.using(ref) as channel:
            await channel.mkdir(body.path)
        return reply({})

    @router.post("/rename")
    async def rename(ref: str, request: Request) -> Response:
        body = await read_json(request, Rename)
        with manager.using(ref) as channel:
            await channel.rename(body.source, body.target)
        return reply({})

    @router.delete("")
    async def remove(ref: str, request: Request) -> Response:
        parameters = query(request, "path", "recursive")
        path = required(parameters, "path")
        with manager.using(ref) as channel:
            if flag(parameters, "recursive"):
                await files.remove_tree(channel, path)
            else:
                await channel.remove(path)
        return reply({})

    @router.get("/archive")
    async def download(ref: str, request: Request) -> Response:
        parameters = query(request, "path", "contents")
        path, contents = required(parameters, "path"), flag(parameters, "contents")
        return Stream(await begun(_archive(manager, ref, path, contents)), "application/x-tar")

    @router.put("/archive")
    async def upload(ref: str, request: Request) -> Response:
        path = required(query(request, "path"), "path")
        with manager.using(ref) as channel:
            await files.untar(channel, path, read_raw(request, UPLOAD_LIMIT))
        return reply({"message": "Archive unpacked."})

    @router.get("/watch")
    async def watch(ref: str, request: Request) -> Response:
        parameters = query(request, "path", "recursive")
        path, recursive = required(parameters, "path"), flag(parameters, "recursive", True)
        return Stream(await begun(_watch(manager, ref, path, recursive)), "application/x-ndjson")

    return router


async def _read(
    manager: EnvironmentManager, ref: str, path: str, offset: int, length: int | None
) -> AsyncGenerator[bytes, None]:
    with manager.using(ref) as channel:
        left = length if length is not None else 1 << 63
        while True:
            wanted = min(left, READ_MAX)
            data = await channel.read(path, offset, wanted)
            if data:
                yield data
            offset += wanted
            left -= wanted
            if len(data) < wanted or left <= 0:
                return


async def _write(channel: Channel, path: str, offset: int | None, chunks: AsyncIterator[bytes]) -> int:
    """Returns how much was written. Without an offset the file is replaced, even by nothing."""
    size = 0
    async for chunk in chunks:
        for begin in range(0, len(chunk), WRITE_MAX):
            piece = chunk[begin : begin + WRITE_MAX]
            await channel.write(path, piece, (offset or 0) + size if size else offset)
            size += len(piece)
    if not size:
        await channel.write(path, b"", offset)
    return size


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def _entries(found: list[FileInfo]) -> AsyncGenerator[bytes, None]:
    """A listing as JSON, in pieces: the largest would keep everybody else waiting."""
    yield b'{"entries":['
    for at in range(0, len(found), ENTRIES_AT_ONCE):
        rows = [line(entry.to_dict()) for entry in found[at : at + ENTRIES_AT_ONCE]]
        yield (b"," if at else b"") + b",".join(rows)
        await asyncio.sleep(0)
    yield b"]}"


async def _archive(
    manager: EnvironmentManager, ref: str, path: str, contents: bool
) -> AsyncGenerator[bytes, None]:
    with manager.using(ref) as channel:
        async with contextlib.aclosing(files.tar(channel, path, contents)) as chunks:
            async for chunk in chunks:
                yield chunk


async def _watch(
    manager: EnvironmentManager, ref: str, path: str, recursive: bool
) -> AsyncGenerator[bytes, None]:
    with manager.using(ref) as channel:
        async with contextlib.aclosing(files.watch(channel, path, recursive)) as events:
            async for event in events:
                yield line(event.to_dict())
