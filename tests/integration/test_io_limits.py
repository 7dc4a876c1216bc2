"""How fast an environment may read and write its disk."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests import support
from tests.integration.daemon import Daemon, started

pytestmark = [pytest.mark.root, pytest.mark.alone]

PATIENCE = 30.0

SYNCS = """
import os, time
file = os.open("synced", os.O_CREAT | os.O_WRONLY)
count, until = 0, time.monotonic() + 2
while time.monotonic() < until:
    os.pwrite(file, os.urandom(4096), 0)
    os.fsync(file)
    count += 1
print(count)
"""


def reported(daemon: Daemon, environment: str) -> dict[str, dict[str, Any]]:
    rows = daemon.call("GET", f"/environments/{environment}")["enforced"]
    return {row["name"]: row for row in rows}


@pytest.mark.limits
def test_operations_on_the_workspace_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A storm of syncs makes hundreds to thousands a second without the limit. It holds after a restart."""
    monkeypatch.setenv("SKERRY_DISK_IOPS", "20")
    monkeypatch.setenv("SKERRY_DISK_BANDWIDTH", "10m")
    with support.temporary_home() as home:
        with started(home) as daemon:
            environment = daemon.create()
            found = reported(daemon, environment)
            if "io_operations" not in found or "no cgroup hierarchy" in found["io_operations"]["by"]:
                support.missing("no io controller, or no workspace on disk, here")
            assert (found["io_operations"]["value"], found["io_bandwidth"]["value"]) == ("20", str(10 << 20))
            assert 1 <= int(daemon.execute(environment, ["python3", "-c", SYNCS])["stdout"]) < 100
            daemon.process.send_signal(signal.SIGTERM)
            daemon.process.wait()
        with started(home) as daemon:
            assert reported(daemon, environment)["io_operations"]["value"] == "20"
            assert int(daemon.execute(environment, ["python3", "-c", SYNCS])["stdout"]) < 100


FILLS = """
import os
block = os.urandom(1 << 20)
while True:
    file = os.open("large", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    try:
        while True: os.write(file, block)
    except OSError: os.close(file)
"""
DEVICE = "import os; device = os.stat('.').st_dev; print(os.major(device), os.minor(device), sep=':')"
ROOT = Path("/sys/fs/cgroup/blkio")
LIMITED = ROOT / "blkio.throttle.write_bps_device"


def sectors(device: str) -> int:
    return int(Path(f"/sys/dev/block/{device}/stat").read_text().split()[6])


@pytest.mark.limits
def test_what_the_kernel_writes_back_later_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """On v1, where programs that never sync are charged to nobody; without the limit it is hundreds of MB a second."""
    if not (ROOT / "release_agent").exists():
        support.missing("no blkio hierarchy of cgroups v1 here")
    before = LIMITED.read_text()
    monkeypatch.setenv("SKERRY_DISK_BANDWIDTH", "8m")
    with support.temporary_home() as home:
        with started(home) as daemon:
            environment = daemon.create()
            device = daemon.execute(environment, ["python3", "-c", DEVICE])["stdout"].strip()
            assert f"{device} {8 << 20}\n" in LIMITED.read_text()
            path = f"/environments/{environment}/executions"
            daemon.call("POST", path, {"argv": ["python3", "-c", FILLS]}, expect=201)
            until = time.monotonic() + 30
            while sectors(device) < 4 << 11:  # 4 MiB: it is being written back
                assert time.monotonic() < until
                time.sleep(0.05)
            begun, seen = time.monotonic(), sectors(device)
            time.sleep(2)
            written = 512 * (sectors(device) - seen) / (time.monotonic() - begun)
            assert written < 16 << 20
    assert LIMITED.read_text() == before


def test_stream_of_data_goes_to_the_disk_directly() -> None:
    """Else the kernel would write it back later, in bursts at the disk's full speed, and others would wait."""
    with support.temporary_home() as home, started(home) as daemon:
        streams, syncs = daemon.create(), daemon.create()

        def start(environment: str, code: str) -> Path:
            device = daemon.execute(environment, ["python3", "-c", DEVICE])["stdout"].strip()
            path = f"/environments/{environment}/executions"
            daemon.call("POST", path, {"argv": ["python3", "-c", code]}, expect=201)
            return Path(f"/sys/dev/block/{device}/loop/dio")

        other = start(syncs, SYNCS.replace("monotonic() + 2", "monotonic() + 3600"))
        direct = start(streams, FILLS)
        until = time.monotonic() + PATIENCE
        while direct.read_text() != "1\n":
            assert time.monotonic() < until
            time.sleep(0.05)
        assert other.read_text() == "0\n"


def test_the_limits_are_the_operators_and_on_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    with support.temporary_home() as home, started(home) as daemon:
        found = reported(daemon, daemon.create())
        assert found["io_operations"]["value"] == "4000"
        assert found["io_bandwidth"]["value"] == str(128 << 20)
        assert "io_operations" not in reported(daemon, daemon.create(workspace="memory"))
    monkeypatch.setenv("SKERRY_DISK_IOPS", "0")
    monkeypatch.setenv("SKERRY_DISK_BANDWIDTH", "0")
    with support.temporary_home() as home, started(home) as daemon:
        found = reported(daemon, daemon.create())
        assert not found["io_operations"]["enforced"]
        assert not found["io_bandwidth"]["enforced"]


def test_environments_that_are_busy_share_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """All together have so many for each core: an operation costs CPU time of the kernel that is charged to nobody."""
    monkeypatch.setenv("SKERRY_DISK_IOPS", "400")
    cores = os.cpu_count() or 1
    with support.temporary_home() as home, started(home) as daemon:
        environments = [daemon.create() for _ in range(2 * cores)]
        found = reported(daemon, environments[0])
        if "io_operations" not in found or "no cgroup hierarchy" in found["io_operations"]["by"]:
            support.missing("no io controller, or no workspace on disk, here")
        assert found["io_operations"]["value"] == "400"
        storm = SYNCS.replace("monotonic() + 2", "monotonic() + 3600")
        for environment in environments:
            path = f"/environments/{environment}/executions"
            daemon.call("POST", path, {"argv": ["python3", "-c", storm]}, expect=201)
        until = time.monotonic() + PATIENCE
        while reported(daemon, environments[0])["io_operations"]["value"] != "200":
            assert time.monotonic() < until
            time.sleep(0.1)
        for environment in environments[1:]:
            daemon.call("DELETE", f"/environments/{environment}")
        until = time.monotonic() + PATIENCE
        while reported(daemon, environments[0])["io_operations"]["value"] != "400":
            assert time.monotonic() < until
            time.sleep(0.1)
