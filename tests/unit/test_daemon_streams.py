"""Bodies that are made while they are sent, and jobs that tell how far they are."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from skerry.daemon.http import images
from skerry.daemon.http.answers import Stream, begun
from skerry.errors import FileMissing, InvalidRequest
from skerry.images.progress import Progress, Report
from skerry.images.store import Image
from skerry.manager.audit.acts import Act
from tests.unit.stubs import CALLER, StubRecords, asynchronous, until

IMAGE = Image("mine", "sha256:0", "rootfs", Path("/nothing"), {}, 1, 0.0, "")


def act() -> Act:
    return Act(StubRecords(), CALLER, "image.build", None, {})


class Client:
    """The other end of an ASGI application."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await asyncio.sleep(0)
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def complete(self) -> bool:
        return bool(self.sent) and self.sent[-1].get("more_body") is not True


@asynchronous
async def test_a_stream_is_sent_to_its_end() -> None:
    async def chunks() -> AsyncGenerator[bytes, None]:
        for number in range(3):
            yield str(number).encode()

    client = Client()
    await Stream(await begun(chunks()), "text/plain")({"type": "http"}, client.receive, client.send)
    assert (client.body, client.complete) == (b"012", True)
    assert b"content-length" not in dict(client.sent[0]["headers"])


@asynchronous
async def test_what_fails_before_the_first_chunk_is_raised() -> None:
    async def chunks() -> AsyncGenerator[bytes, None]:
        raise FileMissing("no")
        yield b""

    with pytest.raises(FileMissing):
        await begun(chunks())


@asynchronous
async def test_what_fails_in_the_middle_leaves_the_body_incomplete() -> None:
    async def chunks() -> AsyncGenerator[bytes, None]:
        yield b"half"
        raise FileMissing("gone meanwhile")

    client = Client()
    await Stream(await begun(chunks()), "text/plain")({"type": "http"}, client.receive, client.send)
    assert (client.body, client.complete) == (b"half", False)


@asynchronous
async def test_a_reader_that_goes_away_closes_the_source() -> None:
    closed = asyncio.Event()

    async def chunks() -> AsyncGenerator[bytes, None]:
        try:
            yield b"first"
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            closed.set()

    client = Client()
    stream = Stream(await begun(chunks()), "text/plain")
    serving = asyncio.create_task(stream({"type": "http"}, client.receive, client.send))
    await until(lambda: client.body == b"first")
    client.gone.set()
    await serving
    assert closed.is_set()


@asynchronous
async def test_a_job_tells_its_steps_and_its_result() -> None:
    def job(report: Report) -> Image:
        report(Progress("working", 0.5))
        return IMAGE

    lines = [
        json.loads(line) async for line in images._work(act(), lambda report: asyncio.to_thread(job, report))
    ]
    assert lines == [{"step": "working", "fraction": 0.5}, {"image": IMAGE.info().to_dict()}]


@pytest.mark.parametrize(
    ("error", "code"), [(InvalidRequest("bad"), "invalid_request"), (OSError(), "internal")]
)
@asynchronous
async def test_a_job_that_fails_ends_with_the_error(error: Exception, code: str) -> None:
    def job(report: Report) -> Image:
        raise error

    (last,) = [
        json.loads(line) async for line in images._work(act(), lambda report: asyncio.to_thread(job, report))
    ]
    assert last["error"]["code"] == code


@asynchronous
async def test_a_job_that_nobody_waits_for_ends_at_its_next_step() -> None:
    go_on = threading.Event()
    ends: list[str] = []

    def job(report: Report) -> Image:
        report(Progress("first", 0.1))
        go_on.wait(30)
        try:
            report(Progress("second", 0.2))
        except Exception as error:
            ends.append(str(error))
            raise
        return IMAGE

    lines = images._work(act(), lambda report: asyncio.to_thread(job, report))
    assert json.loads(await anext(lines))["step"] == "first"
    closing = asyncio.create_task(lines.aclose())
    await asyncio.sleep(0)
    go_on.set()
    await closing
    assert ends == ["nobody waits for this any more"]
