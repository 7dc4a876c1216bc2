"""Operations of images: list, inspect, remove; build and import, which take long and tell how far they are."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from starlette.responses import Response

from skerry.daemon.http import schemas
from skerry.daemon.http.answers import Stream, line, log, reply
from skerry.daemon.http.operations import NDJSON, OCTETS, TAR, Call, Operation, Parameter
from skerry.daemon.http.requests import Body, Text
from skerry.errors import (
    Conflict,
    DiskFull,
    ImageNotFound,
    IsolationUnavailable,
    PlatformError,
    RegistryUnavailable,
    SkerryError,
)
from skerry.host.space import LOOK_EVERY, check_space
from skerry.images import definition
from skerry.images.build import build
from skerry.images.importer import import_archive
from skerry.images.progress import Progress, Report
from skerry.images.store import Image, check_name
from skerry.manager.audit.acts import CANCELED, Act

ARCHIVE_LIMIT = 64 << 30


class Build(Body):
    name: Text
    """Of the definition, which becomes the image's."""


async def list_images(call: Call) -> Response:
    found = await asyncio.to_thread(call.engine.images.list)
    names = sorted(definition.available())
    return reply({"images": [image.info().to_dict() for image in found], "definitions": names})


async def build_image(call: Call, body: Build) -> Response:
    wanted = definition.find(body.name)
    act = call.manager.act(call.caller, "image.build", name=body.name)
    await act.begin()
    return Stream(
        _work(act, lambda report: asyncio.to_thread(build, wanted, call.engine.images, report)), NDJSON
    )


class Pull(Body):
    image: Text
    """As in `docker://python:3.12-slim`."""


async def pull_image(call: Call, body: Pull) -> Response:
    act = call.manager.act(call.caller, "image.pull", image=body.image)
    await act.begin()
    return Stream(_work(act, partial(call.manager.pull, body.image)), NDJSON)


async def import_image(call: Call, name: str) -> Response:
    name = check_name(name)
    act = call.manager.act(call.caller, "image.import", name=name)
    await act.begin()
    uploaded = contextlib.ExitStack()
    try:
        folder = await asyncio.to_thread(uploaded.enter_context, call.engine.images.staging())
        await _receive(call, folder / "archive")
    except BaseException as error:
        act.failed(error)
        await asyncio.to_thread(uploaded.close)
        raise

    def work(report: Report) -> Image:
        with uploaded:
            return import_archive(folder / "archive", name, call.engine.images, report)

    return Stream(_work(act, lambda report: asyncio.to_thread(work, report)), NDJSON)


async def inspect(call: Call, image: str) -> Response:
    found = await asyncio.to_thread(call.engine.images.get, image)
    users = [
        environment.id
        for environment in call.manager.environments(call.caller)
        if environment.image.digest == found.digest
    ]
    return reply({**found.info().to_dict(), "env": found.env, "environments": users})


async def remove(call: Call, image: str) -> Response:
    in_use = call.manager.in_use
    async with call.manager.act(call.caller, "image.remove", image=image):
        await asyncio.to_thread(call.engine.images.remove, image, lambda found: found.digest in in_use())
    return reply({})


async def _receive(call: Call, path: Path) -> None:
    """Write the body to a new file. Raises LimitReached, DiskFull, PlatformError."""
    folder = str(path.parent)
    length = call.header(b"content-length")
    check_space(folder, int(length) if length.isdecimal() else 0)
    unchecked = 0
    try:
        file = await asyncio.to_thread(path.open, "xb")
        with file:
            async for chunk in call.chunks(ARCHIVE_LIMIT):
                await asyncio.to_thread(file.write, chunk)
                unchecked += len(chunk)
                if unchecked >= LOOK_EVERY:
                    unchecked = 0
                    check_space(folder)
    except OSError as error:
        kind = DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else PlatformError
        raise kind(f"cannot store the archive: {error.strerror}") from error


async def _work(act: Act, job: Callable[[Report], Coroutine[Any, Any, Image]]) -> AsyncGenerator[bytes, None]:
    """Lines of progress of a job, which may report from another thread, and at last the image or the error.

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

    working = asyncio.create_task(job(report))
    working.add_done_callback(lambda _: news.set())
    try:
        while latest or not working.done():
            await news.wait()
            news.clear()
            for step in latest:
                yield line({"step": step.step, "fraction": step.fraction})
            latest.clear()
        image = await working
        act.end("completed", digest=image.digest)
        yield line({"image": image.info().to_dict()})
    except SkerryError as error:
        act.failed(error)
        yield line({"error": error.to_dict()})
    except Exception as error:
        act.end(PlatformError.code)
        log.exception("work on an image failed")
        yield line({"error": PlatformError(f"internal error: {type(error).__name__}").to_dict()})
    finally:
        unwanted.set()
        with contextlib.suppress(Exception):
            await asyncio.shield(working)
        act.end(CANCELED)  # unless it has ended in another way


EXAMPLE = {
    "name": "dev",
    "digest": "sha256:9b1f04",
    "kind": "rootfs",
    "size": 734003200,
    "created_at": 1767225600.0,
    "description": "git, Python, Node and a C compiler",
}

OPERATIONS = (
    Operation(
        name="list_images",
        method="GET",
        path="/images",
        tag="images",
        verb="read",
        summary="List images and definitions",
        handler=list_images,
        answer=schemas.Images,
        answer_example={"images": [EXAMPLE], "definitions": ["dev"]},
    ),
    Operation(
        name="build_image",
        method="POST",
        path="/images/build",
        tag="images",
        verb="images",
        summary="Build an image from its definition",
        text="Reports progress, one JSON object a line; the last has the `image`, or the `error`. If the "
        "connection breaks, the build is canceled.",
        handler=build_image,
        body=Build,
        body_example={"name": "dev"},
        answer=schemas.Progress,
        media=(NDJSON,),
        answer_example={"step": "installing packages", "fraction": 0.4},
        errors=(ImageNotFound,),
    ),
    Operation(
        name="pull_image",
        method="POST",
        path="/images/pull",
        tag="images",
        verb="create",
        summary="Pull an image that the Docker Engine lacks",
        text="One that it has stays as it is. A create pulls as well, without progress. Answers as `build_image` does.",
        handler=pull_image,
        body=Pull,
        body_example={"image": "docker://python:3.12-slim"},
        answer=schemas.Progress,
        media=(NDJSON,),
        answer_example={"step": "pulling docker://python:3.12-slim", "fraction": 0.4},
        errors=(ImageNotFound, DiskFull, RegistryUnavailable, IsolationUnavailable),
    ),
    Operation(
        name="import_image",
        method="POST",
        path="/images/import",
        tag="images",
        verb="images",
        summary="Import an image from an archive",
        text="A tar of a root filesystem, an OCI layout, or what `docker save` writes; compressed or not. Answers "
        "as `build_image` does.",
        handler=import_image,
        query=(Parameter("name", "string", "Name of the image.", required=True, example="mine"),),
        uploads=(OCTETS, TAR),
        body_example="@rootfs.tar",
        answer=schemas.Progress,
        media=(NDJSON,),
        answer_example={"image": EXAMPLE},
        errors=(DiskFull,),
    ),
    Operation(
        name="get_image",
        method="GET",
        path="/images/{image}",
        tag="images",
        verb="read",
        summary="Inspect an image",
        handler=inspect,
        answer=schemas.ImageDetails,
        answer_example={**EXAMPLE, "env": {"LANG": "C.UTF-8"}, "environments": ["k3v9x1m2p7qa"]},
        errors=(ImageNotFound,),
    ),
    Operation(
        name="remove_image",
        method="DELETE",
        path="/images/{image}",
        tag="images",
        verb="images",
        summary="Remove an image",
        text="By name: the name, and the image with its last one. By digest: the image with all its names.",
        handler=remove,
        answer=schemas.Nothing,
        answer_example={},
        errors=(ImageNotFound, Conflict),
    ),
)
