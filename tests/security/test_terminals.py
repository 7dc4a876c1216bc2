"""What an environment says, shown on a terminal or in a log: nothing there obeys it."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from typing import Any

import pytest

from skerry.models import ExecutionResult, Outcome, Usage
from tests.unit.scripted_server import every_request, serving

pytestmark = pytest.mark.timeout(60)

SECONDS = 10.0
EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202etxt.exe\x00\r"


def on_a_terminal(*arguments: str, env: dict[str, str]) -> bytes:
    """What the command line writes to a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "skerry.cli", *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=env
    ) as process:
        os.close(theirs)
        seen = b""
        with contextlib.suppress(OSError):
            while data := os.read(ours, 65536):
                seen += data
        assert process.wait(SECONDS) == 0, seen
    os.close(ours)
    return seen


@pytest.mark.parametrize(
    "verb",
    [
        ("logs", "abc123abc123"),
        ("ls",),
        ("info", "abc123abc123"),
        ("code", "run", "-l", "python", os.devnull),
        ("session", "run", "abc123abc123", "-c", "1"),
    ],
)
def test_the_command_line_shows_no_terminal_escapes(verb: tuple[str, ...]) -> None:
    described: dict[str, Any] = dict.fromkeys(("name", "image", "state", "isolation", "ended_reason"), EVIL)
    described |= {"environment_id": "abc123abc123", "created_at": 1.0, "expires_at": 2.0}
    enforced = [{"name": EVIL, "enforced": True, "value": EVIL, "by": EVIL}]

    said = EVIL.encode()
    result = ExecutionResult(
        "abc", Outcome.COMPLETED, 0, said, said, len(said), len(said), 0.1, Usage(), EVIL
    ).to_dict()
    ran = {
        "values": [{"data": {"text/plain": EVIL}}],
        "raised": {"traceback": EVIL},
        "language": "",
        "version": "",
    }

    def answer(method: str, target: str, body: bytes) -> Any:
        if target == "/execute" or target.endswith("/run"):
            return {**result, **ran}
        if target.endswith("/sessions"):
            return {"session_id": "main", "state": "idle"}
        if target.partition("?")[0].endswith("/logs"):
            return json.dumps({"stream": "stdout", "encoding": "utf-8", "data": EVIL}).encode() + b"\n"
        if target.partition("?")[0] == "/environments":
            return {"environments": [described]}
        return {**described, "enforced": enforced}

    with serving(every_request(answer, "/none", lambda peer: None)):
        seen = on_a_terminal(*verb, env=dict(os.environ))
    assert b"owned" in seen
    assert not {0x1B, 0x07, 0x00} & set(seen), seen
    assert b"\xc2\x9b" not in seen
    assert "\u202e".encode() not in seen


def test_the_daemons_log_holds_no_terminal_escapes() -> None:
    script = (
        "import structlog\nfrom skerry.daemon import logs\nlogs.configure()\n"
        f"structlog.get_logger('skerry.test').warning('create failed', error={EVIL!r}, environment={EVIL!r})\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, check=True, env=dict(os.environ)
    ).stderr
    assert b"owned" in said
    assert not {0x1B, 0x07, 0x00} & set(said)
    assert said.count(b"\n") == 1
