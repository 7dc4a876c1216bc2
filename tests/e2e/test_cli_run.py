"""`skerry run`, `exec`, `ls`, `info`, `rm`, `logs` with a real daemon."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import Cli
from tests.support import Nobody


@pytest.fixture(autouse=True)
def _no_environment_stays(cli: Cli) -> object:
    yield
    assert cli.ok("ls", "-q") == ""


def test_the_two_examples(cli: Cli) -> None:
    assert cli("run", "--", "python3", "-c", "print(6*7)") == (0, b"42\n", b"")
    assert cli("run", "--", "sh", "-c", "exit 7") == (7, b"", b"")


def test_the_two_examples_as_an_unprivileged_user(as_nobody: Nobody) -> None:
    done = as_nobody.skerry("run", "--", "python3", "-c", "import os; print(6*7, os.getuid())")
    assert (done.returncode, done.stdout) == (0, "42 1000\n"), done.stderr
    done = as_nobody.skerry("run", "--", "sh", "-c", "exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")


def test_output_is_byte_exact_and_apart(cli: Cli) -> None:
    program = "import sys; b = bytes(range(256)) * 4096; sys.stdout.buffer.write(b); sys.stderr.buffer.write(b[::-1])"
    everything = bytes(range(256)) * 4096
    assert cli("run", "--", "python3", "-c", program) == (0, everything, everything[::-1])


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["true"], 0),
        (["sh", "-c", "exit 7"], 7),
        (["no-such-program"], 127),
        (["/etc/passwd"], 126),
        (["sh", "-c", "kill -9 $$"], 137),
        (["sh", "-c", "kill -15 $$"], 143),
    ],
)
def test_exit_codes(cli: Cli, words: list[str], code: int) -> None:
    assert cli("run", "--", *words)[0] == code


def test_a_time_limit(cli: Cli) -> None:
    code, out, err = cli("run", "--timeout", "0.3", "--", "sh", "-c", "echo before; sleep 60 & sleep 60")
    assert (code, out) == (124, b"before\n")
    assert err.startswith(b"skerry: ")


@pytest.mark.root
def test_out_of_memory(cli: Cli) -> None:
    code, _, err = cli("run", "--memory", "64m", "--", "python3", "-c", "x = bytearray(200 << 20)")
    assert code == 137
    assert err.startswith(b"skerry: ")


def test_input(cli: Cli) -> None:
    data = bytes(range(256)) * 8192
    assert cli("run", "-i", "--", "cat", input=data) == (0, data, b"")
    assert cli("run", "--", "cat", input=data) == (0, b"", b"")


def test_variables_and_directory(cli: Cli) -> None:
    words = ["-e", "A=b c", "-w", "/tmp", "--", "sh", "-c", 'echo "$A $PWD"; id -u']
    assert cli.ok("run", *words).split() == ["b", "c", "/tmp", "1000"]
    assert cli.ok("run", "-u", "root", "--", "id", "-u") == "0"


def test_json(cli: Cli) -> None:
    code, out, _ = cli("run", "--json", "--", "sh", "-c", "echo out; echo err >&2; exit 3")
    result = json.loads(out)
    assert (code, result["exit_code"], result["stdout"], result["stderr"]) == (3, 3, "out\n", "err\n")


def test_ctrl_c_reaches_the_command(cli: Cli) -> None:
    program = "trap 'echo caught; exit 9' INT; echo ready; while :; do sleep 0.05; done"
    with cli.start("run", "--", "sh", "-c", program) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == b"caught\n"
        assert process.wait(30) == 9


def test_a_second_ctrl_c_kills(cli: Cli) -> None:
    program = "trap 'echo caught' INT; echo ready; while :; do sleep 0.05; done"
    with cli.start("run", "--", "sh", "-c", program) as process:
        assert process.stdout is not None
        for line in (b"ready\n", b"caught\n"):
            assert process.stdout.readline() == line
            process.send_signal(signal.SIGINT)
        assert process.wait(30) == 137


def test_sigterm_cleans_up(cli: Cli) -> None:
    with cli.start("run", "--", "sh", "-c", "echo ready; sleep 100") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.terminate()
        assert process.wait(30) == 143


def test_a_reader_that_leaves(cli: Cli) -> None:
    with cli.start("run", "--", "yes") as process:
        assert process.stdout is not None
        assert process.stdout.read(4) == b"y\ny\n"
        process.stdout.close()
        assert process.wait(30) == 141
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_a_client_that_is_killed_takes_its_command_along(cli: Cli) -> None:
    name = "killed-client"
    with cli.start("run", "--name", name, "--", "sh", "-c", "echo ready; sleep 100") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
    try:
        deadline = 50
        while (
            json.loads(cli.ok("exec", "--json", name, "--", "sh", "-c", "pgrep sleep | wc -l"))["stdout"]
            != "0\n"
        ):
            deadline -= 1
            assert deadline, "the command lives on"
    finally:
        cli.ok("rm", name)


def test_the_life_of_an_environment(cli: Cli) -> None:
    ref = cli.ok("create", "--name", "web", "--memory", "256m", "-e", "A=1")
    try:
        assert cli.ok("ls", "-q") == ref
        assert cli.ok("exec", "web", "--", "sh", "-c", "echo $A > f; cat f") == "1"
        assert cli.ok("exec", ref[:4], "cat", "f") == "1"
        assert "web" in cli.ok("ls")
        info = json.loads(cli.ok("info", "--json", "web"))
        assert (info["environment_id"], info["limits"]["memory"]) == (ref, 256 << 20)
        assert "memory" in cli.ok("info", "web")
        assert "1\n" in cli("logs", "web")[1].decode()
        execution = cli.ok("exec", "-d", "web", "--", "sh", "-c", "echo in the background; sleep 100")
        with cli.start("logs", "-f", "web", execution) as follower:
            assert follower.stdout is not None
            assert follower.stdout.readline() == b"in the background\n"
            follower.send_signal(signal.SIGINT)
            assert follower.wait(30) == 130
        code, _, err = cli("create", "--name", "web")
        assert (code, b"web" in err) == (2, True)
    finally:
        assert cli.ok("rm", "web") == ref
    assert cli("rm", "never-was")[0] == 2
    assert cli("rm", "-f", "never-was") == (0, b"", b"")
    ended = json.loads(cli.ok("ls", "-a", "--json"))
    assert ref in [one["environment_id"] for one in ended]


def test_a_kept_environment(cli: Cli) -> None:
    code, out, err = cli("run", "--keep", "--name", "kept", "--", "sh", "-c", "echo 1 > f")
    assert (code, out) == (0, b"")
    assert b"skerry rm" in err
    assert cli.ok("exec", "kept", "cat", "f") == "1"
    cli.ok("rm", "--all")


@pytest.mark.parametrize(
    "words",
    [
        ["run", "--image", "nothing", "true"],
        ["run", "--memory", "lots", "true"],
        ["run", "--memory", "1k", "true"],
        ["run", "--profile", "lax", "true"],
        ["run", "--timeout", "0", "true"],
        ["run", "--isolation", "prayer", "true"],
        ["run", "--name", "../x", "true"],
        ["run", "-w", "/nowhere/at/all", "true"],
        ["run", "-u", "mallory", "true"],
        ["run", "--", "echo", *["x" * 100_000] * 15],
        ["exec", "nothing", "true"],
        ["info", "nothing"],
        ["logs", "nothing"],
        ["cp", "nothing:f", "f"],
        ["image", "inspect", "nothing"],
        ["image", "rm", "nothing"],
        ["image", "build", "nothing"],
    ],
)
def test_mistakes_are_explained(cli: Cli, words: list[str]) -> None:
    code, out, err = cli(*words)
    assert (code, out) == (2, b"")
    assert err.startswith(b"skerry: ")
    assert b"Traceback" not in err


def test_unavailable_isolation_is_not_downgraded(cli: Cli) -> None:
    code, _, err = cli("run", "--isolation", "microvm", "true")
    assert code == 125
    assert b"microvm" in err


def test_a_daemon_that_cannot_start(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "home")
    cli.home.write_text("in the way")
    code, out, err = cli("run", "true")
    assert (code, out) == (2, b"")
    assert b"SKERRY_HOME" in err


def test_twenty_first_commands_at_once_start_one_daemon(home: Path) -> None:
    cli = Cli(home)
    processes = [cli.start("run", "--", "echo", str(number)) for number in range(20)]
    for number, process in enumerate(processes):
        out, err = process.communicate(timeout=100)
        assert (process.returncode, out, err) == (0, f"{number}\n".encode(), b"")
    assert cli.ok("ls", "-q") == ""
    ready = [line for line in (home / "daemon.log").read_text().splitlines() if '"serving"' in line]
    assert len(ready) <= 1
    assert json.loads(cli.ok("version", "--json"))["daemon"]["home"] == str(home)


def test_stop(home: Path) -> None:
    cli = Cli(home)
    cli.ok("create")
    code, _, err = cli("stop")
    assert (code, b"--force" in err or b"force" in err) == (2, True)
    assert cli.ok("stop", "--force") == ""
    assert cli("stop") == (0, b"", b"no daemon is running\n")


def test_doctor_and_serve_are_there() -> None:
    """They become other programs; that those exist is what can go wrong here."""
    for module in ("skerry.daemon", "skerry.daemon.doctor"):
        subprocess.run([sys.executable, "-m", module, "--help"], check=True, stdout=subprocess.DEVNULL)
