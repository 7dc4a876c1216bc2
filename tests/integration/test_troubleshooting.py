"""The page on what goes wrong quotes the words that there are: each is provoked here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import skerry
from tests import support

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md").read_text()


@pytest.fixture(scope="module")
def client() -> Iterator[skerry.Client]:
    with support.temporary_home() as home, skerry.Client(str(home)) as client:
        yield client


@pytest.fixture(scope="module")
def env(client: skerry.Client) -> Iterator[skerry.Environment]:
    with skerry.Environment(memory="64m", disk="16m", client=client) as env:
        yield env


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("head -c 32m /dev/zero > full; rm full", "No space left on device"),
        ("touch /usr/file", "Read-only file system"),
        (
            "python3 -c 'import ctypes; c = ctypes.CDLL(None); c.prctl(22, 2, 0); c.perror(None)'",
            "Invalid argument",
        ),
        ("python3 -c 'import socket; socket.getaddrinfo(\"example.com\", 80)'", "failure in name resolution"),
    ],
)
@pytest.mark.requirement("R91", "R115")
def test_words_of_commands(command: str, words: str, env: skerry.Environment) -> None:
    assert words in env.execute(command, shell="words").stderr
    assert words in PAGE


def test_words_of_too_many_processes(client: skerry.Client) -> None:
    with skerry.Environment(pids=20, client=client) as env:
        words = "Resource temporarily unavailable"
        forks = "import os, signal\nfor _ in range(40):\n    if os.fork() == 0: signal.pause()"
        assert words in env.run(["python3", "-c", forks]).stderr
    assert words in PAGE


@pytest.mark.requirement("R91", "R115")
def test_words_of_outcomes(env: skerry.Environment) -> None:
    late = env.execute("sleep 600", timeout=0.2)
    assert (late.outcome, late.exit_code, late.message) == ("timed_out", 124, "killed after 0.2 s")
    large = env.execute("python3 -c \"x = 'x' * (1 << 30)\"")
    assert (large.outcome, large.exit_code) == ("oom_killed", 137)
    for words in ("`timed_out`, exit code 124, `killed after 30 s`", large.message.partition(": ")[2]):
        assert words in PAGE
    assert f"`oom_killed`, exit code 137, `{large.message.partition(': ')[2]}`" in PAGE


@pytest.mark.parametrize(
    ("act", "error", "words"),
    [
        (
            lambda client: skerry.Environment("dev", client=client).create(),
            "ImageNotFound",
            "there is no image 'dev'",
        ),
        (
            lambda client: skerry.Environment(isolation="microvm", client=client).create(),
            "IsolationUnavailable",
            "is not available here: ",
        ),
        (
            lambda client: skerry.Client(url="https://127.0.0.1:1", token="t").version(),
            "DaemonUnavailable",
            "Connection refused",
        ),
    ],
)
@pytest.mark.requirement("R91", "R103", "R111", "R115")
def test_words_of_errors(
    act: Callable[[skerry.Client], object], error: str, words: str, client: skerry.Client
) -> None:
    with pytest.raises(getattr(skerry, error)) as caught:
        act(client)
    assert words in str(caught.value)
    assert words in PAGE


@pytest.mark.requirement("R91", "R115")
def test_words_of_a_daemon_that_is_not_yours(as_nobody: support.Nobody, client: skerry.Client) -> None:
    home = str(client.version()["home"])
    asked = as_nobody.run([as_nobody.python, "-m", "skerry.cli", "ls"], env={"SKERRY_HOME": home})
    assert asked.returncode != 0
    for words in ("belongs to another user", "SKERRY_HOME"):
        assert words in asked.stderr
        assert words in PAGE


def test_words_of_files_and_ends(client: skerry.Client, env: skerry.Environment) -> None:
    with pytest.raises(skerry.PathOutside) as outside:
        env.files.read("/etc/shadow")
    assert "leads outside of /workspace and /tmp" in outside.value.message
    gone = skerry.Environment(client=client).create()
    gone.delete()
    with pytest.raises(skerry.EnvironmentEnded) as ended:
        gone.execute("true")
    assert "has ended: " in ended.value.message
    for words in ("leads outside of /workspace and /tmp", "`has ended: …`"):
        assert words in PAGE


def test_words_of_a_network_that_refuses(client: skerry.Client) -> None:
    with skerry.Environment(allow=["api.example.com"], client=client) as env:
        support.require("curl")
        assert "Could not resolve host" in env.execute("curl -sS http://example.org").stderr
        assert env.network.denials()[0]["host"] == "example.org"
    assert "Could not resolve host" in PAGE
