"""HTTP/1.1 and WebSockets on a transport of our own: framing, order, pace, and what is refused."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, cast

import pytest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from skerry.daemon.http1.feed import PIECE_MAX, PIECE_MIN, Feed
from skerry.daemon.http1.protocol import Activity, Admission, HttpProtocol, Timeouts
from skerry.daemon.http1.websocket import WebSocketProtocol
from skerry.daemon.peers import Peer, take_share
from skerry.errors import DaemonUnavailable
from skerry.fairness import SLICE, budget, lines
from tests.unit.stubs import asynchronous

UPGRADE = (
    b"upgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)


class Anybody(Admission):
    def identify(self, transport: asyncio.Transport) -> Peer:
        return Peer("192.0.2.1", trusted=False)

    def share(self, tenant: str, instead_of: str | None) -> bool:
        return True

    def leave(self, tenant: str) -> None:
        pass

    def check(self, scope: Scope, target: bytes) -> None:
        pass


class Pipe(asyncio.Transport):
    """The client's end: whether something was written to it, and whether it is read from."""

    def __init__(self) -> None:
        super().__init__()
        self.answered = asyncio.Event()
        self.answers = 0
        self.aborted = self.closed = False
        self.reading = asyncio.Event()
        self.reading.set()
        self.written = b""
        self.protocol: asyncio.BaseProtocol | None = None

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def write(self, data: Any) -> None:
        self.answered.set()
        self.written += data
        self.answers += bytes(data).count(b"HTTP/1.1 400")

    def pause_reading(self) -> None:
        self.reading.clear()

    def resume_reading(self) -> None:
        self.reading.set()

    def is_closing(self) -> bool:
        return self.closed or self.aborted

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True


async def refuses(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers without a look at the body."""
    take_share(scope, "tenant")
    await send({"type": "http.response.start", "status": 400, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def connected(pipe: Pipe, app: ASGIApp = refuses) -> HttpProtocol:
    connection = HttpProtocol(app, Anybody(), Timeouts(), Activity())
    connection.connection_made(pipe)
    return connection


@asynchronous
async def test_the_rest_of_a_refused_body_is_read_in_turns() -> None:
    pipe = Pipe()
    connection = connected(pipe)
    size = 1 << 20
    connection.data_received(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % size)
    await pipe.answered.wait()
    connection.data_received(bytes(size // 4))
    await pipe.reading.wait()
    lines().of("tenant").flow.spend(0.1)
    budget().flow("other").spend(0.0001)
    connection.data_received(bytes(size // 4))
    assert not pipe.reading.is_set()
    await pipe.reading.wait()
    connection.data_received(bytes(size // 2))
    connection.connection_lost(None)


@asynchronous
async def test_requests_that_come_at_once_are_parsed_a_few_at_a_time() -> None:
    pipe = Pipe()
    connection = connected(pipe)
    count = 2000
    connection.data_received(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n" * count)
    assert len(connection._queue) < PIECE_MAX // 20
    assert not pipe.reading.is_set()
    most = 0
    while pipe.answers < count:
        most = max(most, len(connection._queue))
        await asyncio.wait(
            asyncio.all_tasks() - {asyncio.current_task()}, return_when=asyncio.FIRST_COMPLETED
        )
    assert most < PIECE_MAX // 20
    connection.connection_lost(None)


@asynchronous
async def test_what_takes_long_to_parse_comes_in_small_pieces() -> None:
    pieces: list[bytes] = []
    seen = asyncio.Event()

    def parse(piece: bytes) -> None:
        pieces.append(piece)
        until = time.perf_counter() + 2 * SLICE
        while time.perf_counter() < until:
            pass
        if sum(map(len, pieces)) == len(data):
            seen.set()

    data = bytes(range(256)) * 64
    pipe = Pipe()
    feed = Feed(pipe, parse, lambda: True, lambda: lines().of("tenant"))
    feed.take(data)
    assert pieces == [data[:PIECE_MAX]]
    assert not pipe.reading.is_set()
    await seen.wait()
    assert b"".join(pieces) == data
    assert {len(piece) for piece in pieces[1:]} == {PIECE_MIN}
    await pipe.reading.wait()


@asynchronous
async def test_nothing_is_parsed_while_the_protocol_is_not_ready() -> None:
    pieces: list[bytes] = []
    ready = False
    pipe = Pipe()
    feed = Feed(pipe, pieces.append, lambda: ready, lambda: lines().of("tenant"))
    feed.take(b"a")
    feed.take(b"b")
    assert (pieces, pipe.reading.is_set()) == ([], False)
    ready = True
    feed.pause()
    feed.go_on()
    assert not feed._turn
    feed.resume()
    await pipe.reading.wait()
    assert pieces == [b"ab"]


@asynchronous
async def test_failure_of_the_parser_ends_the_connection() -> None:
    def parse(piece: bytes) -> None:
        if len(pieces) == 1:
            raise ValueError("mine")
        pieces.append(piece)

    pieces: list[bytes] = []
    pipe = Pipe()
    feed = Feed(pipe, parse, lambda: True, lambda: lines().of("tenant"))
    lines().of("tenant").flow.spend(0.1)
    feed.take(b"a")
    feed.take(b"b")
    waiting = feed._turn
    assert waiting is not None
    with pytest.raises(ValueError, match="mine"):
        await waiting
    assert pipe.aborted


async def closes(scope: Scope, receive: Receive, send: Send) -> None:
    """Ends a WebSocket as soon as it is open."""
    await receive()
    await send({"type": "websocket.accept"})
    await send({"type": "websocket.close"})


@asynchronous
async def test_websocket_ends_when_the_peer_has_answered_the_close() -> None:
    pipe = Pipe()
    connection = connected(pipe, closes)
    connection.data_received(b"GET / HTTP/1.1\r\nhost: a\r\n" + UPGRADE + b"\r\n")
    assert pipe.protocol is not connection
    websocket = cast(asyncio.Protocol, pipe.protocol)
    await asyncio.wait(connection._activity.tasks)
    assert pipe.written.startswith(b"HTTP/1.1 101 ")
    assert not pipe.closed
    websocket.data_received(b"\x88\x82\0\0\0\0\x03\xe8")  # a close frame with the code 1000
    assert pipe.closed
    websocket.connection_lost(None)
    assert connection.lost.done()


async def echoes(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the target, the header `x`, and the body."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message["body"], message["more_body"]
    headers = dict(scope["headers"])
    body = b"%b %b %b" % (scope["raw_path"], headers.get(b"x", b"-"), body)
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]}
    )
    await send({"type": "http.response.body", "body": body})


TURNS = 50


async def answers_to(data: bytes, app: ASGIApp = echoes, *, piece: int = 1 << 20) -> list[bytes]:
    """All responses to these bytes, sent in pieces; the last item is `closed` if the connection was closed."""
    pipe = Pipe()
    connection = connected(pipe, app)
    for at in range(0, len(data), piece):
        connection.data_received(data[at : at + piece])
        turns = 0
        while (
            busy := {*connection._activity.tasks, *filter(None, [connection._feed._turn])}
        ) and turns < TURNS:
            # However busy the machine is: in so many turns, whatever does not wait for more of the data has been done.
            waits = connection._feed._turn is None and all(each.more_body for each in connection._queue)
            turns = turns + 1 if waits else 0
            await asyncio.wait(busy, timeout=0.02 / TURNS)
    connection.connection_lost(None)
    found = [b"HTTP/1.1 " + each for each in pipe.written.split(b"HTTP/1.1 ")[1:]]
    return [*found, b"closed"] if pipe.closed or pipe.aborted else found


SMUGGLING = {
    "two lengths": b"content-length: 5\r\ncontent-length: 5\r\n\r\n",
    "different lengths": b"content-length: 5\r\ncontent-length: 50\r\n\r\n",
    "list of lengths": b"content-length: 5, 5\r\n\r\n",
    "signed length": b"content-length: +5\r\n\r\n",
    "hexadecimal length": b"content-length: 0x5\r\n\r\n",
    "length that overflows": b"content-length: 18446744073709551621\r\n\r\n",
    "length and chunks": b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
    "chunked twice": b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked is not last": b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "other coding": b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "unknown coding": b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "vertical tab": b"transfer-encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
    "space before the colon": b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
    "folded line": b"x: a\r\n b\r\n\r\n",
    "folded length": b"content-length:\r\n 5\r\n\r\n",
    "line begins with a space": b" x: a\r\n\r\n",
    "bare LF": b"x: a\ny: b\r\n\r\n",
    "bare LF ends the head": b"x: a\r\n\n",
    "bare CR": b"x: a\rtransfer-encoding: chunked\r\n\r\n",
    "NUL": b"x: a\0b\r\n\r\n",
    "chunk size with 0x": b"transfer-encoding: chunked\r\n\r\n0x1\r\na\r\n0\r\n\r\n",
    "chunk size with a space": b"transfer-encoding: chunked\r\n\r\n1 \r\na\r\n0\r\n\r\n",
    "chunk size that overflows": b"transfer-encoding: chunked\r\n\r\n10000000000000001\r\na\r\n0\r\n\r\n",
    "bare LF after a chunk size": b"transfer-encoding: chunked\r\n\r\n1\na\r\n0\r\n\r\n",
    "bare LF in an extension": b"transfer-encoding: chunked\r\n\r\n1;a\n=b\r\na\r\n0\r\n\r\n",
    "no end of a chunk": b"transfer-encoding: chunked\r\n\r\n1\r\naX0\r\n\r\n",
    "upgrade with a length": b"upgrade: x\r\nconnection: upgrade\r\ncontent-length: 5\r\n\r\n",
    "upgrade with chunks": b"upgrade: x\r\nconnection: upgrade\r\ntransfer-encoding: chunked\r\n\r\n",
    "WebSocket with a length": UPGRADE + b"content-length: 5\r\n\r\n",
}


@pytest.mark.parametrize("name", SMUGGLING)
@pytest.mark.parametrize("piece", [1 << 20, 1], ids=["at once", "by byte"])
@asynchronous
async def test_ambiguous_request_is_refused_and_ends_the_connection(name: str, piece: int) -> None:
    """What follows is never taken for another request."""
    hidden = b"GET /hidden HTTP/1.1\r\nhost: a\r\n\r\n"
    request = b"POST /first HTTP/1.1\r\nhost: a\r\n" + SMUGGLING[name] + hidden
    refused, closed = await answers_to(request, piece=piece)
    assert refused.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in refused
    assert closed == b"closed"


@pytest.mark.parametrize(
    "line",
    [
        b"GET /",
        b"GET / HTTP/0.9",
        b"GET / HTTP/2.0",
        b"GET / HTTP/1.2",
        b"GET / HTTP/1.1 ",
        b"get / HTTP/1.1",
    ],
)
@asynchronous
async def test_other_versions_and_request_lines_are_refused(line: bytes) -> None:
    refused, closed = await answers_to(line + b"\r\nhost: a\r\n\r\n")
    assert refused.startswith(b"HTTP/1.1 400 ")
    assert closed == b"closed"


@asynchronous
async def test_chunks_of_http_1_0_are_refused() -> None:
    found = await answers_to(b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n")
    assert found[0].startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("piece", [1 << 20, 1, 7])
@asynchronous
async def test_bodies_are_framed_however_they_arrive(piece: int) -> None:
    data = (
        b"POST /a HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\n\r\nabc"
        b"POST /b HTTP/1.1\r\nhost: a\r\nTransfer-Encoding: Chunked\r\n\r\n2;x=y\r\nde\r\n1\r\nf\r\n0\r\nx: t\r\n\r\n"
        b"GET /c%20?d HTTP/1.1\r\nhost: a\r\n\r\n"
        b"GET /e HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\nGET /f HTTP/1.1\r\nhost: a\r\n\r\n"
    )
    found = await answers_to(data, piece=piece)
    # A trailer is no header, and nothing follows the last request.
    assert [each.partition(b"\r\n\r\n")[2] for each in found[:-1]] == [
        b"/a - abc",
        b"/b - def",
        b"/c%20 - ",
        b"/e - ",
    ]
    assert found[-1] == b"closed"
    assert b"connection: close" in found[-2]


@asynchronous
async def test_upgrade_to_an_unknown_protocol_is_the_last_request() -> None:
    data = b"GET /a HTTP/1.1\r\nhost: a\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\nGET /b HTTP/1.1\r\n\r\n"
    answered, closed = await answers_to(data)
    assert answered.endswith(b"/a - ")
    assert closed == b"closed"


@asynchronous
async def test_nothing_is_parsed_behind_an_upgrade_that_is_being_answered() -> None:
    paths: list[str] = []

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        paths.append(scope["path"])
        while (await receive())["type"] != "http.disconnect":
            pass

    pipe = Pipe()
    connection = connected(pipe, waits)
    connection.data_received(b"GET /a HTTP/1.1\r\nhost: a\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n")
    connection.data_received(b"GET /b HTTP/1.1\r\nhost: a\r\n\r\n")
    assert len(connection._queue) == 1
    await asyncio.sleep(0)
    connection.connection_lost(None)
    await asyncio.wait(connection._activity.tasks)
    assert paths == ["/a"]


@asynchronous
async def test_frames_before_the_handshake_are_refused() -> None:
    refused, closed = await answers_to(b"GET / HTTP/1.1\r\nhost: a\r\n" + UPGRADE + b"\r\n\x81\x80\0\0\0\0")
    assert refused.startswith(b"HTTP/1.1 400 ")
    assert closed == b"closed"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"x", b"a\r\ny: b"),
        (b"x", b"a\nb"),
        (b"x\r\ny", b"a"),
        (b"x y", b"a"),
        (b"transfer-encoding", b"chunked"),
    ],
)
@asynchronous
async def test_header_that_would_split_the_response_is_an_internal_error(name: bytes, value: bytes) -> None:
    async def splits(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(name, value)]})

    failed, closed = await answers_to(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", splits)
    assert failed.startswith(b"HTTP/1.1 500 ")
    assert closed == b"closed"


@pytest.mark.parametrize("size", [1, 3])
@asynchronous
async def test_response_of_another_length_than_promised_ends_the_connection(size: int) -> None:
    async def wrong(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": bytes(size)})

    request = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
    found = await answers_to(request + request, wrong)
    assert found[1:] == [b"closed"]
    assert found[0].endswith(b"content-length: 2\r\n\r\n")


@asynchronous
async def test_error_is_not_written_into_a_response_that_has_begun() -> None:
    begun = asyncio.Event()

    async def streams(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"part", "more_body": True})
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass

    pipe = Pipe()
    connection = connected(pipe, streams)
    connection.data_received(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    await begun.wait()
    connection.data_received(b"no HTTP\r\n\r\n")
    assert pipe.aborted
    assert pipe.written.endswith(b"4\r\npart\r\n")
    connection.connection_lost(None)
    await asyncio.wait(connection._activity.tasks)


@asynchronous
async def test_lost_connection_is_told_to_the_request_under_way_and_ends_those_behind_it() -> None:
    paths: list[str] = []

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        paths.append(scope["path"])
        while (await receive())["type"] != "http.disconnect":
            pass

    pipe = Pipe()
    connection = connected(pipe, waits)
    connection.data_received(b"GET /a HTTP/1.1\r\nhost: a\r\n\r\nGET /b HTTP/1.1\r\nhost: a\r\n\r\n")
    await asyncio.sleep(0)
    connection.connection_lost(None)
    await asyncio.wait(connection._activity.tasks)
    assert paths == ["/a"]
    assert not pipe.written


@asynchronous
async def test_client_that_expects_it_is_told_to_continue() -> None:
    pipe = Pipe()
    connection = connected(pipe, echoes)
    connection.data_received(
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\nexpect: 100-continue\r\n\r\n"
    )
    await pipe.answered.wait()
    assert pipe.written == b"HTTP/1.1 100 Continue\r\n\r\n"
    connection.data_received(b"x")
    await asyncio.wait(connection._activity.tasks)
    assert pipe.written.endswith(b"/ - x")
    connection.connection_lost(None)


@asynchronous
async def test_websocket_may_be_denied_with_a_response() -> None:
    async def denies(scope: Scope, receive: Receive, send: Send) -> None:
        answer = Response(b"{}", 404, {"x": "y", "connection": "close"})
        await WebSocket(scope, receive, send).send_denial_response(answer)

    denied, closed = await answers_to(b"GET / HTTP/1.1\r\nhost: a\r\n" + UPGRADE + b"\r\n", denies)
    assert denied == b"HTTP/1.1 404 Not Found\r\nconnection: close\r\nx: y\r\ncontent-length: 2\r\n\r\n{}"
    assert closed == b"closed"


@asynchronous
async def test_handshake_that_meets_the_end_of_the_daemon_can_be_tried_again() -> None:
    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "websocket.connect"
        assert (await receive())["type"] == "websocket.disconnect"

    pipe = Pipe()
    connection = connected(pipe, waits)
    connection.data_received(b"GET / HTTP/1.1\r\nhost: a\r\n" + UPGRADE + b"\r\n")
    cast(WebSocketProtocol, pipe.protocol).shutdown()
    assert pipe.written.startswith(b"HTTP/1.1 503 ")
    assert json.loads(pipe.written.partition(b"\r\n\r\n")[2])["code"] == DaemonUnavailable.code
    await asyncio.wait(connection._activity.tasks)


@asynchronous
async def test_failure_before_the_handshake_is_an_internal_error() -> None:
    async def fails(scope: Scope, receive: Receive, send: Send) -> None:
        raise ValueError("mine")

    failed, closed = await answers_to(b"GET / HTTP/1.1\r\nhost: a\r\n" + UPGRADE + b"\r\n", fails)
    assert failed.startswith(b"HTTP/1.1 500 ")
    assert closed == b"closed"


@asynchronous
async def test_fragments_pings_and_text_of_a_websocket() -> None:
    received: list[Message] = []

    async def collects(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while not received or received[-1]["type"] == "websocket.receive":
            received.append(await receive())

    pipe = Pipe()
    connection = connected(pipe, collects)
    connection.data_received(b"GET / HTTP/1.1\r\nhost: a\r\n" + UPGRADE + b"\r\n")
    await pipe.answered.wait()
    websocket = cast(asyncio.Protocol, pipe.protocol)
    key = b"\0\0\0\0"
    frames = [
        b"\x01\x81" + key + b"a",
        b"\x89\x81" + key + b"p",
        b"\x80\x81" + key + b"b",
        b"\x82\x81" + key + b"\xff",
    ]
    websocket.data_received(b"".join(frames) + b"\x81\x81" + key + b"\xff")  # the last one is no UTF-8
    await asyncio.wait(connection._activity.tasks)
    assert received[:2] == [
        {"type": "websocket.receive", "text": "ab"},
        {"type": "websocket.receive", "bytes": b"\xff"},
    ]
    assert received[2]["code"] == 1007
    assert b"\x8a\x01p" in pipe.written
    assert pipe.closed
    websocket.connection_lost(None)
