"""Disk that workspaces, uploads and packages may use: what cannot fit is refused, and the reserve stays free."""

from __future__ import annotations

import gzip
import io
import json
import os
import signal
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from skerry.policy import GIB, MIB
from tests import leaks, support
from tests.integration.daemon import Daemon, launch, started

pytestmark = pytest.mark.root


@contextmanager
def disk(size: str) -> Iterator[Path]:
    """A home that is a disk of its own, of this size."""
    with tempfile.TemporaryDirectory(prefix="skerry-test-", dir="/tmp") as folder:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "skerry-test", folder], check=True
        )
        try:
            yield Path(folder)
            support.stop_daemon(Path(folder))
            assert leaks.of_home(Path(folder)) == []
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


def refused(daemon: Daemon, **body: Any) -> dict[str, Any]:
    answer: dict[str, Any] = daemon.call("POST", "/environments", body, expect=507)
    assert answer["code"] == "disk_full"
    assert answer["hint"]
    return answer


def free(home: Path) -> int:
    found = os.statvfs(home)
    return found.f_bavail * found.f_frsize


def test_a_workspace_that_can_never_fit_is_refused_with_numbers() -> None:
    with disk("4g") as home, started(home) as daemon:
        answer = refused(daemon, disk="8g")
        assert "8.0 GiB" in answer["message"]
        assert answer["detail"]["asked"] == 8 * GIB
        assert answer["detail"]["free"] <= 4 * GIB
        assert answer["detail"]["reserve"] == 512 * MIB
        assert daemon.call("GET", "/environments")["environments"] == []
        daemon.create(disk="8g", workspace="memory")  # counts as memory


def test_promises_never_exceed_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an overcommit of 1, so that every workspace can be filled; also after another daemon took over."""
    monkeypatch.setenv("SKERRY_DISK_OVERCOMMIT", "1")
    with disk("4g") as home:
        with started(home) as daemon:
            made = [daemon.create(disk="1g") for _ in range(3)]
            answer = refused(daemon, disk="1g")
            assert answer["detail"]["promised"] == 3 * GIB
            daemon.process.send_signal(signal.SIGTERM)  # leaves them to the next
            daemon.process.wait()
        with started(home) as daemon:
            refused(daemon, disk="1g")
            daemon.call("DELETE", f"/environments/{made.pop()}")
            # What is written is not promised any more: 1.5 GiB are, and nearly 3 are free beyond the reserve.
            daemon.execute(made[0], "head -c 512M /dev/zero > big; sync")
            refused(daemon, disk="2g")
            daemon.create(disk="1200m")


def test_an_overcommit_is_the_operators_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKERRY_DISK_OVERCOMMIT", "2.5")
    with disk("2g") as home, started(home) as daemon:
        for _ in range(3):
            daemon.create(disk="1g")
        refused(daemon, disk="1g")
    monkeypatch.setenv("SKERRY_DISK_OVERCOMMIT", "0.5")
    with support.temporary_home() as home:
        process, word = launch(home)
        assert process.wait() != 0
        assert "SKERRY_DISK_OVERCOMMIT must be a number of at least 1" in json.loads(word)["message"]


def test_everything_but_the_store_stops_at_the_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKERRY_DISK_RESERVE", "64m")
    with disk("256m") as home, started(home) as daemon:
        kept = daemon.create(workspace="memory")
        with open(home / "full", "wb") as full:
            os.posix_fallocate(full.fileno(), 0, free(home) - 60 * MIB)
        refused(daemon, disk="1m")
        status, _, body = daemon.raw("POST", "/images/import?name=mine", b"x")
        assert (status, json.loads(body)["code"]) == (507, "disk_full")
        # State and audit are written as before.
        assert daemon.execute(kept, "echo here")["stdout"] == "here\n"
        daemon.create(workspace="memory")
        assert daemon.call("GET", "/audit/verify")["intact"]


def test_an_upload_that_cannot_fit_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKERRY_DISK_RESERVE", "64m")
    with disk("256m") as home, started(home, "--backend", "fake") as daemon:
        headers = {"content-length": str(1 << 30)}
        status, _, body = daemon.raw("POST", "/images/import?name=mine", b"x", headers)
        answer = json.loads(body)
        assert (status, answer["code"], answer["detail"]["needed"]) == (507, "disk_full", 1 << 30)


def test_an_upload_stops_at_the_reserve_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKERRY_DISK_RESERVE", "64m")
    with disk("256m") as home, started(home, "--backend", "fake") as daemon:
        before = free(home)
        least = before
        sent = 0

        def body() -> Iterator[bytes]:
            nonlocal least, sent
            while sent < 300 * MIB:
                sent += MIB
                yield bytes(MIB)
                least = min(least, free(home))

        status, _, answer = daemon.raw("POST", "/images/import?name=mine", body())
        assert (status, json.loads(answer)["code"]) == (507, "disk_full")
        assert least > 40 * MIB
        assert free(home) > before - MIB


def test_an_archive_stops_unpacking_at_the_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small one that unpacks to more than there is."""
    monkeypatch.setenv("SKERRY_DISK_RESERVE", "64m")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        info = tarfile.TarInfo("big")
        info.size = 120 * MIB
        tar.addfile(info, io.BytesIO(bytes(120 * MIB)))
    with disk("128m") as home, started(home, "--backend", "fake") as daemon:
        before = free(home)
        status, _, body = daemon.raw("POST", "/images/import?name=mine", gzip.compress(packed.getvalue(), 1))
        last = json.loads(body.splitlines()[-1])
        assert (status, last["error"]["code"]) == (200, "disk_full"), last
        assert "reserve" in last["error"]["message"]
        assert free(home) > before - MIB
