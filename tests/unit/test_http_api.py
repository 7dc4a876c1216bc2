"""The application: finding operations, and what becomes of failures."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.responses import Response

from skerry.daemon.auth import Authenticator
from skerry.daemon.http import api as apis
from skerry.daemon.http import events
from skerry.daemon.http.answers import reply
from skerry.daemon.http.api import Api
from skerry.daemon.http.operations import Call, Engine, Operation, Parameter
from skerry.daemon.http.readiness import Readiness
from skerry.daemon.http.requests import Body, Text
from skerry.daemon.http.system import ready
from skerry.daemon.metrics import Metrics
from skerry.daemon.peers import PEER, Peer
from skerry.errors import DaemonUnavailable
from skerry.fairness import budget, lines
from skerry.manager.environments.request import CreateRequest
from skerry.manager.executions.commands import Command
from skerry.manager.executions.execution import Execution
from skerry.manager.executions.output import STDOUT, TAP_LIMIT, Chunk
from skerry.manager.tenants.tokens import Tokens
from skerry.store import Store
from tests.unit.stubs import CALLER, POLICY, StubBackend, asynchronous, make_manager


async def echo(call: Call, **arguments: Any) -> Response:
    return reply(arguments)


async def broken(call: Call) -> Response:
    raise ValueError("secret words")


def operation(path: str, method: str = "GET", handler: Any = echo, **more: Any) -> Operation:
    return Operation(
        name=path, method=method, path=path, tag="", verb="", summary="", handler=handler, answer=dict, **more
    )


API = Api(
    cast(Engine, SimpleNamespace(authenticator=Authenticator(cast(Tokens, None)), metrics=Metrics())),
    [
        operation("/a/{x}"),
        operation("/a/b"),
        operation("/a/{x}/c/{y}", query=(Parameter("n", "integer", "", default=7, most=9),)),
        operation("/broken", handler=broken),
    ],
)


async def ask(
    path: str, query: str = "", method: str = "GET", *, api: Api = API, body: bytes = b""
) -> tuple[int, dict[str, Any]]:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [],
        "state": {PEER: Peer("uid 0", trusted=True)},
    }
    await api(scope, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


@asynchronous
async def test_a_daemon_that_stops_refuses_new_requests_and_says_that_nothing_was_done() -> None:
    manager = make_manager(StubBackend())
    engine = SimpleNamespace(
        authenticator=Authenticator(cast(Tokens, None)), metrics=Metrics(), manager=manager
    )
    api = Api(cast(Engine, engine), [replace(operation("/a/b"), verb="read"), operation("/healthz")])
    assert (await ask("/a/b", api=api))[0] == 200
    manager.refuse()
    status, problem = await ask("/a/b", api=api)
    assert (status, problem["code"], problem["retryable"]) == (503, "daemon_unavailable", True)
    assert problem["detail"] == {"begun": False}
    assert (await ask("/healthz", api=api))[0] == 200


@asynchronous
async def test_requests_of_a_tenant_that_used_its_share_wait_while_others_are_at_work() -> None:
    engine = SimpleNamespace(
        authenticator=Authenticator(cast(Tokens, None)),
        metrics=Metrics(),
        manager=make_manager(StubBackend()),
    )
    api = Api(cast(Engine, engine), [replace(operation("/a/b"), verb="read"), operation("/healthz")])
    lines().of("default").flow.spend(0.1)
    budget().flow("other").spend(0.0001)
    waiting = asyncio.create_task(ask("/a/b", api=api))
    assert (await ask("/healthz", api=api))[0] == 200
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    assert (await waiting)[0] == 200


@asynchronous
async def test_caller_that_had_to_wait_is_looked_at_again() -> None:
    manager = make_manager(StubBackend())
    engine = SimpleNamespace(
        authenticator=Authenticator(cast(Tokens, None)), metrics=Metrics(), manager=manager
    )
    api = Api(cast(Engine, engine), [replace(operation("/a/b"), verb="read")])
    lines().of("default").flow.spend(0.1)
    budget().flow("other").spend(0.0001)
    waiting = asyncio.create_task(ask("/a/b", api=api))
    for _ in range(10):
        await asyncio.sleep(0)
    manager.refuse()
    assert (await waiting)[1]["code"] == "daemon_unavailable"


@asynchronous
async def test_refusals_of_one_address_wait_while_others_are_at_work() -> None:
    refused = [asyncio.create_task(ask("/nowhere")) for _ in range(20)]
    budget().flow("other").spend(0.0001)
    for _ in range(10):
        await asyncio.sleep(0)
    assert 0 < sum(task.done() for task in refused) < 20
    assert {(await task)[0] for task in refused} == {404}


@pytest.mark.parametrize(
    ("path", "query", "expected"),
    [
        ("/a/b", "", {}),
        ("/a/z", "", {"x": "z"}),
        ("/a/z%2Fb", "", {"x": "z/b"}),
        ("/a/%ff", "", {"x": "\udcff"}),
        ("/a/b%", "", {"x": "b%"}),
        ("/a/1/c/2", "", {"x": "1", "y": "2", "n": 7}),
        ("/a/1/c/2", "n=9", {"x": "1", "y": "2", "n": 9}),
    ],
)
def test_paths_and_parameters(path: str, query: str, expected: dict[str, Any]) -> None:
    @asynchronous
    async def check() -> None:
        assert await ask(path, query) == (200, expected)

    check()


@pytest.mark.parametrize(
    ("path", "query", "status"),
    [
        ("/", "", 404),
        ("/a", "", 404),
        ("/a/", "", 404),
        ("/a/b/", "", 404),
        ("//a/b", "", 404),
        ("/a/1/c", "", 404),
        ("/a/b", "n=1", 400),
        ("/a/1/c/2", "n=10", 400),
        ("/a/1/c/2", "n=-1", 400),
        ("/a/1/c/2", "n=%C2%B2", 400),
        ("/a/1/c/2", "n=1&n=1", 400),
    ],
)
def test_what_is_not_there(path: str, query: str, status: int) -> None:
    @asynchronous
    async def check() -> None:
        found, problem = await ask(path, query)
        assert (found, problem["status"]) == (status, status)

    check()


@asynchronous
async def test_a_failure_of_ours_is_told_without_its_words() -> None:
    status, problem = await ask("/broken")
    assert (status, problem["code"]) == (500, "internal")
    assert "secret" not in json.dumps(problem)


async def running() -> Execution:
    environment = await make_manager(StubBackend()).create(CALLER, CreateRequest(policy=POLICY))
    assert environment.executions is not None
    return await environment.executions.start(CALLER, Command(argv=["x"]))


@asynchronous
async def test_silence_is_broken_by_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "HEARTBEAT", 0.0)
    execution = await running()
    stream = events.stream(execution, 0)
    assert [await anext(stream), await anext(stream)] == [b":\n\n", b":\n\n"]
    await stream.aclose()
    assert execution._taps == []


@asynchronous
async def test_events_after_a_gap_have_no_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "HEARTBEAT", 0.0)
    execution = await running()
    stream = events.stream(execution, 0)

    async def following() -> bytes:
        while (found := await anext(stream)) == events.COMMENT:
            pass  # it waits for its share of the loop
        return found

    await anext(stream)
    (tap,) = execution._taps
    tap.offer(Chunk(0.0, execution.id, STDOUT, b"x" * TAP_LIMIT))
    tap.offer(Chunk(0.0, execution.id, STDOUT, b"lost"))
    assert (await following()).startswith(f"id: {events.DAEMON}-262144\nevent: output\n".encode())
    tap.offer(Chunk(0.0, execution.id, STDOUT, b"later"))
    assert (await following()).startswith(b'event: dropped\ndata: {"message":"4 bytes')
    assert (await following()).startswith(b"event: output\n")
    await stream.aclose()


@asynchronous
async def test_readiness_is_looked_at_now_and_then(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await Store.open(f"sqlite://{tmp_path}/store.db")
    manager = make_manager(StubBackend())
    readiness = Readiness(manager, store, str(tmp_path))
    assert await readiness.check() == "namespace"
    await manager.close()
    assert await readiness.check() == "namespace"
    readiness._until = 0.0
    with pytest.raises(DaemonUnavailable, match="stopping"):
        await readiness.check()
    full = Readiness(make_manager(StubBackend()), store, str(tmp_path))
    monkeypatch.setattr("skerry.daemon.http.readiness.SPACE_NEEDED", 1 << 62)
    with pytest.raises(DaemonUnavailable, match="left"):
        await full.check()
    await store.close()


@asynchronous
async def test_a_daemon_whose_store_cannot_be_written_is_not_ready(tmp_path: Any) -> None:
    store = await Store.open(f"sqlite://{tmp_path}/store.db")
    readiness = Readiness(make_manager(StubBackend()), store, str(tmp_path))
    await store.close()
    with pytest.raises(DaemonUnavailable, match="not ready: the store is closed"):
        await readiness.check()
    for trusted, words in ((True, "not ready: the store is closed"), (False, "not ready")):
        scope = {"state": {PEER: Peer("somebody", trusted=trusted)}}
        call: Any = SimpleNamespace(scope=scope, engine=SimpleNamespace(readiness=readiness))
        with pytest.raises(DaemonUnavailable) as caught:
            await ready(call)
        assert caught.value.message == words


@asynchronous
async def test_large_bodies_that_are_held_by_what_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of many megabytes that sleeps: the daemon has its text until it has answered."""
    monkeypatch.setattr(apis, "BODY_USUAL", 100)
    monkeypatch.setattr(apis, "BODIES_MAX", 1000)
    go_on = asyncio.Event()

    class Said(Body):
        text: Text

    async def wait(call: Call, body: Said) -> Response:
        await go_on.wait()
        return reply({})

    engine = cast(Engine, SimpleNamespace(authenticator=Authenticator(cast(Tokens, None)), metrics=Metrics()))
    api = Api(engine, [operation("/wait", method="POST", handler=wait, body=Said)])

    async def say(size: int) -> int:
        body = json.dumps({"text": "x" * size}).encode()
        return (await ask("/wait", method="POST", api=api, body=body))[0]

    held = [asyncio.create_task(say(300)) for _ in range(2)]
    await asyncio.sleep(0)
    small = asyncio.create_task(say(50))
    assert await say(300) == 429
    go_on.set()
    assert [await task for task in (*held, small)] == [200] * 3
    assert await say(300) == 200
