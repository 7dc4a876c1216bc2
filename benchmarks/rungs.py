"""`python -m benchmarks rungs`: every backend side by side, beside `docker` and `runsc` alone.

Each has a live environment for commands and session calls, and is created and deleted once in each round.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import skerry
from benchmarks import baselines, dockerd, ours
from benchmarks.dockerd import Unavailable, require, root_filesystem
from benchmarks.measure import Subject, command, first_output, take_turns, timed
from skerry.backends.oci import PLATFORMS

RUNGS = ("namespace", "oci", "docker", "docker-runsc", "microvm")
ROUNDS = 20
RAW = {
    "runsc_run": "`runsc run`, to its first output",
    "runsc_exec": "`runsc exec` of `true`",
    "docker_run": "`docker run --rm`, to its first output",
    "docker_exec": "`docker exec` of `true`",
}


@contextmanager
def rung(client: skerry.Client, backend: str) -> Iterator[list[Subject]]:
    """The subjects of one rung. Raises Unavailable."""

    def cycle() -> dict[str, float]:
        start = time.perf_counter()
        env = skerry.Environment(memory="512m", cpus=1, backend=backend, client=client).create()
        created = time.perf_counter()
        if env.run(["echo", "x"]).stdout != "x\n":
            raise RuntimeError(f"{backend} gave the wrong output")
        first = time.perf_counter()
        env.delete()
        ended = time.perf_counter()
        times = {"create": created - start, "fresh": first - start, "delete": ended - first}
        return {f"rung_{backend}_{part}": seconds for part, seconds in times.items()}

    try:
        live = skerry.Environment(
            memory="512m", cpus=1, lifetime=3600, backend=backend, client=client
        ).create()
    except skerry.SkerryError as error:
        raise Unavailable(error.message) from error
    with live:
        session = live.session("python")

        def calls() -> None:
            for _ in range(ours.CALLS):
                if session.run("6 * 7").value != "42":
                    raise RuntimeError(f"{backend}: session.run gave the wrong value")

        calls()
        yield [
            Subject(cycle),
            Subject(lambda: {f"rung_{backend}_run": timed(lambda: live.run(["true"]))}),
            Subject(lambda: {f"rung_{backend}_session": timed(calls) / ours.CALLS}),
        ]


def idle_memory(client: skerry.Client, backend: str) -> int | None:
    """Bytes charged to an environment in which nothing has run."""
    with skerry.Environment(memory="512m", cpus=1, backend=backend, client=client) as env:
        return env.usage().memory_bytes


@contextmanager
def raw_runsc(folder: Path) -> Iterator[list[Subject]]:
    """`runsc run` and `runsc exec` as root, with the settings of `runsc spec`, without limits or a network."""
    require("runsc")
    root = folder / "rootfs"
    root.mkdir(parents=True)
    subprocess.run(["tar", "-xf", root_filesystem(), "-C", root, "--exclude=./dev/*"], check=True)
    options = ["--root", str(folder / "state"), "--ignore-cgroups", "--network", "none"]
    runsc = ["runsc", *options, "--platform", PLATFORMS[0]]

    def bundle(name: str, *arguments: str) -> str:
        place = folder / name
        place.mkdir()
        subprocess.run(["runsc", "spec", "--", *arguments], cwd=place, check=True)
        config = json.loads((place / "config.json").read_text())
        config["root"]["path"] = str(root)
        config["process"]["terminal"] = False
        (place / "config.json").write_text(json.dumps(config))
        return str(place)

    once, live = bundle("once", "echo", "x"), bundle("live", "sleep", "infinity")
    numbers = itertools.count()

    def run() -> Mapping[str, float]:
        name = f"skerry-bench-{os.getpid()}-{next(numbers)}"
        return first_output("runsc_run", [*runsc, "run", "--bundle", once, name]).once()

    name = f"skerry-bench-{os.getpid()}-live"
    subprocess.run([*runsc, "run", "--detach", "--bundle", live, name], check=True, stdin=subprocess.DEVNULL)
    try:
        yield [Subject(run), command("runsc_exec", [*runsc, "exec", name, "/bin/true"])]
    finally:
        subprocess.run([*runsc, "kill", name, "KILL"], check=True)
        subprocess.run([*runsc, "delete", "--force", name], check=True)


class Found:
    """The subjects that this machine has, idle memory in bytes by backend, and why the rest is missing."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.subjects: list[Subject] = []
        self.idle: dict[str, int | None] = {}
        self.missing: dict[str, str] = {}

    def add(self, name: str, make: Callable[[], AbstractContextManager[list[Subject]]]) -> bool:
        try:
            self.subjects += self.stack.enter_context(make())
        except Unavailable as error:
            self.missing[name] = str(error)
        return name not in self.missing

    def add_rungs(self, client: skerry.Client) -> None:
        for name in RUNGS:
            if self.add(name, partial(rung, client, name)):
                self.idle[name] = idle_memory(client, name)


@contextmanager
def raw_docker(folder: Path) -> Iterator[list[Subject]]:
    """`docker run` and `docker exec` of an engine of our own, which our daemon will use as well."""
    folder.mkdir()
    with dockerd.running(folder) as docker, baselines.docker(docker) as subjects:
        os.environ["DOCKER_HOST"] = docker.host
        yield subjects


def measure(rounds: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """Medians in seconds by key, idle memory in bytes by backend, and why something was not measured."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="skerry-bench-", dir="/tmp")))
        found = Found(stack)
        found.add("`docker` alone", partial(raw_docker, folder / "docker"))
        found.add("`runsc` alone", partial(raw_runsc, folder / "runsc"))
        found.add_rungs(stack.enter_context(ours.daemon(str(folder / "home"))))
        times = take_turns(found.subjects, rounds, lambda number: progress(f"round {number} of {rounds}"))
        medians = {key: summary.median for key, summary in times.items()}
        return {"times": medians, "idle": found.idle, "missing": found.missing}


def markdown(found: Mapping[str, Any]) -> str:
    times, idle = found["times"], found["idle"]
    lines = [
        "| backend | create | create to first output | command | call in a session | delete | idle memory |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name in idle:
        cells = [
            _ms(times[f"rung_{name}_{part}"]) for part in ("create", "fresh", "run", "session", "delete")
        ]
        memory = "-" if idle[name] is None else f"{idle[name] / 2**20:.1f} MiB"
        lines.append(f"| `{name}` | {' | '.join(cells)} | {memory} |")
    lines += ["", "| alone | median |", "|---|--:|"]
    lines += [f"| {what} | {_ms(times[key])} |" for key, what in RAW.items() if key in times]
    lines += ["", *(f"- Not measured: {name} ({why})." for name, why in found["missing"].items())]
    return "\n".join(lines).rstrip()


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
