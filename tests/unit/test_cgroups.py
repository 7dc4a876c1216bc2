"""Cgroups without a kernel: plain directories that look like the hierarchies of other machines."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from skerry.errors import EnvironmentNotFound, InvalidRequest, LaunchFailed
from skerry.host import cgroup_processes, cgroups
from skerry.host.cgroups import CgroupManager, cpu_quota
from skerry.models import Enforcement, Usage
from skerry.policy import MIB, Limits

pytestmark = pytest.mark.limits

ID = "abcdefghij12"
LEAF = f"skerry/skerry-{ID}"


class Machine:
    """A fake /proc/self and the cgroup mounts that it speaks of."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cgroup: list[str] = []
        self.mounts = ["22 1 0:5 / /proc rw - proc proc rw"]

    def mount(self, where: str, controllers: str, path: str = "/", root: str = "/") -> Path:
        """A v1 hierarchy, or with no controllers the v2 one; this process is at `path` in it."""
        top = self.root / where
        top.mkdir(parents=True)
        kind = "cgroup" if controllers else "cgroup2"
        escaped = str(top).replace(" ", r"\040")
        self.cgroup.append(f"{len(self.cgroup)}:{controllers}:{path}")
        self.mounts.append(f"30 22 0:9 {root} {escaped} rw,nosuid shared:4 - {kind} {kind} rw,{controllers}")
        return top

    def detect(self) -> CgroupManager:
        (self.root / "cgroup").write_text("\n".join(self.cgroup) + "\n")
        (self.root / "mountinfo").write_text("\n".join(self.mounts) + "\n")
        return CgroupManager.detect(proc=str(self.root))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def files(directory: Path, texts: dict[str, str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (directory / name).write_text(text)


def v2_top(machine: Machine, controllers: str = "cpu io memory pids") -> Path:
    """A v2 hierarchy in which controllers are handed down already."""
    top = machine.mount("sys", "")
    for directory in (top, top / "skerry"):
        texts = {"cgroup.procs": "", "cgroup.controllers": controllers, "cgroup.subtree_control": controllers}
        files(directory, texts)
    return top


def limit(manager: CgroupManager, name: str) -> Enforcement:
    return next(row for row in manager.open(ID).enforced() if row.name == name)


# Where cgroups are


def test_v1_hierarchies_are_found_wherever_and_however_they_are_mounted(machine: Machine) -> None:
    cpu = machine.mount("odd place/cpu", "cpu,cpuacct")
    memory = machine.mount("mem", "memory")
    machine.mount("named", "name=systemd")
    manager = machine.detect()
    (cpu / LEAF).mkdir()
    assert manager.mode == "v1"
    assert manager.reason == "pids: no mounted cgroup hierarchy has the controller"
    join = manager.open(ID).join
    assert join.tasks_files == [f"{cpu}/{LEAF}/tasks", f"{memory}/{LEAF}/tasks"]
    assert join.into_dir is None


def test_a_mount_that_shows_only_our_own_cgroup_is_its_own_top(machine: Machine) -> None:
    """In a container the mount's root is the container's cgroup, which /proc/self/cgroup may name in full."""
    top = machine.mount("pids", "pids", path="/docker/1234", root="/docker/1234")
    machine.detect()
    assert (top / "skerry").is_dir()


@pytest.mark.parametrize(
    ("path", "root"), [("/../elsewhere", "/"), ("/elsewhere", "/docker/1234"), ("/", "/../docker")]
)
def test_a_cgroup_outside_of_the_mount_is_not_guessed_at(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, path: str, root: str
) -> None:
    """From inside a cgroup namespace, a cgroup further out has dots in its path."""
    top = machine.mount("sys/pids", "pids", path=path, root=root)
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(top))
    assert machine.detect().mode == "none"
    assert [path.name for path in top.parent.iterdir()] == ["pids"]


def test_hybrid_counts_cpu_time_in_v2_and_leaves_cpuacct_alone(machine: Machine) -> None:
    cpuacct = machine.mount("cpuacct", "cpuacct")
    pids = machine.mount("pids", "pids")
    top = v2_top(machine, controllers="")
    files(top / LEAF, {"cpu.stat": "usage_usec 1500000\nuser_usec 1\n"})
    manager = machine.detect()
    cgroup = manager.open(ID)
    assert manager.mode == "hybrid"
    assert cgroup.join.tasks_files == [f"{pids}/{LEAF}/tasks"]
    assert cgroup.join.into_dir == f"{top}/{LEAF}"
    assert cgroup.sample() == (1_500_000_000, 0)
    assert not list(cpuacct.iterdir())
    cgroup.close()


def test_v2_controllers_that_were_not_delegated_are_reported_with_the_fix(machine: Machine) -> None:
    top = v2_top(machine, controllers="memory pids")
    (top / LEAF).mkdir()
    manager = machine.detect()
    assert manager.mode == "v2"
    assert manager.reason.startswith(f"cpu: the controller is not delegated to {top}")
    row = limit(manager, "cpu")
    assert not row.enforced
    assert "Delegate=yes" in row.by


def test_without_any_cgroups_everything_works_and_nothing_is_claimed(machine: Machine) -> None:
    manager = machine.detect()
    assert manager.mode == "none"
    assert manager.reason == "no cgroup filesystem is mounted: mount cgroup2 on /sys/fs/cgroup"
    for cgroup in (manager.create(ID), manager.open(ID)):
        assert cgroup.join.tasks_files == []
        assert cgroup.join.into_dir is None
        assert cgroup.usage() == Usage()
        assert cgroup.sample() == (None, 0)
        assert cgroup.cpu_time() is None
        cgroup.weigh(2)
        assert cgroup.oom_kills() == 0
        assert not cgroup.reset_peak()
        assert [row.name for row in cgroup.enforced()] == ["cpu", "memory", "swap", "pids"]
        assert all(not row.enforced and row.by == manager.reason for row in cgroup.enforced())
        cgroup.kill()
        cgroup.remove()
    assert manager.list() == []


def test_no_proc_is_no_cgroups(tmp_path: Path) -> None:
    assert CgroupManager.detect(proc=str(tmp_path / "absent")).mode == "none"


# Names


@pytest.mark.parametrize(
    "bad", ["", "short", ID + "3", "../../../etc", "ABCDEFGHIJ12", "abcdefghij1/", "abcdefghij1\n", ID + "\n"]
)
def test_what_is_not_an_environment_id_is_refused(machine: Machine, bad: str) -> None:
    manager = machine.detect()
    with pytest.raises(InvalidRequest):
        manager.create(bad)
    with pytest.raises(InvalidRequest):
        manager.open(bad)


@pytest.mark.parametrize("bad", ["", "docker", "../skerry", "skerry/x", "skerry-A"])
def test_what_is_not_a_parents_name_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="parent"):
        CgroupManager.detect(parent=bad)


def test_list_has_environments_of_any_hierarchy_and_nothing_else(machine: Machine) -> None:
    pids, memory = machine.mount("pids", "pids"), machine.mount("memory", "memory")
    for path in (pids / LEAF, memory / "skerry/skerry-zzzzzzzzzzzz", memory / "skerry/skerry-other"):
        path.mkdir(parents=True)
    manager = machine.detect()
    assert manager.list() == [ID, "zzzzzzzzzzzz"]
    with pytest.raises(EnvironmentNotFound):
        manager.open("yyyyyyyyyyyy")


# Limits and counters


@pytest.mark.parametrize(
    ("millicores", "quota"),
    [(1000, (100_000, 100_000)), (500, (50_000, 100_000)), (2500, (250_000, 100_000)), (10, (1000, 100_000))],
)
def test_cpu_quota(millicores: int, quota: tuple[int, int]) -> None:
    assert cpu_quota(millicores) == quota


def test_a_tiny_cpu_quota_gets_the_longest_period() -> None:
    """The kernel refuses quotas under 1 ms and periods over 1 s."""
    assert cpu_quota(9) == (9000, 1_000_000)


def test_a_refused_limit_is_told(machine: Machine) -> None:
    top = machine.mount("pids", "pids")
    manager = machine.detect()
    cgroup = manager.create(ID)
    with pytest.raises(LaunchFailed) as failure:
        cgroup.apply(Limits(pids=7))  # a plain directory has no pids.max
    path = f"{top}/{LEAF}/pids.max"
    assert failure.value.detail == {"step": "cgroup: write 7 to", "path": path, "errno": errno.ENOENT}
    assert failure.value.hint


def test_an_id_that_is_taken_is_not_shared(machine: Machine) -> None:
    top = machine.mount("pids", "pids")
    manager = machine.detect()
    (top / LEAF).mkdir()
    with pytest.raises(LaunchFailed, match="File exists"):
        manager.create(ID)
    assert manager.list() == [ID]


def test_v1_counters(machine: Machine) -> None:
    files(machine.mount("a", "cpu,cpuacct") / LEAF, {"cpuacct.usage": "2500000000\n"})
    files(
        machine.mount("m", "memory") / LEAF,
        {
            "memory.usage_in_bytes": "4096\n",
            "memory.max_usage_in_bytes": "8192\n",
            "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
        },
    )
    files(machine.mount("p", "pids") / LEAF, {"pids.current": "3\n"})
    cgroup = machine.detect().open(ID)
    assert cgroup.usage() == Usage(2.5, 4096, 8192, 3, 0, 0, 2)
    assert cgroup.sample() == (2_500_000_000, 2)
    assert cgroup.cpu_time() == 2.5
    cgroup.close()


def test_v2_counters(machine: Machine) -> None:
    files(
        v2_top(machine) / LEAF,
        {
            "cpu.stat": "usage_usec 2500000\nuser_usec 2000000\nsystem_usec 500000\n",
            "memory.current": "4096\n",
            "memory.peak": "8192\n",
            "memory.events": "low 0\nhigh 0\nmax 9\noom 5\noom_kill 2\noom_group_kill 0\n",
            "pids.current": "3\n",
            "io.stat": "8:0 rbytes=100 wbytes=200 rios=1 wios=1 dbytes=0 dios=0\n7:0 rbytes=5 wbytes=6\n",
        },
    )
    cgroup = machine.detect().open(ID)
    assert cgroup.usage() == Usage(2.5, 4096, 8192, 3, 105, 206, 2)
    assert cgroup.sample() == (2_500_000_000, 2)
    assert cgroup.cpu_time() == 2.5
    cgroup.close()


@pytest.mark.parametrize(("parts", "weight"), [(1, 1024), (4, 256), (64, 16)])
def test_weights_of_v1(machine: Machine, parts: int, weight: int) -> None:
    v1 = machine.mount("c", "cpu") / LEAF
    files(v1, {"cpu.shares": ""})
    machine.detect().open(ID).weigh(parts)
    assert (v1 / "cpu.shares").read_text() == str(weight)


@pytest.mark.parametrize(("parts", "weight"), [(1, 100), (4, 25), (64, 2)])
def test_weights_of_v2(machine: Machine, parts: int, weight: int) -> None:
    v2 = v2_top(machine) / LEAF
    files(v2, {"cpu.weight": ""})
    machine.detect().open(ID).weigh(parts)
    assert (v2 / "cpu.weight").read_text() == str(weight)


def test_counters_open_their_files_once_and_close_them(machine: Machine) -> None:
    files(v2_top(machine) / LEAF, {"cpu.stat": "usage_usec 1\n", "pids.current": "3\n"})
    cgroup = machine.detect().open(ID)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        cgroup.usage()
    assert len(os.listdir("/proc/self/fd")) == before + 2
    cgroup.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_v1_without_swap_accounting_says_that_swap_is_not_forbidden(machine: Machine) -> None:
    memory = machine.mount("m", "memory") / LEAF
    files(memory, {"memory.limit_in_bytes": "1048576\n"})
    row = limit(machine.detect(), "swap")
    assert not row.enforced
    assert "swapaccount=1" in row.by


def test_v1_swap_is_what_is_allowed_beyond_memory(machine: Machine) -> None:
    texts = {"memory.limit_in_bytes": f"{MIB}\n", "memory.memsw.limit_in_bytes": f"{MIB + 4096}\n"}
    files(machine.mount("m", "memory") / LEAF, texts)
    assert limit(machine.detect(), "swap") == Enforcement("swap", True, "4096", "memory.memsw.limit_in_bytes")


@pytest.mark.parametrize(
    ("name", "file", "text"),
    [("memory", "memory.max", "max"), ("cpu", "cpu.max", "max 100000"), ("pids", "pids.max", "max")],
)
def test_a_limit_that_is_not_set_is_not_claimed(machine: Machine, name: str, file: str, text: str) -> None:
    files(v2_top(machine) / LEAF, {file: f"{text}\n"})
    assert limit(machine.detect(), name) == Enforcement(name, False, "", f"{file}: {text}")


def test_a_kernel_without_the_file_is_not_claimed_to_limit(machine: Machine) -> None:
    (v2_top(machine) / LEAF).mkdir()
    manager = machine.detect()
    assert limit(manager, "swap").by == "memory.swap.max: no such file in this kernel"
    assert limit(manager, "cpu").by == "cpu.max: no such file in this kernel"


# The end


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def test_without_cgroup_kill_members_are_signaled(
    machine: Machine, bystander: subprocess.Popen[bytes]
) -> None:
    leaf = v2_top(machine) / LEAF
    files(leaf, {"cgroup.procs": f"{bystander.pid}\n", "pids.max": "9"})
    machine.detect().open(ID).kill()
    assert bystander.wait(10) == -signal.SIGKILL
    assert (leaf / "pids.max").read_text() == "0"


def test_a_number_that_passed_to_another_process_is_not_signaled(
    machine: Machine, bystander: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The member dies after the list was read, and an outsider gets its number: the second look spares it."""
    files(machine.mount("pids", "pids") / LEAF, {"pids.max": "9"})
    looks = [{bystander.pid}]
    for module in (cgroups, cgroup_processes):
        monkeypatch.setattr(module, "pids_in", lambda directory: looks.pop() if looks else set())
    machine.detect().open(ID).kill()
    assert not looks
    bystander.terminate()
    assert bystander.wait(10) == -signal.SIGTERM
