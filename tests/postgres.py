"""A real Postgres for the tests: Debian's programs, a cluster in a temporary directory, everything synced."""

from __future__ import annotations

import itertools
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

from tests import support

USER = "postgres"
READY = "database system is ready to accept connections"
WAIT_SECONDS = 60.0


class Server:
    """A running cluster in `folder`; `restart()` gives it a new process with the same address."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs = programs
        self._folder = folder
        self._names = (f"skerry_{n}" for n in itertools.count(1))
        self._password = secrets.token_hex(16)
        (folder / "password").write_text(self._password)
        self._own(folder, folder / "password")
        self._run(
            "initdb", f"--pgdata={folder}/data", f"--username={USER}", f"--pwfile={folder}/password",
            "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C.UTF-8",
        )  # fmt: skip
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._process = self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def url(self, database: str = "postgres", *, over: str = "tcp") -> str:
        """For a connection over loopback, or over the unix socket (`over="unix"`)."""
        where = (
            f"127.0.0.1:{self.port}"
            if over == "tcp"
            else f"{str(self._folder).replace('/', '%2F')}:{self.port}"
        )
        return f"postgresql://{USER}:{self._password}@{where}/{database}"

    def new_database(self, options: str = "") -> str:
        """The URL of an empty database, made with these options of CREATE DATABASE."""
        name = next(self._names)
        self._run(
            "psql", "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1",
            f"--command=CREATE DATABASE {name} TEMPLATE template0 {options}", self.url(over="unix"),
        )  # fmt: skip
        return self.url(name)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """End the server: by SIGINT at once but cleanly, by SIGQUIT as in a crash."""
        self._process.send_signal(how)
        self._process.wait(WAIT_SECONDS)
        self._reader.join()
        assert self._process.stderr is not None
        self._process.stderr.close()

    def start(self) -> None:
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self._argv(
                "postgres", "-D", f"{self._folder}/data", "-k", str(self._folder), "-p", str(self.port),
                "-c", "listen_addresses=127.0.0.1", "-c", "fsync=on", "-c", "shared_buffers=16MB",
                "-c", "log_destination=stderr", "-c", "logging_collector=off", "-c", "log_min_messages=log",
            ),
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={"PATH": support.PATH, "LC_ALL": "C.UTF-8"},
        )  # fmt: skip
        assert process.stderr is not None
        try:
            said = []
            for line in process.stderr:
                said.append(line)
                if READY in line:
                    # What it says from here on must not fill the pipe.
                    self._reader = Thread(target=process.stderr.read, daemon=True)
                    self._reader.start()
                    return process
            raise RuntimeError(f"Postgres did not start:\n{''.join(said)}")
        except BaseException:
            process.kill()
            process.wait()
            process.stderr.close()
            raise

    def _run(self, *argv: str) -> None:
        done = subprocess.run(
            self._argv(*argv),
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env={"PATH": support.PATH, "LC_ALL": "C.UTF-8"},
            timeout=WAIT_SECONDS,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{argv[0]} ended with {done.returncode}: {done.stderr}")

    def _argv(self, program: str, *arguments: str) -> list[str]:
        """As the user `postgres` when this is root: the server refuses to be root."""
        argv = [str(self._programs / program), *arguments]
        if os.geteuid() != 0:
            return argv
        return ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", *argv]

    def _own(self, *paths: Path) -> None:
        if os.geteuid() == 0:
            user = pwd.getpwnam(USER)
            for path in paths:
                os.chown(path, user.pw_uid, user.pw_gid)


@contextmanager
def server() -> Iterator[Server]:
    """A fresh cluster, gone at the end. Without Debian's postgresql the test is skipped, and fails in CI."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[4]))
    if not found:
        support.missing("Postgres is not installed (apt-get install postgresql)")
    if os.geteuid() == 0:
        support.require("setpriv", "util-linux")
    folder = Path(tempfile.mkdtemp(prefix="skerry-postgres-", dir="/tmp"))
    try:
        running = Server(found[-1].parent, folder)
        try:
            yield running
        finally:
            running.stop()
    finally:
        shutil.rmtree(folder)
