"""One daemon for all tests of a module, and the CLI as a user calls it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import support
from tests.e2e.elsewhere import daemon_for_others


class Cli:
    """Runs `skerry` with the daemon of the module."""

    def __init__(self, home: Path, variables: dict[str, str] | None = None) -> None:
        self.home = home
        self.argv = [sys.executable, "-m", "skerry.cli"]
        self.env = {**os.environ, **(variables or {"SKERRY_HOME": str(home)})}

    def start(self, *words: str, **options: Any) -> subprocess.Popen[bytes]:
        options = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            **options,
        }
        return subprocess.Popen([*self.argv, *words], env=self.env, **options)

    def __call__(self, *words: str, input: bytes | None = None) -> tuple[int, bytes, bytes]:
        """(exit code, stdout, stderr)"""
        with self.start(*words, stdin=subprocess.DEVNULL if input is None else subprocess.PIPE) as process:
            out, err = process.communicate(input, timeout=60)
        return process.returncode, out, err

    def ok(self, *words: str, input: bytes | None = None) -> str:
        """What it printed; it must succeed and have nothing else to say."""
        code, out, err = self(*words, input=input)
        assert (code, err) == (0, b"")
        return out.decode().strip()


@pytest.fixture(scope="module", params=support.first_of(["home", "tls"]))
def cli(request: pytest.FixtureRequest) -> Iterator[Cli]:
    """With a daemon that starts by itself, and with one elsewhere."""
    if request.param == "home":
        with support.temporary_home() as home:
            yield Cli(home)
        return
    with daemon_for_others(request.param) as there:
        yield Cli(there.daemon.home, there.variables)
