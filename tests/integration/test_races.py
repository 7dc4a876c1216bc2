"""Calls that meet the end of a daemon, of an environment or of each other, on real daemons."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import leaks, support
from tests.integration.daemon import Connection, Daemon
from tests.integration.nursery import Nursery, nursery

SLOW: dict[str, Any] = {"workspace": "memory"}


@pytest.fixture(scope="module")
def daemons() -> Iterator[Nursery]:
    with nursery() as found:
        yield found


@pytest.fixture
def place() -> Iterator[Path]:
    with support.temporary_home() as home:
        yield home


def answered(daemon: Daemon, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
    status, _, text = daemon.raw(method, path, body)
    return status, json.loads(text)


def refused(answer: tuple[int, dict[str, Any]]) -> bool:
    return answer[0] == 503 and answer[1]["code"] == "daemon_unavailable" and answer[1]["retryable"]


def eventually(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def test_no_call_is_told_that_an_environment_ended_when_the_daemon_leaves_it(
    daemons: Nursery, place: Path
) -> None:
    with daemons.started(place) as daemon, ThreadPoolExecutor(8) as threads:
        made = daemon.create(**SLOW)
        at = f"/environments/{made}"
        daemon.call("POST", f"{at}/sessions", {"language": "python", "session_id": "one"}, expect=201)
        body = {"argv": ["sh", "-c", "echo up; sleep 1000"]}
        server = daemon.call("POST", f"{at}/executions", body, expect=201)["execution_id"]
        code = {"code": "import time; print('in session', flush=True); time.sleep(1000)"}
        calls = [
            threads.submit(answered, daemon, "POST", f"{at}/execute", {"command": "echo shell; sleep 1000"}),
            threads.submit(answered, daemon, "POST", f"{at}/sessions/one/run", code),
        ]
        for word in ("up", "shell", "in session"):
            daemon.wait_for_output(made, word)
        calls.append(threads.submit(answered, daemon, "POST", f"{at}/execute", {"command": "echo behind it"}))
        eventually(lambda: len(daemon.call("GET", f"{at}/executions")["executions"]) == 3)
        with (
            daemon.stream(f"{at}/executions/{server}/events") as events,
            daemon.stream(f"{at}/logs?follow=1") as log,
        ):
            assert any(b"up" in log.readline() for _ in range(3))  # one for each word, as they came
            assert events.readline()
            daemon.process.send_signal(signal.SIGTERM)
            for call in calls:
                assert refused(call.result(20)), call.result()
            for stream in (events, log):
                with pytest.raises(http.client.IncompleteRead) as cut:
                    stream.read()
                assert b"event: ended" not in cut.value.partial
        daemon.process.wait()
    with daemons.started(place) as daemon:
        assert daemon.call("GET", f"/environments/{made}")["state"] == "running"
        assert daemon.execute(made, "echo back")["stdout"] == "back\n"
        listed = daemon.call("GET", f"/environments/{made}/executions")["executions"]
        assert [(each["execution_id"], each["state"]) for each in listed] == [(server, "running")]


def test_concurrent_restarts_leave_one_interpreter(daemons: Nursery, place: Path) -> None:
    with daemons.started(place) as daemon, ThreadPoolExecutor(10) as threads:
        made = daemon.create(**SLOW)
        at = f"/environments/{made}/sessions"

        def processes() -> int:
            return int(daemon.execute(made, "ls -d /proc/[0-9]* | wc -l")["stdout"])

        def is_so(count: int) -> bool:
            return processes() == count

        without = processes()
        for language in ("python", "bash"):
            daemon.call("POST", at, {"language": language, "session_id": language}, expect=201)
            once = processes()
            assert once > without
            restarts = [
                threads.submit(answered, daemon, "POST", f"{at}/{language}/restart", {}) for _ in range(10)
            ]
            assert {restart.result()[0] for restart in restarts} == {200}
            eventually(partial(is_so, once))
            daemon.call("DELETE", f"{at}/{language}")
            eventually(partial(is_so, without))


def test_network_changes_that_race_deletes_leave_no_descriptor(daemons: Nursery, place: Path) -> None:
    with daemons.started(place) as daemon, ThreadPoolExecutor(4) as threads:

        def race() -> None:
            made = daemon.create(**SLOW)
            body = {"network": "allowlist", "allow": ["example.com"]}
            setting = threads.submit(answered, daemon, "PUT", f"/environments/{made}/network", body)
            daemon.call("DELETE", f"/environments/{made}")
            assert setting.result()[0] in (200, 404, 410)

        def descriptors() -> int:
            return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))

        for _ in range(3):
            race()
        before = descriptors()
        for _ in range(12):
            race()
        # The daemon may hold a few more for a while: connections, prepared environments. 12 leaks would be 48.
        eventually(lambda: descriptors() < before + 12)


def test_a_crash_loop_does_not_prolong_a_lease(daemons: Nursery, place: Path) -> None:
    with daemons.started(place) as daemon:
        made = daemon.create(lifetime=20, **SLOW)
        daemon.kill()
    ends = []
    for _ in range(3):
        with daemons.started(place) as daemon:
            ends.append(daemon.call("GET", f"/environments/{made}")["expires_at"])
            daemon.kill()
    assert ends[0] > time.time() + 30, "no grace at all"
    assert ends[1:] == ends[:1] * 2
    with daemons.started(place) as daemon:
        daemon.call("POST", f"/environments/{made}/heartbeat", {"lifetime": 20})
        daemon.kill()
    with daemons.started(place) as daemon:
        again = daemon.call("GET", f"/environments/{made}")["expires_at"]
        assert again > time.time() + 30, "a heartbeat is a new lease"


def test_an_end_that_was_told_survives_a_kill(daemons: Nursery, place: Path) -> None:
    with daemons.started(place) as daemon:
        made = daemon.create(**SLOW)
        daemon.raw("POST", f"/environments/{made}/heartbeat", {"lifetime": 0.05})
        eventually(lambda: daemon.raw("POST", f"/environments/{made}/execute", {"command": "true"})[0] == 410)
        daemon.kill()
    with daemons.started(place) as daemon:
        assert daemon.call("GET", f"/environments/{made}")["state"] == "ended"


def post(daemon: Daemon, body: dict[str, Any], key: str = "") -> socket.socket:
    """A connection on which a create is asked for."""
    connection = Connection(daemon.socket)
    headers = {"content-type": "application/json", **({"idempotency-key": key} if key else {})}
    connection.request("POST", "/environments", json.dumps(body), headers)
    return connection.sock


def test_a_create_whose_client_goes_away_is_swept_unless_it_can_be_found(
    daemons: Nursery, place: Path
) -> None:
    with daemons.started(place) as daemon:

        def all_of_them() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = daemon.call("GET", "/environments?all=1")["environments"]
            return found

        # A busy daemon reads a request later, and does not begin one whose caller has gone by then: ask again.
        for body, key in ((SLOW, ""), ({**SLOW, "name": "mine"}, ""), (SLOW, "k")):
            before = len(all_of_them())
            deadline = time.monotonic() + 60
            while len(all_of_them()) == before:
                assert time.monotonic() < deadline, "no create was begun"
                post(daemon, body, key).close()
                with contextlib.suppress(AssertionError):
                    eventually(lambda before=before: len(all_of_them()) > before, seconds=2)  # type: ignore[misc]
        eventually(lambda: {each["state"] for each in all_of_them()} <= {"ended", "running"})
        eventually(lambda: sum(each["state"] == "running" for each in all_of_them()) == 2)
        swept = [each for each in all_of_them() if each["state"] == "ended"]
        assert {(each["name"], each["ended_reason"]) for each in swept} == {
            ("", "its caller went away before it was told")
        }
        kept = {each["environment_id"] for each in all_of_them() if each["state"] == "running"}
        assert daemon.call("GET", "/environments/mine")["environment_id"] in kept
        sock = post(daemon, SLOW, key="k")
        sock.recv(1 << 16)
        sock.close()
        assert len(all_of_them()) == len(swept) + 2
        # An answer that was sent counts as known, whether or not anybody read it.
        sock = post(daemon, SLOW)
        sock.recv(1, socket.MSG_PEEK)
        sock.close()
        daemon.call("GET", "/environments")
        assert len(daemon.call("GET", "/environments")["environments"]) == 3


def test_a_key_whose_environment_was_deleted_is_a_clear_error(daemons: Nursery, place: Path) -> None:
    with daemons.started(place) as daemon:
        headers = {"idempotency-key": "k"}
        status, _, answer = daemon.raw("POST", "/environments", dict(SLOW), headers)
        assert status == 201
        daemon.call("DELETE", f"/environments/{json.loads(answer)['environment_id']}")
        status, _, answer = daemon.raw("POST", "/environments", dict(SLOW), headers)
        told = json.loads(answer)
        assert (status, told["code"]) == (409, "conflict")
        assert "used up" in told["message"]
        assert "new key" in told["hint"]


def test_a_stop_without_force_deletes_nothing_that_is_created_meanwhile(
    daemons: Nursery, place: Path
) -> None:
    for _ in range(5):
        with daemons.started(place) as daemon, ThreadPoolExecutor(1) as threads:
            both = threading.Barrier(2)

            def create(daemon: Daemon = daemon, both: threading.Barrier = both) -> tuple[int, dict[str, Any]]:
                both.wait()
                with contextlib.suppress(OSError, http.client.HTTPException):
                    return answered(daemon, "POST", "/environments", dict(SLOW))
                return 503, {}

            creating = threads.submit(create)
            both.wait()
            status, _ = answered(daemon, "POST", "/stop", {"force": False})
            made = creating.result()
            assert (made[0], status) in ((201, 409), (503, 200)), made


FREEZER = Path("/sys/fs/cgroup/freezer")


@pytest.mark.root
def test_kill_of_a_tree_that_is_slow_to_die_spares_others(daemons: Nursery, place: Path) -> None:
    """As on a machine that is too busy to let it die: a task that is frozen on cgroups v1 ignores even SIGKILL."""
    if not (FREEZER / "tasks").exists():
        pytest.skip("no freezer of cgroups v1 here")
    with daemons.started(place) as daemon, ThreadPoolExecutor(1) as threads:
        made = daemon.create(**SLOW)
        path = f"/environments/{made}/executions"
        unique = f"1000.{os.getpid()}"
        slow = daemon.call("POST", path, {"argv": ["sleep", unique]}, expect=201)["execution_id"]
        frozen = FREEZER / f"skerry-test-{made}"
        frozen.mkdir()
        try:
            (sleep,) = [each for each in leaks.processes() if each.argv == ["sleep", unique]]
            (frozen / "tasks").write_text(str(sleep.pid))
            (frozen / "freezer.state").write_text("FROZEN")
            killing = threads.submit(answered, daemon, "DELETE", f"{path}/{slow}")
            # Longer than the guest's patience with a tree that it kills.
            innocent = daemon.execute(made, ["sleep", "3"])
            assert innocent["outcome"] == "completed"
            assert not killing.done()
        finally:
            (frozen / "freezer.state").write_text("THAWED")
            daemon.call("DELETE", f"/environments/{made}")
            eventually(lambda: not (frozen / "tasks").read_text())
            frozen.rmdir()
