"""Real terminals: `run -it`, `exec -it` and `shell` on a pseudo-terminal of the test."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import Cli


class Terminal:
    """A CLI on a terminal of 30 rows and 100 columns."""

    def __init__(self, cli: Cli, *words: str) -> None:
        self.fd, other = pty.openpty()
        self.resize(30, 100)
        self.before = termios.tcgetattr(other)
        self._other = other
        self.process = cli.start(
            *words,
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self.shown = b""

    def resize(self, rows: int, cols: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("4H", rows, cols, 0, 0))

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def expect(self, pattern: str, seconds: float = 30) -> str:
        """Wait until the pattern has been shown; what comes before it is forgotten."""
        deadline = time.monotonic() + seconds
        while not (match := re.search(pattern.encode(), self.shown)):
            ready, _, _ = select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{pattern!r} did not come; there is {self.shown!r}"
            data = os.read(self.fd, 4096)
            assert data
            self.shown += data
        self.shown = self.shown[match.end() :]
        return match[0].decode()

    def end(self) -> int:
        """The exit code. The terminal must be as it was."""
        code = self.process.wait(30)
        assert termios.tcgetattr(self._other) == self.before
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.fd)
        os.close(self._other)


@pytest.fixture
def terminals(cli: Cli) -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()
    assert cli.ok("ls", "-q") == ""


def test_run_it(cli: Cli, terminals: list[Terminal]) -> None:
    program = (
        "stty size; test -t 0 && test -t 1 && test -t 2 && echo all; echo $TERM; read x; echo got $x; exit 5"
    )
    cli.env["TERM"] = "vt220"
    terminal = Terminal(cli, "run", "-it", "--", "sh", "-c", program)
    terminals.append(terminal)
    terminal.expect("30 100\r\nall\r\nvt220\r\n")
    terminal.type("hello\r")
    terminal.expect("hello\r\ngot hello\r\n")
    assert terminal.end() == 5


def test_resizing(cli: Cli, terminals: list[Terminal]) -> None:
    program = "trap 'stty size' WINCH; echo ready; while :; do sleep 0.05; done"
    terminal = Terminal(cli, "run", "-it", "--", "sh", "-c", program)
    terminals.append(terminal)
    terminal.expect("ready")
    terminal.resize(11, 22)
    terminal.expect("11 22")
    terminal.type("\x03")
    assert terminal.end() == 130


def test_keys_are_the_command_s(cli: Cli, terminals: list[Terminal]) -> None:
    """Ctrl-C, Ctrl-Z and Ctrl-D go to the terminal inside, not to the CLI."""
    program = "trap 'echo int' INT; echo ready; while read x; do echo got $x; done; echo eof"
    terminal = Terminal(cli, "run", "-it", "--", "bash", "-c", program)
    terminals.append(terminal)
    terminal.expect("ready")
    terminal.type("\x03")
    terminal.expect("int")
    terminal.type("a\r")
    terminal.expect("got a")
    terminal.type("\x04")
    terminal.expect("eof")
    assert terminal.end() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_terminal_is_restored_after_a_signal(cli: Cli, terminals: list[Terminal], number: int) -> None:
    terminal = Terminal(cli, "run", "-it", "--", "sh", "-c", "echo ready; sleep 100")
    terminals.append(terminal)
    terminal.expect("ready")
    terminal.process.send_signal(number)
    assert terminal.end() == 128 + number


def test_the_terminal_is_restored_after_an_error(cli: Cli, terminals: list[Terminal]) -> None:
    ref = cli.ok("create")
    terminal = Terminal(cli, "exec", "-it", ref, "sh", "-c", "echo ready; sleep 100")
    terminals.append(terminal)
    terminal.expect("ready")
    cli.ok("rm", ref)
    assert terminal.end() != 0


def test_shell(cli: Cli, terminals: list[Terminal]) -> None:
    cli.ok("create", "--name", "home")
    try:
        for words in (["shell", "home"], ["shell"]):
            terminal = Terminal(cli, *words)
            terminals.append(terminal)
            terminal.type("echo $((6*7)) $(tty); exit 3\r")
            terminal.expect("42 /dev/pts/\\d")
            assert terminal.end() == 3
    finally:
        cli.ok("rm", "home")


def test_a_shell_without_a_terminal(cli: Cli) -> None:
    assert cli("shell", input=b"echo hi; exit 4\n") == (4, b"hi\n", b"")


def test_t_without_i(cli: Cli) -> None:
    """A terminal for the command, though there is none here."""
    code, out, _ = cli("run", "-t", "--", "sh", "-c", "test -t 1 && echo yes; echo no >&2")
    assert (code, out) == (0, b"yes\r\nno\r\n")


def test_it_needs_a_terminal(cli: Cli) -> None:
    code, _, err = cli("run", "-it", "sh")
    assert (code, b"not a terminal" in err) == (2, True)


def test_logs_on_a_terminal_are_harmless(cli: Cli, terminals: list[Terminal]) -> None:
    ref = cli.ok("create")
    try:
        cli("exec", ref, "--", "printf", "\\033]0;title\\007end\\n")
        terminal = Terminal(cli, "logs", ref)
        terminals.append(terminal)
        assert "\x1b" not in terminal.expect("(?s).*end")
        assert terminal.end() == 0
    finally:
        cli.ok("rm", ref)


def test_completion_in_bash(cli: Cli) -> None:
    ref = cli.ok("create", "--name", "completed")
    program = (
        'skerry() { "$PYTHON" -m skerry.cli "$@"; }; eval "$(skerry completion bash)";'
        'COMP_WORDS=(skerry exec comp); COMP_CWORD=2; _skerry; echo "${COMPREPLY[@]}"'
    )
    try:
        done = subprocess.run(
            ["bash", "-c", program],
            env={**cli.env, "PYTHON": cli.argv[0]},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == "completed\n"
    finally:
        cli.ok("rm", ref)
