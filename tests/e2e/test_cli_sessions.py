"""`skerry session` with a real daemon."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import Cli


@pytest.fixture
def environment(cli: Cli) -> Iterator[str]:
    found = cli.ok("create")
    yield found
    cli.ok("rm", found)


@pytest.mark.requirement("R9")
def test_state_stays_from_command_to_command(cli: Cli, environment: str) -> None:
    assert cli.ok("session", "run", environment, "-c", "x = 6\nprint('hello')\nx * 7") == "hello\n42"
    assert cli.ok("session", "run", environment, "--code", "x") == "6"
    assert (
        json.loads(cli.ok("session", "run", "--json", environment, "-c", "x"))["values"][0]["kind"] == "value"
    )
    assert (
        cli.ok("session", "run", "-l", "bash", "-s", "shell", environment, "-c", "echo $HOME") == "/workspace"
    )
    listed = json.loads(cli.ok("session", "ls", "--json", environment))["sessions"]
    assert [(each["session_id"], each["language"], each["calls"]) for each in listed] == [
        ("main", "python", 3),
        ("shell", "bash", 1),
    ]
    assert "main     python" in cli.ok("session", "ls", environment)
    cli.ok("session", "rm", environment, "main", "shell")
    assert json.loads(cli.ok("session", "ls", "--json", environment))["sessions"] == []


def test_code_that_fails_has_an_exit_code(cli: Cli, environment: str) -> None:
    def ran(*words: str) -> tuple[int, str, str]:
        code, out, err = cli("session", "run", environment, *words)
        return code, out.decode(), err.decode()

    code, _, words = ran("-c", "1/0")
    assert (code, "ZeroDivisionError: division by zero" in words) == (1, True)
    code, _, words = ran("--timeout", "0.1", "-c", "while True: pass")
    assert (code, "interrupted after 0.1 s" in words) == (124, True)
    code, _, words = ran("-c", "import os; os._exit(0)")
    assert (code, "ended with exit code 0" in words) == (1, True)
    code, out, words = ran("-c", "2 + 2")
    assert (code, out, "is restarted without its state" in words) == (0, "4\n", True)
    assert cli("session", "rm", environment, "nothing")[0] == 2


def test_packages_that_are_none_are_refused(cli: Cli, environment: str) -> None:
    code, out, err = cli("session", "run", environment, "--package=-rx", "-c", "print('ran')")
    assert (code, out) == (2, b"")
    assert "'-rx' is not a package that pip can be asked for" in err.decode()
    assert json.loads(cli.ok("session", "ls", "--json", environment))["sessions"] == []
