"""Sessions over HTTP, through both clients, and in the audit."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from http.client import HTTPResponse
from typing import Any

import pytest

from skerry.client.aio.client import AsyncClient
from skerry.client.aio.environment import AsyncEnvironment
from skerry.client.sync.client import Client
from skerry.client.sync.environment import Environment
from skerry.errors import Conflict, SessionNotFound
from skerry.models import Outcome
from tests import support
from tests.integration.daemon import Connection, Daemon, started
from tests.integration.test_audit import rows


@pytest.fixture
def env(daemon: Daemon, environment: str) -> Iterator[Environment]:
    with Client(str(daemon.home)) as client:
        yield Environment.get(environment, client)


@pytest.mark.requirement("R9", "R45")
def test_state_stays_from_call_to_call(env: Environment) -> None:
    with env.session("python") as session:
        assert session.run("import os\nx = 6\nos.chdir('/tmp')").value is None
        result = session.run("print('hello')\nx * 7, os.getcwd()")
        assert (result.stdout, result.value, result.ok) == ("hello\n", "(42, '/tmp')", True)
        assert [(each.name, each.text) for each in session.variables()] == [("x", "6")]
        assert (session.info().state, session.info().calls) == ("idle", 3)
    with pytest.raises(SessionNotFound, match="with the daemon that started them"):
        session.run("x")
    assert env.sessions() == []


def test_a_session_has_the_variables_of_its_environment(daemon: Daemon) -> None:
    with Client(str(daemon.home)) as client:
        with Environment(env={"A": "1"}, secrets={"B": "2"}, client=client) as env:
            with env.session("python", env={"C": "3"}, cwd="/tmp") as session:
                code = "import os\n[os.environ[name] for name in 'ABC'], os.getcwd()"
                assert session.run(code).value == "(['1', '2', '3'], '/tmp')"


@pytest.mark.requirement("R9")
def test_it_is_found_by_its_id(env: Environment) -> None:
    env.session("python", id="analysis").run("x = 5")
    assert env.session("python", id="analysis").run("x").value == "5"
    assert [info.session_id for info in env.sessions()] == ["analysis"]


def test_output_comes_while_the_code_runs(env: Environment) -> None:
    with env.session("python") as session:
        seen: list[str] = []

        def interrupt(text: str) -> None:
            seen.append(text)
            session.interrupt()

        result = session.run("x = 5\nprint('begün')\nwhile True: pass", on_stdout=interrupt)
        assert result.raised is not None
        assert (result.raised.name, result.stdout, seen) == ("KeyboardInterrupt", "begün\n", ["begün\n"])
        result = session.run("import sys\nprint(x, file=sys.stderr)\nx", on_stderr=seen.append)
        assert (result.value, result.stderr, seen) == ("5", "5\n", ["begün\n", "5\n"])


def test_a_crash_is_a_result_and_can_be_mended(env: Environment) -> None:
    with env.session("python") as session:
        result = session.run("import os; os._exit(7)", on_stdout=print)
        assert (result.outcome, result.exit_code, result.crashed) == (Outcome.FAILED, 7, True)
        with pytest.raises(Conflict, match="restart"):
            session.run("1")
        assert session.info().state == "crashed"
        session.restart()
        assert session.run("1").value == "1"


def test_limits_of_one_call(env: Environment) -> None:
    with env.session("python") as session:
        result = session.run("x = 5\nwhile True: pass", timeout=1)
        assert (result.outcome, result.crashed) == (Outcome.TIMED_OUT, False)
        result = session.run("'a' * 500_000_000", memory="200m")
        assert result.raised is not None
        assert (result.raised.name, session.run("x").value) == ("MemoryError", "5")


def test_both_worlds(daemon: Daemon, environment: str) -> None:
    async def main() -> None:
        async with AsyncClient(str(daemon.home)) as client:
            env = await AsyncEnvironment.get(environment, client)
            async with await env.session("python") as session:
                seen: list[str] = []
                result = await session.run("print(input())\n5", stdin="given", on_stdout=seen.append)
                assert (result.value, seen) == ("5", ["given\n"])
                begun = asyncio.Event()
                code = "x = 1\nprint('begun')\nwhile True: pass"
                running = asyncio.create_task(session.run(code, on_stdout=lambda _: begun.set()))
                await begun.wait()
                assert (await session.info()).state == "busy"
                running.cancel()  # which interrupts the code
                assert (await session.run("x")).value == "1"

    asyncio.run(main())


@pytest.mark.parametrize("path", ["run", "stream"])
def test_code_whose_caller_leaves_is_interrupted(daemon: Daemon, environment: str, path: str) -> None:
    session = f"/environments/{environment}/sessions/one"
    daemon.call(
        "POST",
        f"/environments/{environment}/sessions",
        {"language": "python", "session_id": "one"},
        expect=201,
    )
    with daemon.asked("POST", f"{session}/{path}", {"code": "x = 5\nprint('begun')\nwhile True: pass"}):
        daemon.wait_for_output(environment, "begun")
    assert daemon.call("POST", f"{session}/run", {"code": "x"})["values"][0]["data"] == {"text/plain": "5"}


def test_a_stream_ends_with_the_result(daemon: Daemon, environment: str) -> None:
    sessions = f"/environments/{environment}/sessions"
    daemon.call("POST", sessions, {"language": "python", "session_id": "one"}, expect=201)
    with daemon.request("POST", f"{sessions}/one/stream", {"code": "print('a')\n1/0"}) as response:
        assert response.status == 200
        first, last = list(_events(response))
    assert (first["stream"], first["data"]) == ("stdout", "a\n")
    assert (last["result"]["raised"]["name"], last["result"]["stdout_size"]) == ("ZeroDivisionError", 2)
    status, _, answer = daemon.raw("POST", f"{sessions}/two/stream", {"code": "1"})
    assert (status, json.loads(answer)["code"]) == (404, "session_not_found")


def _events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response.read().splitlines():
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


def test_output_that_is_not_read_stops_the_code_and_nothing_else(daemon: Daemon, environment: str) -> None:
    sessions = f"/environments/{environment}/sessions"
    daemon.call("POST", sessions, {"language": "python", "session_id": "one"}, expect=201)
    connection = Connection(daemon.socket)
    body = json.dumps({"code": "while True: print('a' * 10_000)", "timeout": 0.5})
    connection.request("POST", f"{sessions}/one/stream", body, {"content-type": "application/json"})
    response = connection.getresponse()
    assert daemon.execute(environment, "echo fine")["stdout"] == "fine\n"
    *_, last = _events(response)
    connection.close()
    assert last["result"]["outcome"] == "timed_out"


def test_what_makes_no_sense_is_refused(daemon: Daemon, environment: str) -> None:
    sessions = f"/environments/{environment}/sessions"
    for body in ({"language": "cobol"}, {}, {"language": "python", "session_id": "a/b"}):
        assert daemon.call("POST", sessions, body, expect=400)["code"] == "invalid_request"
    missing = {"language": "python", "cwd": "/nowhere"}
    assert daemon.call("POST", sessions, missing, expect=400)["code"] == "invalid_request"
    daemon.call("POST", sessions, {"language": "python", "session_id": "one"}, expect=201)
    refused: list[dict[str, Any]] = [{"code": "1", "timeout": -1}, {"code": "1", "memory": "much"}]
    for code in (*refused, {"code": "a" * 1_100_000}, {}):
        assert daemon.call("POST", f"{sessions}/one/run", code, expect=400)["code"] == "invalid_request"
    assert (
        daemon.call("POST", f"{sessions}/two/run", {"code": "1"}, expect=404)["code"] == "session_not_found"
    )


def test_the_audit_tells_of_code_as_of_commands(daemon: Daemon, environment: str) -> None:
    sessions = f"/environments/{environment}/sessions"
    wanted = {"language": "python", "session_id": "told", "secrets": {"KEY": "correct-horse"}}
    daemon.call("POST", sessions, wanted, expect=201)
    daemon.call("POST", f"{sessions}/told/run", {"code": "print('out')\n1/0"})
    daemon.call("GET", f"{sessions}/told/variables")
    for call in ("interrupt", "restart"):
        daemon.call("POST", f"{sessions}/told/{call}")
    daemon.call("DELETE", f"{sessions}/told")
    found = [row for row in rows(daemon, environment=environment) if row["action"].startswith("session.")]
    acts = [row["action"].removeprefix("session.") for row in found if row["kind"] == "intent"]
    assert acts == ["open", "run", "variables", "interrupt", "restart", "close"]
    opened, run = (
        row["detail"] for row in found if row["kind"] == "intent" and row["action"] in OPEN_AND_RUN
    )
    assert (opened["session_id"], opened["secrets"]) == ("told", ["KEY"])
    assert (run["session_id"], run["code"]) == ("told", "print('out')\n1/0")
    (ran,) = (row["detail"] for row in found if (row["kind"], row["action"]) == ("result", "session.run"))
    assert (ran["ended"], ran["exit_code"], ran["stdout_size"]) == ("failed", 1, 4)
    assert "correct-horse" not in json.dumps(found)


OPEN_AND_RUN = ("session.open", "session.run")


def test_a_running_call_is_activity_and_an_idle_session_is_none(daemon: Daemon) -> None:
    environment = daemon.create(idle=2)
    sessions = f"/environments/{environment}/sessions"
    daemon.call("POST", sessions, {"language": "python", "session_id": "one"}, expect=201)
    ran = daemon.call("POST", f"{sessions}/one/run", {"code": "import time; time.sleep(3)"})
    assert ran["outcome"] == "completed"
    with daemon.stream(f"/environments/{environment}/logs?follow=1") as log:
        log.read()  # until the environment has ended
    assert daemon.call("GET", sessions, expect=410)["code"] == "environment_ended"


@pytest.mark.requirement("R9")
def test_sessions_end_with_the_daemon_and_the_next_one_says_so() -> None:
    """They can begin anew, as they were opened."""
    with support.temporary_home() as home, Client(str(home)) as client:
        with started(home, "--backend", "fake") as daemon:
            environment = daemon.create()
            env = Environment.get(environment, client)
            session = env.session("python", env={"A": "1"}, secrets={"B": "2"}, cwd="/tmp")
            other = env.session("bash", id="other")
            session.run("x = 5")
            daemon.process.send_signal(signal.SIGTERM)
            daemon.process.wait()
        with started(home, "--backend", "fake") as daemon:
            assert env.sessions() == []
            for each in (session, other):
                with pytest.raises(
                    SessionNotFound, match="the daemon was restarted, and sessions end with it"
                ):
                    each.run("x")
            left = daemon.execute(environment, ["pgrep", "-f", "scope = {'__name__': 'session'"])
            assert left["stdout"] == ""
            session.restart()
            other.restart()
            code = "import os\n[os.environ[name] for name in 'AB'], os.getcwd(), 'x' in globals()"
            assert session.run(code).value == "(['1', '2'], '/tmp', False)"
            assert other.run("echo fine").stdout == "fine\n"
            assert {info.session_id for info in env.sessions()} == {session.id, "other"}
