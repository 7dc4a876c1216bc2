"""Bad input, by the CLI and by the SDK: an error in words with what to do next, the documented exit code, and nothing
is left behind. Exit code 2 is the caller's fault, 125 the machine's."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import skerry
from skerry.backends import blanks
from tests import support
from tests.e2e.conftest import Cli
from tests.support import Nobody


@pytest.fixture
def client(cli: Cli) -> Iterator[skerry.Client]:
    with skerry.Client(str(cli.home)) as client:
        yield client


@pytest.fixture(autouse=True)
def _no_environment_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "cli" in request.fixturenames:
        home = request.getfixturevalue("cli").home
        deadline = time.monotonic() + 20
        # Some are prepared for whoever comes next; a probe has one for a moment.
        while len(list(home.glob("instances/*"))) > blanks.READY:
            assert time.monotonic() < deadline, "environments are left"
            time.sleep(0.05)
        with skerry.Client(str(home)) as client:
            assert client.environments() == []


def fails(cli: Cli, *words: str) -> tuple[int, str]:
    """(exit code, what it said); nothing on stdout, and no traceback."""
    status, out, err = cli(*words)
    text = err.decode()
    assert status != 0
    assert out == b""
    assert text.startswith("skerry: ")
    assert "Traceback" not in text
    return status, text


# What an environment is asked to be

CREATE: list[tuple[list[str], dict[str, Any], type[skerry.SkerryError], int, str]] = [
    (["--image", "nothing"], {"image": "nothing"}, skerry.ImageNotFound, 2, "image"),
    (["--image", "dev"], {"image": "dev"}, skerry.ImageNotFound, 2, "skerry image build dev"),
    (["--image", "../etc"], {"image": "../etc"}, skerry.SkerryError, 2, "image"),
    (["--memory", "lots"], {"memory": "lots"}, skerry.InvalidRequest, 2, "512m"),
    (["--memory", "-1"], {"memory": -1}, skerry.InvalidRequest, 2, "memory"),
    (["--memory", "0"], {"memory": 0}, skerry.InvalidRequest, 2, "memory"),
    (["--memory", "1k"], {"memory": "1k"}, skerry.InvalidRequest, 2, "at least 16m"),
    (["--memory", "9" * 400], {"memory": "9" * 400}, skerry.InvalidRequest, 2, "memory"),
    (["--cpus", "0"], {"cpus": 0}, skerry.InvalidRequest, 2, "cpus"),
    (["--cpus", "-2"], {"cpus": -2}, skerry.InvalidRequest, 2, "cpus"),
    (["--cpus", "nan"], {"cpus": float("nan")}, skerry.InvalidRequest, 2, "cpus"),
    (["--pids", "1"], {"pids": 1}, skerry.InvalidRequest, 2, "pids"),
    (["--pids", "-5"], {"pids": -5}, skerry.InvalidRequest, 2, "pids"),
    (["--disk", "-1"], {"disk": -1}, skerry.InvalidRequest, 2, "disk"),
    (["--isolation", "microvm"], {"isolation": "microvm"}, skerry.IsolationUnavailable, 125, "skerry doctor"),
    (["--isolation", "none"], {"isolation": "none"}, skerry.InvalidRequest, 2, "namespace"),
    (["--profile", "loose"], {"profile": "loose"}, skerry.InvalidRequest, 2, "strict"),
    (["--profile", "../default"], {"profile": "../default"}, skerry.InvalidRequest, 2, "strict"),
    (["--lifetime", "-1"], {"lifetime": -1}, skerry.InvalidRequest, 2, "lifetime"),
    (["--lifetime", "inf"], {"lifetime": float("inf")}, skerry.InvalidRequest, 2, "lifetime"),
    (["--name", "a/b"], {"name": "a/b"}, skerry.InvalidRequest, 2, "name"),
    (["--name", "x" * 64], {"name": "x" * 64}, skerry.InvalidRequest, 2, "name"),
    (["--workspace", "cloud"], {"workspace": "cloud"}, skerry.InvalidRequest, 2, "memory"),
    (["--env", "=x"], {"env": {"": "x"}}, skerry.InvalidRequest, 2, "name"),
]
IDS = [" ".join(words)[:40] for words, *_ in CREATE]


@pytest.mark.parametrize(("words", "values", "error", "status", "hint"), CREATE, ids=IDS)
def test_creating(
    cli: Cli,
    client: skerry.Client,
    words: list[str],
    values: dict[str, Any],
    error: type[skerry.SkerryError],
    status: int,
    hint: str,
) -> None:
    with pytest.raises(error) as caught:
        skerry.Environment(**values, client=client).create()
    assert hint in str(caught.value)
    for verb in (["create"], ["run", "--"]):
        said = fails(cli, verb[0], *words, *verb[1:], *(["true"] if verb[1:] else []))
        assert said[0] == status, said
        assert hint in said[1]
    assert client.environments() == []


def test_a_name_that_is_taken(cli: Cli, client: skerry.Client) -> None:
    with skerry.Environment(name="taken", workspace="memory", client=client) as env:
        with pytest.raises(skerry.Conflict, match=env.id):
            skerry.Environment(name="taken", client=client).create()
        assert fails(cli, "create", "--name", "taken")[0] == 2
        assert [info.environment_id for info in client.environments()] == [env.id]


# What is done with it


@pytest.fixture
def env(client: skerry.Client) -> Iterator[skerry.Environment]:
    with skerry.Environment(workspace="memory", client=client) as env:
        yield env


CALLS: dict[str, tuple[Callable[[skerry.Environment], object], type[skerry.SkerryError]]] = {
    "no argv": (lambda e: e.run([]), skerry.InvalidRequest),
    "empty program": (lambda e: e.run([""]), skerry.InvalidRequest),
    "NUL in an argument": (lambda e: e.run(["echo", "a\0b"]), skerry.InvalidRequest),
    "NUL in a command": (lambda e: e.execute("echo a\0b"), skerry.InvalidRequest),
    "NUL in a path": (lambda e: e.files.read("a\0b"), skerry.InvalidRequest),
    "NUL in cwd": (lambda e: e.run(["true"], cwd="/tmp\0b"), skerry.InvalidRequest),
    "NUL in a variable": (lambda e: e.run(["true"], env={"A": "a\0b"}), skerry.InvalidRequest),
    "a variable without a name": (lambda e: e.run(["true"], env={"": "x"}), skerry.InvalidRequest),
    "a variable with =": (lambda e: e.run(["true"], env={"A=B": "x"}), skerry.InvalidRequest),
    "a huge argument": (lambda e: e.run(["true", "x" * 1_000_000]), skerry.SkerryError),
    "a huge environment": (lambda e: e.run(["true"], env={"A": "x" * 1_000_000}), skerry.SkerryError),
    "no such cwd": (lambda e: e.run(["true"], cwd="/nothing"), skerry.SkerryError),
    "unknown user": (lambda e: e.run(["true"], user="nobody"), skerry.InvalidRequest),
    "timeout of zero": (lambda e: e.run(["true"], timeout=0), skerry.InvalidRequest),
    "negative timeout": (lambda e: e.run(["true"], timeout=-1), skerry.InvalidRequest),
    "negative output limit": (lambda e: e.run(["true"], output_limit=-1), skerry.InvalidRequest),
    "a bad shell name": (lambda e: e.execute("true", shell="a/b"), skerry.InvalidRequest),
    "a terminal of no size": (lambda e: e.start("true", pty=(0, 0)), skerry.InvalidRequest),
    "a path outside": (lambda e: e.files.read("/etc/passwd"), skerry.PathOutside),
    "a path above": (lambda e: e.files.write("../../x", "x"), skerry.PathOutside),
    "no path": (lambda e: e.files.read(""), skerry.InvalidRequest),
    "a long name": (lambda e: e.files.write("x" * 300, "x"), skerry.InvalidRequest),
    "a long path": (lambda e: e.files.read("x/" * 3000), skerry.SkerryError),
    "a missing file": (lambda e: e.files.read("nothing"), skerry.FileMissing),
    "a directory as a file": (lambda e: e.files.read("."), skerry.FileConflict),
    "a negative heartbeat": (lambda e: e.heartbeat(-1), skerry.InvalidRequest),
    "an unknown execution": (lambda e: e.attach("nothing"), skerry.ExecutionNotFound),
}


@pytest.mark.parametrize("name", CALLS)
def test_calling(env: skerry.Environment, name: str) -> None:
    call, error = CALLS[name]
    with pytest.raises(error) as caught:
        call(env)
    assert caught.value.message
    assert caught.value.status < 500
    assert env.run(["echo", "alive"]).stdout == "alive\n"


@pytest.mark.parametrize(
    "words",
    [
        ["cp", "{}:/etc/passwd", "{here}"],
        ["cp", "{}:../etc/passwd", "{here}"],
        ["cp", "{}:nothing", "{here}"],
        ["cp", "nothing-here", "{}:x"],
        ["cp", "a", "b"],
        ["exec", "--cwd", "/nothing", "{}", "true"],
        ["exec", "--timeout", "-1", "{}", "true"],
        ["exec", "--user", "nobody", "{}", "true"],
        ["exec", "{}"],
    ],
    ids=lambda words: " ".join(words),
)
def test_commands_on_an_environment(
    cli: Cli, env: skerry.Environment, words: list[str], tmp_path: Path
) -> None:
    here = tmp_path / "here"
    status, _ = fails(cli, *(word.format(env.id, here=here) for word in words))
    assert status == 2
    assert not here.exists()
    assert env.run(["echo", "alive"]).stdout == "alive\n"


def test_an_argument_that_is_too_long(cli: Cli, env: skerry.Environment) -> None:
    status, said = fails(cli, "exec", env.id, "echo", *["x" * 100_000] * 2)
    assert status == 2
    assert "bytes" in said


@pytest.mark.parametrize(
    "words", [["nonsense"], ["run"], ["run", "--nonsense"], ["create", "--pids", "many"]]
)
def test_commands_that_make_no_sense(cli: Cli, words: list[str]) -> None:
    status, _, err = cli(*words)
    assert status == 2
    assert b"skerry" in err
    assert b"Traceback" not in err


# One that is gone


def test_a_dead_environment(cli: Cli, client: skerry.Client, tmp_path: Path) -> None:
    env = skerry.Environment(workspace="memory", client=client).create()
    ref = env.id
    with skerry.Environment.get(ref, client=client) as same:
        env.delete()
        calls: list[Callable[[], object]] = [
            lambda: same.execute("true"),
            lambda: same.run(["true"]),
            lambda: same.start("true"),
            lambda: same.files.read("x"),
            lambda: same.files.list(),
            lambda: same.files.upload(__file__, "x"),
            lambda: same.heartbeat(),
        ]
        for call in calls:
            with pytest.raises((skerry.EnvironmentEnded, skerry.EnvironmentNotFound)) as caught:
                call()
            assert ref in caught.value.message
        same.delete()
    for words in (["exec", ref, "true"], ["shell", ref], ["logs", ref], ["cp", f"{ref}:x", str(tmp_path)]):
        assert fails(cli, *words)[0] == 2, words


@pytest.mark.parametrize("ref", ["nothing", "aaaaaaaaaaaa", "..", "", "a/b", "%2e%2e"])
def test_an_unknown_environment(cli: Cli, client: skerry.Client, ref: str) -> None:
    with pytest.raises((skerry.NotFound, skerry.InvalidRequest)):
        skerry.Environment.get(ref, client=client)
    assert fails(cli, "exec", ref, "true")[0] == 2
    assert fails(cli, "rm", ref)[0] == 2


# A daemon that cannot start


def without_a_daemon(home: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "SKERRY_HOME": home, **variables}
    return subprocess.run(
        [sys.executable, "-m", "skerry.cli", "run", "--", "true"], env=env, capture_output=True, text=True
    )


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode in (2, 125)
    assert done.stdout == ""
    assert done.stderr.startswith("skerry: ")
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_a_home_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    refused(without_a_daemon(str(tmp_path / "home")), "SKERRY_HOME")
    assert (tmp_path / "home").read_text() == "a file"


@pytest.mark.parametrize("length", [90, 120])
def test_a_home_with_too_long_a_path(length: int) -> None:
    """For the sockets of environments, or even for the daemon's."""
    with tempfile.TemporaryDirectory(prefix="skerry-test-", dir="/tmp") as folder:
        home = Path(folder, "x" * (length - len(folder) - 1))
        refused(without_a_daemon(str(home)), "too long", "SKERRY_HOME")
        assert not home.exists() or list(home.iterdir()) == []


def test_a_home_that_others_can_write_to(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o777)
    refused(without_a_daemon(str(home)), "SKERRY_HOME")
    assert list(home.iterdir()) == []


def test_a_home_of_another_user(as_nobody: Nobody, tmp_path: Path) -> None:
    root_owned = tmp_path / "home"
    root_owned.mkdir()
    root_owned.chmod(0o755)
    for folder in root_owned.parents:
        if folder.stat().st_uid == os.geteuid() and folder.is_relative_to("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o055)
    for home in (str(root_owned), "/proc/skerry", "/nothing/skerry"):
        done = as_nobody.run(
            [as_nobody.python, "-m", "skerry.cli", "run", "--", "true"], env={"SKERRY_HOME": home}
        )
        refused(done, "SKERRY_HOME")
    assert list(root_owned.iterdir()) == []


@pytest.mark.root
def test_root_does_not_take_another_users_home(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    os.chown(home, support.NOBODY, support.NOBODY)
    refused(without_a_daemon(str(home)), "SKERRY_HOME")
    assert list(home.iterdir()) == []
    with pytest.raises((skerry.InvalidRequest, skerry.DaemonUnavailable)), skerry.Client(str(home)) as client:
        client.version()
