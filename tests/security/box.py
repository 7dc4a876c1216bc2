"""What the tests of this folder are written with: a `Box` is one environment, `Boxes` hands them out.

box = boxes("rootful")                          shared by all tests that ask for the same
box = boxes("rootless", without=["seccomp"])    with a defence taken away: see keeper.py
with boxes.fresh("rootful") as box: ...         one of its own, for tests that may break it
box = boxes("oci")                              of another backend: see tests/conformance/kinds.py
box.run(["id", "-u"]).text, box.shell("pwd").code, box.put("a.txt", b"...")
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from skerry.errors import SkerryError, from_dict
from tests.conformance.kinds import given

MODES = ("rootful", "rootless")
PROBES = Path(__file__).parent / "probes"
SECONDS = 30.0
ANSWER_SECONDS = 60.0
LIMITS = {"cpus": 2.0, "memory": 256 << 20, "pids": 256, "disk": 64 << 20}


def users(mode: str) -> list[str]:
    """Who can work in an environment."""
    return ["appuser", "root"] if "users" in given(mode) else ["appuser"]


def own_kernel(mode: str) -> bool:
    """True on a rung whose kernel is not the host's."""
    return "host_kernel" not in given(mode)


class Result(NamedTuple):
    code: int
    signal: int | None
    stdout: bytes
    stderr: bytes
    late: bool
    """It did not end in time, and was killed."""

    @property
    def text(self) -> str:
        return self.stdout.decode(errors="replace").strip()


class Keeper:
    """The other end of a keeper.py process. Several calls may be under way: `ask` now, `answer` later."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
        self._process = subprocess.Popen(
            argv, env=env, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._numbers = itertools.count()
        self._answers: dict[int, dict[str, Any]] = {}
        self._rest = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, call: str, **arguments: Any) -> Any:
        """Raises SkerryError as the keeper met it."""
        return self.answer(self.ask(call, **arguments))

    def ask(self, call: str, **arguments: Any) -> int:
        number = next(self._numbers)
        assert self._process.stdin is not None
        line = json.dumps({"call": call, "arguments": arguments, "number": number}).encode() + b"\n"
        while line:
            line = line[self._process.stdin.write(line) or 0 :]
        return number

    def answer(self, number: int, seconds: float = ANSWER_SECONDS) -> Any:
        deadline = time.monotonic() + seconds
        while number not in self._answers:
            self._read(deadline)
        found = self._answers.pop(number)
        if "error" in found:
            raise from_dict(found["error"])
        assert "failure" not in found, found["failure"]
        return found["result"]

    def _read(self, deadline: float) -> None:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, "no answer in time"
        data = self._process.stdout.read(1 << 20)
        assert data, "the keeper died"
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            self._answers[answer["number"]] = answer

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            assert self._process.wait(ANSWER_SECONDS) == 0
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()


class NoControl(Exception):
    """A defence cannot be taken away on this rung: what follows is shown on `namespace`."""


class Running:
    """Something that was started in a box."""

    def __init__(self, box: Box, name: str) -> None:
        self._box, self._keeper = box, box.keeper
        self.name = name

    def until(self, text: str) -> None:
        """Returns when it has written `text`."""
        self._keeper.call("until", name=self.name, text=base64.b64encode(text.encode()).decode())

    def kill(self) -> None:
        """Kill it with everything that it started; returns when nothing of it lives."""
        self._keeper.call("kill", name=self.name)

    def finish(self, seconds: float = SECONDS) -> Result:
        found = self._keeper.call("finish", name=self.name, seconds=seconds)
        self._box.used()
        stdout, stderr = (base64.b64decode(found[stream]) for stream in ("stdout", "stderr"))
        return Result(found["code"], found["signal"], stdout, stderr, found["late"])


class Box:
    """One environment."""

    _names = itertools.count()

    def __init__(
        self, keeper: Keeper, mode: str, id_: str, pid: int, used: Callable[[], None] = lambda: None
    ) -> None:
        self.keeper = keeper
        self.used = used
        """Called for each program that has run in it."""
        self.mode = mode
        self.id = id_
        self.pid = pid
        """The host's number of its process 1."""
        self._there: set[str] = set()

    def start(
        self,
        argv: Sequence[str] | None = None,
        *,
        stdin: bytes | None = None,
        user: str = "appuser",
        **options: Any,
    ) -> Running:
        """`options` are those of guest.start.Start: command, shell, cwd, env, pty, ...; and `profile`, an execution
        profile by its name or its fields."""
        name = f"{self.id}/{next(self._names)}"
        arguments = {**options, "argv": None if argv is None else list(argv)}
        if user == "root":
            arguments["uid"] = 0
        data = None if stdin is None else base64.b64encode(stdin).decode()
        self.keeper.call("begin", id=self.id, name=name, stdin=data, **arguments)
        return Running(self, name)

    def run(self, argv: Sequence[str], seconds: float = SECONDS, **options: Any) -> Result:
        return self.start(argv, **options).finish(seconds)

    def sh(self, script: str, **options: Any) -> Result:
        """A script for a shell of its own."""
        return self.run(["sh", "-c", script], **options)

    def shell(self, command: str, name: str = "main", seconds: float = SECONDS, **options: Any) -> Result:
        """A command of the stateful shell `name`."""
        return self.start(command=command, shell=name, **options).finish(seconds)

    def put(self, path: str, data: bytes) -> None:
        self.keeper.call("write", id=self.id, path=path, data=base64.b64encode(data).decode())

    def get(self, path: str) -> bytes:
        return base64.b64decode(self.keeper.call("read", id=self.id, path=path))

    def probe(self, name: str, *arguments: str, **options: Any) -> Any:
        """What the function `name` of a program in probes/ (by its file: `file.name`) returns inside."""
        file, _, function = name.partition(".")
        if file not in self._there:
            self.put(f"/tmp/{file}.py", (PROBES / f"{file}.py").read_bytes())
            self._there.add(file)
        done = self.run(["python3", "-B", f"/tmp/{file}.py", function, *arguments], **options)
        assert done.code == 0, (done.code, done.text, done.stderr.decode(errors="replace"))
        return json.loads(done.stdout)

    def ping(self) -> None:
        self.keeper.call("ping", id=self.id)

    def processes(self) -> list[dict[str, Any]]:
        """What the guest says that it runs."""
        found: list[dict[str, Any]] = self.keeper.call("processes", id=self.id)
        return found

    def on_host(self) -> dict[int, str]:
        """Everything that lives in it but its process 1: the host's pid and the name of each."""
        namespace = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = {}
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if name.isdigit() and os.readlink(f"/proc/{name}/ns/pid") == namespace:
                    found[int(name)] = Path(f"/proc/{name}/comm").read_text(errors="replace").strip()
        found.pop(self.pid, None)
        return found

    def left(self, seconds: float = 10.0) -> list[str]:
        """The names of what lives on in it, after having waited for everything to end."""
        deadline = time.monotonic() + seconds
        while (found := self.on_host()) and time.monotonic() < deadline:
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    fd = os.pidfd_open(pid)
                    select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
                    os.close(fd)
        return sorted(found.values())


class Boxes:
    """Environments by what they are; made when first asked for, and shared."""

    def __init__(self, keepers: Mapping[str, Keeper]) -> None:
        self._keepers = keepers
        self._shared: dict[str, Box] = {}
        self.shown = False
        """True if the test that runs now has run a program in a box."""

    def __call__(self, mode: str, **options: Any) -> Box:
        key = repr((mode, sorted(options.items())))
        if key not in self._shared:
            self._shared[key] = self._make(mode, **options)
        return self._shared[key]

    @contextlib.contextmanager
    def fresh(self, mode: str, **options: Any) -> Iterator[Box]:
        box = self._make(mode, **options)
        try:
            yield box
        finally:
            box.keeper.call("stop", id=box.id)

    def _make(
        self,
        mode: str,
        *,
        without: Sequence[str] = (),
        binds: Sequence[tuple[str, ...]] = (),
        helper: Path | None = None,
        program: bytes | None = None,
        profile: str = "default",
        limits: Mapping[str, Any] | None = None,
        workspace: str = "memory",
    ) -> Box:
        keeper = self._keepers[mode]
        if mode not in MODES and (without or binds or helper or program):
            raise NoControl(f"on {mode} no defence is taken away: see the same test on namespace")
        made = keeper.call(
            "create",
            without=list(without),
            binds=list(binds),
            helper=None if helper is None else str(helper),
            program=None if program is None else base64.b64encode(program).decode(),
            profile=profile,
            limits={**LIMITS, **(limits or {})},
            workspace=workspace,
        )
        return Box(keeper, mode, made["id"], made["pid"], self._used)

    def _used(self) -> None:
        self.shown = True


__all__ = [
    "MODES",
    "Box",
    "Boxes",
    "Keeper",
    "NoControl",
    "Result",
    "Running",
    "SkerryError",
    "own_kernel",
    "users",
]
