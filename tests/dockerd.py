"""A private Docker Engine: own data, socket and cgroup, no network of its own, removed afterwards."""

from __future__ import annotations

import hashlib
import http.client
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests import leaks, support

START_SECONDS, END_SECONDS, ANSWER_SECONDS = 60.0, 60.0, 60.0
PROGRAMS = ("dockerd", "containerd", "runc")
_numbers = itertools.count()


class Unavailable(Exception):
    """A program that is needed is not installed, or does not start here."""


class Dockerd:
    """One engine that runs, and can be killed and started again with the same data."""

    def __init__(self, folder: Path, options: Sequence[str] = ()) -> None:
        self.folder = folder
        self.socket = f"{folder}/docker.sock"
        self.host = f"unix://{self.socket}"
        self.cgroup = f"skerry-dockerd-{os.getpid()}-{next(_numbers)}"
        self._options = options
        self._reapers: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Returns when it answers. Raises Unavailable."""
        folder = self.folder
        (folder / "daemon.json").write_text(json.dumps({"runtimes": _runtimes()}))
        (folder / "pid").unlink(missing_ok=True)
        with open(folder / "log", "a") as log:
            reaper = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.reaper"),
                    *("dockerd", "-H", self.host, "--pidfile", folder / "pid"),
                    *("--config-file", folder / "daemon.json"),
                    *("--data-root", folder / "data", "--exec-root", folder / "exec"),
                    *("--storage-driver=overlay2", f"--cgroup-parent=/{self.cgroup}", "--bridge=none"),
                    *("--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false"),
                    *self._options,
                ],
                cwd=Path(__file__).parent.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._reapers.insert(0, reaper)
        deadline = time.monotonic() + START_SECONDS
        while not self.answers():
            if reaper.poll() is not None or time.monotonic() > deadline:
                self.end()
                raise Unavailable("dockerd does not start here")
            time.sleep(0.05)

    def answers(self) -> bool:
        try:
            return self._request("GET", "/_ping")[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def ask(self, method: str, path: str) -> Any:
        """The answer's JSON. Fails the test when the engine refuses."""
        status, answer = self._request(method, path)
        assert status < 300, answer
        return json.loads(answer) if answer else None

    def containers(self, home: Path) -> set[str]:
        """The environments of a home that are containers, whether they run or not."""
        name = hashlib.sha256(os.fsencode(home)).hexdigest()[:12]
        labels = [each["Labels"] for each in self.ask("GET", "/containers/json?all=1")]
        return {found["skerry.environment"] for found in labels if found.get("skerry.home") == name}

    def belongings(self) -> set[str]:
        """Its containers, volumes and images."""
        found = {f"container {'/'.join(each['Names'])}" for each in self.ask("GET", "/containers/json?all=1")}
        found |= {f"volume {each['Name']}" for each in self.ask("GET", "/volumes")["Volumes"] or ()}
        return found | {f"image {each['RepoTags']}" for each in self.ask("GET", "/images/json?all=1")}

    def tell(self, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        """A POST that is answered with lines of progress. Fails the test when one of them is an error."""
        status, answer = self._request("POST", path, body, headers or {})
        assert (status, b'"error"' in answer) == (200, False), answer

    def _request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("docker", timeout=ANSWER_SECONDS)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(ANSWER_SECONDS)
            sock.connect(self.socket)
            connection.sock = sock
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return response.status, response.read()

    @property
    def pid(self) -> int:
        return int((self.folder / "pid").read_text())

    def kill(self) -> None:
        """SIGKILL, as an engine that crashes: its containers live on until the next one starts."""
        engine = os.pidfd_open(self.pid)
        try:
            signal.pidfd_send_signal(engine, signal.SIGKILL)
            support.await_end(engine, END_SECONDS)
        finally:
            os.close(engine)

    def end(self) -> None:
        """Returns when everything of it has ended and nothing is left of it but its folder."""
        for reaper in self._reapers:  # the last one's engine ends what earlier ones have left
            reaper.send_signal(signal.SIGTERM)
            reaper.wait(END_SECONDS)
        self._reapers.clear()
        # One that was killed has left mounts, and its successor leaves some of them.
        mounted = [mount.split(" (")[0] for mount in leaks.mounts()]
        for point in sorted(mounted, reverse=True):
            if point.startswith(f"{self.folder}/"):
                subprocess.run(["umount", point], check=True)
        for cgroup in Path("/sys/fs/cgroup").glob(f"*/{self.cgroup}"):
            for folder, _, _ in os.walk(cgroup, topdown=False):
                os.rmdir(folder)


def _runtimes() -> dict[str, object]:
    runsc = shutil.which("runsc")
    return (
        {"runsc": {"path": runsc, "runtimeArgs": ["--platform=systrap", "--network=none"]}} if runsc else {}
    )


def require(*programs: str) -> None:
    """Raises Unavailable when one of the programs is missing, or when this is not root."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if missing := [program for program in programs if shutil.which(program, path=path) is None]:
        raise Unavailable(f"{', '.join(missing)} not installed")
    if os.geteuid() != 0:
        raise Unavailable("needs root")


@contextmanager
def running(folder: Path, options: Sequence[str] = ()) -> Iterator[Dockerd]:
    """An engine with all its files below `folder`. Raises Unavailable."""
    require(*PROGRAMS)
    engine = Dockerd(folder, options)
    engine.start()
    try:
        yield engine
    finally:
        engine.end()


class Shared:
    """The engine that all tests of a process share, started by the first one that asks."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._engine: Dockerd | None = None

    def get(self) -> Dockerd:
        """Skips the test where there can be none."""
        if self._engine is None:
            try:
                folder = self._stack.enter_context(
                    tempfile.TemporaryDirectory(prefix="skerry-test-", dir="/tmp")
                )
                self._engine = self._stack.enter_context(running(Path(folder)))
            except Unavailable as error:
                support.missing(f"no Docker Engine for the tests: {error}")
        assert self._engine is not None
        return self._engine

    def close(self) -> None:
        self._engine = None
        self._stack.close()


shared = Shared()
