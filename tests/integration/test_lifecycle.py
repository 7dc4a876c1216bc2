"""The daemon from its start to its end, and what it leaves: nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import leaks, support
from tests.integration.conftest import BACKENDS
from tests.integration.daemon import Connection, launch, started


@pytest.fixture(params=support.first_of(BACKENDS))
def options(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return BACKENDS[request.param]


def test_a_second_daemon_of_one_home_does_not_start(home: Path, options: tuple[str, ...]) -> None:
    with started(home, *options) as daemon:
        process, word = launch(home, *options)
        assert process.wait(30) == 2
        problem = json.loads(word)
        assert problem["code"] == "conflict"
        assert str(daemon.process.pid) in problem["message"]
        daemon.call("GET", "/healthz")


def test_why_it_did_not_start_is_told(home: Path) -> None:
    process, word = launch(home, "--backend", "nothing")
    assert process.wait(30) == 2
    assert json.loads(word)["code"] == "invalid_request"
    home.chmod(0o777)
    process, word = launch(home)
    home.chmod(0o700)
    assert process.wait(30) == 2
    assert "written by others" in json.loads(word)["message"]
    assert not (home / "daemon.sock").exists()


def test_it_ends_when_idle_and_not_before(home: Path, options: tuple[str, ...]) -> None:
    with started(home, "--idle-exit", "1", *options) as daemon:
        environment = daemon.create()
        with daemon.stream(f"/environments/{environment}/logs?follow=1") as log:
            with pytest.raises(subprocess.TimeoutExpired):
                daemon.process.wait(2.5)
            daemon.call("DELETE", f"/environments/{environment}")
            assert log.read() == b""
        assert daemon.process.wait(30) == 0
    assert not os.path.exists(daemon.socket)


def test_in_the_foreground_it_stays(home: Path, options: tuple[str, ...]) -> None:
    with started(home, "--foreground", "--idle-exit", "0.2", *options) as daemon:
        with pytest.raises(subprocess.TimeoutExpired):
            daemon.process.wait(1.5)
        daemon.call("GET", "/healthz")


def test_an_interrupt_ends_it_with_everything(home: Path, options: tuple[str, ...]) -> None:
    with started(home, *options) as daemon:
        environments = [daemon.create() for _ in range(3)]
        with ThreadPoolExecutor() as pool:
            running = pool.submit(daemon.execute, environments[0], "echo begun; sleep 1000")
            daemon.wait_for_output(environments[0], "begun")
            daemon.process.send_signal(signal.SIGINT)
            assert daemon.process.wait(30) == 0, (home / "daemon.log").read_text()
            result = running.result()
        assert (result["outcome"], result["message"]) == (
            "canceled",
            "the environment ended: the daemon stopped",
        )
        assert not leaks.of_home(home)
        assert not os.path.exists(daemon.socket)
    assert "all environments are deleted" in (home / "daemon.log").read_text()


def test_stop_is_refused_while_environments_live_unless_forced(home: Path, options: tuple[str, ...]) -> None:
    with started(home, *options) as daemon:
        daemon.create()
        assert daemon.call("POST", "/stop", {}, expect=409)["code"] == "conflict"
        assert daemon.call("POST", "/stop", {"force": True}) == {"stopping": True}
        assert daemon.process.wait(30) == 0


def test_deletes_from_everywhere_at_once(home: Path, options: tuple[str, ...]) -> None:
    with started(home, *options) as daemon, ThreadPoolExecutor(50) as pool:
        environment = daemon.create()
        running = [
            pool.submit(daemon.raw, "POST", f"/environments/{environment}/execute", body) for body in BODIES
        ]
        deletes = [pool.submit(daemon.raw, "DELETE", f"/environments/{environment}") for _ in range(50)]
        assert {delete.result()[0] for delete in deletes} == {200}
        for execution in running:
            status, _, body = execution.result()
            assert status in (200, 410), body
            if status == 200:
                assert json.loads(body)["outcome"] in ("completed", "canceled")
        assert not (home / "instances" / environment).exists()


BODIES = [{"command": "echo x"}, {"argv": ["sleep", "1000"]}, {"command": "sleep 1000", "shell": "b"}] * 5


def _children(pid: int | str) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_an_environment_whose_guest_is_killed_ends_with_a_reason(
    home: Path, options: tuple[str, ...]
) -> None:
    with started(home, *options) as daemon:
        environment = daemon.create()
        connection = Connection(daemon.socket)
        connection.request(
            "POST", f"/environments/{environment}/execute", json.dumps({"command": "echo begun; sleep 1000"})
        )
        path = f"/environments/{environment}"
        daemon.wait_for_output(environment, "begun")
        # Others are made ahead, and run nothing.
        (guest,) = [pid for pid in _children(daemon.process.pid) if _children(pid)]
        os.kill(int(guest), signal.SIGKILL)
        result = json.loads(connection.getresponse().read())
        connection.close()
        assert (result["outcome"], result["exit_code"]) == ("internal", 125)
        while (info := daemon.call("GET", path))["state"] != "ended":
            pass
        assert "guest" in info["ended_reason"]
        assert not (home / "instances" / environment).exists()
        assert (
            daemon.call("POST", f"{path}/execute", {"command": "true"}, expect=410)["code"]
            == "environment_ended"
        )


@pytest.mark.requirement("R34", "R38")
def test_leases_end_environments(home: Path, options: tuple[str, ...]) -> None:
    with started(home, *options) as daemon:
        idle = daemon.create(idle=0.3)
        short = daemon.create(lifetime=0.6)
        result = daemon.execute(short, "sleep 1000")
        assert (result["outcome"], result["message"]) == (
            "canceled",
            "the environment ended: expired: lifetime of 0.6 s is over",
        )
        for environment, reason in (
            (idle, "expired: idle for 0.3 s"),
            (short, "expired: lifetime of 0.6 s is over"),
        ):
            while (info := daemon.call("GET", f"/environments/{environment}"))["state"] != "ended":
                pass
            assert info["ended_reason"] == reason


def test_nothing_of_callers_is_in_the_log(home: Path, options: tuple[str, ...]) -> None:
    with started(home, *options) as daemon:
        environment = daemon.create(env={"TOKEN": "hunter2"})
        result = daemon.execute(
            environment, "echo $TOKEN; cat; : hunter3", stdin="hunter4", env={"B": "hunter5"}
        )
        assert result["stdout"] == "hunter2\nhunter4"
        daemon.raw("POST", "/environments", '{"env": {"A": "hunter6\\u0000"}}')
        daemon.raw("POST", f"/environments/{environment}/execute", {"argv": ["hunter7\0"]})
    log = (home / "daemon.log").read_text()
    assert "created" in log
    assert "hunter" not in log
