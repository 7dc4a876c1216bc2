"""Routes of images: list, inspect, remove; build and import, which take long and tell how far they are."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from fastapi import APIRouter, Request, Response

from skerry.daemon.http.answers import Stream, line, log, reply
from skerry.daemon.http.requests import Body, Text, query, read_json, read_raw, required
from skerry.errors import Conflict, DiskFull, PlatformError, SkerryError
from skerry.images import definition
from skerry.images.build import build
from skerry.images.importer import import_archive
from skerry.images.progress import Progress, Report
from skerry.images.store import Image, ImageStore, check_name
from skerry.manager.environments import EnvironmentManager

ARCHIVE_LIMIT = 64 << 30


class Build(Body):
    name: Text


def routes(store: ImageStore, manager: EnvironmentManager) -> APIRouter:
    router = APIRouter(prefix="/images")

    @router.get("")
    async def list_images() -> Response:
        found = await asyncio.to_thread(store.list)
        names = sorted(definition.available())
        return reply({"images": [image.info().to_dict() for image in found], "definitions": names})

    @router.post("/build")
    async def build_image(request: Request) -> Response:
        wanted = definition.find((await read_json(request, Build)).name)
        return Stream(_work(lambda report: build(wanted, store, report)), "application/x-ndjson")

    @router.post("/import")
    async def import_image(request: Request) -> Response:
        name = check_name(required(query(request, "name"), "name"))
        uploaded = contextlib.ExitStack()
        try:
            folder = await asyncio.to_thread(uploaded.enter_context, store.staging())
            await _receive(request, folder / "archive")
        except BaseException:
            await asyncio.to_thread(uploaded.close)
            raise

        def work(report: Report) -> Image:
            with uploaded:
                return import_archive(folder / "archive", name, store, report)

        return Stream(_work(work), "application/x-ndjson")

    @router.get("/{ref}")
    async def inspect(ref: str) -> Response:
        image = await asyncio.to_thread(store.get, ref)
        users = manager.in_use().get(image.digest, [])
        return reply({**image.info().to_dict(), "env": image.env, "environments": users})

    @router.delete("/{ref}")
    async def remove(ref: str) -> Response:
        await asyncio.to_thread(store.remove, ref, lambda image: image.digest in manager.in_use())
        return reply({})

    return router


async def _receive(request: Request, path: Path) -> None:
    """Write the body to a new file. Raises LimitReached, DiskFull, PlatformError."""
    try:
        file = await asyncio.to_thread(path.open, "xb")
        with file:
            async for chunk in read_raw(request, ARCHIVE_LIMIT):
                await asyncio.to_thread(file.write, chunk)
    except OSError as error:
        kind = DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else PlatformError
        raise kind(f"cannot store the archive: {error.strerror}") from error


async def _work(job: Callable[[Report], Image]) -> AsyncGenerator[bytes, None]:
    """Lines of progress of a job in a thread, and at last the image or the error.

    When nobody reads any more, the job ends at its next step. Of steps that come faster than they are read only
    the last is told.
    """
    loop = asyncio.get_running_loop()
    news = asyncio.Event()
    latest: list[Progress] = []
    unwanted = threading.Event()

    def tell(progress: Progress) -> None:
        latest[:] = [progress]
        news.set()

    def report(progress: Progress) -> None:
        if unwanted.is_set():
            raise Conflict("nobody waits for this any more")
        loop.call_soon_threadsafe(tell, progress)

    working = loop.run_in_executor(None, job, report)
    working.add_done_callback(lambda _: news.set())
    try:
        while latest or not working.done():
            await news.wait()
            news.clear()
            for step in latest:
                yield line({"step": step.step, "fraction": step.fraction})
            latest.clear()
        yield line({"image": (await working).info().to_dict()})
    except SkerryError as error:
        yield line({"error": error.to_dict()})
    except Exception as error:
        log.exception("work on an image failed")
        yield line({"error": PlatformError(f"internal error: {type(error).__name__}").to_dict()})
    finally:
        unwanted.set()
        with contextlib.suppress(Exception):
            await asyncio.shield(working)
