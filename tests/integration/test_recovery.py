"""A daemon is killed, at any moment: the next one takes over what ran, and leaves nothing of what was half made."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import http.client
import json
import os
import select
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from skerry.backends import blanks
from skerry.settings import Home
from skerry.store import Store
from tests import postgres, support
from tests.integration.daemon import Daemon, launch, started

KEPT = {"command": "echo $state"}
COUNTER = "i=0; while :; do i=$((i + 1)); echo n$i; sleep 0.05; done"


@pytest.fixture(params=support.first_of(["namespace", "fake", "namespace-postgres"]))
def options(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Of the daemon; its store is SQLite unless said otherwise."""
    if request.param.endswith("postgres"):
        monkeypatch.setenv("SKERRY_DATABASE", request.getfixturevalue("postgres_server").new_database())
    return ("--backend", "fake") if request.param == "fake" else ()


def start(daemon: Daemon, ref: str, command: str, **body: Any) -> str:
    answer = daemon.call(
        "POST", f"/environments/{ref}/executions", {"argv": ["sh", "-c", command], **body}, expect=201
    )
    found: str = answer["execution_id"]
    return found


def listed(daemon: Daemon) -> dict[str, dict[str, Any]]:
    found = daemon.call("GET", "/environments")["environments"]
    return {environment["environment_id"]: environment for environment in found}


def execution(daemon: Daemon, ref: str, id_: str) -> dict[str, Any]:
    found: dict[str, Any] = daemon.call("GET", f"/environments/{ref}/executions/{id_}")
    return found


def reason(daemon: Daemon, ref: str) -> str:
    found: str = daemon.call("GET", f"/environments/{ref}")["ended_reason"]
    return found


@pytest.mark.requirement("R24")
def test_environments_outlive_their_daemon(home: Path, options: tuple[str, ...]) -> None:
    with started(home, *options) as daemon:
        kept = daemon.create(name="kept", lifetime=600, env={"WHO": "me"})
        gone = daemon.create()
        daemon.call("DELETE", f"/environments/{gone}")
        daemon.execute(kept, "mkdir deep; cd deep; export STATE=7; echo text > file")
        before = daemon.call("GET", f"/environments/{kept}")
        daemon.kill()
    with started(home, *options) as daemon:
        after = daemon.call("GET", f"/environments/{kept}")
        for key in ("usage", "enforced"):
            del before[key], after[key]
        assert after == before
        result = daemon.execute("kept", "pwd; echo $STATE $WHO; cat file")
        assert result["stdout"].split() == [f"{workspace(daemon, kept)}/deep", "7", "me", "text"]
        # Why another one ended is still known.
        assert reason(daemon, gone) == "deleted"
        daemon.call("DELETE", f"/environments/{kept}")
        assert not (home / "instances" / kept).exists()
        assert listed(daemon) == {}


def workspace(daemon: Daemon, ref: str) -> str:
    found: str = daemon.execute(ref, ["pwd"])["stdout"].strip()
    return found


def test_what_ran_in_the_background_goes_on_and_keeps_its_name(home: Path, options: tuple[str, ...]) -> None:
    with started(home, *options) as daemon:
        environment = daemon.create()
        counting = start(daemon, environment, COUNTER)
        script = "read line; echo got $line; exit 3"
        reading = start(daemon, environment, script, stdin=True, profile="offline")
        daemon.wait_for_output(environment, "n3\n")
        daemon.kill()
    with started(home, *options) as daemon:
        assert execution(daemon, environment, counting)["state"] == "running"
        assert execution(daemon, environment, reading)["profile"] == "offline"
        daemon.wait_for_output(environment, "n")
        daemon.raw("POST", f"/environments/{environment}/executions/{reading}/stdin", b"word\n")
        daemon.wait_for_output(environment, "got word")
        daemon.raw("DELETE", f"/environments/{environment}/executions/{counting}")
        ended = wait(daemon, environment, reading)
        assert (ended["outcome"], ended["exit_code"]) == ("failed", 3)
        assert wait(daemon, environment, counting)["outcome"] == "canceled"


def wait(daemon: Daemon, ref: str, id_: str) -> dict[str, Any]:
    """How it ended."""
    with daemon.stream(f"/environments/{ref}/executions/{id_}/events") as events:
        while events.readline():
            pass
    return execution(daemon, ref, id_)


def test_exit_code_of_what_ended_without_a_daemon_is_known(home: Path, options: tuple[str, ...]) -> None:
    with started(home, *options) as daemon:
        environment = daemon.create()
        command = (
            f": {environment}; trap 'echo done; exit 5' USR1; mkfifo f; exec 3<>f; echo waits; read x <&3"
        )
        ending = start(daemon, environment, command)
        daemon.wait_for_output(environment, "waits")
        daemon.kill()
    [pid] = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if command.encode() in read(path)
    ]
    ended = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGUSR1)
        assert select.select([ended], [], [], 60)[0]
    finally:
        os.close(ended)
    with started(home, *options) as daemon:
        found = wait(daemon, environment, ending)
        assert (found["outcome"], found["exit_code"]) == ("failed", 5)


def read(path: Path) -> bytes:
    """Of a process, which may have ended."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_what_somebody_waited_for_is_ended(home: Path, options: tuple[str, ...]) -> None:
    """Whoever waited has lost the connection: nobody would ever stop it."""
    with started(home, *options) as daemon, ThreadPoolExecutor(1) as pool:
        environment = daemon.create()
        waiting = pool.submit(
            daemon.raw, "POST", f"/environments/{environment}/execute", {"argv": ["sh", "-c", COUNTER]}
        )
        daemon.wait_for_output(environment, "n2\n")
        daemon.kill()
        with pytest.raises((OSError, http.client.HTTPException)):
            waiting.result()
    with started(home, *options) as daemon:
        assert daemon.call("GET", f"/environments/{environment}/executions")["executions"] == []
        if not options:  # with processes of its own
            found = daemon.execute(environment, ["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"])[
                "stdout"
            ]
            assert COUNTER not in found


def test_an_environment_that_died_meanwhile_is_told(home: Path, options: tuple[str, ...]) -> None:
    with started(home, *options) as daemon:
        environment = daemon.create()
        pid = int(os.readlink(home / "instances" / environment / "process").split()[0])
        daemon.kill()
    os.kill(pid, signal.SIGKILL)
    with started(home, *options) as daemon:
        assert listed(daemon) == {}
        assert reason(daemon, environment).startswith("lost while no daemon ran")
        assert not (home / "instances" / environment).exists()


def test_hung_guest_delays_no_other_environment(home: Path, options: tuple[str, ...]) -> None:
    """The daemon serves while one takeover goes on; when that guest answers, its environment is as it was."""
    with started(home, *options) as daemon:
        healthy, hung = daemon.create(), daemon.create()
        daemon.execute(hung, "state=kept")
        pid = int(os.readlink(home / "instances" / hung / "process").split()[0])
        daemon.kill()
    os.kill(pid, signal.SIGSTOP)
    try:
        with started(home, *options) as daemon:
            assert daemon.execute(healthy, "echo here")["stdout"] == "here\n"
            # Were it waited for, it would have ended before the daemon served.
            assert {id_: info["state"] for id_, info in listed(daemon).items()} == dict.fromkeys(
                (healthy, hung), "running"
            )
            answer = daemon.call("POST", f"/environments/{hung}/execute", {"command": "true"}, expect=503)
            assert (answer["code"], answer["retryable"]) == ("daemon_unavailable", True)
            os.kill(pid, signal.SIGCONT)
            deadline = time.monotonic() + 60
            while (answer := daemon.raw("POST", f"/environments/{hung}/execute", KEPT))[0] == 503:
                assert time.monotonic() < deadline
            assert json.loads(answer[2])["stdout"] == "kept\n"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def test_environment_can_be_deleted_while_its_takeover_hangs(home: Path, options: tuple[str, ...]) -> None:
    with started(home, *options) as daemon:
        hung = daemon.create()
        pid = int(os.readlink(home / "instances" / hung / "process").split()[0])
        daemon.kill()
    os.kill(pid, signal.SIGSTOP)
    with started(home, *options) as daemon:
        daemon.call("DELETE", f"/environments/{hung}")
        assert listed(daemon) == {}
        assert not (home / "instances" / hung).exists()


def test_a_daemon_waits_for_the_addresses_of_the_one_before(home: Path) -> None:
    """A process that was just being started when that one was killed has its lock and its sockets for a moment."""
    port, lock = support.free_port(), os.open(home / "daemon.pid", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with ThreadPoolExecutor(1) as pool:
        with socket.create_server(("127.0.0.1", port)):
            starting = pool.submit(launch, home, "--backend", "fake", "--listen", f"127.0.0.1:{port}")
            support.eventually(lambda: starting.done() or _opened_by_another(home / "daemon.pid"), 60)
        os.close(lock)
        process, word = starting.result()
    process.send_signal(signal.SIGINT)
    process.wait()
    assert word == b"ready\n"


def _opened_by_another(file: Path) -> bool:
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if link.parts[2] != str(os.getpid()) and link.readlink() == file:
                return True
    return False


def test_a_restart_of_the_host_is_noticed(home: Path, options: tuple[str, ...]) -> None:
    with started(home, *options) as daemon:
        environment = daemon.create()
        daemon.kill()
    edit(home, "boot_id = 'another'")
    with started(home, *options) as daemon:
        assert listed(daemon) == {}
        assert "the host was restarted" in reason(daemon, environment)


def edit(home: Path, change: str) -> None:
    async def write() -> None:
        store = await Store.open(Home(str(home)).database)
        await store.write(lambda tx: tx.run(f"UPDATE environments SET {change}"))
        await store.close()

    asyncio.run(write())


def test_a_lease_goes_on_where_it_was(home: Path, options: tuple[str, ...]) -> None:
    with started(home, *options) as daemon:
        long, short = daemon.create(lifetime=5000), daemon.create(lifetime=5000)
        daemon.kill()
    # As if it had run out while no daemon was there: a while is left for a heartbeat.
    document = json.dumps({"expires": 1.0})
    edit(home, f"instance = CASE id WHEN '{short}' THEN '{document}' ELSE instance END")
    with started(home, *options) as daemon:
        assert listed(daemon).keys() == {long, short}
        answer = daemon.call("POST", f"/environments/{short}/heartbeat", {"lifetime": 100})
        assert answer["expires_at"] > 0


def test_sigterm_leaves_environments_to_the_next_daemon(home: Path, options: tuple[str, ...]) -> None:
    with started(home, *options) as daemon:
        environment = daemon.create()
        counting = start(daemon, environment, COUNTER)
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(30) == 0
    with started(home, *options) as daemon:
        assert execution(daemon, environment, counting)["state"] == "running"
        assert daemon.execute(environment, "echo here")["stdout"] == "here\n"


def repeated(daemon: Daemon, key: str, **body: Any) -> tuple[int, dict[str, Any]]:
    status, _, answer = daemon.raw("POST", "/environments", body, {"idempotency-key": key})
    return status, json.loads(answer)


def test_a_create_that_is_repeated_with_its_key_makes_one_environment(
    home: Path, options: tuple[str, ...]
) -> None:
    with started(home, *options) as daemon:
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(repeated, daemon, "once", name="one", lifetime=600) for _ in range(8)]
            answers = [each.result() for each in asked]
        assert {status for status, _ in answers} == {201}
        (first,) = {answer["environment_id"] for _, answer in answers}
        assert listed(daemon).keys() == {first}
        status, answer = repeated(daemon, "once", name="one", lifetime=601)
        assert (status, answer["code"]) == (409, "conflict")
        assert repeated(daemon, "k" * 256)[0] == 400
        daemon.kill()
    with started(home, *options) as daemon:
        assert repeated(daemon, "once", name="one", lifetime=600)[1]["environment_id"] == first
        assert repeated(daemon, "twice", lifetime=600)[1]["environment_id"] != first
        # What has failed may be tried again.
        assert repeated(daemon, "thrice", image="nothing")[0] == 404
        assert repeated(daemon, "thrice", image="host")[0] == 201
        assert len(listed(daemon)) == 3
        on_disk = {entry.name for entry in (home / "instances").iterdir()}
        assert len(on_disk - listed(daemon).keys()) <= blanks.READY


def test_daemons_that_share_a_store_leave_each_other_alone(
    home: Path, postgres_server: postgres.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKERRY_DATABASE", postgres_server.new_database())
    with support.temporary_home() as other, started(other) as second:
        theirs = second.create(name="theirs")
        with started(home) as first:
            ours = first.create(name="ours")
            # A name is one environment's, whichever daemon has it.
            assert first.call("POST", "/environments", {"name": "theirs"}, expect=409)["code"] == "conflict"
            assert listed(first).keys() == {ours}
            first.kill()
        with started(home) as first:
            assert listed(first).keys() == {ours}
            assert listed(second).keys() == {theirs}
            first.call("GET", f"/environments/{theirs}", expect=404)
            assert second.execute(theirs, "echo here")["stdout"] == "here\n"


def test_without_its_store_nothing_is_done_and_what_runs_goes_on(
    home: Path, postgres_server: postgres.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKERRY_DATABASE", postgres_server.new_database())
    with started(home) as daemon:
        environment = daemon.create()
        base = f"/environments/{environment}"
        running = daemon.call("POST", f"{base}/executions", {"argv": ["sleep", "1000"]}, expect=201)
        postgres_server.stop()
        try:
            for path, body in (
                ("/environments", {}),
                (f"{base}/execute", {"command": "touch done"}),
                (f"{base}/executions", {"argv": ["touch", "done"]}),
                (f"{base}/files/write", {"path": "done", "content": ""}),
            ):
                answer = daemon.call("POST", path, body, expect=503)
                assert answer["code"] == "store_unavailable"
                assert "the audit cannot be written" in answer["message"]
            found = daemon.call("GET", f"{base}/executions/{running['execution_id']}")
            assert found["state"] == "running"
        finally:
            postgres_server.start()
        assert daemon.execute(environment, "ls")["stdout"] == ""
        assert listed(daemon).keys() == {environment}
        created = daemon.create()
        assert listed(daemon).keys() == {environment, created}
