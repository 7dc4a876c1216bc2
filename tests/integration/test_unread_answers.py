"""Answers that nobody reads: what they hold is accounted for by tenant, and everybody else is served."""

from __future__ import annotations

import asyncio
import json
import select
import struct
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import ExitStack, closing
from typing import Any, cast

import pytest

from skerry.daemon.http import files as http_files
from skerry.daemon.http.answers import Stream
from skerry.fairness import lines
from skerry.guest import files
from skerry.guest.channel import Channel
from skerry.guest.files import Listing
from skerry.policy import MIB
from tests import support
from tests.integration.daemon import Daemon, started
from tests.integration.test_floods import Growth, unread

LARGE = 15 * MIB
UNREAD = 25
GROWTH = 120 * MIB
"""Without an account of them, these answers take 25 times 15 MiB, as bytes and as JSON."""
NAMES = 50_000


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with support.temporary_home() as home, started(home) as running:
        yield running


def test_large_files_that_nobody_reads(daemon: Daemon, environment: str) -> None:
    daemon.execute(environment, ["sh", "-c", f"head -c {LARGE} /dev/zero > large; seq 3 > small"])
    path = f"/environments/{environment}/files/read?path="
    growth = Growth(daemon)
    with ExitStack() as stack:
        held = []
        for _ in range(UNREAD):
            held.append(stack.enter_context(closing(unread(daemon, "GET", f"{path}large"))))
            assert select.select([held[-1].sock], [], [], 20)[0]
            growth.look()
        answers = [connection.getresponse() for connection in held]
        statuses = [answer.status for answer in answers]
        assert statuses[0] == 200
        assert set(statuses[2:]) == {429}
        assert answers[-1].headers["retry-after"] == "1"
        assert "unread" in json.loads(answers[-1].read())["message"]
        # What is small is answered, and so is what is large of another tenant.
        assert daemon.call("GET", f"{path}small")["content"] == "1\n2\n3\n"
        assert daemon.execute(environment, ["echo", "alive"])["stdout"] == "alive\n"
        other = {"skerry-tenant": "other"}
        status, _, made = daemon.raw("POST", "/environments", {}, other)
        assert status == 201
        its = f"/environments/{json.loads(made)['environment_id']}"
        script = ["sh", "-c", f"head -c {LARGE} /dev/zero > large"]
        assert daemon.raw("POST", f"{its}/execute", {"argv": script}, other)[0] == 200
        status, _, answer = daemon.raw("GET", f"{its}/files/read?path=large", None, other)
        assert (status, json.loads(answer)["size"]) == (200, LARGE)
        daemon.raw("DELETE", its, None, other)
        # A command has run: its result is told, with what there is room for.
        found = daemon.execute(environment, ["head", "-c", str(4 * MIB), "/dev/zero"], output_limit=8 * MIB)
        assert (found["outcome"], found["stdout_size"], found["stdout_truncated"]) == (
            "completed",
            4 * MIB,
            True,
        )
        assert "unread" in found["message"]
        growth.look()
    assert growth.most < GROWTH
    while daemon.raw("GET", f"{path}large")[0] == 429:  # until the daemon has heard that they are gone
        pass
    for content in ("large", "small"):
        assert daemon.raw("GET", f"{path}{content}")[0] == 200


def test_large_output_arrives_whole(daemon: Daemon, environment: str) -> None:
    for make in ("yes é | head -c 3000000", "head -c 3000000 /dev/urandom", "seq 100000"):
        daemon.execute(environment, ["sh", "-c", f"{make} > out"])
        found = daemon.execute(environment, ["cat", "out"], output_limit=8 * MIB)
        content = daemon.call("GET", f"/environments/{environment}/files/read?path=out")
        assert (found["stdout"], found["stdout_encoding"]) == (content["content"], content["encoding"])
        assert (found["stdout_size"], found["stdout_truncated"]) == (content["size"], False)


@pytest.mark.slow
def test_large_listings_that_nobody_reads(daemon: Daemon, environment: str) -> None:
    script = f"mkdir many && cd many && seq -f n%06g {NAMES} | xargs touch"
    daemon.execute(environment, ["sh", "-c", script])
    path = f"/environments/{environment}/files/list?path=many"
    names = [entry["path"] for entry in daemon.call("GET", path)["entries"]]
    assert names == [f"n{number:06}" for number in range(1, NAMES + 1)]
    growth = Growth(daemon)
    with ExitStack() as stack:
        for _ in range(10):
            connection = stack.enter_context(closing(unread(daemon, "GET", path)))
            assert select.select([connection.sock], [], [], 60)[0]
            growth.look()
        assert connection.getresponse().status == 429
    assert growth.most < GROWTH


def test_large_listing_is_made_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read and sent in many turns of the event loop, also when all of it is there at once."""

    class Applet:
        async def records(self) -> AsyncGenerator[bytes, None]:
            for number in reversed(range(5000)):
                name = f"n{number:04}".encode()
                head = struct.pack("<BIIIQqH", ord("f"), 0o644, 0, 0, 0, 0, len(name))
                yield head + name + b"\0\0"

        @classmethod
        async def start(cls, *_: object) -> Applet:
            return cls()

    async def turns(work: Coroutine[Any, Any, Any]) -> tuple[int, Any]:
        """How often others have their turn while it runs, and its result."""
        count = 0
        task = asyncio.create_task(work)
        while not task.done():
            count += 1
            await asyncio.sleep(0)
        return count, task.result()

    async def pages(listing: Listing) -> bytes:
        sent: list[bytes] = []

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))

        answer = Stream(http_files._entries(listing), "application/json")
        answer.charge(lines().of("tenant"))
        await answer({"type": "http"}, asyncio.Event().wait, send)  # type: ignore[arg-type]
        return b"".join(sent)

    async def test() -> None:
        monkeypatch.setattr(files, "_Applet", Applet)
        reading, listing = await turns(files.list_directory(cast(Channel, None), "many"))
        assert reading > listing.weight / files.HELD_AT_ONCE - 1 > 3
        sending, text = await turns(pages(listing))
        assert sending >= 5000 / http_files.ENTRIES_AT_ONCE
        names = [entry["path"] for entry in json.loads(text)["entries"]]
        assert names == [f"n{number:04}" for number in range(5000)]

    asyncio.run(test())
