"""One HTTP request and its response: the `receive` and `send` of an ASGI application."""

from __future__ import annotations

import asyncio
import http
import re
from typing import TYPE_CHECKING, Any

import structlog
from starlette.types import ASGIApp, Message, Scope

from skerry.daemon.http.answers import problem
from skerry.errors import PlatformError

if TYPE_CHECKING:
    from skerry.daemon.http1.protocol import HttpProtocol

BODY_HELD_MAX = 64 << 10
"""Bytes of a body that wait for the application before reading pauses."""

_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(rb"[^\x00-\x08\x0a-\x1f\x7f]*")
_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status} {status.phrase}\r\n".encode() for status in http.HTTPStatus
}
_DISCONNECT: Message = {"type": "http.disconnect"}

log = structlog.get_logger(component="daemon")


class HttpExchange:
    """Runs the application for one request of a connection."""

    def __init__(
        self,
        connection: HttpProtocol,
        app: ASGIApp,
        scope: Scope,
        *,
        keep_alive: bool,
        expects_continue: bool,
    ) -> None:
        self._connection = connection
        self._app = app
        self._scope = scope
        self.keep_alive = keep_alive
        self.expects_continue = expects_continue
        """The client sends the body only after `100 Continue`, which `receive` writes."""
        self.more_body = True
        self.started = False
        """The head of the response was sent, or waits for its first bytes of body."""
        self.complete = False
        self._disconnected = False
        self._body = bytearray()
        self._changed = asyncio.Event()
        self._head = b""
        self._chunked = False
        self._left = 0
        """Bytes that the Content-Length of the response still promises."""

    # ---- for the connection ----

    def take_body(self, data: bytes) -> bool:
        """Hold bytes for the application; drop them if it has answered already. True: hold no more for now."""
        if self.complete:
            return False
        self._body += data
        self._changed.set()
        return len(self._body) > BODY_HELD_MAX

    def end_body(self) -> None:
        self.more_body = False
        self._changed.set()

    def disconnect(self) -> None:
        if not self.complete:
            self._disconnected = True
        self._changed.set()

    async def run(self) -> None:
        """Run the application. A response that it leaves incomplete ends the connection."""
        try:
            await self._app(self._scope, self._receive, self._send)
        except asyncio.CancelledError:
            self._connection.transport.abort()
            raise
        except Exception:
            log.exception("request failed", path=self._scope["path"])
        if not self.started and not self._disconnected:
            answer = problem(PlatformError("internal error", hint="see the daemon's log"))
            answer.headers["connection"] = "close"
            await answer(self._scope, self._receive, self._send)
        elif not self.complete:
            self._flush_head()
            self._connection.transport.close()

    # ---- for the application ----

    async def _receive(self) -> Message:
        if self.expects_continue and not self._connection.transport.is_closing():
            self.expects_continue = False
            self._connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not self._disconnected and not self.complete:
            self._connection.resume_body()
            await self._changed.wait()
            self._changed.clear()
        if self._disconnected or self.complete:
            return _DISCONNECT
        body, self._body = bytes(self._body), bytearray()
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def _send(self, message: Message) -> None:
        if not self._disconnected:
            await self._connection.writable.wait()
        if self._disconnected:
            return
        if not self.started and message["type"] == "http.response.start":
            self._start(message)
        elif self.started and not self.complete and message["type"] == "http.response.body":
            self._continue(message.get("body", b""), message.get("more_body", False))
        else:
            raise RuntimeError(f"unexpected ASGI message {message['type']!r}")

    def _start(self, message: Message) -> None:
        """Raises RuntimeError for a header that would change the form of the response."""
        status: int = message["status"]
        lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
        length: int | None = None
        close = not self.keep_alive
        for name, value in message.get("headers", ()):
            if (
                not _NAME.fullmatch(name)
                or not _VALUE.fullmatch(value)
                or name.lower() == b"transfer-encoding"
            ):
                raise RuntimeError(f"invalid header {name!r}")
            if name.lower() == b"content-length":
                length = int(value)
            elif name.lower() == b"connection":  # nothing but `close` is ever sent
                close = True
                continue
            lines += (name, b": ", value, b"\r\n")
        self.started = True
        self.expects_continue = False
        self.keep_alive = not close
        if close:
            lines.append(b"connection: close\r\n")
        if self._scope["method"] == "HEAD" or status in (204, 304):
            self._left = 0
        elif length is None:
            self._chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        else:
            self._left = length
        lines.append(b"\r\n")
        # Head and body in two pieces would wake the client twice: the head waits for what is sent at once.
        self._head = b"".join(lines)
        asyncio.get_running_loop().call_soon(self._flush_head)

    def _flush_head(self) -> None:
        if self._head:
            self._write(b"")

    def _write(self, data: bytes) -> None:
        head, self._head = self._head, b""
        if head or data:
            self._connection.transport.write(head + data)

    def _continue(self, body: Any, more: bool) -> None:
        """Raises RuntimeError for more or fewer bytes than the head promised."""
        if self._scope["method"] == "HEAD":
            body = b""
        elif self._chunked:
            body = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            if not more:
                body += b"0\r\n\r\n"
        else:
            self._left -= len(body)
            if self._left < 0 or (self._left and not more):
                raise RuntimeError("the response is not as long as its Content-Length")
        self._write(body)
        if not more:
            self.complete = True
            self._changed.set()
            if not self.keep_alive:
                self._connection.transport.close()
            self._connection.response_complete()
