"""Measures the noisy-neighbour table: latencies of one tenant beside 1, 4 and 16 attackers of another.

The neighbour has a tenant, an environment, a client process and an address of its own. Each attack has a fresh daemon;
the baseline is the same number of environments that burn CPU. Needs root;
all of it runs in an isolated network namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import skerry
from benchmarks import attacks
from benchmarks.attacks import CLIENTS, Program, Target
from benchmarks.dockerd import Unavailable
from benchmarks.measure import summarize
from benchmarks.neighbours_table import CALLS, GIVE_UP, YARDSTICK, Cell, missed, yardsticks
from skerry.host.cgroup_places import write
from skerry.host.cgroups import CgroupManager
from skerry.ids import new_id
from tests import support
from tests.integration.daemon import Daemon, started
from tests.integration.egress_world import ip
from tests.integration.internet import in_a_network_of_its_own, internet

COUNTS = (1, 4, 16)
ADDRESS = "93.184.216.34"
"""Destination of the attackers' connections."""
SETTLE = 1.0
"""Seconds between the start of an attack and the first measurement."""
IDLE = "idle"
HOSTS = ("127.0.0.1", "127.0.0.2")
"""Addresses of the daemon for attackers and for the neighbour; each also connects from its own."""

ROUND = ("command", "read", "command", "read", "create")
ROUNDS = 100
"""Rounds of each cell: enough that the 99th percentile is not the slowest call."""
ROUND_SECONDS = 0.2
"""A cell ends early if its rounds take longer than this on average."""
YARDSTICK_TIMES = 3
"""The baseline has this many times the rounds."""
AGAIN_TIMES = 5
"""A cell that misses its target is measured again with this many times the rounds, in turn with the baseline.

200 samples say little about a 99th percentile.
"""
AGAIN_TURNS = 2


class Neighbour:
    """The client process of the neighbour; it runs `_serve`."""

    def __init__(self, url: str, token: str) -> None:
        argv = [sys.executable, "-m", "benchmarks.neighbours", url, token]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self._ask("")

    def measure(self, rounds: int) -> dict[str, Any] | None:
        """Seconds of each call by kind, and the `refused` ones. Returns None if a call went unanswered."""
        return self._ask(str(rounds), rounds * ROUND_SECONDS)

    def _ask(self, line: str, seconds: float = 0.0) -> dict[str, Any] | None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if line:
            self._process.stdin.write(f"{line}\n".encode())
        if not select.select([self._process.stdout], [], [], seconds + GIVE_UP)[0]:
            return None
        answer = b""
        while not answer.endswith(b"\n"):
            data = self._process.stdout.read(1 << 20)
            if not data:
                raise RuntimeError("the neighbour's process has ended")
            answer += data
        found: dict[str, Any] = json.loads(answer)
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def _serve(url: str, token: str) -> None:
    """Client process: reads a number of rounds from stdin, prints a line of JSON with the measurements, repeats."""
    with skerry.Client(url=url, token=token) as client, skerry.Environment(client=client) as env:
        env.files.write("a.txt", b"x" * 1024)
        env.run(["true"])
        print("{}", flush=True)
        for line in sys.stdin:
            print(json.dumps(_calls(client, env, int(line))), flush=True)


def _calls(client: skerry.Client, env: skerry.Environment, rounds: int) -> dict[str, Any]:
    taken: dict[str, list[float]] = {name: [] for name in CALLS}
    refused: list[str] = []
    end = time.monotonic() + rounds * ROUND_SECONDS
    for _ in range(rounds):
        if time.monotonic() > end:
            break
        for name in ROUND:
            made = None
            start = time.perf_counter()
            try:
                if name == "command":
                    if env.run(["true"]).exit_code != 0:
                        raise skerry.PlatformError("true failed")
                elif name == "read":
                    env.files.read_bytes("a.txt")
                else:
                    made = skerry.Environment(client=client).create()
            except skerry.SkerryError as error:
                refused.append(f"{name}: {error}")
                continue
            taken[name].append(time.perf_counter() - start)
            if made is not None:
                with contextlib.suppress(skerry.SkerryError):
                    made.delete()
    return {"taken": taken, "refused": refused}


class Scene:
    """One daemon with its neighbour and attackers."""

    def __init__(self, daemon: Daemon, port: int, grpc_port: int, stack: ExitStack) -> None:
        self.daemon = daemon
        self._ports = port, grpc_port
        self._stack = stack
        operator = stack.enter_context(skerry.Client(str(daemon.home)))
        tokens = [operator.create_token(name, tenant=name)["token"] for name in ("attacker", "neighbour")]
        self._token = tokens[0]
        self._attacker = stack.enter_context(
            skerry.Client(url=f"http://{HOSTS[0]}:{port}", token=self._token)
        )
        self.neighbour = Neighbour(f"http://{HOSTS[1]}:{port}", tokens[1])
        stack.callback(self.neighbour.close)
        self._attackers = 0
        self._shared = ""
        self._place = stack.enter_context(_clients_place())

    def grow(self, name: str, count: int) -> None:
        """Adds attackers until there are `count`."""
        new, self._attackers = count - self._attackers, count
        if name in CLIENTS:
            self._clients(name, new)
        elif name != IDLE:
            self._programs(attacks.programs(ADDRESS).get(name, attacks.BURNER), new)

    def _create(self, options: dict[str, Any]) -> str:
        # Never deleted: the daemon ends them all when it stops.
        return skerry.Environment(client=self._attacker, **options).create().id

    def _programs(self, program: Program, count: int) -> None:
        for environment in [self._create(program.options) for _ in range(count)]:
            for _ in range(program.copies):
                path = f"/environments/{environment}/executions"
                self._attacker.transport.call("POST", path, json={"argv": program.argv})

    def _clients(self, name: str, count: int) -> None:
        client = CLIENTS[name]
        waiting = []
        for _ in range(count):
            environment = self._shared or self._create(client.options)
            if client.prepare and not self._shared:
                env = skerry.Environment.get(environment, self._attacker)
                if env.execute(client.prepare).exit_code != 0:
                    raise RuntimeError(f"{client.prepare} failed")
                self._shared = environment  # prepared once, used by all
            target = Target(HOSTS[0], *self._ports, self._token, environment)
            process = subprocess.Popen(
                attacks.argv(name, target), stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            self._stack.callback(_end, process)
            for file in self._place:
                write(file, str(process.pid))
            waiting.append(process)
        for process in waiting:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdout.readline()
            process.stdin.write(b"go\n")
            process.stdin.flush()


@contextmanager
def _clients_place() -> Iterator[list[str]]:
    """cgroup files that the attackers' clients join, with the CPU weight of all environments together.

    In practice those clients run on other machines and use no CPU here.
    """
    cgroups = CgroupManager.detect("skerry-clients")
    cgroup = cgroups.create(new_id())  # an aborted run may have left its own behind
    try:
        join = cgroup.join
        yield [*join.tasks_files, *([f"{join.into_dir}/cgroup.procs"] if join.into_dir else [])]
    finally:
        cgroup.remove()
        cgroups.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


@contextmanager
def _scene() -> Iterator[Scene]:
    port, grpc_port = support.free_port(), support.free_port()
    listen = [word for host in HOSTS for word in ("--listen", f"{host}:{port}")]
    with support.temporary_home() as home:
        try:
            with (
                started(home, *listen, "--grpc", f"{HOSTS[0]}:{grpc_port}") as daemon,
                ExitStack() as stack,
            ):
                yield Scene(daemon, port, grpc_port, stack)
        except subprocess.TimeoutExpired:
            # It was killed because it did not stop. The next daemon of this home cleans up.
            with started(home):
                pass


def _measure(scene: Scene, name: str, count: int, rounds: int) -> Cell:
    """Measures one cell; calls are lists of seconds."""
    scene.grow(name, count)
    time.sleep(SETTLE if count else 0.0)
    peak = Path(f"/proc/{scene.daemon.process.pid}")
    (peak / "clear_refs").write_text("5")  # resets the peak
    found = scene.neighbour.measure(rounds)
    status = (peak / "status").read_text()
    return {
        "attack": name,
        "attackers": count,
        "peak_bytes": 1024 * int(status.split("VmHWM:")[1].split()[0]),
        "answered": found is not None,
        "refused": [] if found is None else found["refused"],
        **({call: [] for call in CALLS} if found is None else found["taken"]),
    }


def _summarized(cell: Cell) -> Cell:
    return {**cell, **{call: asdict(summarize(cell[call])) if cell[call] else None for call in CALLS}}


def _attack(name: str, counts: Sequence[int], rounds: int) -> list[Cell]:
    cells: list[Cell] = []
    try:
        with _scene() as scene:
            for count in counts:
                cells.append(_measure(scene, name, count, rounds))
                if not cells[-1]["answered"]:
                    break
    except (OSError, RuntimeError, AssertionError, skerry.SkerryError, pytest.fail.Exception) as error:
        cells.append({"attack": name, "failed": f"{type(error).__name__}: {error}"})
    return cells


def _again(cell: Cell, rounds: int) -> Cell:
    """Measures a cell with more rounds, in turn with a baseline of its own."""
    turns: dict[str, list[Cell]] = {YARDSTICK: [], cell["attack"]: []}
    for _ in range(AGAIN_TURNS):
        for name, found in turns.items():
            [one] = _attack(name, [cell["attackers"]], rounds * AGAIN_TIMES // AGAIN_TURNS)
            if "failed" in one or not one["answered"]:
                return one if "failed" in one else _summarized(one)
            found.append(one)
    whole = _summarized(_joined(turns[cell["attack"]]))
    return {**whole, "beside": {call: _summarized(_joined(turns[YARDSTICK]))[call] for call in CALLS}}


def _joined(cells: Sequence[Cell]) -> Cell:
    return {
        **cells[0],
        "peak_bytes": max(cell["peak_bytes"] for cell in cells),
        "refused": [why for cell in cells for why in cell["refused"]],
        **{call: [seconds for cell in cells for seconds in cell[call]] for call in CALLS},
    }


def names() -> list[str]:
    """Names of all attacks, in table order."""
    return [*attacks.programs(ADDRESS), *CLIENTS]


def measure(
    rounds: int = ROUNDS,
    wanted: Sequence[str] = (),
    counts: Sequence[int] = COUNTS,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Cell]:
    """Cells of the table: idle, the baseline, each attack. Then repeats the cells that miss the target.

    Raises Unavailable without root.
    """
    if os.geteuid() != 0:
        raise Unavailable("needs root")
    cells: list[Cell] = []

    def body() -> None:
        ip("link set lo up", f"route replace table local local {HOSTS[1]} dev lo src {HOSTS[1]}")
        with internet([ADDRESS]) as outside:
            outside.names = {"www.example.com": ADDRESS}

            def add(name: str, counts: Sequence[int], rounds: int) -> None:
                progress(name)
                found = _attack(name, counts, rounds)
                cells.extend(cell if "failed" in cell else _summarized(cell) for cell in found)

            add(IDLE, [0], rounds)
            add(YARDSTICK, counts, rounds * YARDSTICK_TIMES)
            for name in wanted or names():
                add(name, counts, rounds)
            for place, cell in enumerate(cells):
                if "failed" not in cell and missed([cell, *yardsticks(cells).values()]):
                    progress(f"{cell['attack']} × {cell['attackers']}, again")
                    cells[place] = _again(cell, rounds)

    in_a_network_of_its_own(body)
    return cells


if __name__ == "__main__":
    _serve(*sys.argv[1:])
