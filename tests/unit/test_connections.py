"""What a connection does with bytes that nobody asked for."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from skerry.daemon.connections import Http, Patience, Porter, WebSocket
from skerry.daemon.http.attach import LOST
from skerry.daemon.intake import LEAST, MOST, Intake
from skerry.daemon.peers import LINE, Peer, take_share
from skerry.fairness import SLICE, budget, lines
from tests.unit.stubs import asynchronous


class Anybody(Porter):
    def greet(self, transport: asyncio.Transport) -> Peer:
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

    def write(self, data: Any) -> None:
        self.answered.set()
        self.answers += bytes(data).count(b"HTTP/1.1 400")

    def pause_reading(self) -> None:
        self.reading.clear()

    def resume_reading(self) -> None:
        self.reading.set()

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True


async def refuses(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers without a look at the body."""
    take_share(scope, "tenant")
    await send({"type": "http.response.start", "status": 400, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def connected(pipe: Pipe) -> Http:
    config = uvicorn.Config(refuses, lifespan="off", log_config=None)
    config.load()
    connection = Http(Anybody(), Patience(), config, ServerState(), asyncio.get_running_loop())
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
    assert len(connection.pipeline) < MOST // 20
    assert not pipe.reading.is_set()
    most = 0
    while pipe.answers < count:
        most = max(most, len(connection.pipeline))
        await asyncio.wait(
            asyncio.all_tasks() - {asyncio.current_task()}, return_when=asyncio.FIRST_COMPLETED
        )
    assert most < MOST // 20
    connection.connection_lost(None)


@asynchronous
async def test_what_takes_long_to_parse_comes_in_small_pieces() -> None:
    pieces: list[bytes] = []
    seen = asyncio.Event()

    def feed(piece: bytes) -> None:
        pieces.append(piece)
        until = time.perf_counter() + 2 * SLICE
        while time.perf_counter() < until:
            pass
        if sum(map(len, pieces)) == len(data):
            seen.set()

    data = bytes(range(256)) * 64
    pipe = Pipe()
    intake = Intake(pipe, feed, lambda: True, lambda: lines().of("tenant"))
    intake.take(data)
    assert pieces == [data[:MOST]]
    assert not pipe.reading.is_set()
    await seen.wait()
    assert b"".join(pieces) == data
    assert {len(piece) for piece in pieces[1:]} == {LEAST}
    await pipe.reading.wait()


@asynchronous
async def test_nothing_is_parsed_while_the_protocol_is_not_ready() -> None:
    pieces: list[bytes] = []
    ready = False
    pipe = Pipe()
    intake = Intake(pipe, pieces.append, lambda: ready, lambda: lines().of("tenant"))
    intake.take(b"a")
    intake.take(b"b")
    assert (pieces, pipe.reading.is_set()) == ([], False)
    ready = True
    intake.pause_reading()
    intake.go_on()
    assert not intake._turn
    intake.resume_reading()
    await pipe.reading.wait()
    assert pieces == [b"ab"]


@asynchronous
async def test_failure_of_the_parser_ends_the_connection() -> None:
    def feed(piece: bytes) -> None:
        if len(pieces) == 1:
            raise ValueError("mine")
        pieces.append(piece)

    pieces: list[bytes] = []
    pipe = Pipe()
    intake = Intake(pipe, feed, lambda: True, lambda: lines().of("tenant"))
    lines().of("tenant").flow.spend(0.1)
    intake.take(b"a")
    intake.take(b"b")
    waiting = intake._turn
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
    config = uvicorn.Config(closes, lifespan="off", log_config=None)
    config.load()
    loop = asyncio.get_running_loop()
    state = {LINE: lambda: lines().of("tenant"), LOST: loop.create_future()}
    server = ServerState()
    websocket = WebSocket(config, server, state, loop)
    websocket.connection_made(pipe)
    websocket.data_received(
        b"GET / HTTP/1.1\r\nhost: a\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    await asyncio.wait(server.tasks)
    assert not pipe.closed
    websocket.data_received(b"\x88\x82\0\0\0\0\x03\xe8")  # a close frame with the code 1000
    assert pipe.closed
    websocket.connection_lost(None)
