"""One request to the application, made inside this process: the part of a server, without a connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import structlog
from starlette.types import ASGIApp, Message, Scope

log = structlog.get_logger(component="grpc")


class Exchange:
    """Runs the application until it has answered, even when nobody wants the answer any more.

    `incoming` is what the client sends; after its end the application is told of nothing but that the client has
    gone. `next()` gives what the application sends, one message ahead of the reader at most.
    """

    def __init__(self, app: ASGIApp, scope: Scope, incoming: AsyncIterator[Message]) -> None:
        self._app = app
        self._scope = scope
        self._incoming: AsyncIterator[Message] | None = incoming
        self._outgoing: asyncio.Queue[Message | None] = asyncio.Queue()
        self._room = asyncio.Semaphore(1)
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the client has gone."""
        self.task = asyncio.create_task(self._run())

    async def next(self) -> Message | None:
        """What the application sends next; None when it has ended."""
        message = await self._outgoing.get()
        self._room.release()
        return message

    def leave(self) -> None:
        """The client has gone, or has all it wanted."""
        if not self.gone.done():
            self.gone.set_result(None)
            self._room.release()

    async def _run(self) -> None:
        try:
            await self._app(self._scope, self._receive, self._send)
        except Exception:
            log.exception("request failed", path=self._scope["path"])
        finally:
            self._outgoing.put_nowait(None)

    async def _receive(self) -> Message:
        if self._incoming is not None:
            message = await anext(self._incoming, None)
            if message is not None and not self.gone.done():
                return message
            self._incoming = None
        await asyncio.shield(self.gone)
        kind = "http" if self._scope["type"] == "http" else "websocket"
        return {"type": f"{kind}.disconnect", "code": 1006}

    async def _send(self, message: Message) -> None:
        await self._room.acquire()
        if self.gone.done():
            self._room.release()  # for whoever waits behind us
        else:
            self._outgoing.put_nowait(message)
