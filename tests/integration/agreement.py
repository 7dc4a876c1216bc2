"""Whether a home's rows and the host agree, to be asked while no daemon runs: nothing is kept ready then."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import time
from pathlib import Path

from skerry.settings import Home
from skerry.store import Connection, Store
from tests import leaks
from tests.dockerd import Dockerd

SETTLE_SECONDS = 10.0
"""The kernel puts processes, cgroups and loop devices away when it gets to it."""


def check(home: Path, engine: Dockerd | None = None) -> set[str]:
    """Fails unless every live row has its instance, its process and (with cgroups at all) its cgroups, or its container
    of an engine; and nothing on the host is without a row. Returns the ids of all that live."""
    live, disks = asyncio.run(_rows(Home(str(home))))
    expected: dict[str, object] = {"instances": live, "processes": live, "volumes": disks}
    if engine is not None:
        expected = {"instances": live, "containers": live}
    elif any(_cgroup_parent(home) in path for path in leaks.cgroups()):
        expected["cgroups"] = live
    deadline = time.monotonic() + SETTLE_SECONDS
    while (found := _on_host(home, expected, engine)) != expected:
        assert time.monotonic() < deadline, f"by the rows {expected}, on the host {found}"
        time.sleep(0.01)
    return live


async def _rows(home: Home) -> tuple[set[str], int]:
    """The ids of the live ones of this home, and how many have a workspace on disk."""

    def read(tx: Connection) -> list[tuple[str, ...]]:
        statement = "SELECT id FROM environments WHERE host = :host AND state <> 'ended'"
        return [tuple(row) for row in tx.rows(statement, {"host": home.identity()})]

    store = await Store.open(home.database)
    try:
        live = {row[0] for row in await store.read(read)}
    finally:
        await store.close()
    return live, sum(_on_disk(home, id_) for id_ in live)


def _on_disk(home: Home, environment_id: str) -> bool:
    """Whether its workspace is a volume: what its backend wrote down."""
    try:
        return '"workspace": "disk"' in os.readlink(f"{home.instances}/{environment_id}/facts")
    except FileNotFoundError:  # not of a backend that writes it down
        return False


def _cgroup_parent(home: Path) -> str:
    return f"/skerry-{hashlib.sha256(os.fsencode(home)).hexdigest()[:12]}/"


def _on_host(home: Path, expected: dict[str, object], engine: Dockerd | None) -> dict[str, object]:
    parent = _cgroup_parent(home)
    instances = home / "instances"
    places = re.compile(rf"{re.escape(parent)}skerry-(\w{{12}})|{re.escape(str(instances))}/(\w{{12}})")

    def ids(text: str) -> set[str]:
        return {first or second for first, second in places.findall(text)}

    found: dict[str, object] = {
        "instances": {entry.name for entry in instances.iterdir()},
        "processes": set().union(*(ids(_belongs_to(process.pid)) for process in leaks.processes())),
        "volumes": sum(f"({home}/" in loop for loop in leaks.loops()),
        "cgroups": set().union(*(ids(path) for path in leaks.cgroups())),
        "containers": engine.containers(home) if engine is not None else set(),
    }
    return {kind: found[kind] for kind in expected}


def _belongs_to(pid: int) -> str:
    """Where a process works: its cgroups, and its directory."""
    try:
        return f"{Path(f'/proc/{pid}/cgroup').read_text()}\n{os.readlink(f'/proc/{pid}/cwd')}/"
    except OSError:
        return ""
