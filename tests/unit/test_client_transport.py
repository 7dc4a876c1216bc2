"""Both transports against a server that does as it is told. Everything is run in both worlds."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import pytest

from skerry.client.aio.transport import AsyncTransport
from skerry.client.http1 import Malformed
from skerry.client.sync.transport import Transport
from skerry.errors import (
    DaemonUnavailable,
    Denied,
    EnvironmentNotFound,
    LimitReached,
    PlatformError,
    SkerryError,
)
from tests.support import NOBODY, temporary_home
from tests.unit import scripted_server
from tests.unit.scripted_server import Peer, every_request, serving


class Client(Protocol):
    def call(self, method: str, path: str, **options: Any) -> Any: ...
    def lines(self, path: str) -> list[Any]: ...
    def upload(self, path: str, parts: list[bytes]) -> Any: ...
    def talk(self, path: str, say: list[str | bytes], hear: int) -> list[str | bytes | None]: ...
    def close(self) -> None: ...


class SyncClient:
    def __init__(self) -> None:
        self.transport = Transport()
        self.call = self.transport.call
        self.close = self.transport.close

    def lines(self, path: str) -> list[Any]:
        return list(self.transport.send("GET", path).lines())

    def upload(self, path: str, parts: list[bytes]) -> Any:
        return self.transport.call("PUT", path, body=iter(parts))

    def talk(self, path: str, say: list[str | bytes], hear: int) -> list[str | bytes | None]:
        socket = self.transport.websocket(path)
        try:
            for message in say:
                socket.send(message)
            return [socket.receive() for _ in range(hear)]
        finally:
            socket.close()


class AioClient:
    """The asynchronous transport, driven by a loop for each call: its connections must survive that."""

    def __init__(self) -> None:
        self.transport = AsyncTransport()
        self.close = self.transport.close

    def call(self, method: str, path: str, **options: Any) -> Any:
        return asyncio.run(self.transport.call(method, path, **options))

    def lines(self, path: str) -> list[Any]:
        async def work() -> list[Any]:
            return [line async for line in (await self.transport.send("GET", path)).lines()]

        return asyncio.run(work())

    def upload(self, path: str, parts: list[bytes]) -> Any:
        async def body() -> AsyncIterator[bytes]:
            for part in parts:
                yield part

        return asyncio.run(self.transport.call("PUT", path, body=body()))

    def talk(self, path: str, say: list[str | bytes], hear: int) -> list[str | bytes | None]:
        async def work() -> list[str | bytes | None]:
            socket = await self.transport.websocket(path)
            try:
                for message in say:
                    await socket.send(message)
                return [await socket.receive() for _ in range(hear)]
            finally:
                socket.close()

        return asyncio.run(work())


@pytest.fixture(params=["unix", "tcp", "tls"], autouse=True)
def door(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Everything must work alike through every door."""
    monkeypatch.setattr(scripted_server, "DOOR", request.param)
    kind: str = request.param
    return kind


@pytest.fixture(params=[SyncClient, AioClient], ids=["sync", "aio"])
def client(request: pytest.FixtureRequest) -> Callable[[], Client]:
    """Makes a client of the server of the moment, to be closed before that is: its threads wait for it."""
    make: Callable[[], Client] = request.param
    return make


Make = Callable[[], Client]


def test_one_connection_serves_many_requests(client: Make) -> None:
    with serving(every_request(lambda method, target, body: [method, target, body.decode()])) as server:
        c = client()
        assert c.call("GET", "/a", query={"x": "é"}) == ["GET", "/a?x=%C3%A9", ""]
        assert c.call("POST", "/b", json={"k": 1}) == ["POST", "/b", '{"k": 1}']
        assert c.call("POST", "/b", body=b"raw") == ["POST", "/b", "raw"]
        assert c.upload("/c", [b"a" * 70_000, b"", b"b"]) == ["PUT", "/c", "a" * 70_000 + "b"]
        assert server.connections == 1
        c.close()


def test_a_connection_that_was_closed_is_not_used_again(client: Make) -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.respond({})

    with serving(script) as server:
        c = client()
        for _ in range(3):
            c.call("POST", "/x", json={})
            assert server.ended.acquire(timeout=10)
        assert server.connections == 3
        c.close()


def test_a_connection_with_an_answer_nobody_asked_for_is_not_used_again(client: Make) -> None:
    """It would be taken for the answer to the next request, and all later ones would be off by one."""
    sent = threading.Event()

    def script(peer: Peer) -> None:
        peer.request()
        peer.respond("right")
        if not sent.is_set():
            peer.respond("nobody asked")
            sent.set()
            peer.request()

    with serving(script) as server:
        c = client()
        assert c.call("GET", "/1") == "right"
        assert sent.wait(10)
        assert c.call("POST", "/2", json={}) == "right"
        assert server.connections == 2
        c.close()


def close_on_second(seen: list[str]) -> Callable[[Peer], None]:
    """The first connection answers once and then hangs up on the next request, having read it."""

    def script(peer: Peer) -> None:
        first = not seen
        while True:
            method, target, _, _ = peer.request()
            seen.append(f"{method} {target}")
            if first and len(seen) == 2:
                return
            peer.respond({})

    return script


def test_a_request_that_may_be_repeated_is_when_the_connection_breaks(client: Make) -> None:
    seen: list[str] = []
    with serving(close_on_second(seen)):
        c = client()
        c.call("GET", "/1")
        c.call("GET", "/2")
        assert seen == ["GET /1", "GET /2", "GET /2"]
        c.close()


def test_a_request_that_may_not_be_repeated_is_not(client: Make) -> None:
    seen: list[str] = []
    with serving(close_on_second(seen)):
        c = client()
        c.call("GET", "/1")
        with pytest.raises(DaemonUnavailable):
            c.call("POST", "/2", json={})
        assert seen == ["GET /1", "POST /2"]
        c.close()


STOPPING = {"code": "daemon_unavailable", "message": "the daemon is stopping"}


@pytest.mark.parametrize(
    ("method", "detail", "repeated"),
    [
        ("GET", {}, True),
        ("DELETE", {}, True),
        ("POST", {"begun": False}, True),
        ("POST", {}, False),
    ],
)
def test_what_a_stopping_daemon_has_not_done_is_asked_of_the_next(
    client: Make, method: str, detail: dict[str, Any], repeated: bool
) -> None:
    asked: list[str] = []

    def answer(method: str, target: str, body: bytes) -> Any:
        asked.append(method)
        return ({**STOPPING, "detail": detail}, 503) if len(asked) == 1 else {"done": True}

    with serving(every_request(answer)):
        one = client()
        if repeated:
            assert one.call(method, "/x") == {"done": True}
        else:
            with pytest.raises(DaemonUnavailable, match="stopping"):
                one.call(method, "/x")
        assert asked == [method] * (1 + repeated)
        one.close()


def test_half_an_answer_is_never_asked_for_again(client: Make) -> None:
    seen = []

    def script(peer: Peer) -> None:
        peer.request()
        seen.append(1)
        if len(seen) == 1:
            peer.respond({})
            peer.request()
            seen.append(2)
            peer.send(b"HTTP/1.1 200")

    with serving(script):
        c = client()
        c.call("GET", "/1")
        with pytest.raises(DaemonUnavailable):
            c.call("GET", "/2")
        assert seen == [1, 2]
        c.close()


def test_errors_come_back_as_what_they_were(client: Make) -> None:
    body = EnvironmentNotFound("no environment x", hint="see ls", detail={"a": 1}).to_dict()
    with serving(every_request(lambda *_: (body, 404))):
        c = client()
        with pytest.raises(EnvironmentNotFound) as caught:
            c.call("GET", "/environments/x")
        assert (caught.value.message, caught.value.hint, caught.value.detail) == (
            "no environment x",
            "see ls",
            {"a": 1},
        )
        with pytest.raises(EnvironmentNotFound):
            c.talk("/environments/x/attach", [], 1)
        c.close()


@pytest.mark.parametrize("body", [b"<html>", b"[1]", b"{}", b""])
def test_errors_that_are_no_problem_json(client: Make, body: bytes) -> None:
    with serving(every_request(lambda *_: (body, 502))):
        c = client()
        with pytest.raises(PlatformError, match="502"):
            c.call("GET", "/")
        c.close()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"SSH-2.0-hello\r\n\r\n", Malformed),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc", DaemonUnavailable),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab", DaemonUnavailable),
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000, Malformed),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc", Malformed),
        (b"", DaemonUnavailable),
        (b"HTTP/1.1 2", DaemonUnavailable),
    ],
)
def test_nonsense_is_a_clear_error(client: Make, answer: bytes, error: type[SkerryError]) -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.send(answer)

    with serving(script):
        c = client()
        with pytest.raises(error):
            c.call("GET", "/x")
        c.close()


def test_a_body_that_is_refused_halfway(client: Make) -> None:
    def script(peer: Peer) -> None:
        peer.take_line()
        peer.respond(LimitReached("too much").to_dict(), 413)

    with serving(script):
        c = client()
        with pytest.raises(LimitReached, match="too much"):
            c.upload("/x", [b"x" * 65536] * 64)
        c.close()


def test_lines_come_as_they_are_cut(client: Make) -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for part in (b'{"a"', b':1}\n{"a":2}\n\n{"a', b'":3}'):
            peer.send(b"%x\r\n%b\r\n" % (len(part), part))
        peer.send(b"0\r\n\r\n")

    with serving(script):
        c = client()
        assert c.lines("/x") == [{"a": 1}, {"a": 2}, {"a": 3}]
        c.close()


def test_websocket(client: Make) -> None:
    got: list[tuple[int, bytes]] = []

    def script(peer: Peer) -> None:
        assert peer.upgrade() == "/attach"
        peer.send_frame(9, b"are you there")
        peer.send_frame(1, b"he", final=False)
        peer.send_frame(0, b"llo")
        peer.send_frame(2, b"\x00\xff")
        peer.send_frame(8, b"\x03\xe8")
        got.extend(peer.take_frame() for _ in range(4))

    with serving(script):
        c = client()
        assert c.talk("/attach", ["text", b"x" * 70_000], 4) == ["hello", b"\x00\xff", None, None]
        c.close()
    assert got == [(1, b"text"), (2, b"x" * 70_000), (10, b"are you there"), (8, b"\x03\xe8")]


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 101 X\r\nsec-websocket-accept: wrong\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n"]
)
def test_websocket_that_is_none(client: Make, answer: bytes) -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.send(answer)

    with serving(script):
        c = client()
        with pytest.raises(Malformed):
            c.talk("/attach", [], 0)
        c.close()


def test_websocket_that_breaks(client: Make) -> None:
    with serving(lambda peer: peer.upgrade()):
        c = client()
        with pytest.raises(DaemonUnavailable):
            c.talk("/attach", [], 1)
        c.close()


def hold(peer: Peer) -> None:
    """Open a WebSocket and wait until the client has left."""
    peer.upgrade()
    while True:
        peer.take_frame()


def test_websocket_closed_while_another_thread_waits() -> None:
    with serving(hold):
        socket = Transport().websocket("/attach")
        got: list[object] = []
        thread = threading.Thread(target=lambda: got.append(socket.receive()))
        thread.start()
        while not socket._receiving:
            time.sleep(0.001)
        socket.close()
        thread.join(10)
        assert got == [None]


def test_websocket_closed_while_another_task_waits() -> None:
    async def work() -> object:
        socket = await AsyncTransport().websocket("/attach")
        task = asyncio.create_task(socket.receive())
        await asyncio.sleep(0)
        assert socket._receiving
        socket.close()
        return await task

    with serving(hold):
        assert asyncio.run(work()) is None


def test_websocket_timeouts_lose_nothing() -> None:
    go = threading.Event()

    def script(peer: Peer) -> None:
        peer.upgrade()
        peer.send(b"\x81")
        go.wait(10)
        peer.send(b"\x02hi")

    async def work() -> str | bytes | None:
        socket = await AsyncTransport().websocket("/")
        with pytest.raises(TimeoutError):
            await socket.receive(0.05)
        go.set()
        try:
            return await socket.receive(10)
        finally:
            socket.close()

    with serving(script):
        socket = Transport().websocket("/")
        with pytest.raises(TimeoutError):
            socket.receive(0.05)
        go.set()
        assert socket.receive(10) == "hi"
        socket.close()
        go.clear()
        assert asyncio.run(work()) == "hi"


def test_canceling_a_call_closes_its_connection() -> None:
    """The daemon kills what was being executed for a client that has gone."""
    asked, gone = threading.Event(), threading.Event()

    def script(peer: Peer) -> None:
        peer.request()
        asked.set()
        try:
            peer.take(1)
        finally:
            gone.set()

    async def work() -> None:
        transport = AsyncTransport()
        task = asyncio.create_task(transport.call("POST", "/execute", json={}))
        await asyncio.to_thread(asked.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(gone.wait, 10)
        transport.close()

    with serving(script):
        asyncio.run(work())


def test_threads_share_a_transport() -> None:
    with serving(every_request(lambda method, target, body: target)):
        transport = Transport()
        got: list[str] = []

        def work(number: int) -> None:
            got.extend(transport.call("GET", f"/{number}-{i}") for i in range(50))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        transport.close()
    assert sorted(got) == sorted(f"/{n}-{i}" for n in range(8) for i in range(50))


def test_a_forked_process_opens_its_own_connection() -> None:
    with serving(every_request(lambda *_: {})) as server:
        transport = Transport()
        transport.call("GET", "/")
        pid = os.fork()
        if pid == 0:
            try:
                transport.call("GET", "/")
                os._exit(0)
            except BaseException:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert server.connections == 2
        transport.call("GET", "/")
        assert server.connections == 2
        transport.close()


@pytest.mark.root
def test_a_daemon_of_somebody_else_is_not_spoken_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may write to the directory could put a socket there and wait for what we send."""
    listen = (
        "import os, socket, sys; os.setuid(int(sys.argv[2])); s = socket.socket(socket.AF_UNIX);"
        "s.bind(sys.argv[1] + '/daemon.sock'); s.listen(); print('ready', flush=True); s.accept()[0].recv(1)"
    )
    with temporary_home(NOBODY) as home:
        monkeypatch.setenv("SKERRY_HOME", str(home))
        argv = [sys.executable, "-Ic", listen, str(home), str(NOBODY)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            server.stdout.readline()
            with pytest.raises(Denied, match=f"uid {NOBODY}"):
                Transport().call("GET", "/")
            os.unlink(f"{home}/daemon.sock")


def test_no_daemon_and_none_wanted(client: Make, home: object) -> None:
    with pytest.raises(DaemonUnavailable, match="no daemon"):
        client().call("GET", "/", start=False)


def test_names_that_are_not_utf8_survive_json(client: Make) -> None:
    name = b"a\xff\x1b".decode(errors="surrogateescape")
    with serving(every_request(lambda method, target, body: json.loads(body))):
        c = client()
        assert c.call("POST", "/", json={"path": name}) == {"path": name}
        c.close()
