"""What the audit tells of a real daemon's work, and what happens when it cannot be written."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from skerry.client.sync.client import Client
from skerry.client.sync.environment import Environment
from tests import support
from tests.integration.daemon import Daemon, started

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
SECRET = "correct-horse-battery-staple"


@pytest.fixture
def daemon(store_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    monkeypatch.setenv("SKERRY_DATABASE", store_url)
    with support.temporary_home() as home, started(home, "--backend", "fake") as daemon:
        yield daemon


def rows(daemon: Daemon, **filters: Any) -> list[dict[str, Any]]:
    query = "&".join(f"{name}={value}" for name, value in filters.items())
    status, _, answer = daemon.raw("GET", f"/audit?{query}")
    assert status == 200, answer
    return [json.loads(line) for line in answer.splitlines()]


@contextmanager
def database(url: str) -> Iterator[Callable[[str], object]]:
    """What runs statements behind the daemon's back."""
    if url.startswith("sqlite:"):
        lite = sqlite3.connect(url.removeprefix("sqlite://"), isolation_level=None)
        try:
            yield lite.execute
        finally:
            lite.close()
    else:
        with psycopg.connect(url, autocommit=True) as connection:
            yield lambda statement: connection.execute(statement.encode())


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.requirement("R57")
def test_a_command_has_an_intent_and_a_result(daemon: Daemon) -> None:
    environment = daemon.create(env={"COLOUR": "blue"})
    base = f"/environments/{environment}"
    body = {
        "argv": ["sh", "-c", "cat; echo $SHAPE >&2; exit 3"],
        "env": {"SHAPE": "round"},
        "secrets": {"KEY": SECRET},
        "stdin": "some input",
        "cwd": ".",
        "timeout": 60,
    }
    status, headers, _ = daemon.raw("POST", f"{base}/execute", body, {"traceparent": TRACE})
    assert status == 200
    intent, result = rows(daemon, request=headers["x-request-id"])
    info = daemon.call("GET", base)
    for row in (intent, result):
        assert row["action"] == "execution"
        assert row["peer"] == f"uid {os.geteuid()}"
        assert row["tenant"] == "default"
        assert row["trace_id"] == TRACE.split("-")[1]
        assert row["environment_id"] == environment
        assert [row[key] for key in ("backend", "isolation", "image_digest")] == [
            info[key] for key in ("backend", "isolation", "image_digest")
        ]
    assert (intent["kind"], result["kind"]) == ("intent", "result")
    assert intent["detail"] == {
        "execution_id": result["detail"]["execution_id"],
        "argv": body["argv"],
        "env": ["SHAPE"],
        "secrets": ["KEY"],
        "cwd": ".",
        "user": "appuser",
        "timeout": 60.0,
    }
    assert (result["outcome"], result["detail"]["exit_code"]) == ("failed", 3)
    assert result["detail"]["stdin"] == {"size": 10, "sha256": sha256(b"some input")}
    assert result["detail"]["stdout"] == {"size": 10, "sha256": sha256(b"some input")}
    assert result["detail"]["stderr"] == {"size": 6, "sha256": sha256(b"round\n")}
    assert result["usage"].keys() == info["usage"].keys()
    (created,) = rows(daemon, kind="intent", action="environment.create")
    assert created["detail"]["env"] == ["COLOUR"]
    assert "blue" not in json.dumps(rows(daemon))


@pytest.mark.requirement("R57")
def test_everything_that_is_done_is_told(daemon: Daemon) -> None:
    with Client(str(daemon.home)) as client, Environment(client=client, name="box") as env:
        env.files.write("a", b"content")
        env.files.read("a")
        env.files.stat("a")
        env.files.mkdir("d")
        env.files.rename("a", "d/b")
        env.files.list("d")
        env.files.remove("d", recursive=True)
        env.heartbeat(100)
        with env.start("read x; exit 4", stdin=True) as process:
            process.signal(28)
            process.write(b"typed\n")
            process.close_stdin()
            assert process.wait().exit_code == 4
        environment = env.id
    told = [(row["kind"], row["action"], row["outcome"]) for row in rows(daemon)]
    assert told == [
        ("intent", "environment.create", ""),
        ("result", "environment.create", "completed"),
        *(
            (kind, f"file.{verb}", outcome)
            for verb in ("write", "read", "stat", "mkdir", "rename", "list", "remove")
            for kind, outcome in (("intent", ""), ("result", "completed"))
        ),
        ("lifecycle", "environment.heartbeat", ""),
        ("intent", "execution", ""),
        ("intent", "execution.signal", ""),
        ("result", "execution.signal", "completed"),
        ("result", "execution", "failed"),
        ("intent", "environment.delete", ""),
        ("lifecycle", "environment.end", "canceled"),
        ("result", "environment.delete", "completed"),
    ]
    content = {"size": 7, "sha256": sha256(b"content")}
    for action in ("file.write", "file.read"):
        (row,) = rows(daemon, action=action, kind="result")
        assert row["detail"]["content"] == content
    (row,) = rows(daemon, action="execution", kind="result")
    assert row["detail"]["stdin"] == {"size": 6, "sha256": sha256(b"typed\n")}
    (row,) = rows(daemon, action="environment.end")
    assert (row["detail"], row["environment_id"]) == ({"reason": "deleted"}, environment)


def test_denials_are_told(daemon: Daemon) -> None:
    mine = daemon.create()
    made = daemon.call("POST", "/tokens", {"name": "x", "tenant": "acme", "verbs": ["read"]}, expect=201)
    headers = {"authorization": f"Bearer {made['token']}"}
    assert daemon.raw("DELETE", f"/environments/{mine}", headers=headers)[0] == 403
    assert daemon.raw("GET", f"/environments/{mine}", headers=headers)[0] == 404
    assert daemon.raw("GET", "/environments", headers={**headers, "skerry-tenant": "default"})[0] == 403
    _, _, answer = daemon.raw("GET", "/audit?kind=denial", headers={"skerry-tenant": "acme"})
    found = [json.loads(line) for line in answer.splitlines()]
    assert [(row["action"], row["outcome"], row["token"]) for row in found] == [
        ("delete_environment", "denied", made["id"]),
        ("environment.find", "environment_not_found", made["id"]),
        ("list_environments", "denied", made["id"]),
    ]
    for _ in range(100):
        daemon.raw("GET", "/environments", headers={"authorization": "Bearer nonsense"})
    strangers = rows(daemon, kind="denial")
    assert 1 <= len(strangers) < 100, "nobody may fill the audit without a token"
    assert {(row["action"], row["outcome"], row["token"]) for row in strangers} == {
        ("list_environments", "unauthorized", "")
    }
    assert [(row["action"], row["detail"]["name"]) for row in rows(daemon, action="token.create")] == [
        ("token.create", "x")
    ]


def test_nobody_chooses_the_audit_that_tells_of_tokens(daemon: Daemon) -> None:
    made = daemon.call("POST", "/tokens", {"name": "x", "verbs": ["admin"]}, expect=201)
    headers = {"authorization": f"Bearer {made['token']}", "skerry-tenant": "elsewhere"}
    _, _, answer = daemon.raw("POST", "/tokens", {"name": "y"}, headers)
    assert daemon.raw("PUT", "/quotas/acme", {"cpus": 1}, headers)[0] == 200
    assert daemon.raw("DELETE", f"/tokens/{json.loads(answer)['id']}", None, headers)[0] == 200
    found = [row for row in rows(daemon, kind="lifecycle") if row["token"] == made["id"]]
    assert [row["action"] for row in found] == ["token.create", "quota.set", "token.revoke"]
    assert found[0]["detail"]["tenant"] == "elsewhere"


def test_a_file_operation_that_fails_is_told_with_its_code(daemon: Daemon) -> None:
    environment = daemon.create()
    daemon.raw("GET", f"/environments/{environment}/files/read?path=missing")
    assert [row["outcome"] for row in rows(daemon, action="file.read")] == ["", "file_missing"]


def test_secrets_reach_the_process_and_nothing_else(daemon: Daemon, store_url: str) -> None:
    home = str(daemon.home)
    shown = b"hash " + sha256(SECRET.encode()).encode()
    program = "printf '%s' \"$KEY\" | sha256sum | cut -c1-64 | sed 's/^/hash /'"
    with Client(home) as client, Environment(client=client, secrets={"KEY": SECRET}) as env:
        assert env.execute(program).stdout_bytes.strip() == shown
        assert env.run(["sh", "-c", program]).stdout_bytes.strip() == shown
        with env.start(program) as process:
            assert process.wait().exit_code == 0
        other = env.run(["sh", "-c", "echo $KEY"], secrets={"KEY": "another-" + SECRET[::-1]})
        assert other.stdout == f"another-{SECRET[::-1]}\n"
        base = f"/environments/{env.id}"
        for body in (
            {"argv": ["true"], "secrets": {"KEY": f"{SECRET}\0"}},
            {"argv": ["true"], "secrets": {"KEY": f"{SECRET}\ud800"}},
            {"argv": ["true"], "secrets": {f"{SECRET}=": "x"}},
            {"argv": ["true"], "secrets": {"KEY": SECRET}, "env": {"KEY": "x"}},
            {"argv": ["true"], "secrets": [SECRET]},
            {"command": "true", "secrets": {"1 2": SECRET}},
            {"argv": ["true"], "secrets": {"KEY": SECRET * 200_000}},
        ):
            status, _, answer = daemon.raw("POST", f"{base}/execute", body)
            assert status >= 400, body
            if f"{SECRET}=" not in body["secrets"]:  # a name is no secret
                assert SECRET not in answer.decode()
        assert SECRET not in json.dumps(daemon.call("GET", f"{base}/executions"))
    written = json.dumps(rows(daemon))
    if store_url.startswith("sqlite:"):
        folder = Path(store_url.removeprefix("sqlite://")).parent
        written += "".join(path.read_bytes().decode("latin-1") for path in folder.iterdir())
    else:
        with psycopg.connect(store_url) as connection:
            for table in ("environments", "executions", "audit"):
                written += repr(connection.execute(f"SELECT * FROM {table}".encode()).fetchall())
    for path in daemon.home.rglob("*"):
        if path.is_file():
            written += path.read_bytes().decode("latin-1")
    assert "KEY" in written
    assert SECRET not in written
    assert SECRET[::-1] not in written


def test_a_trace_goes_on(daemon: Daemon) -> None:
    environment = daemon.create()
    body = {"argv": ["sh", "-c", "echo $TRACEPARENT"]}
    for header, passed_on in (
        (TRACE, TRACE),
        ("00-00000000000000000000000000000000-00f067aa0ba902b7-01", ""),
        ("nonsense", ""),
        (f"{TRACE}\x00", ""),
    ):
        status, _, answer = daemon.raw(
            "POST", f"/environments/{environment}/execute", body, {"traceparent": header.replace("\0", "x")}
        )
        assert (status, json.loads(answer)["stdout"]) == (200, f"{passed_on}\n")
    assert len(rows(daemon, trace=TRACE.split("-")[1])) == 2


TAMPERED = {
    "changed": "UPDATE audit SET detail = replace(detail, 'echo 2', 'echo 9') WHERE detail LIKE '%echo 2%'",
    "removed": "DELETE FROM audit WHERE detail LIKE '%echo 2%'",
    "removed at the end": "DELETE FROM audit WHERE seq = (SELECT max(seq) FROM audit)",
    "moved": "UPDATE audit SET seq = CASE seq WHEN 5 THEN -7 ELSE -5 END WHERE seq IN (5, 7)",
    "added": "INSERT INTO audit SELECT tenant, seq + 1, at, kind, action, request_id, trace_id, token, peer,"
    " environment_id, backend, isolation, image_digest, detail, outcome, usage, hash FROM audit"
    " WHERE seq = (SELECT max(seq) FROM audit)",
}


@pytest.mark.parametrize("how", TAMPERED)
def test_verify_finds_what_was_done_behind_our_back(daemon: Daemon, store_url: str, how: str) -> None:
    environment = daemon.create()
    for number in range(4):
        daemon.execute(environment, ["sh", "-c", f"echo {number}"])
    before = daemon.call("GET", "/audit/verify")
    assert before["intact"]
    assert before["seq"] == 10
    with database(store_url) as run:
        run(TAMPERED[how])
        if how == "moved":
            run("UPDATE audit SET seq = -seq WHERE seq < 0")
    found = daemon.call("GET", "/audit/verify")
    assert not found["intact"]
    assert found["broken"]["seq"] > 0
    assert found["broken"]["reason"]


def test_prune(daemon: Daemon) -> None:
    environment = daemon.create()
    daemon.execute(environment, "true")
    daemon.call("DELETE", f"/environments/{environment}")
    before = daemon.call("GET", "/audit/verify")
    assert before["pruned"] is None
    assert (
        daemon.call("POST", "/audit/prune", {"before": time.time() + 60}, expect=400)["code"]
        == "invalid_request"
    )
    assert daemon.call("POST", "/audit/prune", {"before": 1000})["removed"] == 0
    pruned = daemon.call("POST", "/audit/prune", {"before": time.time()})
    assert pruned == {
        "removed": before["seq"],
        "seq": before["seq"],
        "hash": before["hash"],
        "unfinished": None,
    }
    [row] = rows(daemon)
    assert (row["action"], row["seq"], row["detail"]["seq"]) == (
        "audit.prune",
        before["seq"] + 1,
        before["seq"],
    )
    assert row["peer"].startswith("uid ")
    after = daemon.call("GET", "/audit/verify")
    assert (after["intact"], after["pruned"]) == (True, {"seq": before["seq"], "hash": before["hash"]})
    assert daemon.call("GET", f"/audit/verify?seq={before['seq']}&hash={before['hash']}")["intact"]


def test_only_an_admin_prunes_and_is_told_of_at_home(daemon: Daemon) -> None:
    token = daemon.call(
        "POST", "/tokens", {"name": "x", "tenant": "acme", "verbs": ["create", "audit"]}, expect=201
    )
    theirs = {"authorization": f"Bearer {token['token']}", "content-type": "application/json"}
    body = json.dumps({"before": time.time()})
    assert daemon.raw("POST", "/environments", "{}", theirs)[0] == 201
    assert daemon.raw("POST", "/audit/prune", body, theirs)[0] == 403
    for_acme = {"skerry-tenant": "acme", "content-type": "application/json"}
    status, _, answer = daemon.raw("POST", "/audit/prune", json.dumps({"before": time.time()}), for_acme)
    removed = json.loads(answer)["removed"]
    assert (status, removed > 0) == (200, True)
    [row] = rows(daemon, action="tenant.audit.prune")
    assert (row["tenant"], row["detail"]["tenant"], row["detail"]["removed"]) == ("default", "acme", removed)


def test_verify_with_a_row_that_was_kept_elsewhere(daemon: Daemon, store_url: str) -> None:
    daemon.create()
    kept = daemon.call("GET", "/audit/verify")
    daemon.create()
    path = f"/audit/verify?seq={kept['seq']}&hash="
    assert daemon.call("GET", path + kept["hash"])["intact"]
    assert not daemon.call("GET", path + "0" * 64)["intact"]
    with database(store_url) as run:  # everything anew, as if it had never been
        run("DELETE FROM audit")
        run("DELETE FROM audit_heads")
    assert daemon.call("GET", "/audit/verify")["intact"]
    assert not daemon.call("GET", path + kept["hash"])["intact"]


LOCKED = {
    "sqlite": (
        "CREATE TRIGGER locked BEFORE INSERT ON audit BEGIN SELECT RAISE(ABORT, 'read-only'); END",
        "DROP TRIGGER locked",
    ),
    "postgres": (
        "CREATE FUNCTION locked() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'read-only' USING ERRCODE = 'read_only_sql_transaction'; END $$;"
        " CREATE TRIGGER locked BEFORE INSERT ON audit FOR EACH ROW EXECUTE FUNCTION locked()",
        "DROP TRIGGER locked ON audit",
    ),
}


def test_nothing_is_done_while_the_audit_is_read_only(daemon: Daemon, store_url: str) -> None:
    lock, unlock = LOCKED[store_url.partition(":")[0].removesuffix("ql")]
    environment = daemon.create()
    base = f"/environments/{environment}"
    body = {"argv": ["sh", "-c", "trap 'touch got-it' USR1; echo up; while :; do sleep 0.01; done"]}
    running = daemon.call("POST", f"{base}/executions", body, expect=201)["execution_id"]
    daemon.wait_for_output(environment, "up")
    with database(store_url) as run:
        run(lock)
        for method, path, request in (
            ("POST", "/environments", {}),
            ("POST", f"{base}/execute", {"command": "touch done"}),
            ("POST", f"{base}/executions", {"argv": ["touch", "done"]}),
            ("POST", f"{base}/executions/{running}/signal", {"signal": 10}),
            ("DELETE", f"{base}/executions/{running}", None),
            ("POST", f"{base}/files/write", {"path": "done", "content": ""}),
            ("GET", f"{base}/files/list", None),
        ):
            problem = daemon.call(method, path, request, expect=503)
            assert problem["code"] == "store_unavailable", path
            assert "the audit cannot be written" in problem["message"]
        assert daemon.call("GET", base)["state"] == "running"
        assert daemon.call("GET", f"{base}/executions/{running}")["state"] == "running"
        run(unlock)
    assert daemon.execute(environment, "ls")["stdout"] == ""
    assert len(daemon.call("GET", "/environments")["environments"]) == 1


def test_follow(daemon: Daemon) -> None:
    environment = daemon.create()
    with daemon.stream("/audit?last=0&follow=1") as stream:
        assert stream.status == 200
        daemon.execute(environment, "true")
        kinds = [json.loads(stream.readline())["kind"] for _ in range(2)]
    assert kinds == ["intent", "result"]


def test_what_a_killed_daemon_had_begun_gets_its_result(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKERRY_DATABASE", store_url)
    with support.temporary_home() as home:
        with started(home, "--backend", "fake") as daemon:
            environment = daemon.create()
            base = f"/environments/{environment}"
            body = {"argv": ["sh", "-c", "echo up; exec sleep 1000"]}
            kept = daemon.call("POST", f"{base}/executions", body, expect=201)["execution_id"]
            with daemon.asked("POST", f"{base}/execute", body):
                while len(begun := rows(daemon, action="execution", kind="intent")) < 2:
                    pass
                lost = begun[1]["detail"]["execution_id"]
                daemon.kill()
        with started(home, "--backend", "fake") as daemon:
            found = rows(daemon, action="execution", kind="result")
            assert [(row["detail"]["execution_id"], row["outcome"]) for row in found] == [(lost, "internal")]
            assert found[0]["request_id"]
            assert found[0]["request_id"] in {row["request_id"] for row in rows(daemon, kind="intent")}
            daemon.call("DELETE", f"{base}/executions/{kept}")
            last = rows(daemon, action="execution", kind="result")[-1]
            assert (last["detail"]["execution_id"], last["outcome"]) == (kept, "canceled")
            assert daemon.call("GET", "/audit/verify")["intact"]
