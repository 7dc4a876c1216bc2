"""Which isolation an environment gets: what it asks for, what its tenant must have, what the machine can do."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skerry
from skerry.backends.machine import Machine
from skerry.backends.oci import OciBackend
from tests import support
from tests.integration.daemon import Daemon, started

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    support.require("runsc")
    with support.temporary_home() as home, started(home) as daemon:
        yield daemon


def created(daemon: Daemon, **body: Any) -> dict[str, Any]:
    info: dict[str, Any] = daemon.call("POST", "/environments", body, expect=201)
    return info


@pytest.mark.requirement("R75")
def test_the_first_preference_that_works_is_given_and_reported(daemon: Daemon) -> None:
    info = created(daemon, isolation="microvm,gvisor", backend="oci")
    assert (info["isolation"], info["backend"]) == ("gvisor", "oci")
    _, _, lines = daemon.raw("GET", f"/audit?environment={info['environment_id']}&action=environment.create")
    rows = [json.loads(line) for line in lines.splitlines()]
    assert {(row["isolation"], row["backend"]) for row in rows} == {("gvisor", "oci")}
    dmesg = daemon.execute(info["environment_id"], "dmesg 2>/dev/null | head -1; cat /proc/version")
    assert os.uname().release not in dmesg["stdout"]


def test_a_backend_that_gives_less_than_was_asked_is_refused(daemon: Daemon) -> None:
    problem = daemon.call(
        "POST", "/environments", {"isolation": "gvisor", "backend": "namespace"}, expect=501
    )
    assert problem["code"] == "isolation_unavailable"
    assert "gives isolation 'namespace', not 'gvisor'" in problem["message"]
    problem = daemon.call("POST", "/environments", {"backend": "xen"}, expect=400)
    assert "oci" in problem["hint"]


def test_an_operator_sets_the_least_isolation_of_a_tenant(daemon: Daemon) -> None:
    assert created(daemon)["isolation"] == "namespace"
    daemon.call("PUT", "/quotas/default", {"isolation": "gvisor"})
    try:
        info = created(daemon)
        assert info["isolation"] == "gvisor"
        program = daemon.call("POST", "/execute", {"language": "bash", "code": "cat /proc/version"})
        assert os.uname().release not in program["stdout"]
    finally:
        daemon.call("PUT", "/quotas/default", {})
    assert created(daemon)["isolation"] == "namespace"


def test_a_least_that_another_daemon_has_set_is_never_missed(daemon: Daemon) -> None:
    assert created(daemon)["isolation"] == "namespace"
    with sqlite3.connect(daemon.home / "state.db") as store:
        store.execute("INSERT OR REPLACE INTO quotas (tenant, isolation) VALUES ('default', 'gvisor')")
    store.close()
    try:
        problem = daemon.call("POST", "/environments", {}, expect=501)
        assert "repeat the request" in problem["hint"]
        assert created(daemon)["isolation"] == "gvisor"
    finally:
        daemon.call("PUT", "/quotas/default", {})


def test_without_a_runtime_the_request_fails_and_says_what_to_install(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runsc = shutil.which("runsc") or "/usr/bin/runsc"
    places = [place for place in os.environ["PATH"].split(os.pathsep) if not Path(place, "runsc").exists()]
    assert all(not os.access(f"{place}/runsc", os.X_OK) for place in places), runsc
    monkeypatch.setenv("PATH", os.pathsep.join([str(without_runsc(home)), *places]))
    with started(home) as daemon, skerry.Client(url=f"unix://{daemon.socket}") as client:
        with pytest.raises(skerry.IsolationUnavailable, match="install runsc"):
            skerry.Environment(isolation=["gvisor"], client=client).create()
        with skerry.Environment(isolation=["gvisor", "namespace"], client=client) as env:
            assert env.info().isolation == "namespace"


def without_runsc(home: Path) -> Path:
    """A directory with the programs of the directory of runsc, but that."""
    place = home / "bin"
    place.mkdir()
    for found in Path(shutil.which("runsc") or "/usr/bin/runsc").parent.iterdir():
        if found.name != "runsc":
            (place / found.name).symlink_to(found)
    return place


def test_a_probe_prepares_nothing_for_a_backend_that_nobody_uses(home: Path) -> None:
    support.require("runsc")

    async def probe() -> int:
        backend = OciBackend(Machine(str(home)))
        try:
            assert (await backend.capabilities()).available
            return backend.prepared()
        finally:
            await backend.close()

    assert asyncio.run(probe()) == 0
