"""Two tenants on one daemon: every operation, with every kind of token."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from skerry.daemon.http import table
from skerry.daemon.http.operations import OCTETS, Operation
from skerry.manager.caller import VERBS
from tests import support
from tests.integration.daemon import Connection, Daemon, started

UPGRADE = {
    "connection": "upgrade",
    "upgrade": "websocket",
    "sec-websocket-version": "13",
    "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
}
GUARDED = [operation for operation in table.OPERATIONS if operation.verb]
OPEN = [operation for operation in table.OPERATIONS if not operation.verb]
OF_AN_ENVIRONMENT = [operation for operation in GUARDED if "{environment_id}" in operation.path]
NOT_TRIED = {"stop", "build_image", "doctor"}
"""Allowed, they would end the daemon or take long; denied, they are tried as all others."""

each_guarded = pytest.mark.parametrize("operation", GUARDED, ids=lambda operation: operation.name)


@dataclass
class World:
    daemon: Daemon
    environment: str
    execution: str
    other: str
    """A token of the tenant `other`, with every verb but admin."""
    port: int = 0
    """Of its TCP door, if the requests shall go there."""

    def token(self, *verbs: str, tenant: str = "acme", lifetime: float | None = None) -> tuple[str, str]:
        """Id and text."""
        body: dict[str, Any] = {"name": "test", "tenant": tenant, "verbs": list(verbs)}
        if lifetime is not None:
            body["lifetime"] = lifetime
        made = self.daemon.call("POST", "/tokens", body, expect=201)
        return made["id"], made["token"]

    def ask(self, operation: Operation, token: str | None) -> tuple[int, dict[str, Any]]:
        """Send the operation's own example; status and problem."""
        path = operation.path.format(
            environment_id=self.environment,
            execution_id=self.execution,
            image="host",
            token_id="t4n8q2r6w1zc",
            session_id="analysis",
            pool="default",
            tenant="acme",
        )
        query = {parameter.name: "1" for parameter in operation.query if parameter.required}
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        body: Any = operation.body_example if operation.body is not None else None
        if operation.uploads and body is None:
            body, headers["content-type"] = b"", OCTETS
        if operation.websocket:
            headers |= UPGRADE
        target = f"{path}?{urlencode(query)}" if query else path
        with self.request(operation.method, target, body, headers) as response:
            raw = response.read() if response.status >= 400 else b"{}"
            return response.status, json.loads(raw)

    @contextlib.contextmanager
    def request(
        self, method: str, path: str, body: Any, headers: dict[str, str]
    ) -> Iterator[http.client.HTTPResponse]:
        if not self.port:
            with self.daemon.request(method, path, body, headers) as response:
                yield response
            return
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            content = json.dumps(body) if isinstance(body, dict) else body
            connection.request(method, path, content, headers)
            yield connection.getresponse()
        finally:
            connection.close()


@pytest.fixture(scope="module", params=support.first_of(["unix", "tcp"]))
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    options = ("--backend", "fake", "--foreground", "--listen", "127.0.0.1:0")
    with support.temporary_home() as home, started(home, *options) as daemon:
        found = re.search(r"listening on http://127\.0\.0\.1:(\d+)", (home / "daemon.log").read_text())
        assert found is not None
        yield make_world(daemon, int(found[1]) if request.param == "tcp" else 0)


def make_world(daemon: Daemon, port: int = 0) -> World:
    world = World(daemon, "", "", "", port)
    _, acme = world.token(*VERBS[:-1])
    _, world.other = world.token(*VERBS[:-1], tenant="other")
    headers = {"authorization": f"Bearer {acme}"}
    _, _, answer = daemon.raw("POST", "/environments", {}, headers)
    world.environment = json.loads(answer)["environment_id"]
    body = {"argv": ["sleep", "1000"], "stdin": True}
    _, _, answer = daemon.raw("POST", f"/environments/{world.environment}/executions", body, headers)
    world.execution = json.loads(answer)["execution_id"]
    return world


def read_to_the_end(read: Callable[[], bytes]) -> None:
    """Fails by a TimeoutError when there is none."""
    with contextlib.suppress(ConnectionError, http.client.IncompleteRead):
        while read():
            pass


@each_guarded
def test_what_is_no_token(operation: Operation, world: World) -> None:
    good_id, good = world.token(*VERBS)
    secret = good.split("_", 2)[2]
    for text in ("", "x", "skt", f"skt_{good_id}_", f"skt_{good_id}_{secret[:-1]}", f"skt_nobody_{secret}"):
        status, problem = world.ask(operation, text)
        assert (status, problem["code"]) == (401, "unauthorized"), text
        assert secret[:-1] not in json.dumps(problem)


@each_guarded
def test_without_a_token(operation: Operation, world: World) -> None:
    if world.port:
        status, problem = world.ask(operation, None)
        assert (status, problem["code"]) == (401, "unauthorized")
    elif operation.name not in NOT_TRIED:  # the operator, on the daemon's own socket
        assert world.ask(operation, None)[0] not in (401, 403)


@each_guarded
def test_a_token_that_was_good(operation: Operation, world: World) -> None:
    revoked_id, revoked = world.token(*VERBS)
    _, expired = world.token(*VERBS, lifetime=0.001)
    if operation.name not in NOT_TRIED and operation.name != "delete_environment":
        assert world.ask(operation, revoked)[0] not in (401, 403)
    world.daemon.call("DELETE", f"/tokens/{revoked_id}")
    time.sleep(0.002)  # it is over when the clock says so
    for text in (revoked, expired):
        status, problem = world.ask(operation, text)
        assert (status, problem["code"]) == (401, "unauthorized")


@each_guarded
def test_a_token_for_something_else(operation: Operation, world: World) -> None:
    for missing in operation.verbs:
        others = [verb for verb in VERBS if verb != missing]
        status, problem = world.ask(operation, world.token(*others)[1])
        assert (status, problem["code"]) == (403, "denied")
        assert missing in problem["message"]


@pytest.mark.parametrize(
    "operation", [each for each in GUARDED if each.name not in NOT_TRIED], ids=lambda each: each.name
)
def test_its_verb_is_enough(operation: Operation, world: World) -> None:
    if operation.name == "delete_environment":
        world = make_world(world.daemon, world.port)
    status, problem = world.ask(operation, world.token(*operation.verbs)[1])
    assert status not in (401, 403), problem
    assert status < 500 or problem["code"] == "isolation_unavailable", problem  # `fake` has no network


@pytest.mark.parametrize("operation", OF_AN_ENVIRONMENT, ids=lambda operation: operation.name)
def test_things_of_others_are_not_there(operation: Operation, world: World) -> None:
    status, problem = world.ask(operation, world.other)
    assert (status, problem["code"]) == (404, "environment_not_found")
    nowhere = World(world.daemon, "nosuchthing1", world.execution, "", world.port)
    _, missing = nowhere.ask(operation, world.other)
    known = json.dumps(problem).replace(world.environment, "nosuchthing1")
    assert json.loads(known) == missing, "the answer tells that it exists"


@pytest.mark.parametrize("operation", OPEN, ids=lambda operation: operation.name)
def test_what_everybody_may_ask(operation: Operation, world: World) -> None:
    for token in (None, "nonsense"):
        assert world.ask(operation, token)[0] == 200


def test_a_tenant_sees_its_own(world: World) -> None:
    daemon = world.daemon

    def get(path: str, token: str, expect: int = 200) -> Any:
        status, _, answer = daemon.raw("GET", path, headers={"authorization": f"Bearer {token}"})
        assert status == expect, answer
        return json.loads(answer)

    mine = world.token(*VERBS[:-1], tenant="third")[1]
    body, headers = {"name": "box"}, {"authorization": f"Bearer {mine}"}
    _, _, answer = daemon.raw("POST", "/environments", body, headers)
    made = json.loads(answer)["environment_id"]
    # The same name is another's for each tenant.
    status, _, answer = daemon.raw("POST", "/environments", body, {"authorization": f"Bearer {world.other}"})
    assert status == 201
    theirs = json.loads(answer)["environment_id"]
    assert get("/environments/box", mine)["environment_id"] == made
    assert get("/environments/box", world.other)["environment_id"] == theirs
    assert [each["environment_id"] for each in get("/environments?all=1", mine)["environments"]] == [made]
    assert get("/version", mine)["environments"] == 1
    assert get("/images/host", mine)["environments"] == [made]
    # Not by the beginning of its id either, nor by what it has after its end.
    get(f"/environments/{theirs[:6]}", mine, expect=404)
    daemon.raw("DELETE", f"/environments/{theirs}", headers={"authorization": f"Bearer {world.other}"})
    get(f"/environments/{theirs}", mine, expect=404)
    assert "deleted by token" in get(f"/environments/{theirs}", world.other)["ended_reason"]
    assert get("/quotas/third", mine)["used"]["environments"] == 1
    get("/quotas/acme", mine, expect=404)
    # The operator is a tenant too, and sees others only when asking for them.
    assert made not in json.dumps(daemon.call("GET", "/environments"))
    _, _, answer = daemon.raw("GET", "/environments", headers={"skerry-tenant": "third"})
    assert [each["environment_id"] for each in json.loads(answer)["environments"]] == [made]
    status, _, answer = daemon.raw("GET", "/environments", headers={**headers, "skerry-tenant": "acme"})
    assert (status, json.loads(answer)["code"]) == (403, "denied")
    daemon.raw("DELETE", f"/environments/{made}", headers=headers)


def test_quotas(world: World) -> None:
    daemon = world.daemon
    _, token = world.token("create", "delete", tenant="small")
    headers = {"authorization": f"Bearer {token}"}
    daemon.call("PUT", "/quotas/small", {"environments": 2, "cpus": 2.5, "memory": "1g"})

    def create(**body: Any) -> tuple[int, Any]:
        status, _, answer = daemon.raw("POST", "/environments", body, headers)
        return status, json.loads(answer)

    status, first = create(cpus=1, memory="256m")
    assert status == 201
    for too_much in ({"cpus": 2}, {"memory": "900m"}):
        status, problem = create(**{"cpus": 0.5, "memory": "64m", **too_much})
        assert (status, problem["code"]) == (429, "quota_exceeded")
        assert problem["detail"]["quota"] == next(iter(too_much))
    assert create(cpus=1, memory="256m")[0] == 201
    status, problem = create(cpus=0.1, memory="16m")
    assert (status, problem["detail"]["quota"]) == (429, "environments")
    daemon.raw("DELETE", f"/environments/{first['environment_id']}", headers=headers)
    assert create(cpus=0.1, memory="16m")[0] == 201
    _, _, answer = daemon.raw("GET", "/audit?kind=denial", headers={"skerry-tenant": "small"})
    assert [json.loads(row)["outcome"] for row in answer.splitlines()] == ["quota_exceeded"] * 3


def test_what_a_tenant_causes_is_charged_to_it_alone(world: World) -> None:
    daemon = world.daemon
    tokens = {
        tenant: world.token("create", "execute", "write", tenant=tenant)[1] for tenant in ("busy", "quiet")
    }

    def ask(tenant: str, path: str, body: Any) -> Any:
        status, _, answer = daemon.raw("POST", path, body, {"authorization": f"Bearer {tokens[tenant]}"})
        assert status < 300, answer
        return json.loads(answer)

    made = {tenant: ask(tenant, "/environments", {})["environment_id"] for tenant in tokens}
    for _ in range(5):
        command = {"command": "head -c 100000 /dev/zero | tr '\\0' x"}
        ask("busy", f"/environments/{made['busy']}/execute", command)
        content = {"path": "a", "content": "x" * 50_000}
        ask("busy", f"/environments/{made['busy']}/files/write", content)
    busy, quiet = (daemon.call("GET", f"/quotas/{tenant}")["caused"] for tenant in ("busy", "quiet"))
    assert (busy["requests"], quiet["requests"]) == (11, 1)
    assert busy["sent_bytes"] > 500_000 > 10_000 > quiet["sent_bytes"]
    assert busy["received_bytes"] > 250_000 > 1000 > quiet["received_bytes"]
    assert busy["rows"] >= 2 + 2 * 10 > quiet["rows"] >= 2
    assert busy["loop_seconds"] > quiet["loop_seconds"] > 0
    text = daemon.raw("GET", "/metrics")[2].decode()
    assert 'skerry_tenant_requests_total{tenant="busy"} 11' in text


def test_quota_of_disk_counts_workspaces_as_large_as_they_may_get(world: World) -> None:
    daemon = world.daemon
    _, token = world.token("create", "delete", tenant="disks")
    headers = {"authorization": f"Bearer {token}"}
    daemon.call("PUT", "/quotas/disks", {"disk": "100m"})

    def create(**body: Any) -> tuple[int, Any]:
        status, _, answer = daemon.raw("POST", "/environments", body, headers)
        return status, json.loads(answer)

    status, first = create(disk="60m")
    assert status == 201
    status, problem = create(disk="60m")
    assert (status, problem["code"], problem["detail"]["quota"]) == (429, "quota_exceeded", "disk")
    assert "100.0 MiB: 60.0 MiB in use, 60.0 MiB more asked for" in problem["message"]
    assert create(disk="60m", workspace="memory")[0] == 201
    assert daemon.call("GET", "/quotas/disks")["used"]["disk"] == 60 << 20
    daemon.raw("DELETE", f"/environments/{first['environment_id']}", headers=headers)
    assert create(disk="60m")[0] == 201


def test_revocation_cuts_what_is_under_way(world: World) -> None:
    daemon = world.daemon
    token_id, token = world.token("read", "execute")
    headers = {"authorization": f"Bearer {token}"}
    base = f"/environments/{world.environment}"
    body = {"argv": ["sh", "-c", "echo ready; exec sleep 1000"]}
    status, _, answer = daemon.raw("POST", f"{base}/executions", body, headers)
    assert status == 201
    events = f"{base}/executions/{json.loads(answer)['execution_id']}/events"
    with (
        world.request("GET", events, None, headers) as stream,
        world.request("GET", f"{base}/logs?follow=1", None, headers) as logs,
        world.request("GET", f"{base}/attach", None, {**headers, **UPGRADE}) as attached,
    ):
        assert stream.readline().startswith(b"id: ")
        assert attached.status == 101
        daemon.call("DELETE", f"/tokens/{token_id}")
        for read in (stream.readline, logs.readline, lambda: attached.fp.read(1)):
            read_to_the_end(read)
    assert daemon.raw("GET", base, headers=headers)[0] == 401


def test_revocation_cuts_what_came_behind_another_request(world: World) -> None:
    """On one connection the next request can begin before the one before it has quite ended."""
    token_id, token = world.token("read", "audit")
    sock = (
        socket.create_connection(("127.0.0.1", world.port)) if world.port else socket.socket(socket.AF_UNIX)
    )
    with sock:
        if not world.port:
            sock.connect(world.daemon.socket)
        sock.settimeout(60)
        head = f"host: localhost\r\nauthorization: Bearer {token}\r\n\r\n"
        path = f"/environments/{world.environment}/logs?follow=1"
        sock.sendall(f"GET /audit?last=1 HTTP/1.1\r\n{head}GET {path} HTTP/1.1\r\n{head}".encode())
        seen = b""
        while seen.count(b"HTTP/1.1 200") < 2:
            seen += sock.recv(65536)
        world.daemon.call("DELETE", f"/tokens/{token_id}")
        read_to_the_end(lambda: sock.recv(65536))


def test_an_expired_token_is_cut_too(world: World) -> None:
    _, token = world.token("read", lifetime=1.0)
    path = f"/environments/{world.environment}/logs?follow=1"
    with world.request("GET", path, None, {"authorization": f"Bearer {token}"}) as logs:
        assert logs.status == 200
        read_to_the_end(logs.readline)


def test_tokens_are_nowhere_but_in_their_answer(tmp_path: Path) -> None:
    with support.temporary_home() as home:
        with started(home, "--backend", "fake") as daemon:
            made = daemon.call("POST", "/tokens", {"name": "ci", "lifetime": 60}, expect=201)
            secret = made["token"].split("_", 2)[2]
            daemon.raw("GET", "/environments", headers={"authorization": f"Bearer {made['token']}x"})
            (listed,) = daemon.call("GET", "/tokens")["tokens"]
            assert listed == {**listed, "name": "ci", "tenant": "default", "revoked_at": None}
            assert "token" not in listed
        written = [path for path in home.rglob("*") if path.is_file()]
        assert written
        for path in written:
            assert secret.encode() not in path.read_bytes(), path


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"name": ""}, "name"),
        ({"name": "x", "verbs": ["fly"]}, "no verb 'fly'"),
        ({"name": "x", "verbs": []}, "allows nothing"),
        ({"name": "x", "tenant": "Not A Tenant"}, "tenant"),
        ({"name": "x", "tenant": "skerry"}, "the daemon's own"),
        ({"name": "x", "lifetime": -1}, "lifetime"),
        ({"name": "x\n"}, "printable"),
    ],
)
def test_bad_tokens_are_not_made(body: dict[str, Any], words: str, world: World) -> None:
    assert words in world.daemon.call("POST", "/tokens", body, expect=400)["message"]


def test_denials_do_not_fill_the_audit(world: World) -> None:
    _, token = world.token("read", tenant="nosy")
    headers = {"authorization": f"Bearer {token}"}
    for _ in range(100):
        assert world.daemon.raw("DELETE", f"/environments/{'x' * 1000}", headers=headers)[0] == 403
    _, _, answer = world.daemon.raw("GET", "/audit?kind=denial", headers={"skerry-tenant": "nosy"})
    rows = [json.loads(line) for line in answer.splitlines()]
    assert 10 <= len(rows) < 100
    assert all(len(row["detail"]["path"]) <= 200 for row in rows)


def test_two_authorizations_are_none(world: World) -> None:
    _, good = world.token("read")
    connection = Connection(world.daemon.socket)
    connection.putrequest("GET", "/environments")
    for token in ("nonsense", good):
        connection.putheader("authorization", f"Bearer {token}")
    connection.endheaders()
    assert connection.getresponse().status == 401
    connection.close()


def test_a_name_may_be_the_id_of_another_tenant(world: World) -> None:
    _, token = world.token("read", "create", "delete", tenant="mimic")
    headers = {"authorization": f"Bearer {token}"}
    _, _, answer = world.daemon.raw("POST", "/environments", {"name": world.environment}, headers)
    made = json.loads(answer)["environment_id"]
    status, _, answer = world.daemon.raw("DELETE", f"/environments/{world.environment}", headers=headers)
    assert (status, json.loads(answer)["environment_id"]) == (200, made)
