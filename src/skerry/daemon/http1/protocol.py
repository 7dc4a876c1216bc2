"""The server's side of an HTTP/1.1 connection, until it ends or becomes a WebSocket.

Requests are answered one at a time, in order. Those that are pipelined behind one under way are parsed a few kilobytes
ahead at most. Whatever two parsers could read differently is refused: see `on_headers_complete` and ADR 29.
"""

from __future__ import annotations

import asyncio
import select
from abc import ABC, abstractmethod
from asyncio import BaseTransport, TimerHandle, Transport
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import unquote

import httptools
from starlette.types import ASGIApp, Receive, Scope, Send

from skerry.daemon.http.answers import problem
from skerry.daemon.http.attach import LOST
from skerry.daemon.http1.exchange import HttpExchange
from skerry.daemon.http1.feed import Feed
from skerry.daemon.http1.websocket import WebSocketProtocol
from skerry.daemon.peers import CUT, GONE, LINE, PEER, SHARE, Peer
from skerry.errors import InvalidRequest, LimitReached, SkerryError, TooSlow
from skerry.fairness import Line, lines
from skerry.manager.caller import DEFAULT_TENANT

HEAD_MAX = 64 << 10
"""Bytes that the parser keeps before it reports something: a head, or what follows a chunked body."""
INVALID = "Invalid HTTP request received."


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds to wait for the other side."""

    handshake: float = 10.0
    head: float = 10.0
    """From the first byte of a request (or the beginning of the connection) to the end of its head."""
    body: float = 30.0
    """Without a byte of a body, while we would take some."""
    idle: float = 300.0
    """Between two requests."""
    silence: float = 300.0
    """Without an acknowledgement of anything by the other machine."""


class Admission(ABC):
    """Decides which connections and requests are served."""

    @abstractmethod
    def identify(self, transport: Transport) -> Peer:
        """Raises the SkerryError that all requests of the connection are answered with."""

    @abstractmethod
    def share(self, tenant: str, instead_of: str | None) -> bool:
        """Count a connection for a tenant, no longer for another. False if its share is used up: then for none."""

    @abstractmethod
    def leave(self, tenant: str) -> None:
        """A connection that was counted for this tenant has ended."""

    @abstractmethod
    def check(self, scope: Scope, target: bytes) -> None:
        """Check the head of a request, and its target as sent. Raises the SkerryError that it is answered with."""


class Activity:
    """The connections and requests of a server."""

    def __init__(self) -> None:
        self.connections: set[Any] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.served = 0
        """Responses that were completed."""
        self.ended = asyncio.Event()
        """Set when a connection or a request ends."""

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._done)

    def discard(self, connection: Any) -> None:
        self.connections.discard(connection)
        self.ended.set()

    def _done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        self.ended.set()


class HttpProtocol(asyncio.Protocol):
    """`lost` is done when the connection has ended, also as a WebSocket. The `on_` methods are for the parser."""

    transport: Transport
    _feed: Feed
    _scope: Scope

    def __init__(self, app: ASGIApp, admission: Admission, timeouts: Timeouts, activity: Activity) -> None:
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = self._loop.create_future()
        self.lost.add_done_callback(self._leave)
        self.writable = asyncio.Event()
        """Cleared while the transport's buffer is full."""
        self.writable.set()
        self.state: dict[str, Any] = {}
        """Of the connection, for the `state` of its requests."""
        self._app = app
        self._admission = admission
        self._timeouts = timeouts
        self._activity = activity
        self._parser: Any = httptools.HttpRequestParser(self)
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] | None = None
        """Of the head that is being parsed; None after its end, so that trailers are dropped."""
        self._queue: deque[HttpExchange] = deque()
        """Requests that were not answered; the first one is being served."""
        self._newest: HttpExchange | None = None
        """The last request whose head was complete."""
        self._upgraded = False
        self._tenant: str | None = None
        """The tenant that the connection counts for: that of its last request."""
        self._slow: TimerHandle | None = None
        """Ends a head, or a body, that takes too long."""
        self._idle: TimerHandle | None = None
        self._heard = 0.0
        self._kept = 0
        """Bytes since the parser last reported something."""

    # ---- for the transport ----

    def connection_made(self, transport: BaseTransport) -> None:
        self.transport = cast(Transport, transport)
        self._feed = Feed(self.transport, self._parse, self._takes_more, self._line)
        self._activity.connections.add(self)
        self._local, self._remote = _addresses(self.transport)
        self._scheme = "https" if transport.get_extra_info("sslcontext") else "http"
        self.state = {
            CUT: self.transport.abort,
            LOST: self.lost,
            GONE: self._gone,
            SHARE: self._share,
            LINE: self._line,
        }
        try:
            self.state[PEER] = self._admission.identify(self.transport)
        except SkerryError as error:
            self._app = _Refusal(error)
        self._expect_head()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_waiting()
        self._stop_idling()
        self._feed.drop()
        for exchange in self._queue:
            exchange.disconnect()
        self._queue.clear()
        self.writable.set()
        self._parser = None  # breaks the reference cycle
        self._activity.discard(self)
        self.end()

    def end(self) -> None:
        """Resolve `lost`. Also for a connection that was never made."""
        if not self.lost.done():
            self.lost.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._heard = self._loop.time()
        self._stop_idling()
        self._feed.take(data)

    def eof_received(self) -> None:
        """The transport closes itself."""

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    # ---- for the server ----

    def shutdown(self) -> None:
        """Close when the request under way, if any, is answered."""
        if self._queue:
            self._queue[0].keep_alive = False
        else:
            self.transport.close()

    # ---- for exchanges ----

    def resume_body(self) -> None:
        self._feed.resume()

    def response_complete(self) -> None:
        self._activity.served += 1
        if self._queue:  # else the connection was lost
            self._queue.popleft()
        if self.transport.is_closing():
            return
        self._feed.resume()
        if self._queue:
            self._activity.run(self._queue[0].run())
        else:
            self._stop_idling()
            # Not `close`: that would wait until everything is sent, to a client that may not read it.
            self._idle = self._loop.call_later(self._timeouts.idle, self.transport.abort)
        self._feed.go_on()

    # ---- for the application, by way of the state ----

    def _gone(self) -> bool:
        if self.lost.done() or self.transport.is_closing():
            return True
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        return bool(poll.poll(0))

    def _share(self, tenant: str) -> bool:
        if tenant == self._tenant:
            return True
        if self.lost.done():
            return False
        granted = self._admission.share(tenant, self._tenant)
        self._tenant = tenant if granted else None
        return granted

    def _leave(self, _: object) -> None:
        if self._tenant is not None:
            self._admission.leave(self._tenant)

    def _line(self) -> Line:
        """The queue of the tenant that is charged for the bytes of this connection."""
        peer: Peer | None = self.state.get(PEER)
        if self._tenant is not None or (peer is not None and peer.trusted):
            return lines().of(self._tenant or DEFAULT_TENANT)
        return lines().of_stranger(peer.host if peer is not None else "")

    # ---- parsing ----

    def _takes_more(self) -> bool:
        """Not while parsed requests wait, nor after the end of HTTP on this connection."""
        return len(self._queue) < 2 and not self._upgraded and not self.transport.is_closing()

    @property
    def _last(self) -> bool:
        """True after a complete request that is the last of its connection: what follows is ignored."""
        newest = self._newest
        return newest is not None and not newest.more_body and not newest.keep_alive

    def _parse(self, data: bytes) -> None:
        if self._last:
            return
        self._kept += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._upgraded:
                self._upgrade(early=upgrade.args[0] < len(data) or self._feed.waits)
            return
        except httptools.HttpParserError:
            if not self._last:
                self._fail(InvalidRequest(INVALID))
            return
        if self._kept > HEAD_MAX and not self._last:
            self._fail(LimitReached(f"the head of a request is larger than {HEAD_MAX} bytes"))
        if self._slow is not None or self.transport.is_closing():
            return
        if self._newest is None or self._newest.complete:
            if self._idle is None:  # else the data was a whole request, answered already
                self._expect_head()
        elif self._newest.more_body:
            self._expect_body(self._timeouts.body)

    def on_message_begin(self) -> None:
        self._target = b""
        self._headers = []

    def on_url(self, target: bytes) -> None:
        self._target += target

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._headers is not None:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._kept = 0
        self._stop_waiting()
        headers, self._headers = self._headers or [], None
        version = self._parser.get_http_version()
        method = self._parser.get_method().decode("ascii")
        keep_alive = version == "1.1" and self._parser.should_keep_alive()
        scope = self._make_scope(method, version, headers)
        app = self._app
        try:
            self._admission.check(scope, self._target)
            _check_framing(headers, version)
            if self._parser.should_upgrade():
                keep_alive = False
                if self._becomes_websocket(headers):
                    self._scope = scope
                    self._upgraded = True
                    return
        except SkerryError as error:
            app, keep_alive = _Refusal(error), False
            self._app = app
        expects = any(name == b"expect" and value.lower() == b"100-continue" for name, value in headers)
        exchange = HttpExchange(self, app, scope, keep_alive=keep_alive, expects_continue=expects)
        self._newest = exchange
        self._queue.append(exchange)
        if len(self._queue) == 1:
            self._activity.run(exchange.run())

    def on_body(self, body: bytes) -> None:
        self._kept = 0
        if self._newest is not None and self._newest.take_body(body):
            self._feed.pause()

    def on_message_complete(self) -> None:
        if self._newest is not None and not self._upgraded:
            self._newest.end_body()

    def _make_scope(self, method: str, version: str, headers: list[tuple[bytes, bytes]]) -> Scope:
        """Raises what the parser of the URL does; that of the request turns it into its own error."""
        url = httptools.parse_url(self._target)
        path = url.path.decode("ascii")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "server": self._local,
            "client": self._remote,
            "scheme": self._scheme,
            "root_path": "",
            "method": method,
            "path": unquote(path) if "%" in path else path,
            "raw_path": url.path,
            "query_string": url.query or b"",
            "headers": headers,
            "state": self.state.copy(),
        }

    def _becomes_websocket(self, headers: list[tuple[bytes, bytes]]) -> bool:
        """For a request to upgrade; one to another protocol is answered as a last request of HTTP/1.1.

        Raises InvalidRequest for one with a body, which the parser skips and would read as the next request, and for a
        WebSocket while a request is under way, which would never learn that the connection was lost.
        """
        given = dict(headers)
        if b"transfer-encoding" in given or given.get(b"content-length", b"0").strip(b"0"):
            raise InvalidRequest("a request to upgrade the connection has no body")
        if given.get(b"upgrade", b"").lower() != b"websocket" or isinstance(self._app, _Refusal):
            return False
        if self._queue:
            raise InvalidRequest("a connection becomes a WebSocket between two requests")
        return True

    def _upgrade(self, *, early: bool) -> None:
        if early:
            self._fail(InvalidRequest("a client of a WebSocket waits for the answer before it sends more"))
            return
        self._feed.drop()
        websocket = WebSocketProtocol(self._app, self._scope, self._target, self._activity, self.writable)
        self.transport.set_protocol(websocket)
        websocket.connection_made(self.transport)
        self._activity.discard(self)

    # ---- time ----

    def _expect_head(self) -> None:
        self._slow = self._loop.call_later(self._timeouts.head, self._too_slow, "the head of a request")

    def _expect_body(self, seconds: float) -> None:
        self._slow = self._loop.call_later(seconds, self._look_at_body)

    def _stop_waiting(self) -> None:
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None

    def _stop_idling(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _look_at_body(self) -> None:
        self._slow = None
        newest = self._newest
        if newest is None or newest.complete or not newest.more_body:
            return
        # The client is not slow while we take nothing.
        if self._feed.paused or self._feed.waits or newest is not self._queue[0] or newest.expects_continue:
            self._heard = self._loop.time()
        left = self._heard + self._timeouts.body - self._loop.time()
        if left > 0:
            self._expect_body(left)
        else:
            self._too_slow("the body of a request")

    def _too_slow(self, what: str) -> None:
        self._slow = None
        self._fail(TooSlow(f"{what} took too long"))

    # ---- errors ----

    def _fail(self, error: SkerryError) -> None:
        """End the connection, with this answer unless another has begun."""
        if self._queue and self._queue[0].started:
            self.transport.abort()
            return
        for exchange in self._queue:
            exchange.disconnect()
        answer = problem(error)
        head = b"".join(b"%s: %s\r\n" % pair for pair in answer.raw_headers)
        start = b"HTTP/1.1 %d \r\n%bconnection: close\r\n\r\n" % (error.status, head)
        self.transport.write(start + bytes(answer.body))
        self.transport.close()


class _Refusal:
    """An application that answers everything with one error, and closes."""

    def __init__(self, error: SkerryError) -> None:
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = problem(self._error)
        answer.headers["connection"] = "close"
        await answer(scope, receive, send)


def _check_framing(headers: list[tuple[bytes, bytes]], version: str) -> None:
    """Refuse what a proxy before us may have read differently. Raises InvalidRequest.

    The parser refuses a repeated Content-Length, one beside a Transfer-Encoding, bare CR or LF, and folded lines.
    """
    if version not in ("1.0", "1.1"):
        raise InvalidRequest(f"HTTP/{version} is not spoken here", hint="use HTTP/1.1")
    codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    if codings and (codings != [b"chunked"] or version == "1.0"):
        raise InvalidRequest("the only Transfer-Encoding is chunked, of HTTP/1.1")


def _addresses(transport: Transport) -> tuple[Any, Any]:
    """The local and the remote address, as ASGI has them."""
    sock = transport.get_extra_info("socket")
    try:
        local, remote = sock.getsockname(), sock.getpeername()
    except (OSError, AttributeError):  # gone again
        return None, None
    return (local[:2], remote[:2]) if isinstance(local, tuple) else ((local, None), None)
