"""The disk of a daemon's home is full: nothing new is promised, what is not wanted any more can go, room mends it."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import leaks, support
from tests.integration.daemon import Daemon, started

SIZE = "128m"
"""Of the whole disk; a daemon wants half of it free to be ready."""
REFUSALS = ((503, "store_unavailable"), (507, "disk_full"))

pytestmark = pytest.mark.root


@pytest.fixture
def home() -> Iterator[Path]:
    """A home that is a small disk of its own."""
    with tempfile.TemporaryDirectory(prefix="skerry-test-", dir="/tmp") as folder:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={SIZE},nr_inodes=5000,mode=700", "skerry-test", folder],
            check=True,
        )
        try:
            yield Path(folder)
            support.stop_daemon(Path(folder))
            assert leaks.of_home(Path(folder)) == []
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


@contextlib.contextmanager
def filled(daemon: Daemon) -> Iterator[None]:
    """Nothing can be written any more, not even where the store had room of its own left."""
    file = daemon.home / "full"
    with open(file, "wb", buffering=0) as full:
        size = 1 << 20
        while size:
            try:
                full.write(b"x" * size)
            except OSError:
                size //= 2
        environment = daemon.call("GET", "/environments")["environments"][0]["environment_id"]
        while daemon.raw("POST", f"/environments/{environment}/heartbeat", {})[0] == 200:
            pass
    try:
        yield
    finally:
        file.unlink()


def listed(daemon: Daemon) -> dict[str, str]:
    found = daemon.call("GET", "/environments?all=1")["environments"]
    return {each["environment_id"]: each["state"] for each in found}


def test_creates_are_refused_deletes_work_and_room_mends_it(home: Path) -> None:
    with started(home) as daemon:
        kept, *gone = (daemon.create(workspace="memory", name=f"n{number}") for number in range(4))
        daemon.execute(kept, "export WORD=word")
        with filled(daemon):
            for _ in range(5):
                status, _, body = daemon.raw("POST", "/environments", {"workspace": "memory"})
                answer = json.loads(body)
                assert (status, answer["code"]) in REFUSALS
                assert answer["hint"]
            # What cannot be audited does not run, and harms nobody.
            answer = daemon.call("POST", f"/environments/{kept}/execute", {"command": "WORD="}, expect=503)
            assert answer["code"] == "store_unavailable"
            while daemon.raw("GET", "/readyz")[0] == 200:
                pass
            answer = daemon.call("GET", "/readyz", expect=503)
            assert "not ready" in answer["message"]
            for environment in gone:
                answer = daemon.call("DELETE", f"/environments/{environment}")
                assert answer == {"environment_id": environment, "deleted": True}
                assert not (home / "instances" / environment).exists()
                assert not [path for path in leaks.cgroups() if environment in path]
                daemon.call("DELETE", f"/environments/{environment}")
            assert listed(daemon) == {kept: "running", **dict.fromkeys(gone, "ended")}
        # There is room again: a name that was given up is free, and all is as it was told.
        again = daemon.create(workspace="memory", name="n1")
        assert daemon.execute(kept, "echo $WORD")["stdout"] == "word\n"
        while daemon.raw("GET", "/readyz")[0] == 503:
            pass
        daemon.kill()
    with started(home) as daemon:
        assert listed(daemon) == {kept: "running", again: "running", **dict.fromkeys(gone, "ended")}
        reasons = {daemon.call("GET", f"/environments/{each}")["ended_reason"] for each in gone}
        assert reasons == {"deleted"}


def test_a_daemon_that_starts_on_a_full_disk_serves_what_it_can(home: Path) -> None:
    with started(home) as daemon:
        first, second, old = (daemon.create(workspace="memory") for _ in range(3))
        daemon.call("DELETE", f"/environments/{old}")
        # It would forget this one, and cannot even do that.
        with contextlib.closing(sqlite3.connect(home / "state.db")) as store, store:
            store.execute("UPDATE environments SET ended_at = 1 WHERE state = 'ended'")
        with filled(daemon):
            daemon.call("DELETE", f"/environments/{first}")
            daemon.kill()
            with started(home) as later:
                assert listed(later)[second] == "running"
                later.call("DELETE", f"/environments/{second}")
                assert list((home / "instances").iterdir()) == []
                later.kill()
    with started(home) as daemon:
        assert "running" not in listed(daemon).values()


def test_no_more_files_can_be_made(home: Path) -> None:
    """The disk has room, but no more inodes."""
    with started(home) as daemon:
        daemon.create(workspace="memory")
        files: list[Path] = []
        with contextlib.suppress(OSError):
            while True:
                path = home / f"full{len(files)}"
                path.touch()
                files.append(path)
        statuses: list[int] = []
        while not statuses or statuses[-1] == 201:  # some are kept ready
            status, _, body = daemon.raw("POST", "/environments", {"workspace": "memory"})
            statuses.append(status)
        assert (status, json.loads(body)["code"]) == (507, "disk_full")
        for environment in listed(daemon):
            daemon.call("DELETE", f"/environments/{environment}")
        for path in files:
            path.unlink()
        daemon.create(workspace="memory")


def test_a_disk_that_was_full_from_the_beginning(home: Path) -> None:
    """Not even what all environments have in common could be made."""
    with started(home) as daemon:
        full = home / "full"
        with open(full, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 20))
        status, _, body = daemon.raw("POST", "/environments", {"workspace": "memory"})
        answer = json.loads(body)
        assert (status, answer["code"]) in REFUSALS
        assert answer["hint"]
        full.unlink()
        daemon.create(workspace="memory")
