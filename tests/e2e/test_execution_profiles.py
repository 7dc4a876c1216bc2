"""Execution profiles by the SDK and the command line, with a real daemon and an operator's file."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

import skerry
from skerry.host import readback
from skerry.manager.executions.profiles import FILE
from tests import support
from tests.e2e.conftest import Cli

pytestmark = pytest.mark.requirement("F10")

OWN = """
[build]
deny = ["mkdir", "mkdirat"]
writable = ["/workspace/out"]
"""
SOCKET = ["python3", "-c", "import socket; socket.socket(); print('socket')"]


@pytest.fixture(scope="module")
def cli() -> Iterator[Cli]:
    if reason := readback.path_rules():
        support.missing(reason)
    with support.temporary_home() as home:
        (home / FILE).write_text(OWN)
        yield Cli(home)


@pytest.fixture
def env(cli: Cli) -> Iterator[skerry.Environment]:
    with skerry.Client(str(cli.home)) as client, skerry.Environment(memory="256m", client=client) as env:
        yield env


def test_one_command_is_under_the_profile_and_the_result_says_so(env: skerry.Environment) -> None:
    env.files.write("out/x", "x")
    strict = env.run(SOCKET, profile="strict")
    assert (strict.exit_code, strict.profile) == (1, "strict")
    assert "PermissionError" in strict.stderr
    plain = env.run(SOCKET)
    assert (plain.stdout, plain.profile) == ("socket\n", "")
    own = env.run(["sh", "-c", "echo y >out/x; mkdir out/d; echo z >x"], profile="build")
    assert (own.stderr.count("Operation not permitted"), own.stderr.count("Permission denied")) == (1, 1)
    assert env.files.read("out/x") == "y\n"


def test_background_executions_take_one(env: skerry.Environment) -> None:
    with env.start(
        ["sh", "-c", "read line; echo x >x; echo over"], stdin=True, profile="readonly"
    ) as process:
        (running,) = env.executions()
        assert running.profile == "readonly"
        process.write("go\n")
        result = process.wait()
        assert (result.profile, result.exit_code) == ("readonly", 0)
    assert env.run(["ls", "x"]).exit_code != 0


def test_errors_say_what_to_do(env: skerry.Environment) -> None:
    with pytest.raises(skerry.InvalidRequest, match="unknown execution profile 'lax'") as caught:
        env.run(["true"], profile="lax")
    assert "build, offline, readonly, strict" in caught.value.hint
    path = f"/environments/{env.id}/execute"
    with pytest.raises(skerry.InvalidRequest, match="stateful shell cannot have a profile"):
        env.client.transport.call("POST", path, json={"command": "true", "profile": "strict"})


def test_by_the_command_line(cli: Cli) -> None:
    code, out, err = cli("run", "--execution-profile", "strict", "--", *SOCKET)
    assert (code, out) == (1, b"")
    assert b"PermissionError" in err
    assert cli("run", "--", *SOCKET) == (0, b"socket\n", b"")
    ref = cli.ok("create")
    try:
        said = json.loads(cli("exec", "--json", "--execution-profile", "build", ref, "--", "mkdir", "d")[1])
        assert (said["exit_code"], said["profile"]) == (1, "build")
        audited = [json.loads(line) for line in cli.ok("audit", "export").splitlines()]
    finally:
        cli.ok("rm", ref)
    assert "build" in json.dumps(audited)
    code, _, err = cli("run", "--execution-profile", "lax", "--", "true")
    assert code != 0
    assert b"known: build, offline, readonly, strict" in err


def test_a_mistake_in_the_operators_file_stops_the_daemon() -> None:
    with support.temporary_home() as home:
        (home / FILE).write_text('[own]\ndeny = ["killl"]\n')
        code, _, err = Cli(home)("ls")
        assert code != 0
        assert b"unknown system call 'killl'" in err
