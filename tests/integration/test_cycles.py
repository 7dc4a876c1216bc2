"""Many environments on each backend, and a daemon that is killed: nothing of them stays."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import select
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import skerry
from skerry.backends import blanks
from skerry.host import uids
from tests import leaks
from tests.conformance import kinds
from tests.conformance.kinds import RUNGS
from tests.integration.daemon import Daemon, started

ON_DISK = 5
"""One of how many cycles has its workspace on disk."""
THREADS = 4
WARM_UP = 20
RUNG_CYCLES = 4
"""On each rung, in `make test`."""
CYCLED = [name for name, kind in RUNGS.items() if not kind.engine]
"""The rungs that are put through cycles here; those of an engine are in test_docker.py, which looks into it."""
WRITTEN_DOWN = [name for name, kind in RUNGS.items() if "prepared" in kind.gives]
"""The rungs whose environments are processes that the daemon has written down."""
SETTLE_SECONDS = 20.0


@pytest.fixture
def client(home: Path) -> Iterator[skerry.Client]:
    with skerry.Client(str(home)) as client:
        yield client


def children(pid: int) -> list[leaks.Process]:
    return [process for process in leaks.processes() if process.parent == pid]


def namespaces(pid: int) -> set[str]:
    """Of a process and all that it started."""
    found = set()
    for process in [pid, *(child.pid for child in children(pid))]:
        with contextlib.suppress(OSError):
            found |= {os.readlink(f"/proc/{process}/ns/{kind}") for kind in os.listdir(f"/proc/{process}/ns")}
    return found


def open_files(pid: int) -> Iterator[str]:
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            yield os.readlink(f"/proc/{pid}/fd/{name}")


def belongings(home: Path, pid: int) -> dict[str, Counter[str]]:
    """All that a daemon and its environments have on the host."""
    parent = f"/skerry-{hashlib.sha256(os.fsencode(home)).hexdigest()[:12]}/"
    found: dict[str, Iterable[str]] = {
        "mounts": (mount for mount in leaks.mounts() if str(home) in mount),
        "cgroups": (path for path in leaks.cgroups() if parent in path),
        "loop devices": (loop.partition(" ")[2] for loop in leaks.loops() if str(home) in loop),
        "namespaces": namespaces(pid),
        "processes": map(str, children(pid)),
        "open files": open_files(pid),
        "files": (f"{where}/{name}" for where, below, names in os.walk(home) for name in below + names),
    }
    # Pipes, sockets and files without a name have numbers that change; so have the ids of what is kept ready.
    changing = r"(?<=instances/)\w{12}|(?<=/skerry-)\w{12}|\d+"
    return {kind: Counter(re.sub(changing, "N", item) for item in items) for kind, items in found.items()}


def cycle(client: skerry.Client, backend: str, workspace: str) -> int:
    """One life of an environment; returns the first of its user ids on the host, 0 if it has none of its own."""
    with skerry.Environment(workspace=workspace, backend=backend, client=client) as env:
        assert env.execute("echo $((6 * 7)) | tee file").stdout == "42\n"
        return int(recorded(Path(client.version()["home"], "instances", env.id))[2])


def recorded(instance: Path) -> list[str]:
    """What a daemon has written down for an instance: process, start time, first of its user ids."""
    try:
        return os.readlink(instance / "process").split()
    except FileNotFoundError:  # not by its backend
        return ["0", "0", "0"]


def on_each(short: int, whole: int, rungs: int) -> pytest.MarkDecorator:
    """Cycles in `make test`, in the long run, and on each rung in the long run."""
    soak = pytest.mark.soak
    cases = [("namespace", short), pytest.param("namespace", whole, marks=soak)]
    for name in CYCLED:
        cases += [(name, RUNG_CYCLES), pytest.param(name, rungs, marks=soak)]
    return pytest.mark.parametrize(("backend", "cycles"), cases)


@on_each(50, 1000, 100)
def test_many_cycles_leave_nothing(home: Path, backend: str, cycles: int) -> None:
    if backend in RUNGS:
        kinds.require(backend)
    # With one backend, as a probe of another would leave what it prepares.
    with started(home, "--backend", backend) as daemon, skerry.Client(str(home)) as client:
        many_cycles(client, daemon, backend, cycles)


def many_cycles(client: skerry.Client, daemon: Daemon, backend: str, cycles: int) -> None:
    home, pid = daemon.home, daemon.process.pid
    for number in range(min(WARM_UP, cycles)):
        cycle(client, backend, "memory" if number % 5 else "auto")
    client.close()  # its idle connections, which are open files of the daemon too
    deadline = time.monotonic() + SETTLE_SECONDS
    made_ahead = blanks.READY if backend not in RUNGS or "prepared" in RUNGS[backend].gives else 0
    # Complete ones: with a process that is written down.
    while sum((each / "process").is_symlink() for each in (home / "instances").iterdir()) < made_ahead:
        assert time.monotonic() < deadline, "what is kept ready is not made"
        time.sleep(0.01)
    before = belongings(home, pid)
    numbers = iter(range(cycles))
    ranges: list[int] = []

    def work() -> None:
        for number in numbers:
            ranges.append(cycle(client, backend, "auto" if number % ON_DISK == 0 else "memory"))

    with ThreadPoolExecutor(THREADS) as pool:
        for worker in [pool.submit(work) for _ in range(THREADS)]:
            worker.result()
    assert len(ranges) == cycles
    assert client.environments() == []
    client.close()
    # Volumes that are prepared ahead come and go on their own.
    deadline = time.monotonic() + SETTLE_SECONDS
    while left := new(before, belongings(home, pid)):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    assert [base for base in ranges if base and is_void_claim(uids._path(base))] == []


def is_void_claim(path: str) -> bool:
    """Whether a range of user ids was not given back; one that somebody else has taken meanwhile was."""
    try:
        owner = int(os.readlink(path).split()[0])
    except FileNotFoundError:
        return False
    return not os.path.exists(f"/proc/{owner}")


def new(before: dict[str, Counter[str]], after: dict[str, Counter[str]]) -> dict[str, Counter[str]]:
    return {kind: more for kind in before if (more := after[kind] - before[kind])}


@pytest.mark.parametrize("backend", ["namespace", *WRITTEN_DOWN])
def test_what_a_killed_daemon_left_is_removed_by_the_next(
    client: skerry.Client, home: Path, backend: str
) -> None:
    if backend in RUNGS:
        kinds.require(backend)
    pid = client.version()["pid"]
    environments = []
    for number in range(5):
        workspace = "memory" if number % 2 else "auto"
        env = skerry.Environment(workspace=workspace, backend=backend, client=client).create()
        env.execute("sleep 1000 & (setsid sleep 1000 &)")
        environments.append(env)
    ready = home / "instances"
    kept = {int(recorded(ready / env.id)[0]) for env in environments}
    # Beside them there are those that are made ready for the next ones, which end with their daemon.
    inside = [process for process in children(pid) if process.pid in kept]
    others = [process for process in children(pid) if process.pid not in kept]
    assert len(inside) == 5
    daemon = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    select.select([daemon], [], [])
    os.close(daemon)
    while any(is_alive(process) for process in others):
        pass
    assert all(is_alive(process) for process in inside)
    assert all((ready / env.id).exists() for env in environments)
    assert client.version()["pid"] != pid
    assert {info.environment_id for info in client.environments()} == {env.id for env in environments}
    for env in environments:
        env.delete()
    assert list(ready.iterdir()) == []
    # The new daemon is not their parent, and cannot say when the kernel has put them away.
    while any(is_alive(process) for process in inside):
        pass
    fresh = belongings(home, client.version()["pid"])
    assert fresh["cgroups"] == fresh["processes"] == Counter()
    cycle(client, backend, "auto")


def is_alive(process: leaks.Process) -> bool:
    return any((other.pid, other.started) == (process.pid, process.started) for other in leaks.processes())
