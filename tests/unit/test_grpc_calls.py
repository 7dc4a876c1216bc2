"""RPCs over a real connection, with an application that does what a test wants."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2
from starlette.types import Receive, Scope, Send

from skerry.daemon.grpc import calls, server
from skerry.daemon.grpc.server import GrpcServer, Health
from skerry.daemon.http import table
from skerry.daemon.http.operations import Operation
from skerry.daemon.peers import cut_of, peer_of
from skerry.errors import DaemonUnavailable, InvalidRequest, SkerryError, Unauthorized
from skerry.manager.caller import Caller
from skerry.v1 import daemon_pb2, environments_pb2, executions_pb2, files_pb2
from skerry.v1.daemon_pb2_grpc import DaemonStub
from skerry.v1.environments_pb2_grpc import EnvironmentsStub
from skerry.v1.executions_pb2_grpc import ExecutionsStub
from skerry.v1.files_pb2_grpc import FilesStub
from skerry.v1.problem_pb2 import Problem
from tests.support import free_port

App = Callable[[Scope, Receive, Send], Awaitable[None]]
WRITE = files_pb2.WriteFileRequest(environment_id="e1", path="f", data=b"part")
FOLLOW = executions_pb2.ReadLogsRequest(environment_id="e1", follow=True)


async def admit(scope: Scope, operation: Operation, request_id: str) -> Caller:
    """As a daemon admits a token for everything; a call with `bearer none` is a stranger's."""
    if operation.verb and (b"authorization", b"Bearer none") in scope["headers"]:
        raise Unauthorized("a token is needed")
    return Caller()


def serving(app: App, client: Callable[[grpc.aio.Channel], Coroutine[Any, Any, None]]) -> None:
    """Runs the client against a server of the application."""

    async def main() -> None:
        address = f"127.0.0.1:{free_port()}"
        served = GrpcServer(app, admit, table.OPERATIONS, lambda: asyncio.sleep(0), [address], None)
        await served.start()
        try:
            async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(30):
                await client(channel)
        finally:
            await served.stop()

    asyncio.run(main())


async def start(send: Send, status: int = 200, **headers: str) -> None:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})


async def reply(send: Send, body: Any, status: int = 200, **headers: str) -> None:
    await start(send, status, **headers)
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


async def error_of(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def silent(channel: grpc.aio.Channel, rpc: str, **options: Any) -> Any:
    """The answer to a call that sends no message."""
    if rpc.endswith(("Attach", "Info")):
        many: Any = channel.stream_stream(f"/{rpc}")(**options)
        return many.read()
    return channel.stream_unary(f"/{rpc}")(**options)


def test_the_application_sees_a_request() -> None:
    seen: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((scope["method"], scope["path"], dict(scope["headers"]), peer_of(scope)))
        seen.append(await receive())
        await reply(send, {"expires_at": 5.5}, x_request_id="r1")

    async def client(channel: grpc.aio.Channel) -> None:
        call = EnvironmentsStub(channel).Heartbeat(
            environments_pb2.HeartbeatRequest(environment_id="e1", lifetime=2),
            metadata=(
                ("authorization", "Bearer skt_x"),
                ("traceparent", "00-a-b-01"),
                ("host", "evil"),
                ("cookie", "no"),
            ),
        )
        assert (await call).expires_at == 5.5
        assert ("x-request-id", "r1") in list(await call.trailing_metadata())

    serving(app, client)
    (method, path, headers, peer), body = seen
    assert (method, path) == ("POST", "/environments/e1/heartbeat")
    assert headers == {
        b"authorization": b"Bearer skt_x",
        b"traceparent": b"00-a-b-01",
        b"content-type": b"application/json",
    }
    assert peer.address.startswith("127.0.0.1:")
    assert not peer.trusted
    assert body == {"type": "http.request", "body": b'{"lifetime": 2.0}'}


def test_an_upload_that_is_canceled_is_never_taken_for_a_whole_one() -> None:
    events: asyncio.Queue[Any] = asyncio.Queue()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (message := await receive())["type"] != "http.disconnect":
            events.put_nowait(message)
            if not message.get("more_body"):
                await reply(send, {"size": 1})
        events.put_nowait(None)

    async def client(channel: grpc.aio.Channel) -> None:
        for how in ["canceled", "late", "whole"] * 3:
            call = FilesStub(channel).WriteFile(timeout=1 if how == "late" else None)
            await call.write(WRITE)
            assert (await events.get())["body"] == b"part"
            if how == "whole":
                await call.done_writing()
                assert (await call).size == 1
                assert await events.get() == {"type": "http.request", "body": b""}
            elif how == "canceled":
                call.cancel()
            assert await events.get() is None

    serving(app, client)


def test_a_client_that_goes_away_is_gone_for_the_application_too() -> None:
    gone = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        assert (await receive())["type"] == "http.disconnect"
        await reply(send, {})  # to nobody
        gone.set()

    async def client(channel: grpc.aio.Channel) -> None:
        execute = ExecutionsStub(channel).Execute
        request = executions_pb2.ExecuteRequest(environment_id="e1", command="sleep 100")
        error = await error_of(execute(request, timeout=1))
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await gone.wait()

    serving(app, client)


def test_what_is_not_read_is_not_made() -> None:
    made = 0
    ended = asyncio.Event()
    stalled = asyncio.Event()
    piece = b"x" * 100_000

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal made
        await start(send)
        leaving = asyncio.create_task(_until_disconnect(receive))
        while not leaving.done():
            sending = asyncio.create_task(
                _send(send, {"type": "http.response.body", "body": piece, "more_body": True})
            )
            if not (await asyncio.wait((sending,), timeout=0.5))[0]:
                stalled.set()
            await sending
            made += len(piece)
        ended.set()

    async def client(channel: grpc.aio.Channel) -> None:
        call = FilesStub(channel).ReadFile(files_pb2.ReadFileRequest(environment_id="e1", path="f"))
        await stalled.wait()
        assert made < 20_000_000
        call.cancel()
        await ended.wait()

    serving(app, client)


async def _send(send: Send, message: Any) -> None:
    await send(message)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def test_a_call_whose_token_is_revoked_ends_at_once() -> None:
    begun = asyncio.Event()
    ended = asyncio.Event()
    cut: list[Callable[[], None]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        cut.append(cut_of(scope))
        await start(send)
        begun.set()
        await _until_disconnect(receive)
        ended.set()

    async def client(channel: grpc.aio.Channel) -> None:
        call = ExecutionsStub(channel).ReadLogs(FOLLOW)
        reading = asyncio.create_task(call.read())
        await begun.wait()
        cut[0]()
        error = await error_of(reading)
        assert error.code() == grpc.StatusCode.UNAUTHENTICATED
        await ended.wait()

    serving(app, client)


def test_an_answer_that_breaks_off_is_an_error() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await start(send)
        await send({"type": "http.response.body", "body": b"some", "more_body": True})
        if scope["query_string"] == b"path=crash":
            raise RuntimeError("on purpose")

    async def client(channel: grpc.aio.Channel) -> None:
        for path in ("end", "crash"):
            call = FilesStub(channel).ReadFile(files_pb2.ReadFileRequest(environment_id="e1", path=path))
            assert await call.read() == files_pb2.Chunk(data=b"some")
            error = await error_of(call.read())
            assert error.code() == grpc.StatusCode.INTERNAL
            assert dict(error.trailing_metadata())["skerry-code"] == "internal"

    serving(app, client)


def test_lines_come_whole_however_they_are_sent() -> None:
    pieces = [
        b'{"t":1,"stream":"stdout","data":"a","encod',
        b'ing":"utf-8"}\n{"t":2,"stream":"dropped"',
        b"}\n",
    ]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await start(send)
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def client(channel: grpc.aio.Channel) -> None:
        lines = [line async for line in ExecutionsStub(channel).ReadLogs(FOLLOW)]
        assert [(line.t, line.data) for line in lines] == [(1, b"a"), (2, b"")]

    serving(app, client)


def test_comments_between_events_are_no_events() -> None:
    body = b':\n\nid: x-1\nevent: dropped\ndata: {"message":"gap"}\n\n:\n\nevent: ended\ndata: {"result":null}\n\n'

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert dict(scope["headers"])[b"last-event-id"] == b"x-0"
        await start(send)
        await send({"type": "http.response.body", "body": body})

    async def client(channel: grpc.aio.Channel) -> None:
        request = executions_pb2.ExecutionEventsRequest(
            environment_id="e1", execution_id="x1", last_event_id="x-0"
        )
        dropped, ended = [event async for event in ExecutionsStub(channel).ExecutionEvents(request)]
        assert (dropped.id, dropped.dropped.message) == ("x-1", "gap")
        assert ended.WhichOneof("event") == "ended"

    serving(app, client)


def test_a_stream_must_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "FIRST_SECONDS", 0.05)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("nothing to ask for")

    async def nothing() -> AsyncIterator[files_pb2.WriteFileRequest]:
        return
        yield

    async def client(channel: grpc.aio.Channel) -> None:
        files = FilesStub(channel)
        assert (await error_of(files.WriteFile(nothing()))).code() == grpc.StatusCode.INVALID_ARGUMENT
        assert (await error_of(files.WriteFile())).code() == grpc.StatusCode.DEADLINE_EXCEEDED

    serving(app, client)


@pytest.mark.parametrize(
    "rpc",
    [
        "skerry.v1.Daemon/Stop",
        "skerry.v1.Files/WriteFile",
        "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
def test_nobody_keeps_a_call_without_saying_anything(monkeypatch: pytest.MonkeyPatch, rpc: str) -> None:
    monkeypatch.setattr(calls, "FIRST_SECONDS", 0.05)
    monkeypatch.setattr(server, "REFLECTION_SECONDS", 0.05)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("nothing to ask for")

    async def client(channel: grpc.aio.Channel) -> None:
        assert (await error_of(silent(channel, rpc))).code() == grpc.StatusCode.DEADLINE_EXCEEDED

    serving(app, client)


def test_nobody_takes_all_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "crowd", lambda: 2)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("nobody asks")

    async def main() -> None:
        port = free_port()
        served = GrpcServer(
            app, admit, table.OPERATIONS, lambda: asyncio.sleep(0), [f"127.0.0.1:{port}"], None
        )
        await served.start()
        others = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
        async with asyncio.timeout(5):  # less than it waits for those who say nothing
            for reader, _ in others[2:]:
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
        for _, writer in others:
            writer.close()
        await served.stop()

    asyncio.run(main())


def test_a_websocket_that_is_refused_is_an_error() -> None:
    problem = DaemonUnavailable("not now").to_dict()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "websocket"
        await receive()
        await send({"type": "websocket.http.response.start", "status": 503, "headers": []})
        await send({"type": "websocket.http.response.body", "body": json.dumps(problem).encode()})

    async def client(channel: grpc.aio.Channel) -> None:
        opening = executions_pb2.Opening(environment_id="e1", command="cat")
        call = ExecutionsStub(channel).Attach()
        await call.write(executions_pb2.AttachRequest(opening=opening))
        error = await error_of(call.read())
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        call = ExecutionsStub(channel).Attach()
        await call.write(executions_pb2.AttachRequest(signal=2))
        assert (await error_of(call.read())).code() == grpc.StatusCode.INVALID_ARGUMENT

    serving(app, client)


def test_what_is_no_message_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while True:
            try:
                await receive()
            except InvalidRequest as error:
                await reply(send, error.to_dict(), 400)
                return

    async def client(channel: grpc.aio.Channel) -> None:
        stop: Any = channel.unary_unary("/skerry.v1.Daemon/Stop")
        assert (await error_of(stop(b"\xff"))).code() == grpc.StatusCode.INVALID_ARGUMENT
        write: Any = channel.stream_unary("/skerry.v1.Files/WriteFile")
        asking: Any = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        assert (await error_of(asking(iter([b"\xff"])).read())).code() == grpc.StatusCode.INVALID_ARGUMENT
        for messages in ([b"\xff"], [WRITE.SerializeToString(), b"\xff"]):
            assert (await error_of(write(iter(messages)))).code() == grpc.StatusCode.INVALID_ARGUMENT

    serving(app, client)
    assert not caplog.records  # strangers cannot fill the log


def test_a_message_that_is_too_large_is_refused() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await reply(send, {"status": "ok"})

    async def client(channel: grpc.aio.Channel) -> None:
        request = executions_pb2.ExecuteRequest(environment_id="e1", stdin=bytes(5 << 20))
        error = await error_of(ExecutionsStub(channel).Execute(request))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await DaemonStub(channel).Health(daemon_pb2.HealthRequest())).status == "ok"

    serving(app, client)


def test_a_daemon_that_is_not_ready_is_not_serving() -> None:
    async def ready() -> str:
        raise DaemonUnavailable("not ready: the disk is full")

    async def asked() -> AsyncIterator[bytes]:
        yield b""

    context: Any = None
    answer = asyncio.run(Health(ready).check(asked(), context))
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize("rpc", ["skerry.v1.Files/WriteFile", "skerry.v1.Executions/Attach"])
def test_token_is_checked_before_a_message_is_read(monkeypatch: pytest.MonkeyPatch, rpc: str) -> None:
    read: list[object] = []
    monkeypatch.setattr(calls, "parsed", lambda kind, asked: read.append(kind))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("strangers do not get here")

    async def client(channel: grpc.aio.Channel) -> None:
        stranger = (("authorization", "Bearer none"),)
        error = await error_of(silent(channel, rpc, metadata=stranger))
        assert error.code() == grpc.StatusCode.UNAUTHENTICATED
        assert "x-request-id" in dict(error.trailing_metadata() or ())

    serving(app, client)
    assert read == []


def test_open_calls_are_answered_without_their_message() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await reply(send, {"status": "ok"})

    async def client(channel: grpc.aio.Channel) -> None:
        for rpc in ("skerry.v1.Daemon/Health", "grpc.health.v1.Health/Check"):
            call: Any = channel.stream_unary(f"/{rpc}")()
            assert await call  # nothing was sent, and nothing is waited for

    serving(app, client)


def test_failed_calls_leave_no_cycle_that_keeps_their_message() -> None:
    kept: list[weakref.ref[BaseException]] = []

    class Unwanted(InvalidRequest):
        pass

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await reply(send, {}, 400)

    def fail(body: bytes) -> SkerryError:
        error = Unwanted("no")
        kept.append(weakref.ref(error))
        return error

    async def client(channel: grpc.aio.Channel) -> None:
        request = executions_pb2.ExecuteRequest(environment_id="e1")
        for _ in range(3):
            await error_of(ExecutionsStub(channel).Execute(request))

    gc.collect()
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(calls, "problem", fail)
            serving(app, client)
        assert len(kept) == 3
        assert [error() for error in kept] == [None] * 3
    finally:
        gc.enable()


def test_long_errors_arrive_with_their_code() -> None:
    long = "ж\U0001f600" * 5000

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        error = InvalidRequest(long, hint=long, detail={"output": [long] * 5, "step": long})
        await reply(send, error.to_dict(), 400)

    async def client(channel: grpc.aio.Channel) -> None:
        request = executions_pb2.ExecuteRequest(environment_id="e1")
        error = await error_of(ExecutionsStub(channel).Execute(request))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        trailing = dict(error.trailing_metadata() or ())
        assert trailing["skerry-code"] == "invalid_request"
        problem = Problem.FromString(cast(bytes, trailing["skerry-problem-bin"]))
        assert problem.message.startswith("ж\U0001f600")
        assert problem.hint.startswith("ж\U0001f600")

    serving(app, client)


def test_first_messages_of_one_tenant_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "READS_AT_ONCE", 1)
    monkeypatch.setattr(calls, "FIRST_SECONDS", 1.0)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await reply(send, {"size": 4})

    async def client(channel: grpc.aio.Channel) -> None:
        silent: Any = FilesStub(channel).WriteFile()
        await silent_read.wait()
        quick = asyncio.ensure_future(ExecutionsStub(channel).Execute(executions_pb2.ExecuteRequest()))
        assert (await error_of(silent)).code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await error_of(quick)

    silent_read = asyncio.Event()
    first_of = calls.first_of

    async def noted(asked: AsyncIterator[Any]) -> Any:
        silent_read.set()
        reads.append("begins")
        try:
            return await first_of(asked)
        finally:
            reads.append("ends")

    reads: list[str] = []
    monkeypatch.setattr(calls, "first_of", noted)
    serving(app, client)
    assert reads == ["begins", "ends"] * 2


def test_uploads_of_one_tenant_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "STREAMS_MAX", 4)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        started.release()
        while (await receive())["type"] != "http.disconnect":
            pass

    async def client(channel: grpc.aio.Channel) -> None:
        held = [FilesStub(channel).WriteFile() for _ in range(2)]
        for call in held:
            await call.write(WRITE)
            await started.acquire()
        third = FilesStub(channel).WriteFile()
        assert (await error_of(third)).code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in held:
            call.cancel()

    started = asyncio.Semaphore(0)
    serving(app, client)


def test_compressed_messages_are_refused() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("it is not even read")

    async def client(channel: grpc.aio.Channel) -> None:
        request = executions_pb2.ExecuteRequest(environment_id="e1", command="x" * 10_000)
        error = await error_of(ExecutionsStub(channel).Execute(request, compression=grpc.Compression.Gzip))
        assert error.code() == grpc.StatusCode.UNIMPLEMENTED

    serving(app, client)
