"""The WebSocket that joins a client to an execution."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, unix_connect

from tests.integration.daemon import Daemon


@contextmanager
def attached(daemon: Daemon, environment: str, **opening: Any) -> Iterator[ClientConnection]:
    uri = f"ws://skerry/environments/{environment}/attach"
    opened = unix_connect(daemon.socket, uri, max_size=None, compression=None, proxy=None, close_timeout=1)
    with opened as websocket:  # who reads no more is not told of the end
        websocket.send(json.dumps(opening))
        yield websocket


def started(websocket: ClientConnection) -> dict[str, Any]:
    event = json.loads(websocket.recv(30))
    assert event["event"] == "started", event
    execution: dict[str, Any] = event["execution"]
    return execution


def until_end(websocket: ClientConnection) -> tuple[bytes, bytes, dict[str, Any]]:
    """Everything written to stdout and stderr, and the last event."""
    streams = {1: bytearray(), 2: bytearray()}
    while isinstance(message := websocket.recv(60), bytes):
        streams[message[0]] += message[1:]
    with pytest.raises(ConnectionClosed):
        websocket.recv(30)
    return bytes(streams[1]), bytes(streams[2]), json.loads(message)


def test_output_then_the_end(daemon: Daemon, environment: str) -> None:
    with attached(daemon, environment, argv=["sh", "-c", "echo out; echo err >&2; exit 3"]) as websocket:
        execution = started(websocket)
        assert (execution["environment_id"], execution["state"]) == (environment, "running")
        out, err, event = until_end(websocket)
    assert (out, err, event["event"]) == (b"out\n", b"err\n", "ended")
    result = event["result"]
    assert (result["exit_code"], result["outcome"], result["stdout_size"]) == (3, "failed", 4)
    assert "stdout" not in result
    assert result["execution_id"] == execution["execution_id"]
    assert websocket.close_code == 1000


def test_stdin_and_its_end(daemon: Daemon, environment: str) -> None:
    with attached(daemon, environment, argv=["cat"], stdin=True) as websocket:
        started(websocket)
        for _ in range(20):
            websocket.send(b"\0" + b"x" * 50_000)
        websocket.send(b"\0")
        out, _, event = until_end(websocket)
    assert out == b"x" * 1_000_000
    assert event["result"]["exit_code"] == 0


def test_a_terminal(daemon: Daemon, environment: str) -> None:
    opening = {"argv": ["sh"], "pty": {"rows": 33, "cols": 77}, "stdin": True}
    with attached(daemon, environment, **opening) as websocket:
        assert started(websocket)["pty"]
        websocket.send(b"\0stty size; echo $TERM\n")
        seen = b""
        while b"xterm-256color" not in seen:
            message = websocket.recv(30)
            assert isinstance(message, bytes)
            seen += message[1:]
        assert b"33 77" in seen
        websocket.send(json.dumps({"resize": [44, 88]}))
        websocket.send(b"\0stty size\n")
        while b"44 88" not in seen:
            message = websocket.recv(30)
            assert isinstance(message, bytes)
            seen += message[1:]
        websocket.send(b"\0exit 9\n")
        assert until_end(websocket)[2]["result"]["exit_code"] == 9


def test_signals_kills_and_timeouts(daemon: Daemon, environment: str) -> None:
    with attached(daemon, environment, argv=["sleep", "56789"]) as websocket:
        started(websocket)
        websocket.send(json.dumps({"signal": 15}))
        result = until_end(websocket)[2]["result"]
        assert (result["outcome"], result["exit_code"]) == ("signaled", 143)
    with attached(daemon, environment, command="sleep 56789 & sleep 56789") as websocket:
        started(websocket)
        websocket.send(json.dumps({"kill": True}))
        assert until_end(websocket)[2]["result"]["outcome"] == "canceled"
    with attached(daemon, environment, argv=["sleep", "56789"], timeout=0.2) as websocket:
        started(websocket)
        result = until_end(websocket)[2]["result"]
        assert (result["outcome"], result["exit_code"]) == ("timed_out", 124)
    assert daemon.execute(environment, ["pgrep", "-c", "-f", "sleep 56789"])["stdout"] == "0\n"


@pytest.mark.parametrize(
    ("opening", "code"),
    [
        ({}, "invalid_request"),
        ({"argv": [], "stdin": True}, "invalid_request"),
        ({"argv": ["true"], "shell": "main"}, "invalid_request"),
        ({"execution_id": "nothing"}, "execution_not_found"),
    ],
)
def test_a_wrong_opening(daemon: Daemon, environment: str, opening: dict[str, Any], code: str) -> None:
    with attached(daemon, environment, **opening) as websocket:
        _, _, event = until_end(websocket)
    assert (event["event"], event["error"]["code"]) == ("error", code)
    assert websocket.close_code == 1011


def test_an_unknown_environment(daemon: Daemon) -> None:
    with pytest.raises(InvalidStatus) as caught, attached(daemon, "nothing", argv=["true"]):
        pass
    assert caught.value.response.status_code == 404
    assert json.loads(caught.value.response.body)["code"] == "environment_not_found"


def test_a_wrong_message_is_answered_and_changes_nothing(daemon: Daemon, environment: str) -> None:
    with attached(daemon, environment, argv=["cat"], stdin=True) as websocket:
        started(websocket)
        for wrong in ("{", '{"resize": 5}', '{"signal": 99}', b"\x05x", b""):
            websocket.send(wrong)
            assert json.loads(websocket.recv(30))["error"]["code"] == "invalid_request"
        websocket.send(b"\0still there")
        websocket.send(b"\0")
        assert until_end(websocket)[0] == b"still there"


def test_one_who_attaches_sees_the_recent_output_and_leaves_without_harm(
    daemon: Daemon, environment: str
) -> None:
    path = f"/environments/{environment}/executions"
    info = daemon.call(
        "POST", path, {"command": "echo first; read x; echo second", "stdin": True}, expect=201
    )
    for _ in range(2):
        with attached(daemon, environment, execution_id=info["execution_id"]) as websocket:
            assert started(websocket)["execution_id"] == info["execution_id"]
            assert websocket.recv(30) == b"\x01first\n"
    assert daemon.call("GET", f"{path}/{info['execution_id']}")["state"] == "running"
    with attached(daemon, environment, execution_id=info["execution_id"]) as websocket:
        started(websocket)
        websocket.send(b"\0\n")
        assert until_end(websocket)[0] == b"first\nsecond\n"
    with attached(daemon, environment, execution_id=info["execution_id"]) as websocket:
        assert started(websocket)["state"] == "ended"
        assert until_end(websocket)[0] == b"first\nsecond\n"


def test_one_who_goes_away_takes_along_what_it_started(daemon: Daemon, environment: str) -> None:
    with attached(daemon, environment, command="sleep 23456 & sleep 23456", stdin=True) as websocket:
        execution = started(websocket)
    path = f"/environments/{environment}/executions/{execution['execution_id']}"
    while (found := daemon.call("GET", path))["state"] == "running":
        pass
    assert found["outcome"] == "canceled"
    assert daemon.execute(environment, ["pgrep", "-c", "-f", "sleep 23456"])["stdout"] == "0\n"


def test_one_who_goes_away_with_its_input_stuck(daemon: Daemon, environment: str) -> None:
    with attached(daemon, environment, argv=["sleep", "34567"], stdin=True) as websocket:
        execution = started(websocket)

        def send() -> None:
            with suppress(ConnectionClosed):
                for _ in range(2000):
                    websocket.send(b"\0" + b"x" * 4096)

        # How much fits in between depends on who is faster; whatever does not must not hold up this test.
        sending = threading.Thread(target=send)
        sending.start()
        sending.join(2)
        websocket.socket.shutdown(2)
        sending.join()
    path = f"/environments/{environment}/executions/{execution['execution_id']}"
    while daemon.call("GET", path)["state"] == "running":
        pass


def test_a_reader_that_stalls_stops_the_program_and_not_the_daemon(daemon: Daemon, environment: str) -> None:
    with attached(daemon, environment, command="head -c 200000000 /dev/zero; echo done >&2") as websocket:
        execution = started(websocket)
        before = resident(daemon)
        path = f"/environments/{environment}/executions/{execution['execution_id']}"
        for _ in range(20):
            assert daemon.execute(environment, "true")["exit_code"] == 0
        assert daemon.call("GET", path)["state"] == "running"
        assert resident(daemon) < before + (32 << 20)
        out, err, _ = until_end(websocket)
    assert (len(out), err) == (200_000_000, b"done\n")


def resident(daemon: Daemon) -> int:
    with open(f"/proc/{daemon.process.pid}/statm") as statm:
        return int(statm.read().split()[1]) * 4096
