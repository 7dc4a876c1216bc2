"""The server's side of a WebSocket: `websockets` parses and makes the frames, this moves them."""

from __future__ import annotations

import asyncio
import logging
from asyncio import BaseTransport, TimerHandle, Transport
from collections.abc import Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING, cast

import structlog
from starlette.types import ASGIApp, Message, Scope
from starlette.websockets import WebSocketDisconnect
from websockets.datastructures import Headers
from websockets.exceptions import InvalidState
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request, Response
from websockets.server import ServerProtocol

from skerry.daemon.http.answers import problem
from skerry.daemon.http.attach import LOST
from skerry.daemon.http1.feed import Feed
from skerry.daemon.peers import LINE
from skerry.errors import DaemonUnavailable

if TYPE_CHECKING:
    from skerry.daemon.http1.protocol import Activity

MESSAGE_MAX = 16 << 20
PING_SECONDS = 5.0
"""A ping notices a peer that is gone: by the write that fails. A slow reader may take its time to answer."""
CLOSE_SECONDS = 10.0
"""Time for the peer to answer a close frame."""
_QUIET = logging.getLogger("skerry.websockets")
_QUIET.disabled = True  # it speaks of what clients send, and they can send a lot

log = structlog.get_logger(component="daemon")


class WebSocketProtocol(asyncio.Protocol):
    """Takes over the transport of an HttpProtocol. Resolves LOST when the connection ends, read from or not."""

    transport: Transport
    _feed: Feed

    def __init__(
        self, app: ASGIApp, scope: Scope, target: bytes, activity: Activity, writable: asyncio.Event
    ) -> None:
        self._app = app
        self._scope: Scope = {
            **scope,
            "type": "websocket",
            "scheme": "wss" if scope["scheme"] == "https" else "ws",
            "subprotocols": [],
            "extensions": {"websocket.http.response": {}},
        }
        self._activity = activity
        self._writable = writable
        self._target = target
        self._frames = ServerProtocol(max_size=MESSAGE_MAX, logger=_QUIET)
        self._accepted: Response | None = None
        self._denial: Message | None = None
        """The head of a response instead of the handshake, until its body is complete."""
        self._denial_body = b""
        self._open = False
        """The handshake was answered, one way or the other."""
        self._closing = False
        """Nothing more is sent: our close frame, or a denial, was the last."""
        self._lost = False
        self._received: asyncio.Queue[Message] = asyncio.Queue()
        self._fragments: list[bytes] = []
        self._is_text = False
        self._ping_timer: TimerHandle | None = None
        self._close_timer: TimerHandle | None = None

    # ---- for the transport ----

    def connection_made(self, transport: BaseTransport) -> None:
        self.transport = cast(Transport, transport)
        self._feed = Feed(self.transport, self._parse, self._takes_more, self._scope["state"][LINE])
        self._activity.connections.add(self)
        headers = b"".join(b"%b: %b\r\n" % pair for pair in self._scope["headers"])
        self._frames.receive_data(
            b"%b %b HTTP/1.1\r\n%b\r\n" % (self._scope["method"].encode(), self._target, headers)
        )
        for event in self._frames.events_received():
            assert isinstance(event, Request)
            self._accepted = self._frames.accept(event)
            if self._accepted.status_code == 101:
                del self._accepted.headers["Date"]
                self._received.put_nowait({"type": "websocket.connect"})
                self._activity.run(self._run())
                return
            self._frames.send_response(self._accepted)
        self._open = self._closing = True
        self._flush()
        self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        for timer in (self._ping_timer, self._close_timer):
            if timer is not None:
                timer.cancel()
        self._received.put_nowait({"type": "websocket.disconnect", "code": CloseCode.ABNORMAL_CLOSURE})
        self._writable.set()
        self._feed.drop()
        self._activity.discard(self)
        lost: asyncio.Future[None] = self._scope["state"][LOST]
        if not lost.done():
            lost.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._feed.take(data)

    def eof_received(self) -> None:
        """The transport closes itself."""

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # ---- for the server ----

    def shutdown(self) -> None:
        if not self._closing:
            self._received.put_nowait({"type": "websocket.disconnect", "code": CloseCode.SERVICE_RESTART})
            if self._open:
                self._frames.fail(CloseCode.SERVICE_RESTART)
                self._flush()
            else:
                answer = problem(DaemonUnavailable("the daemon is stopping", hint="try again in a moment"))
                self._deny(answer.status_code, answer.raw_headers, bytes(answer.body))
        self.transport.close()

    # ---- what comes in ----

    def _takes_more(self) -> bool:
        """One message ahead of the application; after our close frame, which nobody reads, until the peer's."""
        return self._open and (self._closing or self._received.empty())

    def _parse(self, data: bytes) -> None:
        self._frames.receive_data(data)
        for event in self._frames.events_received():
            assert isinstance(event, Frame)
            self._handle(event)
        if self._frames.parser_exc is not None:
            self._end()

    def _handle(self, frame: Frame) -> None:
        if frame.opcode is Opcode.PING:
            # Answered only while the answers are read: else they would pile up here.
            answer = self._output()
            if self._writable.is_set():
                self.transport.write(answer)
        elif frame.opcode is Opcode.CLOSE:
            self._end()
        elif frame.opcode is not Opcode.PONG and not self._closing:
            if frame.opcode is not Opcode.CONT:
                self._is_text, self._fragments = frame.opcode is Opcode.TEXT, []
            self._fragments.append(bytes(frame.data))
            if frame.fin:
                self._deliver(b"".join(self._fragments))

    def _deliver(self, data: bytes) -> None:
        self._fragments = []
        message: Message = {"type": "websocket.receive", "bytes": data}
        if self._is_text:
            try:
                message = {"type": "websocket.receive", "text": data.decode()}
            except UnicodeDecodeError:
                self._frames.fail(CloseCode.INVALID_DATA)
                self._end()
                return
        self._received.put_nowait(message)

    def _end(self) -> None:
        """The peer has sent a close frame, or something that is none at all."""
        if not self._closing:
            self._closing = True
            close = self._frames.close_rcvd or self._frames.close_sent
            code, reason = (close.code, close.reason) if close else (CloseCode.ABNORMAL_CLOSURE, "")
            self._received.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
            self._flush()
        self.transport.close()

    # ---- for the application ----

    async def _run(self) -> None:
        try:
            await self._app(self._scope, self._receive, self._send)
        except asyncio.CancelledError:
            self.transport.abort()
            raise
        except (_Lost, WebSocketDisconnect):
            pass
        except Exception:
            log.exception("request failed", path=self._scope["path"])
        if not self._open and not self._lost:
            self._deny(500)
        if self._close_timer is None:
            self.transport.close()

    async def _receive(self) -> Message:
        message = await self._received.get()
        self._feed.go_on()
        return message

    async def _send(self, message: Message) -> None:
        """Raises an OSError when the connection is lost."""
        await self._writable.wait()
        if self._lost:
            raise _Lost
        kind = message["type"]
        if self._open:
            if kind not in ("websocket.send", "websocket.close"):
                raise RuntimeError(f"unexpected ASGI message {kind!r}")
            try:
                self._send_frame(message)
            except InvalidState:
                raise _Lost from None
        elif kind == "websocket.accept":
            self._accept()
        elif kind == "websocket.close":
            self._deny(403)
        elif kind == "websocket.http.response.start":
            self._denial = message
        elif kind == "websocket.http.response.body" and self._denial is not None:
            self._denial_body += message.get("body", b"")
            if not message.get("more_body", False):
                self._deny(self._denial["status"], self._denial.get("headers", ()), self._denial_body)
        else:
            raise RuntimeError(f"unexpected ASGI message {kind!r}")

    def _accept(self) -> None:
        assert self._accepted is not None
        self._open = True
        self._frames.send_response(self._accepted)
        self._flush()
        self._ping_later()
        self._feed.go_on()

    def _deny(self, status: int, headers: Iterable[tuple[bytes, bytes]] = (), body: bytes = b"") -> None:
        given = Headers(connection="close")
        for name, value in headers:
            if name.lower() != b"connection":
                given[name.decode("latin-1")] = value.decode("latin-1")
        given.setdefault("Content-Length", str(len(body)))
        self._open = self._closing = True
        self._received.put_nowait({"type": "websocket.disconnect", "code": CloseCode.ABNORMAL_CLOSURE})
        self._frames.send_response(Response(status, HTTPStatus(status).phrase, given, body))
        self._flush()
        self.transport.close()

    def _send_frame(self, message: Message) -> None:
        """Raises InvalidState after the end of the WebSocket."""
        if message["type"] == "websocket.close":
            self._frames.send_close(
                message.get("code", CloseCode.NORMAL_CLOSURE), message.get("reason") or ""
            )
            self._closing = True
            self._close_timer = asyncio.get_running_loop().call_later(CLOSE_SECONDS, self.transport.close)
            self._feed.go_on()
        elif message.get("bytes") is not None:
            self._frames.send_binary(message["bytes"])
        else:
            self._frames.send_text(message["text"].encode())
        self._flush()

    def _output(self) -> bytes:
        return b"".join(self._frames.data_to_send())

    def _flush(self) -> None:
        if (data := self._output()) and not self.transport.is_closing():
            self.transport.write(data)

    def _ping_later(self) -> None:
        self._ping_timer = asyncio.get_running_loop().call_later(PING_SECONDS, self._ping)

    def _ping(self) -> None:
        if self._closing or self.transport.is_closing():
            return
        if self._writable.is_set():
            self._frames.send_ping(b"")
            self._flush()
        self._ping_later()


class _Lost(OSError):
    """The connection is lost: there is nobody to send to."""
