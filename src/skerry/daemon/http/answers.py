"""What the daemon answers: JSON, problems, and streams that end when their reader goes away."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from skerry.errors import MethodNotAllowed, SkerryError, Unauthorized

log = structlog.get_logger(component="daemon")
_encode = json.JSONEncoder(separators=(",", ":")).encode
WATCH_AFTER = 0.05
"""Seconds before anybody looks whether the client is still there: most executions have ended by then."""


def reply(body: dict[str, Any], status: int = 200) -> Response:
    """JSON, with lone surrogates (bytes of names that are not UTF-8) escaped and so kept."""
    return Response(_encode(body), status, media_type="application/json")


def line(body: dict[str, Any]) -> bytes:
    """One line of an NDJSON stream."""
    return _encode(body).encode() + b"\n"


RETRY_AFTER = "1"
"""Seconds after which it is worth trying again what can succeed later."""


def problem(error: SkerryError) -> Response:
    headers = {}
    if error.retryable:
        headers["retry-after"] = RETRY_AFTER
    if isinstance(error, MethodNotAllowed):
        headers["allow"] = error.detail["allow"]
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    return Response(_encode(error.to_dict()), error.status, headers, media_type="application/problem+json")


class Stream(Response):
    """A body that is made while it is sent. `chunks` is closed whether it ended, failed or was not wanted.

    A failure in the middle cuts the connection, so that nobody takes the part for the whole.
    """

    def __init__(self, chunks: AsyncGenerator[bytes, None], media_type: str) -> None:
        super().__init__(media_type=media_type)
        del self.headers["content-length"]
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.cancel()
            leaving.cancel()
            await asyncio.wait((sending, leaving))

    async def _send(self, send: Send) -> None:
        try:
            async with contextlib.aclosing(self._chunks):
                async for chunk in self._chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except SkerryError as error:
            log.warning("stream failed", error=str(error))


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
