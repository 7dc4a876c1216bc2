"""What the daemon answers: JSON, problems, and streams that end when their reader goes away."""

from __future__ import annotations

import asyncio
import base64
import codecs
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from skerry.daemon.peers import cut_of
from skerry.errors import Busy, DaemonUnavailable, MethodNotAllowed, SkerryError, Unauthorized
from skerry.fairness import Line, timed

log = structlog.get_logger(component="daemon")
_encode = json.JSONEncoder(separators=(",", ":")).encode
WATCH_AFTER = 0.05
"""Seconds before anybody looks whether the client is still there: most executions have ended by then."""


AT_ONCE = 48 << 10
"""Bytes of a large answer that are made and sent in one step, about."""
STEP = 12 << 10
"""Bytes that are turned into JSON in one step, which may become six times as many; a multiple of 3 for base64."""
UNREAD_SECONDS = 60.0
"""An answer that is held in memory is given up when its reader takes nothing of it for this long."""


@dataclass(frozen=True, slots=True)
class Octets:
    """Bytes that an answer has as text: `encoding` is `utf-8`, if they are that, or `base64`."""

    data: bytes | bytearray
    encoding: str


def reply(body: dict[str, Any], status: int = 200) -> Response:
    """JSON, with lone surrogates (bytes of names that are not UTF-8) escaped and so kept."""
    weight = _weight(body)
    if weight > AT_ONCE:
        return Stream(_pieces(body), "application/json", status=status, weight=weight)
    return Response(_encode(body), status, media_type="application/json")


class Receipt(Response):
    """JSON without which nobody knows what was made: `undo` is awaited if the client goes away before it is sent."""

    def __init__(
        self,
        body: dict[str, Any],
        status: int,
        gone: Callable[[], bool],
        undo: Callable[[], Awaitable[None]],
    ) -> None:
        super().__init__(_encode(body), status, media_type="application/json")
        self._gone = gone
        self._undo = undo

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Waits while answers before this one are not read.
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self._gone():
            await self._undo()
        await send({"type": "http.response.body", "body": self.body})


def _weight(value: Any) -> int:
    """Roughly the bytes that a value takes in memory until it is sent."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_weight, value.values()))
    if isinstance(value, list):
        return sum(map(_weight, value)) + 200 * len(value)
    return len(value.data) if isinstance(value, Octets) else 8


async def _pieces(body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    """A large body as JSON, in steps that keep nobody waiting."""
    made: list[str] = []
    size = 0
    for text in _texts(body):
        made.append(text)
        size += len(text)
        if size >= AT_ONCE:
            piece = "".join(made).encode()
            made, size, text = [], 0, ""  # the reader may be slow
            yield piece
    yield "".join(made).encode()


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, Octets):
        yield '"'
        decode = codecs.getincrementaldecoder("utf-8")().decode
        for at in range(0, len(value.data), STEP):
            data = value.data[at : at + STEP]
            yield (
                base64.b64encode(data).decode() if value.encoding == "base64" else _encode(decode(data))[1:-1]
            )
        yield '"'
    elif _weight(value) <= AT_ONCE:
        yield _encode(value)
    elif isinstance(value, str):
        yield '"'
        for at in range(0, len(value), STEP):
            yield _encode(value[at : at + STEP])[1:-1]
        yield '"'
    elif isinstance(value, dict):
        for number, (name, item) in enumerate(value.items()):
            yield f"{',' if number else '{'}{_encode(name)}:"
            yield from _texts(item)
        yield "}"
    else:
        for number, item in enumerate(value):
            yield "," if number else "["
            yield from _texts(item)
        yield "]"


def line(body: dict[str, Any]) -> bytes:
    """One line of an NDJSON stream."""
    return _encode(body).encode() + b"\n"


RETRY_AFTER = "1"
"""Seconds after which it is worth trying again what can succeed later."""


def problem(error: SkerryError) -> Response:
    headers = {}
    if error.retryable:
        headers["retry-after"] = RETRY_AFTER
    if isinstance(error, DaemonUnavailable):
        headers["connection"] = "close"  # another try needs another daemon
    if isinstance(error, MethodNotAllowed):
        headers["allow"] = error.detail["allow"]
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    return Response(_encode(error.to_dict()), error.status, headers, media_type="application/problem+json")


class Stream(Response):
    """A body that is made while it is sent. `chunks` is closed whether it ended, failed or was not wanted.

    A failure in the middle cuts the connection, so that nobody takes the part for the whole. With a `weight` (the bytes
    that it holds in memory) the connection is also cut if its reader takes nothing for UNREAD_SECONDS.
    """

    def __init__(
        self, chunks: AsyncGenerator[bytes, None], media_type: str, *, status: int = 200, weight: int = 0
    ) -> None:
        super().__init__(status_code=status, media_type=media_type)
        del self.headers["content-length"]
        self._chunks = chunks
        self._line: Line | None = None
        self.weight = weight

    def charge(self, line: Line) -> None:
        """Whom the time of sending it is charged to."""
        self._line = line

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        work = self._send(send, scope)
        if self._line is not None:
            work = timed(work, self._line.flow)
        sending = asyncio.create_task(work)
        leaving = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.cancel()
            leaving.cancel()
            await asyncio.wait((sending, leaving))

    async def _send(self, send: Send, scope: Scope) -> None:
        patience = UNREAD_SECONDS if self.weight else None
        try:
            async with contextlib.aclosing(self._chunks):
                async for chunk in self._chunks:
                    async with asyncio.timeout(patience):
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    if self._line is not None:
                        await self._line.pause()
            await send({"type": "http.response.body", "body": b""})
        except SkerryError as error:
            log.warning("stream failed", error=str(error))
        except TimeoutError:
            log.warning("nobody reads an answer: its connection is cut", weight=self.weight)
            cut_of(scope)()


def unread() -> Busy:
    """For an answer that there is no room for."""
    return Busy(
        "too many large answers are unread", hint="read them, then try again; or ask for less at once"
    )


async def begun(chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The same chunks, once the first is there: what fails until then is still raised to the caller."""
    return followed(await anext(chunks, b""), chunks)


async def followed(first: bytes, chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(chunks):
        if first:
            yield first
        async for chunk in chunks:
            yield chunk


async def exhaust(chunks: AsyncGenerator[bytes, None]) -> None:
    """Let it come to its end by itself, when nothing is left but that."""
    async with contextlib.aclosing(chunks):
        async for _ in chunks:
            pass


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Watch:
    """Calls `gone` when the client goes away before the block ends."""

    __slots__ = ("_gone", "_receive", "_task", "_timer")

    def __init__(self, receive: Receive, gone: Callable[[], None]) -> None:
        self._receive = receive
        self._gone = gone
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER, self._begin)

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _begin(self) -> None:
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        await disconnected(self._receive)
        self._gone()
