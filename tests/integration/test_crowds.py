"""Environments in which a crowd wants the CPU are paused for moments, and go on."""

from __future__ import annotations

import os
import select
from pathlib import Path

import pytest

from skerry.host import crowds
from tests import leaks, support
from tests.integration.daemon import started

COUNT = max(crowds.BUSY * (os.cpu_count() or 1) + crowds.CROWD, 256)
CROWD = """
import mmap, os, sys
file = os.open(sys.executable, os.O_RDONLY)
while True:
    try: os.fork()
    except OSError: mmap.mmap(file, 0, prot=mmap.PROT_READ).close()
"""
"""Forks that are refused take no lock; mapping a file does, the same one for all who map it."""
pytestmark = pytest.mark.alone
PATIENCE = 60.0


def freezable(environment_id: str) -> Path:
    """The cgroup (v2) of an environment."""
    ours = (Path(path) for path in leaks.cgroups() if path.endswith(f"/skerry-{environment_id}"))
    found = next((path for path in ours if (path / "cgroup.freeze").exists()), None)
    if found is None:
        support.missing("no cgroup v2 hierarchy that this user may write")
    assert found is not None
    return found


def paused_within(cgroup: Path, seconds: float) -> bool:
    """Whether its events change while something lives in it: then it has been frozen, or let go."""
    with open(cgroup / "cgroup.events", "rb", buffering=0) as events:
        changed = select.poll()
        changed.register(events, select.POLLPRI)
        events.read()
        return bool(changed.poll(seconds * 1000)) and b"populated 1" in os.pread(events.fileno(), 4096, 0)


def test_a_crowd_is_paused_and_goes_on() -> None:
    with support.temporary_home() as home, started(home) as daemon:
        env = daemon.create(pids=COUNT, cpus=os.cpu_count())
        daemon.call("POST", f"/environments/{env}/executions", {"argv": ["python3", "-c", CROWD]}, expect=201)
        assert paused_within(freezable(env), PATIENCE)
        daemon.call("GET", f"/environments/{env}/files/stat?path=.")  # there is no room for one process more
        daemon.call("DELETE", f"/environments/{env}")


def test_what_a_killed_daemon_left_frozen_goes_on() -> None:
    with support.temporary_home() as home:
        with started(home) as daemon:
            env = daemon.create()
            cgroup = freezable(env)
            daemon.kill()
        (cgroup / "cgroup.freeze").write_text("1")
        with started(home) as daemon:
            assert daemon.execute(env, ["echo", "there"])["stdout"] == "there\n"
            daemon.call("DELETE", f"/environments/{env}")
