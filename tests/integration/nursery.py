"""Daemons without the half second that Python takes to load one: forks of a process that has loaded it already.

For tests that need hundreds. What they start is the daemon's own `main`, in a process of its own, to be killed at will.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.integration.daemon import START_SECONDS, Daemon

_LOADED = """
import contextlib, json, os, socket, sys, uvloop
from skerry.daemon import __main__ as daemon, app, logs, server

door = socket.socket(fileno=int(sys.argv[1]))
while True:
    wish, fds, _, _ = socket.recv_fds(door, 65536, 2)
    if not wish:
        break
    # Not before: until now the test could still ask for the one that has ended.
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    child = os.fork()
    if child == 0:
        door.close()
        ready, log = fds
        os.dup2(log, 2)
        os.close(log)
        arguments, variables = json.loads(wish)
        os.environ.update(variables)
        os._exit(daemon.main([*arguments, "--ready-fd", str(ready)]))
    for fd in fds:
        os.close(fd)
    door.send(str(child).encode())
"""


class Forked:
    """A process that is somebody else's child; as much of `Popen` as the tests use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handle = os.pidfd_open(pid)

    def poll(self) -> int | None:
        return 0 if select.select([self._handle], [], [], 0)[0] else None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = START_SECONDS) -> int:
        assert select.select([self._handle], [], [], timeout)[0], f"process {self.pid} does not end"
        return 0

    def close(self) -> None:
        os.close(self._handle)


class Nursery:
    """Made by `nursery()`."""

    def __init__(self, door: socket.socket) -> None:
        self._door = door

    @contextmanager
    def started(self, home: Path, *options: str, env: Mapping[str, str] | None = None) -> Iterator[Daemon]:
        """As `daemon.started`. One that dies before it is ready is no error: that may be what it was told to."""
        ready, tell = os.pipe()
        with open(home / "daemon.log", "ab") as log:
            variables = {name: value for name, value in os.environ.items() if name.startswith("SKERRY_")}
            wish = json.dumps([["--home", str(home), *options], {**variables, **(env or {})}]).encode()
            socket.send_fds(self._door, [wish], [tell, log.fileno()])
        pid = int(self._door.recv(64))
        try:
            process = Forked(pid)
        finally:
            os.close(tell)
        try:
            with open(ready, "rb") as pipe:
                assert select.select([pipe], [], [], START_SECONDS)[0], "it does not get ready"
                said = pipe.read()
            assert said in (b"ready\n", b""), said
            yield Daemon(home, process)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait()
            finally:
                process.kill()
                process.close()


@contextmanager
def nursery() -> Iterator[Nursery]:
    ours, theirs = socket.socketpair()
    variables = {name: value for name, value in os.environ.items() if not name.startswith("SKERRY_")}
    argv = [sys.executable, "-c", _LOADED, str(theirs.fileno())]
    with ours, subprocess.Popen(argv, pass_fds=[theirs.fileno()], env=variables):
        theirs.close()
        try:
            yield Nursery(ours)
        finally:
            ours.close()  # or it would be waited for without end
