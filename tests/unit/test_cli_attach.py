"""`run` and `exec` with a daemon that does as it is told: streams, signals, and what is cleaned up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import skerry
from tests.unit.scripted_server import Peer, every_request, serving

EXECUTION = {
    "execution_id": "e1",
    "environment_id": "abc123abc123",
    "command": "x",
    "state": "running",
    "started_at": 1.0,
}
started: list[subprocess.Popen[bytes]] = []
Script = Callable[[Peer, dict[str, Any]], None]


def ended(peer: Peer, exit_code: int = 0, outcome: str = "completed", message: str = "") -> None:
    result = {"execution_id": "e1", "outcome": outcome, "exit_code": exit_code, "message": message}
    peer.send_event(event="ended", result=result)
    peer.send_frame(8, b"\x03\xe8")


@contextmanager
def daemon(script: Script) -> Iterator[list[str]]:
    """Runs `script` for what is attached; yields the requests."""
    seen: list[str] = []

    def answer(method: str, target: str, body: bytes) -> Any:
        seen.append(f"{method} {target}")
        return {"environment_id": "abc123abc123"}

    def attach(peer: Peer) -> None:
        seen.append(f"WS {peer.upgrade()}")
        request = json.loads(peer.take_frame()[1])
        peer.send_event(event="started", execution=EXECUTION)
        script(peer, request)

    with serving(every_request(answer, "/attach", attach)):
        try:
            yield seen
        finally:
            while started:
                started.pop().kill()  # whatever a failed test has left


def start(*words: str, **options: Any) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "skerry.cli", *words]
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    process = subprocess.Popen(argv, **options)
    started.append(process)
    return process


def finish(process: subprocess.Popen[bytes], data: bytes | None = None) -> tuple[int, bytes, bytes]:
    out, err = process.communicate(data, timeout=60)
    return process.returncode, out, err


RUN = ["POST /environments", "WS /environments/abc123abc123/attach", "DELETE /environments/abc123abc123"]


def test_output_is_passed_on_byte_for_byte() -> None:
    everything = bytes(range(256)) * 1000

    def script(peer: Peer, request: dict[str, Any]) -> None:
        assert request == {"argv": ["x", "-y"], "stdin": False, "cwd": "/tmp", "user": "root", "timeout": 5.0}
        peer.send_frame(2, b"\x01" + everything)
        peer.send_frame(9, b"still there?")
        peer.send_frame(2, b"\x02" + everything[::-1])
        assert peer.take_frame() == (10, b"still there?")
        ended(peer, 7, "failed")

    with daemon(script) as seen:
        words = ["run", "-w", "/tmp", "-u", "root", "--timeout", "5", "x", "-y"]
        assert finish(start(*words)) == (7, everything, everything[::-1])
    assert seen == RUN


def test_exec_leaves_the_environment() -> None:
    def script(peer: Peer, request: dict[str, Any]) -> None:
        assert request == {"argv": ["x"], "stdin": False, "env": {"A": "1"}}
        ended(peer)

    with daemon(script) as seen:
        assert finish(start("exec", "-e", "A=1", "web", "x")) == (0, b"", b"")
    assert seen == ["WS /environments/web/attach"]


def test_a_kept_environment_is_named() -> None:
    with daemon(lambda peer, _: ended(peer)) as seen:
        code, out, err = finish(start("run", "--keep", "x"))
    assert (code, out) == (0, b"")
    assert b"skerry rm abc123abc123" in err
    assert seen == RUN[:2]


def test_input_and_output_at_once_do_not_block_each_other() -> None:
    """The daemon takes no input until its output is gone, and there is more of each than buffers hold."""
    given = os.urandom(3 << 20)
    taken = bytearray()

    def script(peer: Peer, request: dict[str, Any]) -> None:
        assert request["stdin"]
        for _ in range(48):
            peer.send_frame(2, b"\x01" + bytes(65536))
        while (payload := peer.take_frame()[1]) != b"\0":
            assert payload[:1] == b"\0"
            taken.extend(payload[1:])
        ended(peer)

    with daemon(script):
        code, out, err = finish(start("run", "-i", "cat", stdin=subprocess.PIPE), given)
    assert (code, len(out), err) == (0, 48 * 65536, b"")
    assert taken == given


@pytest.mark.parametrize(
    ("outcome", "exit_code", "message", "code", "words"),
    [
        ("completed", 0, "", 0, b""),
        ("failed", 127, "", 127, b""),
        ("signaled", 139, "", 139, b""),
        ("timed_out", 124, "killed after 5 s", 124, b"skerry: killed after 5 s\n"),
        ("oom_killed", 137, "", 137, b"skerry: oom killed\n"),
        (
            "internal",
            1,
            "the environment \x1b[0mwent away",
            125,
            b"skerry: the environment \\x1b[0mwent away\n",
        ),
    ],
)
def test_exit_codes(outcome: str, exit_code: int, message: str, code: int, words: bytes) -> None:
    with daemon(lambda peer, _: ended(peer, exit_code, outcome, message)) as seen:
        assert finish(start("run", "x")) == (code, b"", words)
    assert seen == RUN


def test_an_error_instead_of_an_end() -> None:
    error = skerry.GuestFailed("it is gone").to_dict()
    with daemon(lambda peer, _: peer.send_event(event="error", error=error)) as seen:
        assert finish(start("run", "x")) == (125, b"", b"skerry: it is gone\n")
    assert seen == RUN


@pytest.mark.parametrize(
    "answer", [b"", b"\x83\x00", b"\x81\x01{", b"\x81\x02[]", b"\x81\x02{}", b"\x88\x00"]
)
def test_nonsense_instead_of_an_end(answer: bytes) -> None:
    with daemon(lambda peer, _: peer.send(answer)) as seen:
        code, _, err = finish(start("run", "x"))
    assert (code, seen) == (125, RUN)
    assert b"Traceback" not in err


def test_the_first_ctrl_c_is_for_the_command() -> None:
    running = threading.Event()

    def script(peer: Peer, request: dict[str, Any]) -> None:
        running.set()
        assert json.loads(peer.take_frame()[1]) == {"signal": 2}
        peer.send_frame(2, b"\x01bye")
        ended(peer, 130, "signaled")

    with daemon(script) as seen:
        process = start("run", "x")
        assert running.wait(30)
        process.send_signal(signal.SIGINT)
        assert finish(process) == (130, b"bye", b"")
    assert seen == RUN


def test_a_ctrl_c_before_the_command_runs_reaches_it() -> None:
    """It is there before the word that the command runs, and nothing else comes to wake us."""
    asked, interrupted = threading.Event(), threading.Event()

    def attach(peer: Peer) -> None:
        peer.upgrade()
        peer.take_frame()
        asked.set()
        assert interrupted.wait(30)
        peer.send_event(event="started", execution=EXECUTION)
        assert json.loads(peer.take_frame()[1]) == {"signal": 2}
        ended(peer, 130, "signaled")

    with serving(every_request(lambda *_: {"environment_id": "abc123abc123"}, "/attach", attach)):
        process = start("run", "x")
        try:
            assert asked.wait(30)
            process.send_signal(signal.SIGINT)
            interrupted.set()
            assert finish(process) == (130, b"", b"")
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 137)]
)
def test_signals_that_end_it_clean_up(number: signal.Signals, code: int) -> None:
    """SIGINT twice; the command does not care for any of it."""
    interrupted, running = threading.Event(), threading.Event()

    def script(peer: Peer, request: dict[str, Any]) -> None:
        running.set()
        peer.take_frame()
        interrupted.set()
        peer.take_frame()

    with daemon(script) as seen:
        process = start("run", "x")
        assert running.wait(30)
        process.send_signal(number)
        if number == signal.SIGINT:
            assert interrupted.wait(30)
            process.send_signal(number)
        assert finish(process) == (code, b"", b"")
    assert seen == RUN


def test_a_signal_while_the_output_is_stuck_cleans_up() -> None:
    """Nobody reads our stdout, so we are inside a write that does not return."""

    def script(peer: Peer, request: dict[str, Any]) -> None:
        while True:
            peer.send_frame(2, b"\x01" + bytes(65536))

    with daemon(script) as seen:
        process = start("run", "x")
        while "pipe_write" not in Path(f"/proc/{process.pid}/wchan").read_text():
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
        process.communicate()
    assert seen == RUN


def test_a_signal_during_the_creation_waits_for_it_and_cleans_up() -> None:
    creating, go = threading.Event(), threading.Event()
    seen: list[str] = []

    def answer(method: str, target: str, body: bytes) -> Any:
        seen.append(method)
        if method == "POST":
            creating.set()
            go.wait(30)
        return {"environment_id": "abc123abc123"}

    with serving(every_request(answer)):
        process = start("run", "x")
        assert creating.wait(30)
        process.send_signal(signal.SIGTERM)
        go.set()
        assert finish(process)[0] == 143
    assert seen == ["POST", "DELETE"]


def test_a_reader_that_leaves_is_no_reason_to_complain() -> None:
    def script(peer: Peer, request: dict[str, Any]) -> None:
        while True:
            peer.send_frame(2, b"\x01" + b"y\n" * 1000)

    with daemon(script) as seen:
        process = start("run", "yes")
        assert process.stdout is not None
        assert process.stdout.read(2) == b"y\n"
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait(60) == 141
        process.stderr.close()
    assert seen == RUN


def test_json_captures_the_output() -> None:
    result = {"outcome": "failed", "exit_code": 3, "stdout": "x", "execution_id": "e"}
    bodies: list[Any] = []

    def answer(method: str, target: str, body: bytes) -> Any:
        bodies.append(json.loads(body) if body else method)
        return result if target.endswith("/execute") else {"environment_id": "abc123abc123"}

    with serving(every_request(answer)):
        code, out, err = finish(start("run", "--json", "-i", "x", stdin=subprocess.PIPE), b"in")
    assert (code, json.loads(out), err) == (3, result, b"")
    assert bodies == [{"idle": 60}, {"argv": ["x"], "stdin": "in", "stdin_encoding": "utf-8"}, "DELETE"]


def test_an_environment_that_cannot_be_removed_is_named() -> None:
    def answer(method: str, target: str, body: bytes) -> Any:
        if method == "DELETE":
            return skerry.PlatformError("device busy").to_dict(), 500
        return {"environment_id": "abc123abc123"}

    def attach(peer: Peer) -> None:
        peer.upgrade()
        peer.take_frame()
        ended(peer, 5, "failed")

    with serving(every_request(answer, "/attach", attach)):
        code, _, err = finish(start("run", "x"))
    assert (code, err) == (5, b"skerry: environment abc123abc123 was not deleted: device busy\n")


def test_a_detached_execution_is_only_started() -> None:
    bodies: list[Any] = []

    def answer(method: str, target: str, body: bytes) -> Any:
        bodies.append((target, json.loads(body)))
        return EXECUTION, 201

    with serving(every_request(answer)):
        assert finish(start("exec", "-d", "--timeout", "9", "web", "x")) == (0, b"e1\n", b"")
    assert bodies == [("/environments/web/executions", {"argv": ["x"], "timeout": 9.0})]
