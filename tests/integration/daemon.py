"""A real daemon in a process of its own, and the plainest client for it."""

from __future__ import annotations

import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from tests.support import Nobody

START_SECONDS = 30.0
OPTIONS: tuple[str, ...] = ()
"""Of every daemon that is started, before its own: the fixture `user` chooses a backend by it."""


class Connection(http.client.HTTPConnection):
    """HTTP over the daemon's socket."""

    def __init__(self, path: str, timeout: float = 60.0) -> None:
        super().__init__("skerry", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Process(Protocol):
    pid: int

    def poll(self) -> int | None: ...

    def send_signal(self, number: int, /) -> None: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float = ...) -> int: ...


class Daemon:
    """Started by `started()`; every call is one request on a connection of its own."""

    def __init__(self, home: Path, process: Process) -> None:
        self.home = home
        self.process = process
        self.socket = f"{home}/daemon.sock"

    def raw(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the answer. A dict travels as JSON, everything else as it is."""
        with self.request(method, path, body, headers) as response:
            return response.status, dict(response.getheaders()), response.read()

    def call(self, method: str, path: str, body: Any = None, *, expect: int = 200) -> Any:
        """The answer's JSON, after a look at its status."""
        status, headers, answer = self.raw(method, path, body)
        assert status == expect, answer.decode(errors="replace")
        kind = "application/json" if status < 400 else "application/problem+json"
        assert headers["content-type"] == kind
        return json.loads(answer)

    @contextmanager
    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """The answer, its body still to be read."""
        headers = dict(headers or {})
        if isinstance(body, dict):
            body = json.dumps(body)
            headers.setdefault("content-type", "application/json")
        connection = Connection(self.socket)
        try:
            connection.request(method, path, body, headers)
            yield connection.getresponse()
        finally:
            connection.close()

    @contextmanager
    def asked(self, method: str, path: str, body: dict[str, Any]) -> Iterator[None]:
        """While a request is under way, whose answer nobody reads."""
        connection = Connection(self.socket)
        try:
            connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
            yield
        finally:
            connection.close()

    def stream(self, path: str) -> AbstractContextManager[http.client.HTTPResponse]:
        return self.request("GET", path)

    def create(self, **body: Any) -> str:
        found: str = self.call("POST", "/environments", body, expect=201)["environment_id"]
        return found

    def execute(self, ref: str, command: str | list[str], **body: Any) -> dict[str, Any]:
        body["command" if isinstance(command, str) else "argv"] = command
        result: dict[str, Any] = self.call("POST", f"/environments/{ref}/execute", body)
        return result

    def wait_for_output(self, ref: str, text: str) -> None:
        """Returns when something in the environment has written `text`."""
        with self.stream(f"/environments/{ref}/logs?follow=1") as log:
            while text not in json.loads(log.readline())["data"]:
                pass

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def started(
    home: Path, *options: str, user: Nobody | None = None, module: str = "skerry.daemon"
) -> Iterator[Daemon]:
    """A daemon that serves. At the end it is told to stop, if it still runs, and waited for."""
    process, word = launch(home, *options, user=user, module=module)
    daemon = Daemon(home, process)
    try:
        assert word == b"ready\n", word
        yield daemon
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(START_SECONDS)
        finally:
            process.kill()


def launch(
    home: Path, *options: str, user: Nobody | None = None, module: str = "skerry.daemon"
) -> tuple[subprocess.Popen[bytes], bytes]:
    """A new daemon process, this user's or another's, and its first word: `ready`, or a problem."""
    ready, tell = os.pipe()
    arguments = ["-m", module, "--home", str(home), "--ready-fd", str(tell), *OPTIONS, *options]
    settings = {name: value for name, value in os.environ.items() if name.startswith("SKERRY_")}
    with open(home / "daemon.log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, *arguments] if user is None else user.argv([user.python, *arguments]),
            stdin=subprocess.DEVNULL,
            stderr=log,
            pass_fds=(tell,),
            cwd=None if user is None else home,
            env=None if user is None else {**user.env, **settings},
            start_new_session=True,  # a signal to the group of the tests would end it without its environments
        )
    os.close(tell)
    word = b""
    with open(ready, "rb") as pipe:
        while not word.endswith(b"\n") and select.select([pipe], [], [], START_SECONDS)[0]:
            data = os.read(ready, 65536)
            if not data:
                break
            word += data
    return process, word
