"""What tests of every kind share: homes that leave nothing, another user, and parts that may be missing."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import select
import shutil
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests import leaks

NOBODY = 65534
STOP_SECONDS = 60.0
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
IN_CI = os.environ.get("CI") == "true"


def missing(reason: str) -> None:
    """A part of the machine is not there: the test is skipped, and fails in CI."""
    if IN_CI:
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def require(tool: str, package: str = "") -> str:
    """The path of a program that the test needs; without it the test is skipped, and fails in CI."""
    path = shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if path is None:
        missing(f"{tool} is not installed (apt-get install {package or tool})")
    assert path is not None
    return path


def first_of(values: Iterable[Any]) -> list[Any]:
    """Parameters of which `make test` takes the first, and `make test-all` every one."""
    first, *others = values
    return [first, *(pytest.param(other, marks=pytest.mark.soak) for other in others)]


def free_port() -> int:
    """Of loopback, below those that Linux gives to connections: nobody else takes it within the next moments."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            port = 10_000 + secrets.randbelow(20_000)
            probe.bind(("127.0.0.1", port))
            return port


def folder_in_memory() -> str:
    """Where the tens of thousands of files of an image are made quickly; /tmp where memory cannot hold devices."""
    shared = "/dev/shm"
    return "/tmp" if os.statvfs(shared).f_flag & os.ST_NODEV else shared


def eventually(happened: Callable[[], bool], seconds: float = STOP_SECONDS) -> None:
    """For what gives no event: ask again and again."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def await_end(process: int, seconds: float) -> None:
    """Return when the process of a pidfd has ended. Fails the test after so many seconds."""
    if not select.select([process], [], [], seconds)[0]:
        pytest.fail(f"a process did not end in {seconds:.0f} s", pytrace=False)


@contextmanager
def temporary_home(uid: int | None = None, folder: str = "/tmp") -> Iterator[Path]:
    """A fresh SKERRY_HOME with a short path, of this user or of `uid`.

    At the end its daemon is stopped with all environments, and the test fails when anything of it is left.
    """
    home = Path(tempfile.mkdtemp(prefix="skerry-test-", dir=folder))
    if uid is not None:
        os.chown(home, uid, uid)
    try:
        yield home
    finally:
        stop_daemon(home)
        if left := leaks.of_home(home):
            pytest.fail(f"left behind by the daemon of {home}:\n" + "\n".join(left), pytrace=False)
        shutil.rmtree(home)


def stop_daemon(home: Path) -> None:
    """Delete all environments of this home and stop its daemon; returns when the process has ended."""
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.connect(f"{home}/daemon.sock")
        except (FileNotFoundError, ConnectionRefusedError):
            return
        pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        daemon = os.pidfd_open(pid)
        try:
            connection = http.client.HTTPConnection("skerry")
            connection.sock = sock
            body = json.dumps({"force": True})
            connection.request("POST", "/stop", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
            if response.status != 200:
                pytest.fail(f"the daemon of {home} refused to stop: {answer.decode()}", pytrace=False)
            if not select.select([daemon], [], [], STOP_SECONDS)[0]:
                pytest.fail(f"the daemon of {home} did not end in {STOP_SECONDS:.0f} s", pytrace=False)
        finally:
            os.close(daemon)


class Nobody:
    """The user `nobody`, with a home of its own and an interpreter that can import skerry."""

    uid = NOBODY

    def __init__(self, home: Path, python: str, packages: Path | None) -> None:
        self.home = home
        self.python = python
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "SKERRY_HOME": str(home),
            "LANG": "C.UTF-8",
        }
        if packages is not None:
            self.env["PYTHONPATH"] = str(packages)

    def argv(self, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` as this user."""
        # By way of env: what setpriv itself starts is looked up with root's rights still.
        become = ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups", "env"]
        return [*become, *argv]

    def run(
        self,
        argv: Sequence[str],
        *,
        input: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program as this user, in its home, and wait for it."""
        return subprocess.run(
            self.argv(argv),
            input=input,
            stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True,
            text=True,
            cwd=self.home,
            env={**self.env, **(env or {})},
            timeout=timeout,
        )

    def skerry(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The command line of Skerry, as this user."""
        return self.run([self.python, "-m", "skerry.cli", *arguments])


def python_for_nobody(folder: Path) -> tuple[str, Path | None]:
    """An interpreter that `nobody` can start, and where it finds skerry, if not by itself.

    A checkout below a private directory is out of reach for other users: skerry and what it needs are then
    copied into `folder`.
    """
    probe = Nobody(Path("/"), sys.executable, None)
    if probe.run([sys.executable, "-c", "import skerry.daemon, starlette"]).returncode == 0:
        return sys.executable, None
    base = os.path.realpath(sys.executable)
    if probe.run([base, "-c", ""]).returncode != 0:
        missing(f"{base} cannot be started by other users; `make test` makes a .venv with one that can")
    packages = folder / "packages"
    skip = shutil.ignore_patterns("mypy*", "ruff*", "pip*", "__pycache__")
    shutil.copytree(sysconfig.get_path("purelib"), packages, ignore=skip)
    source = Path(__file__).resolve().parent.parent / "src" / "skerry"
    shutil.copytree(source, packages / "skerry", ignore=skip, dirs_exist_ok=True)
    for path in (folder, packages):
        path.chmod(0o755)
    return base, packages
