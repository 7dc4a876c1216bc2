"""Cgroups on the kernel at hand: limits bite, counters count, a kill leaves nothing.

The same tests run on v1, hybrid and v2, as root and as a user with a delegated subtree.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import select
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skerry.errors import EnvironmentNotFound, PlatformError
from skerry.host import cgroup_places, cgroups
from skerry.host.cgroup_places import WEIGHT_PERCENT
from skerry.host.cgroup_processes import pids_in
from skerry.host.cgroups import Cgroup, CgroupManager
from skerry.models import Enforcement
from skerry.policy import MIB, Limits
from tests import support

pytestmark = pytest.mark.limits

SMALL = Limits(cpus=0.5, memory=64 * MIB, pids=16)
PARENT = f"skerry-test{os.getpid()}"

_SYS_CLONE3 = 435
_CLONE_INTO_CGROUP = 1 << 33


class Member:
    """A Python program inside a cgroup, born there the way that the join plan says."""

    def __init__(self, cgroup: Cgroup, code: str) -> None:
        stdin, self._to = os.pipe()
        self._from, stdout = os.pipe()
        self.pid = _clone_into(cgroup.join.into_dir)
        if self.pid == 0:
            try:
                for path in cgroup.join.tasks_files:
                    fd = os.open(path, os.O_WRONLY)
                    os.write(fd, b"0")
                    os.close(fd)
                os.dup2(stdin, 0)
                os.dup2(stdout, 1)
                os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", "import os, sys, time\n" + code])
            finally:
                os._exit(126)
        os.close(stdin)
        os.close(stdout)
        self._out = os.fdopen(self._from)

    def line(self) -> str:
        return self._out.readline().strip()

    def wait(self) -> int:
        """Let it go on past a read of its input; the exit code, or minus the signal."""
        if self.pid:
            os.close(self._to)
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self._out.close()
            self.pid = 0
        return self._code


def _clone_into(directory: str | None) -> int:
    """fork(), into a v2 cgroup if one is given."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY) if directory else 0
    arguments = [0] * 11
    arguments[0], arguments[4], arguments[10] = (_CLONE_INTO_CGROUP if directory else 0), signal.SIGCHLD, fd
    block = struct.pack("11Q", *arguments)
    pid = ctypes.PyDLL(None, use_errno=True).syscall(_SYS_CLONE3, block, len(block))
    if pid and directory:
        os.close(fd)
    if pid < 0:
        raise OSError(ctypes.get_errno(), f"clone3 into {directory}")
    return int(pid)


@pytest.fixture
def manager() -> Iterator[CgroupManager]:
    manager = CgroupManager.detect(PARENT)
    if manager.mode == "none":
        support.missing(manager.reason)
    yield manager
    left = manager.list()
    for environment_id in left:
        cgroup = manager.open(environment_id)
        cgroup.kill()
        cgroup.remove()
    manager.close()
    assert left == []


@pytest.fixture
def create(manager: CgroupManager) -> Iterator[Callable[..., Cgroup]]:
    made: list[Cgroup] = []

    def create(limits: Limits = SMALL) -> Cgroup:
        made.append(manager.create(f"{len(made):012d}"))
        made[-1].apply(limits)
        return made[-1]

    yield create
    for cgroup in made:
        cgroup.kill()
        cgroup.remove()


@pytest.fixture
def run(create: Callable[..., Cgroup]) -> Iterator[Callable[[Cgroup, str], Member]]:
    started: list[Member] = []

    def run(cgroup: Cgroup, code: str) -> Member:
        started.append(Member(cgroup, code))
        return started[-1]

    yield run
    for member in started:
        if member.pid:
            os.kill(member.pid, signal.SIGKILL)
        member.wait()


Create = Callable[..., Cgroup]
Run = Callable[[Cgroup, str], Member]


def need(cgroup: Cgroup, controller: str) -> Path:
    if controller not in cgroup._dirs:
        pytest.skip(cgroup._missing[controller])
    return Path(cgroup._dirs[controller])


def ends(pidfd: int) -> bool:
    """Whether the process has ended; a killed one is out of its cgroup a moment before that."""
    ended, _, _ = select.select([pidfd], [], [], 10)
    os.close(pidfd)
    return bool(ended)


# Limits


def test_every_limit_is_in_force_and_reported_as_the_kernel_has_it(create: Create) -> None:
    cgroup = create()
    rows = {row.name: row for row in cgroup.enforced()}
    assert {name: (row.enforced, row.value) for name, row in rows.items()} == {
        "cpu": (True, "0.5"),
        "memory": (True, str(64 * MIB)),
        "swap": (True, "0"),
        "pids": (True, "16"),
    }
    (need(cgroup, "pids") / "pids.max").write_text("9")
    assert cgroup.enforced()[3] == Enforcement("pids", True, "9", "pids.max")


def test_a_process_over_the_memory_limit_is_killed_counted_and_alone(create: Create, run: Run) -> None:
    """Twice the limit: with swap allowed it would fit. The other process of the environment lives on."""
    cgroup = create()
    need(cgroup, "memory")
    other = run(cgroup, "print('up', flush=True); sys.stdin.read()")
    assert other.line() == "up"
    hog = run(cgroup, f"x = bytearray(b'x') * {128 * MIB}")
    assert hog.wait() == -signal.SIGKILL
    assert cgroup.oom_kills() == 1
    assert cgroup.sample()[1] == 1
    assert cgroup.usage().oom_kills == 1
    peak = cgroup.usage().memory_peak_bytes
    assert peak is None or 48 * MIB < peak <= 64 * MIB
    assert other.wait() == 0


def test_the_pids_limit_is_exact(create: Create, run: Run) -> None:
    cgroup = create(Limits(memory=64 * MIB, pids=12))
    need(cgroup, "pids")
    forker = run(
        cgroup,
        "n = 1\n"
        "try:\n"
        "    while n < 100:\n"
        "        if os.fork() == 0: sys.stdin.read(); os._exit(0)\n"
        "        n += 1\n"
        "except OSError as error: print(n, error.errno, flush=True)\n",
    )
    assert forker.line() == f"12 {errno.EAGAIN}"
    assert cgroup.usage().pids == 12


@pytest.mark.alone
def test_the_cpu_quota_holds_within_a_tenth(create: Create, run: Run) -> None:
    """Measured in the kernel's own periods: CPU time that was used over CPU time that elapsed."""
    cgroup = create(Limits(cpus=0.1, memory=64 * MIB))
    stat = need(cgroup, "cpu") / "cpu.stat"
    burner = run(cgroup, "while time.process_time() < 0.5: pass")
    assert burner.wait() == 0
    counters = dict(line.split() for line in stat.read_text().splitlines())
    used, _ = cgroup.sample()
    assert used is not None
    elapsed = int(counters["nr_periods"]) * 100_000_000
    assert elapsed > 4e9
    assert used / elapsed == pytest.approx(0.1, rel=0.1)  # in a virtual machine beside others: 0.105


# Counters


def test_environments_together_weigh_little_where_cpu_is_short(create: Create) -> None:
    parent = need(create(), "cpu").parent
    weight, shares = parent / "cpu.weight", parent / "cpu.shares"
    found = int(weight.read_text()) if weight.exists() else int(shares.read_text()) * 100 // 1024
    assert found in (WEIGHT_PERCENT, WEIGHT_PERCENT - 1)  # shares are rounded


def test_usage_is_what_the_processes_inside_used(create: Create, run: Run) -> None:
    cgroup = create(Limits(memory=64 * MIB))
    for controller in ("memory", "pids"):
        need(cgroup, controller)
    assert cgroup.usage().pids == 0
    member = run(
        cgroup,
        f"x = bytearray(b'x') * {16 * MIB}\n"
        "while time.process_time() < 0.2: pass\n"
        "print(time.process_time_ns(), flush=True); sys.stdin.read()\n",
    )
    cpu_ns = int(member.line())
    usage = cgroup.usage()
    assert usage.pids == 1
    assert usage.memory_bytes is not None
    assert 16 * MIB < usage.memory_bytes < 32 * MIB
    member.wait()
    usage = cgroup.usage()
    assert usage.pids == 0
    assert usage.cpu_seconds is not None
    assert usage.cpu_seconds >= cpu_ns / 1e9
    assert usage.oom_kills == 0


def test_io_is_counted_also_that_of_children_that_ended(create: Create, run: Run, tmp_path: Path) -> None:
    cgroup = create(Limits(memory=64 * MIB))
    member = run(
        cgroup,
        "import mmap\n"
        "if os.fork() == 0:\n"
        f"    fd = os.open({str(tmp_path / 'file')!r}, os.O_RDWR | os.O_CREAT | os.O_DIRECT)\n"
        f"    block = mmap.mmap(-1, {MIB})\n"
        "    assert os.pwrite(fd, block, 0) == os.preadv(fd, [block], 0) == len(block)\n"
        "    os._exit(0)\n"
        "print(os.wait()[1], flush=True); sys.stdin.read()\n",
    )
    assert member.line() == "0"
    usage = cgroup.usage()
    assert usage.io_read_bytes is not None
    assert usage.io_write_bytes is not None
    assert usage.io_read_bytes >= MIB
    assert usage.io_write_bytes >= MIB


def test_the_peak_can_start_anew(create: Create, run: Run) -> None:
    cgroup = create(Limits(memory=64 * MIB))
    need(cgroup, "memory")
    member = run(
        cgroup,
        f"x = bytearray(b'x') * {32 * MIB}\ndel x\nprint('freed', flush=True); sys.stdin.read()\n",
    )
    member.line()
    if not cgroup.reset_peak():
        assert cgroup.join.tasks_files == []
        pytest.skip("memory.peak cannot be reset before Linux 6.12")
    peak = cgroup.usage().memory_peak_bytes
    assert peak is not None
    assert 0 < peak < 32 * MIB


def test_a_removed_cgroup_counts_nothing_and_keeps_no_file_open(manager: CgroupManager) -> None:
    fds = len(os.listdir("/proc/self/fd"))
    cgroup = manager.create("000000000000")
    cgroup.apply(SMALL)
    assert cgroup.usage().cpu_seconds == 0
    cgroup.remove()
    assert cgroup.usage().cpu_seconds is None
    assert cgroup.sample() == (None, 0)
    assert len(os.listdir("/proc/self/fd")) == fds


# The end

FORK_BOMB = """
first = os.getpid()
while True:
    try:
        if os.fork() == 0: os.setsid()
    except OSError:
        if os.getpid() == first: print("full", flush=True)
"""


@pytest.mark.parametrize("with_cgroup_kill", [True, False])
def test_a_kill_leaves_nothing(
    create: Create, run: Run, monkeypatch: pytest.MonkeyPatch, with_cgroup_kill: bool
) -> None:
    """Against a fork bomb that fills the environment with sessions of their own."""
    write = cgroup_places.write

    def old_kernel(path: str, value: str) -> None:
        if path.endswith("/cgroup.kill"):
            raise FileNotFoundError(path)
        write(path, value)

    if not with_cgroup_kill:
        monkeypatch.setattr(cgroups, "write", old_kernel)
    cgroup = create()
    bomb = run(cgroup, FORK_BOMB)
    assert bomb.line() == "full"
    pids = pids_in(cgroup._all[0])
    assert bomb.pid in pids
    assert len(pids) > 1
    pidfds = [os.pidfd_open(pid) for pid in pids]
    cgroup.kill()
    assert bomb.wait() == -signal.SIGKILL
    cgroup.remove()
    assert not [path for path in cgroup._all if os.path.exists(path)]
    assert [ends(pidfd) for pidfd in pidfds] == [True] * len(pids)


def test_nothing_is_removed_under_a_living_process(
    create: Create, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    cgroup = create()
    member = run(cgroup, "print('up', flush=True); sys.stdin.read()")
    member.line()
    monkeypatch.setattr(cgroups, "PATIENCE", 0.05)
    with pytest.raises(PlatformError, match="busy") as failure:
        cgroup.remove()
    assert str(member.pid) in failure.value.hint
    assert member.wait() == 0


def test_environments_outlive_the_daemon_that_made_them(manager: CgroupManager, run: Run) -> None:
    cgroup = manager.create("abcdefghij12")
    cgroup.apply(SMALL)
    member = run(cgroup, "print('up', flush=True); sys.stdin.read()")
    member.line()
    cgroup.close()
    later = CgroupManager.detect(PARENT)
    assert later.list() == ["abcdefghij12"]
    found = later.open("abcdefghij12")
    assert found.enforced() == cgroup.enforced()
    assert found.join == cgroup.join
    found.kill()
    assert member.wait() == -signal.SIGKILL
    found.remove()
    found.remove()
    found.kill()
    with pytest.raises(EnvironmentNotFound):
        later.open("abcdefghij12")


def test_daemons_with_other_parents_do_not_see_each_other(manager: CgroupManager) -> None:
    other = CgroupManager.detect(f"{PARENT}b")
    cgroup = manager.create("abcdefghij12")
    cgroup.apply(SMALL)
    assert manager.list() == ["abcdefghij12"]
    assert other.list() == []
    cgroup.remove()
    other.close()


def test_the_parent_is_made_again_after_another_daemon_closed_it(manager: CgroupManager) -> None:
    CgroupManager.detect(PARENT).close()
    assert not any(map(os.path.exists, manager._parents))
    cgroup = manager.create("abcdefghij12")
    cgroup.apply(SMALL)
    assert all(row.enforced for row in cgroup.enforced())
    cgroup.remove()


# Places


def in_a_child(task: Callable[[], dict[str, object]]) -> dict[str, object]:
    """What `task` returns in a forked process."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, json.dumps(task()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        result = json.loads(pipe.read())
    os.waitpid(pid, 0)
    assert isinstance(result, dict)
    return result


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_plain_user_without_delegation_is_told_so(manager: CgroupManager) -> None:
    def as_nobody() -> dict[str, object]:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        found = CgroupManager.detect(PARENT)
        return {"mode": found.mode, "reason": found.reason}

    found = in_a_child(as_nobody)
    assert found["mode"] == "none"
    assert str(found["reason"]).startswith("no delegation: uid 65534 may not write")


@pytest.fixture
def box(manager: CgroupManager) -> Iterator[Path]:
    """A v2 cgroup marked as systemd marks a delegated unit, with controllers that it may hand down."""
    if manager._places.controllers.get("memory") != manager._places.unified or not manager._places.unified:
        pytest.skip("no cgroup v2 with controllers here")
    box = Path(manager._places.unified).parent / f"skerry-box{os.getpid()}"
    box.mkdir()
    os.setxattr(box, "user.delegate", b"1")
    yield box
    for path in (box / PARENT, box / "skerry-daemon", box):
        if path.exists():
            path.rmdir()


def detect_in(box: Path) -> dict[str, object]:
    (box / "cgroup.procs").write_text("0")
    found = CgroupManager.detect(PARENT)
    usable = sorted(found._places.controllers)
    own = Path("/proc/self/cgroup").read_text().strip().rpartition("/")[2]
    return {"mode": found.mode, "reason": found.reason, "usable": usable, "own": own}


def test_in_a_delegated_cgroup_of_our_own_we_step_aside(box: Path) -> None:
    found = in_a_child(lambda: detect_in(box))
    assert found == {
        "mode": "v2",
        "reason": "",
        "usable": ["cpu", "io", "memory", "pids"],
        "own": "skerry-daemon",
    }
    assert (box / PARENT / "cgroup.subtree_control").read_text().split()


def test_in_a_cgroup_shared_with_others_nobody_is_moved(box: Path) -> None:
    read, write = os.pipe()
    other = os.fork()
    if other == 0:
        (box / "cgroup.procs").write_text("0")
        os.write(write, b"in")
        signal.pause()
    os.read(read, 2)
    try:
        found = in_a_child(lambda: detect_in(box))
        assert found["usable"] == []
        assert f"has other processes in it ({other})" in str(found["reason"])
        assert found["own"] == box.name
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
        os.close(read)
        os.close(write)
