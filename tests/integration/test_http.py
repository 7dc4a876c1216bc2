"""The HTTP contract, route by route, against a real daemon."""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import stat
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from tests.integration.daemon import Connection, Daemon

UPGRADE_HEADERS = {
    "upgrade": "websocket",
    "connection": "upgrade",
    "sec-websocket-version": "13",
    "sec-websocket-key": "AAAAAAAAAAAAAAAAAAAAAA==",
}


def test_health_and_version(daemon: Daemon) -> None:
    assert daemon.call("GET", "/healthz") == {"status": "ok"}
    version = daemon.call("GET", "/version")
    assert (version["api"], version["pid"], version["home"]) == (1, daemon.process.pid, str(daemon.home))
    assert isinstance(version["environments"], int)
    isolation = daemon.call("GET", f"/environments/{daemon.create(name='ready')}")["isolation"]
    assert daemon.call("GET", "/readyz") == {"status": "ready", "isolation": isolation}
    daemon.call("DELETE", "/environments/ready")


def test_the_doctor(daemon: Daemon) -> None:
    report = daemon.call("GET", "/doctor")
    assert {"kernel", "helper", "environment"} <= {check["name"] for check in report["checks"]}
    assert daemon.call("GET", "/environments") == {"environments": [], "next": None}


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/environments/", 404, "not_found"),
        ("PUT", "/healthz", 405, "method_not_allowed"),
        ("GET", "/environments/nothing", 404, "environment_not_found"),
        ("DELETE", "/environments/nothing", 404, "environment_not_found"),
        ("GET", "/environments/nothing/usage", 404, "environment_not_found"),
        ("GET", "/environments/nothing/files/read?path=x", 404, "environment_not_found"),
        ("GET", "/environments?al=1", 400, "invalid_request"),
        ("GET", "/environments?all=2", 400, "invalid_request"),
        ("GET", "/images/nothing", 404, "image_not_found"),
    ],
)
def test_wrong_requests_are_problems(daemon: Daemon, method: str, path: str, status: int, code: str) -> None:
    problem = daemon.call(method, path, expect=status)
    assert (problem["code"], problem["status"]) == (code, status)
    assert problem["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("{", "not JSON"),
        ("[" * 50_000, "not JSON"),
        ("[]", "valid dictionary"),
        ('"x"', "valid dictionary"),
        ('{"memori":"1g"}', "unknown field 'memori'"),
        ('{"memory":"much"}', "'much' is not a size"),
        ('{"memory":-1}', "memory"),
        ('{"cpus":"1"}', "cpus"),
        ('{"pids":1.5}', "pids"),
        ('{"lifetime":0}', "lifetime"),
        ('{"lifetime":NaN}', "lifetime"),
        ('{"lifetime":"1h"}', "lifetime"),
        ('{"idle":true}', "idle"),
        ('{"isolation":"none"}', "isolation"),
        ('{"network":"everything"}', "network"),
        ('{"name":"a/b"}', "name"),
        ('{"name":7}', "name"),
        ('{"env":{"A":1}}', "env"),
        ('{"env":{"A=":"1"}}', "variable"),
    ],
)
def test_a_wrong_create_says_what_is_wrong_and_makes_nothing(daemon: Daemon, body: str, words: str) -> None:
    status, _, answer = daemon.raw("POST", "/environments", body)
    assert status == 400
    assert words in json.loads(answer)["message"]
    assert daemon.call("GET", "/environments") == {"environments": [], "next": None}


def test_a_wrong_method_names_the_right_ones(daemon: Daemon) -> None:
    status, headers, body = daemon.raw("PUT", "/environments")
    assert (status, headers["allow"], headers["content-type"]) == (
        405,
        "POST, GET",
        "application/problem+json",
    )
    assert json.loads(body)["code"] == "method_not_allowed"


@pytest.mark.parametrize("path", ["/environments", "/environments/x/files/write", "/images/import?name=x"])
@pytest.mark.parametrize(
    "media", ["text/plain", "application/x-www-form-urlencoded", "x", "application/json-x"]
)
def test_a_body_of_another_kind_is_refused(daemon: Daemon, path: str, media: str) -> None:
    status, _, body = daemon.raw("POST", path, b"{}", {"content-type": media})
    assert (status, json.loads(body)["code"]) == (415, "unsupported_media_type")
    assert "application/" in json.loads(body)["hint"]


def test_problems_have_the_members_of_rfc_9457_and_of_the_executor(daemon: Daemon) -> None:
    problem = daemon.call("GET", "/environments/a%2Fb%ff", expect=404)
    assert problem == {
        "error": True,
        "type": "urn:skerry:error:environment_not_found",
        "title": problem["message"],
        "status": 404,
        "code": "environment_not_found",
        "message": "no environment 'a/b\\udcff'",
        "hint": problem["hint"],
        "retryable": False,
        "detail": {},
    }


def test_what_is_no_http_gets_a_problem_too(daemon: Daemon) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(daemon.socket)
        sock.sendall(b"hello\r\n\r\n")
        answer = b"".join(iter(lambda: sock.recv(4096), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"content-type: application/problem+json" in head
    assert json.loads(body)["code"] == "invalid_request"


def test_an_answer_comes_in_one_piece(daemon: Daemon) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(daemon.socket)
        for _ in range(3):
            sock.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
            head, _, body = sock.recv(65536).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            assert "version" in json.loads(body)


def test_answers_of_requests_that_were_sent_together_come_in_order(daemon: Daemon) -> None:
    asked = b"".join(
        b"%s %s HTTP/1.1\r\nhost: x\r\n%s\r\n" % (method, path, last)
        for method, path, last in (
            (b"GET", b"/healthz", b""),
            (b"HEAD", b"/version", b""),
            (b"GET", b"/nothing", b""),
            (b"GET", b"/version", b"connection: close\r\n"),
        )
    )
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(daemon.socket)
        sock.sendall(asked)
        answers = b"".join(iter(lambda: sock.recv(65536), b""))
    assert [int(piece[:3]) for piece in answers.split(b"HTTP/1.1 ")[1:]] == [200, 405, 404, 200]


@pytest.mark.parametrize("path", ["/nothing", "/version", "/environments/x/attach/y"])
def test_a_websocket_where_there_is_none(daemon: Daemon, path: str) -> None:
    status, headers, body = daemon.raw("GET", path, None, UPGRADE_HEADERS)
    assert status in (400, 404)
    assert headers["content-type"] == "application/problem+json"
    assert json.loads(body)["status"] == status


def test_a_plain_request_for_a_websocket(daemon: Daemon, environment: str) -> None:
    assert "WebSocket" in daemon.call("GET", f"/environments/{environment}/attach", expect=400)["message"]


def test_lists_in_parts(daemon: Daemon) -> None:
    before = {row["environment_id"] for row in daemon.call("GET", "/environments?all=1")["environments"]}
    made = [daemon.create(name=f"listed{number}") for number in range(5)]
    try:
        pages, after = [], ""
        while after is not None:
            answer = daemon.call("GET", f"/environments?limit=2&after={after}")
            pages.append([row["environment_id"] for row in answer["environments"]])
            after = answer["next"]
        assert pages == [made[:2], made[2:4], made[4:]]
        assert daemon.call("GET", "/environments?limit=5")["next"] is None
        first = daemon.call("GET", "/environments?limit=2")
        daemon.call("DELETE", f"/environments/{made[0]}")
        daemon.call("DELETE", f"/environments/{made[1]}")
        rest = daemon.call("GET", f"/environments?after={first['next']}")["environments"]
        assert [row["environment_id"] for row in rest] == made[2:]

        def found(query: str) -> list[str]:
            rows = daemon.call("GET", f"/environments?{query}")["environments"]
            return [row["environment_id"] for row in rows if row["environment_id"] not in before]

        assert found("name=listed3") == [made[3]]
        assert found("name=listed0") == []
        assert found("name=listed0&all=1") == [made[0]]
        assert found("state=running") == made[2:]
        assert found("state=ended") == made[:2]
        assert found("image=host") == made[2:]
        assert found("image=other") == []
        assert found("all=1") == made
        digest = daemon.call("GET", "/images/host")["digest"]
        assert found(f"image={digest}") == made[2:]
    finally:
        for environment_id in made:
            daemon.call("DELETE", f"/environments/{environment_id}")


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "after=x", "state=lost"])
def test_wrong_lists(daemon: Daemon, query: str) -> None:
    assert daemon.call("GET", f"/environments?{query}", expect=400)["code"] == "invalid_request"


@pytest.mark.requirement("R111")
def test_an_unknown_image_names_the_way_to_get_it(daemon: Daemon) -> None:
    problem = daemon.call("POST", "/environments", {"image": "dev"}, expect=404)
    assert problem["code"] == "image_not_found"
    assert "skerry image build dev" in problem["hint"]


def test_more_isolation_than_there_is_is_refused(daemon: Daemon, environment: str) -> None:
    if daemon.call("GET", f"/environments/{environment}")["isolation"] == "none":
        pytest.skip("its operator has chosen the backend")
    problem = daemon.call("POST", "/environments", {"isolation": "microvm"}, expect=501)
    assert "skerry doctor" in problem["hint"]


def test_bodies_beyond_the_limit_are_refused(daemon: Daemon, environment: str) -> None:
    body = json.dumps({"path": "big", "content": "x" * (16 << 20)})
    status, _, answer = daemon.raw("POST", f"/environments/{environment}/files/write", body)
    assert (status, json.loads(answer)["code"]) == (413, "limit_reached")
    daemon.call("GET", f"/environments/{environment}/files/stat?path=big", expect=404)


@pytest.mark.requirement("R26", "R27", "R28")
def test_an_environment_from_create_to_delete(daemon: Daemon) -> None:
    info = daemon.call(
        "POST",
        "/environments",
        {"name": "first", "memory": "128m", "cpus": 0.5, "lifetime": 60, "idle": 30},
        expect=201,
    )
    ref = info["environment_id"]
    assert re.fullmatch("[a-z][a-z0-9]{11}", ref)
    assert (info["state"], info["image"], info["name"], info["profile"]) == (
        "running",
        "host",
        "first",
        "default",
    )
    assert (info["limits"]["memory"], info["limits"]["cpus"]) == (128 << 20, 0.5)
    assert info["expires_at"] == pytest.approx(info["created_at"] + 60)
    assert daemon.call("POST", "/environments", {"name": "first"}, expect=409)["code"] == "conflict"
    for found in (ref, ref[:3], "first"):
        assert daemon.call("GET", f"/environments/{found}")["environment_id"] == ref
    assert "memory_bytes" in daemon.call("GET", f"/environments/{ref}")["usage"]
    assert daemon.call("GET", f"/environments/{ref}/usage").keys() >= {"cpu_seconds", "oom_kills"}
    assert [row["environment_id"] for row in daemon.call("GET", "/environments")["environments"]] == [ref]
    extended = daemon.call("POST", f"/environments/{ref}/heartbeat", {"lifetime": 600})
    assert extended["expires_at"] > info["expires_at"] + 500
    daemon.call("POST", f"/environments/{ref}/heartbeat")
    for _ in range(2):
        assert daemon.call("DELETE", "/environments/first") == {"environment_id": ref, "deleted": True}
    assert daemon.call("GET", "/environments") == {"environments": [], "next": None}
    (ended,) = [
        row for row in daemon.call("GET", "/environments?all=1")["environments"] if row["name"] == "first"
    ]
    assert (ended["state"], ended["ended_reason"]) == ("ended", "deleted")
    for method, path in (("POST", "execute"), ("GET", "files/list"), ("GET", "logs"), ("POST", "heartbeat")):
        body = {"command": "true"} if path == "execute" else None
        problem = daemon.call(method, f"/environments/{ref}/{path}", body, expect=410)
        assert problem["code"] == "environment_ended"
        assert "deleted" in problem["message"]


@pytest.mark.requirement("R21", "R26", "R28", "R29", "R30", "R31", "R44")
def test_a_task_from_the_first_call_to_the_last(daemon: Daemon) -> None:
    """What a client needs that knows of the service only its six paths and the fields of its answers."""
    environment = daemon.call("POST", "/environments", expect=201)["environment_id"]
    path = f"/environments/{environment}"
    assert daemon.call("POST", f"{path}/heartbeat")["expires_at"] > time.time()
    saved = daemon.call("POST", f"{path}/files/write", {"path": "a/b.txt", "content": "text"})
    assert (saved["error"], saved["message"]) == (False, "File saved successfully.")
    read = daemon.call("GET", f"{path}/files/read?path=a/b.txt")
    assert (read["error"], read["content"]) == (False, "text")
    body = {"command": "cd a && cat b.txt && export LEFT=1", "timeout_seconds": 60}
    done = daemon.call("POST", f"{path}/execute", body)
    assert [done[key] for key in ("error", "stdout", "stderr", "exit_code")] == [False, "text", "", 0]
    done = daemon.call("POST", f"{path}/execute", {"command": "basename $PWD; echo $LEFT >&2; exit 3"})
    assert [done[key] for key in ("error", "stdout", "stderr", "exit_code")] == [True, "a\n", "1\n", 3]
    missing = daemon.call("GET", f"{path}/files/read?path=missing", expect=404)
    assert missing["error"]
    assert missing["message"]
    daemon.call("DELETE", path)
    assert daemon.call("POST", f"{path}/heartbeat", expect=410)["error"]


def test_what_can_succeed_later_says_when(daemon: Daemon) -> None:
    environment = daemon.create(pids=2000)
    path = f"/environments/{environment}/executions"
    started = [daemon.raw("POST", path, {"argv": ["sleep", "3456"]}) for _ in range(257)]
    daemon.call("DELETE", f"/environments/{environment}")
    assert [status for status, _, _ in started] == [201] * 256 + [429]
    status, headers, body = started[-1]
    assert (status, headers["retry-after"], json.loads(body)["code"]) == (429, "1", "busy")
    assert "retry-after" not in daemon.raw("GET", "/nothing")[1]


@pytest.mark.requirement("R29", "R45")
def test_execute_keeps_state_and_argv_does_not(daemon: Daemon, environment: str) -> None:
    result = daemon.execute(environment, "mkdir -p d; cd d; export A=1; echo out; echo err >&2; exit 3")
    assert (result["stdout"], result["stderr"], result["exit_code"]) == ("out\n", "err\n", 3)
    assert (result["outcome"], result["error"]) == ("failed", True)
    daemon.execute(environment, "cd d; export A=1")
    assert daemon.execute(environment, "echo $A; basename $PWD")["stdout"] == "1\nd\n"
    assert daemon.execute(environment, "echo [$A]", shell="other")["stdout"] == "[]\n"
    result = daemon.execute(environment, ["sh", "-c", "echo [$A] $B $HOME $USER", "x"], env={"B": "b"})
    home = daemon.execute(environment, "echo $HOME")["stdout"]
    assert result["stdout"] == f"[] b {home.strip()} appuser\n"
    assert re.fullmatch("[a-z][a-z0-9]{11}", result["execution_id"])
    assert result["duration_seconds"] > 0
    assert daemon.execute(environment, ["no-such-program"])["exit_code"] == 127


def test_execute_with_stdin_cwd_env_and_limits(daemon: Daemon, environment: str) -> None:
    assert daemon.execute(environment, ["cat"], stdin="grüße")["stdout"] == "grüße"
    assert daemon.execute(environment, "cat", stdin="text")["stdout"] == "text"
    encoded = base64.b64encode(bytes(range(256))).decode()
    result = daemon.execute(environment, ["cat"], stdin=encoded, stdin_encoding="base64")
    assert (result["stdout"], result["stdout_encoding"]) == (encoded, "base64")
    large = "0123456789abcdef" * 20_000
    assert daemon.execute(environment, ["cat"], stdin=large)["stdout"] == large
    assert daemon.execute(environment, ["true"], stdin=large)["exit_code"] == 0
    daemon.execute(environment, "mkdir -p sub")
    assert daemon.execute(environment, ["sh", "-c", "basename $PWD"], cwd="sub")["stdout"] == "sub\n"
    result = daemon.execute(environment, "head -c 3000000 /dev/zero | tr '\\0' x", output_limit=1000)
    assert (result["stdout"], result["stdout_size"], result["stdout_truncated"]) == (
        "x" * 1000,
        3000000,
        True,
    )
    assert result["outcome"] == "completed"
    result = daemon.execute(environment, "head -c 3000000 /dev/zero | tr '\\0' x")
    assert (len(result["stdout"]), result["stdout_size"]) == (1 << 20, 3000000)


def test_a_timeout_kills_and_leaves_the_shells_state(daemon: Daemon, environment: str) -> None:
    daemon.execute(environment, "A=kept")
    result = daemon.execute(environment, "A=lost; sleep 45678 & sleep 45678", timeout=0.3)
    assert (result["outcome"], result["exit_code"], result["message"]) == (
        "timed_out",
        124,
        "killed after 0.3 s",
    )
    assert daemon.execute(environment, "sleep 45678", timeout_seconds=0.1)["outcome"] == "timed_out"
    assert daemon.execute(environment, "echo $A")["stdout"] == "kept\n"
    assert daemon.execute(environment, ["pgrep", "-c", "-f", "sleep 45678"])["stdout"] == "0\n"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "either argv or command"),
        ({"command": "a", "argv": ["a"]}, "either argv or command"),
        ({"argv": []}, "empty"),
        ({"argv": "a"}, "argv"),
        ({"argv": ["a\0b"]}, "NUL"),
        ({"command": "a\0b"}, "NUL"),
        ({"command": "a", "cwd": "/\0"}, "NUL"),
        ({"command": "a", "env": {"A": "\0"}}, "NUL"),
        ({"command": "a", "timeout": -1}, "timeout"),
        ({"command": "a", "timeout": 1, "timeout_seconds": 1}, "timeout_seconds"),
        ({"command": "a", "output_limit": 1 << 40}, "output_limit"),
        ({"command": "a", "user": "daemon"}, "user"),
        ({"command": "a", "stdin": "%%", "stdin_encoding": "base64"}, "base64"),
        ({"command": "a", "stdin_encoding": "latin1"}, "stdin_encoding"),
        ({"argv": ["true", "x" * 200_000]}, "bytes"),
        ({"argv": ["true"], "cwd": "missing"}, "working directory"),
    ],
)
def test_wrong_executions(daemon: Daemon, environment: str, body: dict[str, Any], words: str) -> None:
    problem = daemon.call("POST", f"/environments/{environment}/execute", body, expect=400)
    assert words in problem["message"]


def test_a_client_that_goes_away_takes_its_execution_along(daemon: Daemon, environment: str) -> None:
    connection = Connection(daemon.socket)
    body = json.dumps({"command": "echo begun; sleep 12345 & sleep 12345"})
    connection.request("POST", f"/environments/{environment}/execute", body)
    path = f"/environments/{environment}/executions"
    daemon.wait_for_output(environment, "begun")
    (running,) = daemon.call("GET", path)["executions"]
    assert (running["command"], running["state"]) == ("echo begun; sleep 12345 & sleep 12345", "running")
    waiting = threading.Thread(target=daemon.execute, args=(environment, "true"))
    waiting.start()
    connection.close()
    waiting.join(30)
    assert not waiting.is_alive()
    while daemon.call("GET", path)["executions"]:
        pass
    assert daemon.execute(environment, ["pgrep", "-c", "-f", "sleep 12345"])["stdout"] == "0\n"


def test_background_executions(daemon: Daemon, environment: str) -> None:
    path = f"/environments/{environment}/executions"
    info = daemon.call(
        "POST", path, {"command": "echo hello; read x; echo got $x; exit 5", "stdin": True}, expect=201
    )
    assert (info["state"], info["environment_id"], info["pty"]) == ("running", environment, False)
    one = f"{path}/{info['execution_id']}"
    assert [row["execution_id"] for row in daemon.call("GET", path)["executions"]] == [info["execution_id"]]
    with daemon.stream(f"/environments/{environment}/logs?follow=1&execution={info['execution_id']}") as log:
        first = json.loads(log.readline())
        assert (first["stream"], first["data"], first["execution_id"]) == (
            "stdout",
            "hello\n",
            info["execution_id"],
        )
        daemon.call("POST", f"{one}/stdin?eof=1", "world\n")
        assert json.loads(log.readline())["data"] == "got world\n"
    while (found := daemon.call("GET", one))["state"] == "running":
        pass
    assert (found["outcome"], found["exit_code"]) == ("failed", 5)
    assert found["result"]["stdout"] == "hello\ngot world\n"
    _, headers, log_text = daemon.raw("GET", f"/environments/{environment}/logs")
    assert headers["content-type"] == "application/x-ndjson"
    assert "".join(json.loads(row)["data"] for row in log_text.splitlines()) == "hello\ngot world\n"
    assert daemon.call("POST", f"{one}/signal", {"signal": 15}, expect=409)["code"] == "conflict"
    assert daemon.call("GET", f"{path}/nothing", expect=404)["code"] == "execution_not_found"


def test_signals_and_kills(daemon: Daemon, environment: str) -> None:
    path = f"/environments/{environment}/executions"
    trap = "trap 'echo caught; exit 7' INT; echo set; while :; do sleep 0.1; done"
    info = daemon.call("POST", path, {"command": trap}, expect=201)
    one = f"{path}/{info['execution_id']}"
    with daemon.stream(f"/environments/{environment}/logs?follow=1") as log:
        assert json.loads(log.readline())["data"] == "set\n"
        daemon.call("POST", f"{one}/signal", {"signal": 2})
        assert json.loads(log.readline())["data"] == "caught\n"
    daemon.call("POST", f"{one}/signal", {"signal": 65}, expect=400)
    info = daemon.call("POST", path, {"argv": ["sleep", "54321"]}, expect=201)
    one = f"{path}/{info['execution_id']}"
    assert daemon.call("DELETE", one) == {}
    assert daemon.call("DELETE", one) == {}
    found = daemon.call("GET", one)
    assert (found["state"], found["outcome"], found["exit_code"]) == ("ended", "canceled", 137)
    assert daemon.execute(environment, ["pgrep", "-c", "-f", "sleep 54321"])["stdout"] == "0\n"


def test_the_socket_is_private(daemon: Daemon) -> None:
    assert stat.S_IMODE(os.stat(daemon.socket).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(daemon.home).st_mode) == 0o700


UPGRADE = "".join(f"{name}: {value}\r\n" for name, value in UPGRADE_HEADERS.items())


@pytest.mark.root
@pytest.mark.parametrize("request_line", ["GET /version", "GET /environments/x/attach"])
@pytest.mark.parametrize("headers", ["", UPGRADE], ids=["plain", "websocket"])
def test_a_foreign_user_gets_nothing_but_403(daemon: Daemon, request_line: str, headers: str) -> None:
    program = (
        "import socket, sys\n"
        "s = socket.socket(socket.AF_UNIX)\n"
        "s.connect(sys.argv[1])\n"
        "s.sendall(sys.stdin.buffer.read())\n"
        "sys.stdout.buffer.write(b''.join(iter(lambda: s.recv(4096), b'')))"
    )
    become = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    os.chmod(daemon.home, 0o755)
    os.chmod(daemon.socket, 0o666)
    try:
        answer = subprocess.run(
            [*become, os.path.realpath(sys.executable), "-ISc", program, daemon.socket],
            input=f"{request_line} HTTP/1.1\r\nhost: x\r\n{headers}\r\n".encode(),
            capture_output=True,
            check=True,
            cwd="/",
        ).stdout
    finally:
        os.chmod(daemon.home, 0o700)
        os.chmod(daemon.socket, 0o600)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 403 ")
    assert json.loads(body)["code"] == "denied"
    assert b"version" not in body


@pytest.mark.requirement("F9")
def test_what_was_used_is_known_after_the_end(daemon: Daemon) -> None:
    environment = daemon.create()
    daemon.execute(environment, ["sh", "-c", "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done"])
    alive = daemon.call("GET", f"/environments/{environment}/usage")
    daemon.call("DELETE", f"/environments/{environment}")
    ended = daemon.call("GET", f"/environments/{environment}")["usage"]
    assert ended == daemon.call("GET", f"/environments/{environment}/usage")
    if alive["cpu_seconds"] is not None:
        assert ended["cpu_seconds"] >= alive["cpu_seconds"] > 0
