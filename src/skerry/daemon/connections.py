"""One connection, from its first byte to its last: who is there, and for how long we wait for it."""

from __future__ import annotations

import asyncio
import select
from abc import ABC, abstractmethod
from asyncio import AbstractEventLoop, BaseTransport, TimerHandle, Transport
from dataclasses import dataclass
from typing import Any, cast

import structlog
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from skerry.daemon.http.answers import problem
from skerry.daemon.http.attach import LOST
from skerry.daemon.intake import Intake
from skerry.daemon.peers import CUT, GONE, LINE, PEER, SHARE, Peer
from skerry.errors import InvalidRequest, LimitReached, SkerryError, TooSlow
from skerry.fairness import Line, lines
from skerry.manager.caller import DEFAULT_TENANT

HEAD_MAX = 64 << 10
"""Bytes of a request that the parser keeps before it hands something on: a head, or what follows a chunked body."""

log = structlog.get_logger(component="daemon")


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds that we wait for the other side."""

    handshake: float = 10.0
    head: float = 10.0
    """From the first byte of a request (or the beginning of the connection) to the end of its head."""
    body: float = 30.0
    """Without a byte of a body, while we would take some."""
    idle: float = 300.0
    """Between two requests."""
    silence: float = 300.0
    """Without an acknowledgement, by the other machine, of anything."""


class Porter(ABC):
    """Decides who comes in."""

    @abstractmethod
    def greet(self, transport: Transport) -> Peer:
        """Who this is. Raises the SkerryError that all its requests are answered with."""

    @abstractmethod
    def share(self, tenant: str, instead_of: str | None) -> bool:
        """Count a connection for a tenant, no longer for another. False if its share is used up: then it has none."""

    @abstractmethod
    def leave(self, tenant: str) -> None:
        """A connection that was counted for this tenant has ended."""

    @abstractmethod
    def check(self, scope: Scope, target: bytes) -> None:
        """Look at the head of a request and its target as sent. Raises the SkerryError that it is answered with."""


class Http(HttpToolsProtocol):
    """HTTP until the connection ends or becomes a WebSocket. `lost` is done when it has ended, as whichever."""

    def __init__(
        self,
        porter: Porter,
        patience: Patience,
        config: uvicorn.Config,
        state: ServerState,
        loop: AbstractEventLoop,
    ) -> None:
        super().__init__(config, state, {}, loop)
        self.lost: asyncio.Future[None] = loop.create_future()
        self.lost.add_done_callback(self._leave)
        self._porter = porter
        self._patience = patience
        self._tenant: str | None = None
        """The one that the connection counts for: that of its last request."""
        self._late: TimerHandle | None = None
        """Ends what takes too long: a head, or a body."""
        self._heard = 0.0
        self._kept = 0
        """Bytes since the parser last handed something on."""

    def connection_made(self, transport: BaseTransport) -> None:
        self._intake = Intake(cast(Transport, transport), self._parse, self._takes_more, self._line)
        super().connection_made(cast(Transport, self._intake))
        self.app_state = {
            CUT: self.transport.abort,
            LOST: self.lost,
            GONE: self._gone,
            SHARE: self._share,
            LINE: self._line,
        }
        try:
            self.app_state[PEER] = self._porter.greet(self.transport)
        except SkerryError as error:
            self._refuse(error)
        self._expect_head()

    def _gone(self) -> bool:
        if self.lost.done() or self.transport.is_closing():
            return True
        socket = select.poll()
        socket.register(self.transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        return bool(socket.poll(0))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()
        self._intake.drop()
        self.end()

    def end(self) -> None:
        """Nothing comes any more, or nothing ever came."""
        if not self.lost.done():
            self.lost.set_result(None)

    def _leave(self, _: object) -> None:
        if self._tenant is not None:
            self._porter.leave(self._tenant)

    def _share(self, tenant: str) -> bool:
        if tenant == self._tenant:
            return True
        if self.lost.done():
            return False
        got = self._porter.share(tenant, self._tenant)
        self._tenant = tenant if got else None
        return got

    def _line(self) -> Line:
        """Whose time it is that the bytes of this connection take."""
        peer: Peer | None = self.app_state.get(PEER)
        if self._tenant is not None or (peer is not None and peer.trusted):
            return lines().of(self._tenant or DEFAULT_TENANT)
        return lines().of_stranger(peer.host if peer is not None else "")

    def data_received(self, data: bytes) -> None:
        self._heard = self.loop.time()
        self._intake.take(data)

    def _takes_more(self) -> bool:
        """Not while requests wait that came with another, nor what follows the end of HTTP on this connection."""
        return not self.pipeline and self in self.connections and not self.transport.is_closing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._intake.go_on()

    def handle_websocket_upgrade(self) -> None:
        super().handle_websocket_upgrade()
        self._intake.drop()

    def _parse(self, data: bytes) -> None:
        self._kept += len(data)
        super().data_received(data)
        if self._kept > HEAD_MAX:
            self._fail(LimitReached(f"the head of a request is larger than {HEAD_MAX} bytes"))
        if self._late is not None or self not in self.connections or self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            if self.timeout_keep_alive_task is None:  # else the data was a whole request, answered already
                self._expect_head()
        elif self.cycle.more_body:
            self._expect_body(self._patience.body)

    def on_body(self, body: bytes) -> None:
        self._kept = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        self._kept = 0
        self._stop_waiting()
        try:
            self._porter.check(cast(Scope, self.scope), self.url)
            self._check_upgrade()
        except SkerryError as error:
            self._refuse(error)
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self.cycle.transport = cast(Transport, _Answer(self.transport, self.loop))

    def timeout_keep_alive_handler(self) -> None:
        """Not `close`: that would wait until everything is sent, to somebody who may not read it."""
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is answered as every other mistake."""
        self._say(InvalidRequest(msg))

    def _check_upgrade(self) -> None:
        """Raises InvalidRequest. A request that is under way would never be told that the WebSocket was lost."""
        under_way = self.cycle is not None and not self.cycle.response_complete
        if under_way and self.parser.should_upgrade():
            raise InvalidRequest("a connection becomes a WebSocket between two requests")

    def _refuse(self, error: SkerryError) -> None:
        """Answer everything with this error. The first answer is also the last."""
        self.app = _Refusal(error)
        self.ws_protocol_class = None

    def _expect_head(self) -> None:
        self._late = self.loop.call_later(self._patience.head, self._too_slow, "the head of a request")

    def _expect_body(self, seconds: float) -> None:
        self._late = self.loop.call_later(seconds, self._look_at_body)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _look_at_body(self) -> None:
        self._late = None
        cycle = self.cycle
        if cycle.response_complete or not cycle.more_body:
            return
        # It is not the client who is slow.
        if self.flow.read_paused or self._intake.waits or cycle.waiting_for_100_continue:
            self._heard = self.loop.time()
        left = self._heard + self._patience.body - self.loop.time()
        if left > 0:
            self._expect_body(left)
        else:
            self._too_slow("the body of a request")

    def _too_slow(self, what: str) -> None:
        self._late = None
        self._fail(TooSlow(f"{what} took too long"))

    def _fail(self, error: SkerryError) -> None:
        """End the connection for this, and say so if nothing else is being said."""
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()
        else:
            self._say(error)

    def _say(self, error: SkerryError) -> None:
        """Answer without the application, and close."""
        answer = problem(error)
        head = b"".join(b"%s: %s\r\n" % pair for pair in answer.raw_headers)
        body = bytes(answer.body)
        self.transport.write(b"HTTP/1.1 %d \r\n%bconnection: close\r\n\r\n%b" % (error.status, head, body))
        self.transport.close()


class _Answer:
    """What an answer is written to: its head goes out together with its body, if that comes at once.

    In two pieces it would wake the caller twice.
    """

    __slots__ = ("_begun", "_head", "_loop", "_transport")

    def __init__(self, transport: Transport, loop: AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._begun = False
        self._head = b""

    def write(self, data: bytes) -> None:
        if not self._begun:
            self._begun, self._head = True, data
            self._loop.call_soon(self._send)
        else:
            head, self._head = self._head, b""
            self._transport.write(head + data)

    def _send(self) -> None:
        if self._head:
            self.write(b"")

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._send()
        self._transport.close()


class _Refusal:
    def __init__(self, error: SkerryError) -> None:
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = problem(self._error)
        answer.headers["connection"] = "close"
        await answer(scope, receive, send)


class WebSocket(WebSocketsSansIOProtocol):
    """What an Http became. Tells the application when it is lost, even while nobody reads from it."""

    def connection_made(self, transport: BaseTransport) -> None:
        line = self.app_state[LINE]
        self._intake = Intake(cast(Transport, transport), super().data_received, self._takes_more, line)
        super().connection_made(cast(Transport, self._intake))

    def _takes_more(self) -> bool:
        """After our close frame nobody reads the queue, but the peer's answer ends the connection."""
        return self.close_sent or self.queue.empty()

    def data_received(self, data: bytes) -> None:
        self._intake.take(data)

    async def receive(self) -> Any:
        message = await super().receive()
        self._intake.go_on()
        return message

    def handle_ping(self) -> None:
        """Answered only while the answers are read: else they would pile up here."""
        answer = b"".join(self.conn.data_to_send())
        if self.writable.is_set():
            self.transport.write(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._intake.drop()
        lost: asyncio.Future[None] = self.app_state[LOST]
        if not lost.done():
            lost.set_result(None)
