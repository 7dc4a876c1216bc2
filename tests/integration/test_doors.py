"""The doors of the daemon, with a small application behind them: who comes in, and who is waited for."""

from __future__ import annotations

import asyncio
import errno
import functools
import json
import os
import socket
import ssl
import subprocess
import sys
import tempfile
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from skerry.daemon import doors
from skerry.daemon.doors import Door, TcpDoor, UnixDoor
from skerry.daemon.http import answers
from skerry.daemon.http1.protocol import Timeouts
from skerry.daemon.listening import open_doors
from skerry.daemon.peers import CUT, cut_of, peer_of, take_share
from skerry.daemon.server import Server
from skerry.errors import InvalidRequest
from skerry.manager.capacity import SharedCapacity
from tests import certificates
from tests.support import require

SHORT = Timeouts(handshake=0.4, head=0.4, body=0.4)
LONG = Timeouts()
SECONDS = 20.0
"""For a whole test: what is never cut off would never end."""
KINDS = ("unix", "tcp", "tls")
UPGRADE = "upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\n"
UPGRADE += "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """`/stream` never ends, `/cut` ends its connection, `/held` is large and held in memory, `/tenant/NAME` counts for
    a tenant, everything else says who is there and what came."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        if scope["path"] == "/cut":
            cut_of(scope)()
        while (await receive())["type"] != "websocket.disconnect":
            pass
        return
    if scope["path"] == "/held":
        await answers.reply({"held": "x" * (8 << 20)})(scope, receive, send)
        return
    if scope["path"].startswith("/tenant/"):
        got = take_share(scope, scope["path"].removeprefix("/tenant/"))
        await answer(send, json.dumps({"got": got}).encode())
        return
    if scope["path"] == "/early":
        await answer(send, b"{}")
        return
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message["body"]), message["more_body"]
    if scope["path"] in ("/stream", "/cut"):
        await send({"type": "http.response.start", "status": 200})
        if scope["path"] == "/cut":
            cut_of(scope)()
        left = asyncio.create_task(gone(receive))
        while not left.done():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.sleep(0)
        return
    peer = peer_of(scope)
    transport = scope["state"][CUT].__self__
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE), (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)]
    sock = transport.get_extra_info("socket")
    kept = [sock.getsockopt(*option) for option in options] if sock.family != socket.AF_UNIX else []
    body = {"peer": peer.address, "trusted": peer.trusted, "size": size, "kept": kept}
    await answer(send, json.dumps(body).encode())


async def answer(send: Send, body: bytes) -> None:
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class House:
    """A server with one door, and the way there."""

    def __init__(self, kind: str, server: Server, door: Door, path: str) -> None:
        self.kind = kind
        self.server = server
        self.door = door
        self._path = path
        self._guests: list[StreamWriter] = []

    async def connect(
        self, *, handshake: bool = True, from_address: str = "127.0.0.1"
    ) -> tuple[StreamReader, StreamWriter]:
        if self.kind == "unix":
            reader, writer = await asyncio.open_unix_connection(self._path)
        else:
            context = None
            if self.kind == "tls" and handshake:
                context = ssl.create_default_context(cafile=certificates.make().ca)
            reader, writer = await asyncio.open_connection(
                *self.door.sock.getsockname()[:2], ssl=context, local_addr=(from_address, 0)
            )
        self._guests.append(writer)
        return reader, writer

    def clear(self) -> None:
        """End what a test that failed has left."""
        for writer in self._guests:
            writer.transport.abort()

    async def say(self, text: str | bytes, *, handshake: bool = True) -> tuple[StreamReader, StreamWriter]:
        """A connection on which this has been sent."""
        reader, writer = await self.connect(handshake=handshake)
        writer.write(text.encode() if isinstance(text, str) else text)
        await writer.drain()
        return reader, writer

    async def ask(self, path: str = "/", headers: str = "host: localhost\r\n") -> tuple[int, Any]:
        """One request on a connection of its own."""
        reader, writer = await self.say(f"GET {path} HTTP/1.1\r\n{headers}\r\n")
        try:
            return await response(reader)
        finally:
            await close(writer)


async def response(reader: StreamReader) -> tuple[int, Any]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
    return int(head.split(" ")[1]), json.loads(await reader.readexactly(length))


async def close(writer: StreamWriter) -> None:
    writer.transport.abort()
    with suppress(OSError):
        await writer.wait_closed()


async def ended(reader: StreamReader) -> bytes:
    """What still comes until the other side ends the connection."""
    data = b""
    with suppress(ConnectionError):
        while more := await reader.read(65536):
            data = (data + more)[-65536:]
    return data


@asynccontextmanager
async def house(kind: str, timeouts: Timeouts = LONG, most: int | None = None) -> AsyncIterator[House]:
    with tempfile.TemporaryDirectory(prefix="skerry-test-", dir="/tmp") as folder:
        path = f"{folder}/daemon.sock"
        door: Door
        if kind == "unix":
            sock = socket.socket(socket.AF_UNIX)
            sock.bind(path)
            sock.listen(1024)
            door = UnixDoor(sock)
        else:
            made = certificates.make() if kind == "tls" else None
            files = (made.cert, made.key) if made is not None else (None, None)
            (door,) = open_doors(["127.0.0.1:0"], ["skerry.test"], *files)
        door.most = most or door.most
        server = Server(application, [door], timeouts)
        server.start()
        found = House(kind, server, door, path)
        try:
            yield found
        finally:
            found.clear()
            await server.stop()


Test = Callable[..., Awaitable[None]]


def in_loop(test: Test) -> Callable[..., None]:
    """Run an async test in the daemon's kind of loop; an error that nobody retrieved fails it."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        unhandled: list[Any] = []

        async def main() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
            async with asyncio.timeout(SECONDS):
                await test(*args, **kwargs)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
        assert not unhandled

    return run


each_door = pytest.mark.parametrize("kind", KINDS)


@each_door
@in_loop
async def test_who_is_there(kind: str) -> None:
    async with house(kind) as there:
        status, body = await there.ask()
        assert status == 200
        if kind == "unix":
            assert body == {"peer": f"uid {os.geteuid()}", "trusted": True, "size": 0, "kept": []}
        else:
            assert body["peer"].startswith("127.0.0.1:")
            assert (body["trusted"], body["kept"]) == (False, [1, 30])


@each_door
@pytest.mark.parametrize("what", ["GET /cut HTTP/1.1\r\nhost: localhost\r\n", "websocket"])
@in_loop
async def test_a_connection_can_be_cut(kind: str, what: str) -> None:
    async with house(kind) as there:
        head = what if what != "websocket" else f"GET /cut HTTP/1.1\r\nhost: localhost\r\n{UPGRADE}"
        reader, writer = await there.say(f"{head}\r\n")
        await ended(reader)
        await close(writer)
        assert (await there.ask())[0] == 200


async def drip(writer: StreamWriter) -> None:
    """A head without an end, byte by byte."""
    with suppress(ConnectionError):
        while not writer.transport.is_closing():
            writer.write(b"x")
            await asyncio.sleep(0.1)


@each_door
@pytest.mark.slow
@in_loop
async def test_others_are_served_beside_200_slow_clients(kind: str) -> None:
    """50 that say nothing, 50 with a slow head, 50 with a slow body; and 50 that do not read, which may stay."""
    body = "POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\nab"
    async with house(kind, SHORT) as there:
        slow = [await there.connect(handshake=False) for _ in range(50)]
        slow += [await there.say("GET / HTTP/1.1\r\nx: ") for _ in range(50)]
        dripping = [asyncio.create_task(drip(writer)) for _, writer in slow[50:]]
        slow += [await there.say(body) for _ in range(50)]
        saying = [asyncio.create_task(ended(reader)) for reader, _ in slow]
        deaf = [await there.say("GET /stream HTTP/1.1\r\nhost: localhost\r\n\r\n") for _ in range(50)]
        for _ in range(20):
            assert (await there.ask())[0] == 200
        said = await asyncio.gather(*saying)
        told = [b'"code":"too_slow"' in answer for answer in said]
        # Of those that drip, a write that fails may come before the answer is read: that they ended is enough.
        assert all(told[100:])
        assert all(told[:50]) or kind == "tls"  # there is no way to say it before the handshake
        await asyncio.gather(*dripping)
        for _, writer in slow:
            await close(writer)
        assert (await there.ask())[0] == 200
        assert len(there.server.activity.connections) >= 50
        for _, writer in deaf:
            await close(writer)


@each_door
@in_loop
async def test_a_body_may_be_slow_while_it_gets_on(kind: str) -> None:
    async with house(kind, Timeouts(body=1.5)) as there:
        reader, writer = await there.say("POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 20\r\n\r\n")
        for _ in range(20):
            await asyncio.sleep(0.1)
            writer.write(b"x")
        assert (await response(reader))[1]["size"] == 20
        await close(writer)


@each_door
@pytest.mark.parametrize("more", [b"\r\n", b"GET"])
@in_loop
async def test_a_kept_connection_is_not_kept_for_a_few_bytes(kind: str, more: bytes) -> None:
    async with house(kind, SHORT) as there:
        reader, writer = await there.say("GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await response(reader))[0] == 200
        writer.write(more)
        assert b"408" in await ended(reader)
        await close(writer)


@each_door
@in_loop
async def test_a_body_that_nobody_waits_for(kind: str) -> None:
    """The answer came before it: what still trickles in keeps the connection no longer than a head would."""
    async with house(kind, SHORT) as there:
        reader, writer = await there.say(
            "POST /early HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9999\r\n\r\n"
        )
        assert (await response(reader))[0] == 200
        dripping = asyncio.create_task(drip(writer))
        await ended(reader)
        await dripping
        await close(writer)


@each_door
@pytest.mark.parametrize(
    "begin",
    [
        "GET / HTTP/1.1\r\nhost: localhost\r\nx: ",
        "GET /",
        "POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nx: ",
        "GET /stream HTTP/1.1\r\nhost: localhost\r\n\r\nGET / HTTP/1.1\r\nx: ",
    ],
    ids=["header", "path", "trailer", "second"],
)
@in_loop
async def test_a_head_without_end(kind: str, begin: str) -> None:
    """What the parser keeps until it is complete is kept in memory."""
    async with house(kind) as there:
        reader, writer = await there.say(begin)
        reading = asyncio.create_task(ended(reader))
        sent = 0
        with suppress(ConnectionError):
            while not reading.done() and sent < 16 << 20:
                writer.write(b"x" * 16384)
                sent += 16384
                await writer.drain()
                await asyncio.sleep(0)
        await reading
        await close(writer)


@each_door
@in_loop
async def test_no_websocket_while_a_request_is_under_way(kind: str) -> None:
    """Nobody would tell that one when the connection ends."""
    async with house(kind) as there:
        stream = "POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\n\r\nx"
        reader, writer = await there.say(f"{stream}GET / HTTP/1.1\r\nhost: localhost\r\n{UPGRADE}\r\n")
        assert (await response(reader))[0] == 200
        assert (await response(reader))[1]["code"] == "invalid_request"
        assert await ended(reader) == b""
        await close(writer)


@each_door
@in_loop
async def test_pings_whose_answers_are_not_read(kind: str) -> None:
    async with house(kind) as there:
        reader, writer = await there.say(f"GET / HTTP/1.1\r\nhost: localhost\r\n{UPGRADE}\r\n")
        assert b" 101 " in await reader.readline()
        (connection,) = there.server.activity.connections
        pings = (b"\x89\xfd" + bytes(4) + b"x" * 125) * 1000
        for _ in range(200):
            writer.write(pings)
            await writer.drain()
        assert connection.transport.get_write_buffer_size() < 1 << 20
        await close(writer)


@each_door
@in_loop
async def test_an_idle_connection_is_not_kept_for_ever(kind: str) -> None:
    async with house(kind, Timeouts(idle=0.2)) as there:
        reader, writer = await there.say("GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await response(reader))[0] == 200
        assert await ended(reader) == b""
        await close(writer)


@each_door
@in_loop
async def test_a_full_house(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "RESERVE", 2)
    async with house(kind, most=3 if kind == "unix" else 6) as there:  # an address has half of it
        inside = [await there.say("GET / HTTP/1.1\r\nhost: localhost\r\n\r\n") for _ in range(3)]
        for reader, _ in inside:
            assert (await response(reader))[0] == 200
        status, body = await there.ask()
        assert (status, body["code"], body["retryable"]) == (503, "daemon_unavailable", True)
        waiting = [await there.connect() for _ in range(2)]
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await there.ask()
        for _, writer in (*waiting, inside.pop()):
            await close(writer)
        while (await there.ask())[0] != 200:  # noqa: ASYNC110 (nothing here tells when the server has heard of it)
            await asyncio.sleep(0.01)
        for _, writer in inside:
            await close(writer)


@pytest.mark.parametrize("kind", ["tcp", "tls"])
@in_loop
async def test_one_address_cannot_take_all_connections(kind: str) -> None:
    async with house(kind, most=8) as there:
        inside = [await there.connect() for _ in range(4)]
        status, body = await there.ask()
        assert (status, body["message"]) == (503, "too many connections from 127.0.0.1")
        for _ in range(2):
            inside.append(await there.connect(from_address="127.0.0.2"))
        reader, writer = inside[-1]
        writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await response(reader))[0] == 200
        for _, writer in inside:
            await close(writer)
        while (await there.ask())[0] != 200:  # noqa: ASYNC110 (nothing here tells when the server has heard of it)
            await asyncio.sleep(0.01)


@each_door
@in_loop
async def test_one_tenant_cannot_take_all_connections(kind: str) -> None:
    async with house(kind, most=16) as there:  # 8 for one address

        async def of(tenant: str) -> tuple[bool, StreamReader, StreamWriter]:
            reader, writer = await there.say(f"GET /tenant/{tenant} HTTP/1.1\r\nhost: localhost\r\n\r\n")
            return (await response(reader))[1]["got"], reader, writer

        there.door._tenants = SharedCapacity(4)
        first = [await of("a") for _ in range(2)]
        assert all(got for got, _, _ in first)
        refused = await of("a")
        other = await of("b")
        assert (refused[0], other[0]) == (False, True)
        # A connection counts for the tenant of its last request, and for none when it has ended.
        _, reader, writer = other
        writer.write(b"GET /tenant/c HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await response(reader))[1]["got"]
        assert dict(there.door._tenants._taken) == {"a": 2, "c": 1}
        writer.write(f"GET / HTTP/1.1\r\nhost: localhost\r\n{UPGRADE}\r\n".encode())
        assert b" 101 " in await reader.readline()
        for _, _, writer in (*first, refused, other):
            await close(writer)
        while there.door._tenants.taken:  # noqa: ASYNC110 (as above)
            await asyncio.sleep(0.01)


@each_door
@in_loop
async def test_held_answer_that_nobody_reads_is_given_up(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "UNREAD_SECONDS", 0.3)
    async with house(kind) as there:
        _, writer = await there.say("GET /held HTTP/1.1\r\nhost: localhost\r\n\r\n")
        while there.server.activity.connections:  # noqa: ASYNC110 (as above)
            await asyncio.sleep(0.01)
        await close(writer)
        reader, writer = await there.say("GET /held HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        size = 0
        while size < 8 << 20:  # a slow reader gets all of it
            size += len(await reader.readexactly(1 << 20))
            await asyncio.sleep(0.05)
        await close(writer)


@pytest.mark.parametrize("kind", ["tls"])
@in_loop
async def test_handshakes_count(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that never speaks TLS takes a descriptor like any other."""
    monkeypatch.setattr(doors, "RESERVE", 0)
    async with house(kind, Timeouts(handshake=0.4), most=6) as there:
        slow = [await there.connect(handshake=False) for _ in range(3)]
        with pytest.raises(ConnectionError):
            await there.ask()
        for reader, writer in slow:
            await ended(reader)
            await close(writer)
        assert (await there.ask())[0] == 200


@each_door
@in_loop
async def test_without_descriptors_it_tries_again(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "TRY_AGAIN", 0.05)
    failed: list[bool] = []

    class Poor:
        """A socket that first has no descriptor to give."""

        def __init__(self, sock: socket.socket) -> None:
            self._sock = sock

        def __getattr__(self, name: str) -> Any:
            return getattr(self._sock, name)

        def accept(self) -> Any:
            if len(failed) < 2:
                failed.append(True)
                raise OSError(errno.EMFILE, "Too many open files")
            return self._sock.accept()

    async with house(kind) as there:
        there.door.sock = Poor(there.door.sock)  # type: ignore[assignment]
        assert (await there.ask())[0] == 200
        assert len(failed) == 2


@in_loop
async def test_a_machine_that_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with house("tcp", Timeouts(silence=0.2)) as there:
        silence = TcpDoor.silence
        reader, writer = await there.say("GET /stream HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await reader.readexactly(10)
        heard: list[float] = []

        def deaf(door: TcpDoor, transport: asyncio.Transport) -> float:
            heard.append(silence(door, transport))
            return 1.0

        monkeypatch.setattr(TcpDoor, "silence", deaf)
        await ended(reader)
        assert 0 <= heard[0] < 60
        await close(writer)


@pytest.mark.root
def test_a_machine_that_is_gone_is_given_up() -> None:
    """With data on its way to it, which keepalive does not look at, and the kernel only after a quarter of an hour."""
    require("ip", "iproute2")
    argv = ["unshare", "--net", sys.executable, "-m", "tests.integration.silent_machine"]
    root = Path(__file__).resolve().parents[2]
    said = subprocess.run(argv, cwd=root, capture_output=True, text=True, timeout=60).stdout
    assert said.endswith("given up\n")


@each_door
@in_loop
async def test_the_end_of_the_server_ends_its_connections(kind: str) -> None:
    async with house(kind) as there:
        reader, writer = await there.say("GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await response(reader))[0] == 200
        stopping = asyncio.create_task(there.server.stop())
        assert await ended(reader) == b""
        await close(writer)
        await stopping
        with pytest.raises(OSError):  # noqa: PT011 (each door fails in its own way)
            await there.connect()


REFUSED = [
    ("", 400),
    ("host:\r\n", 400),
    ("host: localhost\r\nhost: localhost\r\n", 400),
    ("host: evil.example\r\n", 403),
    ("host: 127.0.0.1.evil.example\r\n", 403),
    ("host: [::2]:80\r\n", 403),
    ("host: [::1]evil.example\r\n", 400),
    ("host: [::1]:80:80\r\n", 400),
    ("host: [::1\r\n", 400),
    ("host: [::1%lo]\r\n", 400),
    ("host: localhost:80@evil.example\r\n", 400),
    ("host: evil.example@localhost\r\n", 400),
    ("host: localhost:\r\n", 400),
    ("host: localhost:0\r\n", 400),
    ("host: localhost:65536\r\n", 400),
    ("host: localhost:8o\r\n", 400),
    ("host: localhost:-1\r\n", 400),
    ("host: localhost:\N{FULLWIDTH DIGIT EIGHT}0\r\n", 400),
    ("host: localhost evil.example\r\n", 400),
    ("host: localhost,evil.example\r\n", 400),
    ("host: localhost/evil\r\n", 400),
    ("host: localhost\0.evil.example\r\n", 400),
    ("host: localhost..\r\n", 403),
    ("host: .\r\n", 403),
    ("host: localhost\r\norigin: null\r\n", 403),
    ("host: localhost\r\norigin: http://evil.example\r\n", 403),
    ("host: localhost:80\r\norigin: http://localhost:81\r\n", 403),
    ("host: localhost:80\r\norigin: ftp://localhost:80\r\n", 403),
    ("host: localhost:80\r\norigin: {scheme}://localhost:80\r\norigin: http://evil.example\r\n", 403),
]
WELCOME = [
    "host: localhost\r\n",
    "HOST: LocalHost:7000\r\n",
    "host: 127.0.0.1:7000\r\n",
    "host: [::1]:7000\r\n",
    "host: skerry.test.:7000\r\n",
    "host: SKERRY.test:7000\r\norigin: {scheme}://skerry.test:7000\r\n",
]


@pytest.mark.parametrize("kind", ["tcp", "tls"])
@in_loop
async def test_names_and_pages(kind: str) -> None:
    scheme = {"tcp": "http", "tls": "https"}[kind]
    async with house(kind) as there:
        for headers, status in REFUSED:
            for more in ("", UPGRADE):
                got, body = await there.ask(headers=headers.format(scheme=scheme) + more)
                assert (got, body["status"]) == (status, status), headers
        for headers in WELCOME:
            assert (await there.ask(headers=headers.format(scheme=scheme)))[0] == 200
            upgrade = headers.format(scheme=scheme) + UPGRADE
            reader, writer = await there.say(f"GET / HTTP/1.1\r\n{upgrade}\r\n")
            assert b" 101 " in await reader.readline()
            await close(writer)


TARGETS = [
    ("http://evil.example/", 400),
    ("http://localhost@evil.example/", 400),
    ("http://evil.example@localhost/", 400),
    ("http://localhost:80/", 400),
    ("HTTP://LOCALHOST/", 200),
    ("http://localhost/", 200),
    ("/http://evil.example/", 200),
]


@in_loop
async def test_absolute_target_must_name_the_host_of_the_header() -> None:
    async with house("tcp") as there:
        for target, status in TARGETS:
            assert (await there.ask(target))[0] == status, target


@in_loop
async def test_the_unix_socket_has_no_name() -> None:
    async with house("unix") as there:
        for headers in ("", "host: anything\r\n"):
            assert (await there.ask(headers=headers))[0] == 200


def test_what_can_be_listened_on() -> None:
    made = certificates.make()
    for place, cert, key, words in [
        ("0.0.0.0:0", None, None, "without TLS"),
        ("[::]:0", None, None, "without TLS"),
        ("127.0.0.1", None, None, "not an address"),
        ("::1:70", None, None, "not an address"),
        (":70", None, None, "not an address"),
        ("127.0.0.1:65536", None, None, "not an address"),
        ("127.0.0.1:http", None, None, "not an address"),
        ("no.such.host.invalid:70", None, None, "cannot listen"),
        ("127.0.0.1:0", made.cert, None, "go together"),
        ("127.0.0.1:0", made.cert, made.ca, "cannot use the certificate"),
        ("127.0.0.1:0", made.cert, "/nothing", "No such file"),
    ]:
        with pytest.raises(InvalidRequest, match=words):
            open_doors([place], [], cert, key)
    (door,) = open_doors(["127.0.0.1:0"], [], None, None)
    with door.sock:
        assert door.url == f"http://127.0.0.1:{door.sock.getsockname()[1]}"
        taken = door.url.partition("//")[2]
        with pytest.raises(InvalidRequest, match="in use"):
            open_doors(["127.0.0.1:0", taken], [], None, None)
    (door,) = open_doors(["127.0.0.2:0"], [], made.cert, made.key)
    with door.sock:
        assert door.url.startswith("https://127.0.0.2:")
