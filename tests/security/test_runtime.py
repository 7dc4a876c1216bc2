"""Where a program is that has broken out of gVisor: what docs/isolation.md says of its processes on the host."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import leaks
from tests.conformance import kinds
from tests.security.box import Box, Boxes

pytestmark = [pytest.mark.timeout(60), pytest.mark.root]
KINDS = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")


@pytest.fixture
def box(boxes: Boxes) -> Box:
    kinds.require("oci")
    box = boxes("oci")
    assert box.run(["true"]).code == 0
    return box


def confined(box: Box) -> list[int]:
    """The sandbox, in which the system calls of the environment are answered, and the gofer, which opens its files."""
    found = [process.pid for process in leaks.processes() if process.parent == box.pid]
    names = {Path(f"/proc/{pid}/cmdline").read_text().partition("\0")[0] for pid in found}
    assert names == {"runsc-sandbox", "runsc-gofer"}
    return found


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def namespaces(pid: int | str) -> dict[str, str]:
    return {kind: os.readlink(f"/proc/{pid}/ns/{kind}") for kind in KINDS}


def test_no_process_of_a_runtime_shares_a_namespace_or_a_user_with_the_host(box: Box) -> None:
    ours = namespaces("self").items()
    for pid in (box.pid, *confined(box)):
        assert not ours & namespaces(pid).items()
        assert min(map(int, status(pid)["Uid"].split())) > 1 << 20
        assert status(pid)["Groups"] == ""


def test_sandbox_and_gofer_have_a_filter_and_capabilities_over_nothing_but_themselves(box: Box) -> None:
    for pid in confined(box):
        found = status(pid)
        assert (found["Seccomp"], found["NoNewPrivs"]) == ("2", "1")
        # A user namespace below that of the runtime: not even the environment's own mounts can be changed.
        assert namespaces(pid)["user"] != namespaces(box.pid)["user"]
        assert namespaces(pid)["mnt"] != namespaces(box.pid)["mnt"]


def test_nothing_of_the_host_is_mounted_but_the_image_the_bundle_and_devices(box: Box) -> None:
    lines = [line.split() for line in Path(f"/proc/{box.pid}/mountinfo").read_text().splitlines()]
    writable = {point for *_, point, options in (line[:6] for line in lines) if "rw" in options.split(",")}
    own = {"/workspace", "/proc", "/tmp", "/state", "/ctl", "/bundle", "/places", "/dev/pts"}
    assert {point for point in writable if not point.startswith("/dev/")} <= own
    devices = {line[4] for line in lines if "nodev" not in line[5].split(",")}
    assert devices <= {f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty", "pts")}
    assert all("nosuid" in line[5].split(",") for line in lines)
