"""Cgroups of environments: limits that bite, counters that are the kernel's, a kill that leaves nothing.

Every environment has one cgroup named `skerry-<id>` in each hierarchy that is needed, under a parent `skerry`
(cgroup_places says where):

    v2      one, with all controllers
    v1      one in each of the hierarchies of cpu, cpuacct, memory, pids and blkio
    hybrid  as v1 without cpuacct, and one in the v2 hierarchy for cgroup.kill, cgroup.events and cpu.stat
    none    we may not write any: the same interface, enforcing nothing and saying so
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from dataclasses import dataclass

from skerry.errors import EnvironmentNotFound, InvalidRequest, LaunchFailed
from skerry.host.cgroup_places import FIX, Places, find_places, places_of, read_text, write
from skerry.host.cgroup_processes import (
    await_change,
    field,
    io_of_processes,
    kill_member,
    pids_in,
    remove_directory,
)
from skerry.models import Enforcement, Usage
from skerry.policy import Limits

PATIENCE = 5.0
"""Seconds that `kill` and `remove` wait for the kernel at most."""

_ENVIRONMENT_ID = re.compile(r"[a-z0-9]{12}")
_PARENT = re.compile(r"skerry(-[a-z0-9]+)?")
_PEAKS = ("memory.max_usage_in_bytes", "memory.peak")


@dataclass(frozen=True, slots=True)
class JoinPlan:
    """How the launch helper gets into an environment's cgroups."""

    tasks_files: list[str]
    """v1: the helper, while it has one thread, writes "0" to each. (Unlike a write to cgroup.procs this does
    not take the lock that stops every fork of the machine.)"""
    into_dir: str | None
    """v2: open with O_PATH | O_DIRECTORY and give to clone3 with CLONE_INTO_CGROUP."""


class Cgroup:
    """The cgroups of one environment; with none, it enforces nothing and counts nothing.

    Made by a CgroupManager. Counters keep their files open until `close` or `remove`. One thread at a time.
    """

    def __init__(self, environment_id: str, places: Places, name: str = "") -> None:
        """It is below `places` by this name; without one, it is where they are."""
        below = f"/{name}" if name else ""
        self.environment_id = environment_id
        self._dirs = {controller: f"{parent}{below}" for controller, parent in places.controllers.items()}
        self._unified = places.unified and f"{places.unified}{below}"
        self._v1 = list(dict.fromkeys(path for path in self._dirs.values() if path != self._unified))
        self._all = [*self._v1, self._unified] if self._unified else self._v1
        self._missing = places.missing
        self._fds: dict[str, int] = {}

    @classmethod
    def of_container(cls, environment_id: str, pid: int, container: str) -> Cgroup | None:
        """The cgroups that somebody else made for a container, by one of its processes; None if it has none here."""
        places = places_of(pid, container)
        return cls(environment_id, places) if places.controllers else None

    @property
    def join(self) -> JoinPlan:
        return JoinPlan([f"{path}/tasks" for path in self._v1], self._unified)

    # Counters

    def sample(self) -> tuple[int | None, int]:
        """(CPU time in ns, OOM kills) so far, as cheaply as can be; None: this machine cannot tell."""
        return self._cpu_ns(), self.oom_kills()

    def usage(self, *, io: bool = True) -> Usage:
        """What the kernel counted; None for what it does not count here, and for everything once removed.

        Without the io controller of v2, I/O is the sum over the living processes, each with the children that
        it has waited for. (v1's blkio does not see what is written through the page cache, and in recent
        kernels nothing at all on devices that are not throttled.) That takes longer the more there are: without
        `io` it is left out.
        """
        cpu_ns = self._cpu_ns()
        read, written = self._io() if io else (None, None)
        return Usage(
            cpu_seconds=None if cpu_ns is None else cpu_ns / 1e9,
            memory_bytes=_number(self._read("memory", "memory.usage_in_bytes", "memory.current")),
            memory_peak_bytes=_number(self._read("memory", *_PEAKS)),
            pids=_number(self._read("pids", "pids.current", "pids.current")),
            io_read_bytes=read,
            io_write_bytes=written,
            oom_kills=self._oom_kills(),
        )

    def cpu_time(self) -> float | None:
        """Seconds so far, for any thread: keeps no file open. None: this machine cannot tell, or it is gone."""
        if self._unified:
            found = field(os.fsencode(read_text(f"{self._unified}/cpu.stat")), b"usage_usec")
            return None if found is None else found / 1e6
        path = self._dirs.get("cpuacct", "")
        found = _number(os.fsencode(read_text(f"{path}/cpuacct.usage"))) if path else None
        return None if found is None else found / 1e9

    def oom_kills(self) -> int:
        """Processes that the kernel killed because the memory limit was reached; 0 where it cannot tell."""
        return self._oom_kills() or 0

    def reset_peak(self) -> bool:
        """Reset the memory peak to the current use. Returns False if the kernel cannot (v2 before 6.12)."""
        if self._fds.keys().isdisjoint(_PEAKS):
            self._read("memory", *_PEAKS)  # which opens it
        for name in _PEAKS:
            with contextlib.suppress(KeyError, OSError):
                os.pwrite(self._fds[name], b"0", 0)
                return True
        return False

    def _cpu_ns(self) -> int | None:
        if self._unified is None:
            return _number(self._read("cpuacct", "cpuacct.usage", ""))
        microseconds = field(self._pread(self._unified, "cpu.stat"), b"usage_usec")
        return None if microseconds is None else microseconds * 1000

    def _oom_kills(self) -> int | None:
        return field(self._read("memory", "memory.oom_control", "memory.events"), b"oom_kill")

    def _io(self) -> tuple[int | None, int | None]:
        if "io" in self._dirs:
            raw = self._read("io", "", "io.stat")
            reads, writes = rb" rbytes=(\d+)", rb" wbytes=(\d+)"
        else:
            raw = io_of_processes(self._all[0]) if self._all else None
            reads, writes = rb"\nread_bytes: (\d+)", rb"\nwrite_bytes: (\d+)"
        if raw is None:
            return None, None
        return sum(map(int, re.findall(reads, raw))), sum(map(int, re.findall(writes, raw)))

    def _read(self, controller: str, v1: str, v2: str) -> bytes | None:
        """A counter by its name in v1 and in v2; None if there is none."""
        if controller not in self._dirs:
            return None
        return self._pread(self._dirs[controller], v2 if self._is_v2(controller) else v1)

    def _pread(self, directory: str, name: str) -> bytes | None:
        try:
            fd = self._fds.get(name)
            if fd is None:
                fd = self._fds[name] = _open_counter(f"{directory}/{name}")
            return os.pread(fd, 4096, 0)
        except OSError:
            return None

    # Limits

    def enforced(self) -> list[Enforcement]:
        """cpu (cores), memory, swap (bytes) and pids, as the kernel's own files say now."""
        return [
            self._cpu_limit(),
            self._limit("memory", "memory", "memory.limit_in_bytes", "memory.max"),
            self._swap_limit(),
            self._limit("pids", "pids", "pids.max", "pids.max"),
        ]

    def _limit(self, name: str, controller: str, v1: str, v2: str) -> Enforcement:
        if controller not in self._dirs:
            return Enforcement(name, False, by=self._missing[controller])
        file = v2 if self._is_v2(controller) else v1
        value = self._setting(controller, file)
        if value.isdecimal():
            return Enforcement(name, True, value, file)
        return Enforcement(name, False, by=f"{file}: {value or 'no such file in this kernel'}")

    def _cpu_limit(self) -> Enforcement:
        if "cpu" not in self._dirs:
            return Enforcement("cpu", False, by=self._missing["cpu"])
        if self._is_v2("cpu"):
            file, words = "cpu.max", self._setting("cpu", "cpu.max").split()
        else:
            file = "cpu.cfs_quota_us"
            words = [self._setting("cpu", file), self._setting("cpu", "cpu.cfs_period_us")]
        if len(words) == 2 and all(word.isdecimal() for word in words):
            return Enforcement("cpu", True, f"{int(words[0]) / int(words[1]):g}", file)
        return Enforcement("cpu", False, by=f"{file}: {' '.join(words) or 'no such file in this kernel'}")

    def _swap_limit(self) -> Enforcement:
        if "memory" not in self._dirs or self._is_v2("memory"):
            return self._limit("swap", "memory", "", "memory.swap.max")
        file = "memory.memsw.limit_in_bytes"
        both, memory = self._setting("memory", file), self._setting("memory", "memory.limit_in_bytes")
        if both and memory:
            return Enforcement("swap", True, str(int(both) - int(memory)), file)
        why = f"this kernel has no {file} (boot it with swapaccount=1); memory.swappiness=0 only avoids swap"
        return Enforcement("swap", False, by=why)

    def _setting(self, controller: str, name: str) -> str:
        return read_text(f"{self._dirs[controller]}/{name}")

    def _is_v2(self, controller: str) -> bool:
        return self._dirs[controller] == self._unified

    def apply(self, limits: Limits) -> None:
        """Set the limits. Raises LaunchFailed, with step, path and errno in its detail, if the kernel refuses."""
        if "cpu" in self._dirs:
            quota, period = cpu_quota(limits.millicores)
            if self._is_v2("cpu"):
                self._set("cpu", "cpu.max", f"{quota} {period}")
            else:
                self._set("cpu", "cpu.cfs_period_us", str(period))
                self._set("cpu", "cpu.cfs_quota_us", str(quota))
        # memory.oom.group stays 0: an OOM kill takes the biggest process, and the environment lives on.
        if "memory" in self._dirs and self._is_v2("memory"):
            self._set("memory", "memory.max", str(limits.memory))
            self._set("memory", "memory.swap.max", "0", optional=True)
        elif "memory" in self._dirs:
            # It may have had smaller ones, and the second must never be below the first.
            self._set("memory", "memory.memsw.limit_in_bytes", "-1", optional=True)
            self._set("memory", "memory.limit_in_bytes", str(limits.memory))
            if not self._set("memory", "memory.memsw.limit_in_bytes", str(limits.memory), optional=True):
                self._set("memory", "memory.swappiness", "0")
            # What sockets hold is counted apart from all else here, and not at all without a limit.
            self._set("memory", "memory.kmem.tcp.limit_in_bytes", str(limits.memory // 8), optional=True)
        if "pids" in self._dirs:
            self._set("pids", "pids.max", str(limits.pids))

    def weigh(self, parts: int) -> None:
        """Set the CPU weight to the default divided by `parts`. Raises LaunchFailed."""
        if "cpu" in self._dirs:
            name, usual = ("cpu.weight", 100) if self._is_v2("cpu") else ("cpu.shares", 1024)
            self._set("cpu", name, str(max(2, round(usual / parts))), optional=True)

    def limit_io(self, device: str, operations: int, bandwidth: int) -> None:
        """Limit operations and bytes a second on a device (`7:0`), for reads and for writes; 0 for no limit.

        On v1 the kernel charges those who read, sync or write directly; what its own threads write back later is
        charged to nobody. Raises LaunchFailed. Does nothing where there is no such controller.
        """
        if "io" in self._dirs:
            self._set("io", "io.max", _io_max(device, operations, bandwidth), optional=True)
        elif "blkio" in self._dirs:
            for name, value in (("iops", operations), ("bps", bandwidth)):
                for what in ("read", "write"):
                    self._set(
                        "blkio", f"blkio.throttle.{what}_{name}_device", f"{device} {value}", optional=True
                    )

    def io_limits(self, device: str) -> list[Enforcement]:
        """Operations and bytes a second, as the kernel's own files say now."""
        return [
            self._io_limit("io_operations", "iops", device),
            self._io_limit("io_bandwidth", "bps", device),
        ]

    def _io_limit(self, name: str, unit: str, device: str) -> Enforcement:
        if "io" in self._dirs:
            file, words = "io.max", re.escape(device) + r" .*\bw" + unit + r"=(\d+)"
        elif "blkio" in self._dirs:
            file, words = f"blkio.throttle.write_{unit}_device", re.escape(device) + r" (\d+)"
        else:
            return Enforcement(name, False, by="no cgroup hierarchy has the controller io, or blkio on v1")
        found = re.search(
            f"^{words}", self._setting("io" if file == "io.max" else "blkio", file), re.MULTILINE
        )
        if found is None:
            return Enforcement(name, False, by=f"{file}: no limit is set")
        return Enforcement(name, True, found[1], file)

    def _set(self, controller: str, name: str, value: str, *, optional: bool = False) -> bool:
        path = f"{self._dirs[controller]}/{name}"
        try:
            write(path, value)
        except OSError as error:
            if optional and error.errno == errno.ENOENT:
                return False
            raise _failed(f"write {value} to", path, error) from error
        return True

    # The end

    def kill(self) -> None:
        """SIGKILL to everything inside and to what it forks meanwhile. Final: nothing can start here after.

        Returns when everything has its signal; `remove` awaits that everything is gone.
        """
        by_signal = self._v1
        if self._unified:
            try:
                write(f"{self._unified}/cgroup.kill", "1")
            except OSError:  # a kernel before 5.14, or removed already
                by_signal = self._all
        if by_signal and "pids" in self._dirs:
            # From here on no fork succeeds, so that the signals win against a fork bomb.
            with contextlib.suppress(OSError):
                write(f"{self._dirs['pids']}/pids.max", "0")
        deadline = time.monotonic() + PATIENCE
        for path in by_signal:
            signaled: set[int] = set()
            while (fresh := pids_in(path) - signaled) and time.monotonic() < deadline:
                for pid in fresh:
                    kill_member(pid, path)
                signaled |= fresh

    def remove(self) -> None:
        """Remove the cgroups; those already gone are fine. Waits up to PATIENCE for what was killed to leave.

        Raises PlatformError if something in there lives on.
        """
        self.close()
        deadline = time.monotonic() + PATIENCE
        for path in self._all:
            while not remove_directory(path, last_try=time.monotonic() > deadline):
                await_change(path, path == self._unified, deadline)

    def close(self) -> None:
        """Close the counters' files. They open again when they are read."""
        fds, self._fds = self._fds, {}
        for fd in fds.values():
            os.close(fd)


class CgroupManager:
    """What this process may do with cgroups here, and the environments' cgroups that exist.

    `mode` is `v1`, `v2`, `hybrid` or `none`; `reason` says what is missing and what to do about it, and is
    empty if nothing is.
    """

    def __init__(self, parent: str, proc: str) -> None:
        self._where = parent, proc
        self._places = places = find_places(parent, proc)
        unified = [places.unified] if places.unified else []
        self._parents = list(dict.fromkeys([*places.controllers.values(), *unified]))
        modes = {(False, False): "none", (False, True): "v2", (True, False): "v1", (True, True): "hybrid"}
        self.mode = modes[len(self._parents) > len(unified), bool(unified)]
        self.reason = places.reason()

    @classmethod
    def detect(cls, parent: str = "skerry", proc: str = "/proc/self") -> CgroupManager:
        """Find the hierarchies, make the parent cgroup in each, and on v2 have controllers handed down to it.

        Raises nothing for what the machine lacks. `parent` (`skerry` or `skerry-<word>`) keeps apart daemons
        that do not share their state: each lists the environments under its own parent alone. On v2 this may
        move the calling process to a leaf of its own cgroup: call it before starting children.
        """
        if not _PARENT.fullmatch(parent):
            raise ValueError(f"not a name for the parent cgroup: {parent!r}")
        return cls(parent, proc)

    def create(self, environment_id: str) -> Cgroup:
        """Make an environment's cgroups, without limits.

        Raises InvalidRequest for an id of another form, and LaunchFailed, with step, path and errno in its
        detail, if the kernel refuses; nothing is left behind then.
        """
        cgroup = self._cgroup(environment_id)
        made: list[str] = []
        try:
            for path in cgroup._all:
                self._make(path)
                made.append(path)
        except LaunchFailed:
            for path in made:
                os.rmdir(path)
            raise
        return cgroup

    def _make(self, path: str) -> None:
        try:
            try:
                os.mkdir(path, 0o755)
            except FileNotFoundError:
                find_places(*self._where)  # another daemon with this parent has ended, and closed it
                os.mkdir(path, 0o755)
        except OSError as error:
            raise _failed("make", path, error) from error

    @property
    def unified(self) -> str | None:
        """The cgroup of v2 that environments' cgroups are in."""
        return self._places.unified

    @property
    def io_top(self) -> str:
        """The cgroup of v1's blkio that has ours in it; "" on v2."""
        return os.path.dirname(self._places.controllers.get("blkio", ""))

    def prepare_io(self, device: str) -> None:
        """Let the kernel get ready to limit a device: the first limit takes it 30 ms, all later ones none."""
        places = self._places.controllers
        with contextlib.suppress(OSError):  # then there is no limit, which `io_limits` tells
            if "io" in places:
                write(f"{places['io']}/io.max", _io_max(device, 1 << 20, 0))
                write(f"{places['io']}/io.max", _io_max(device, 0, 0))
            elif "blkio" in places:
                for value in (1 << 20, 0):
                    write(f"{places['blkio']}/blkio.throttle.write_iops_device", f"{device} {value}")

    def open(self, environment_id: str) -> Cgroup:
        """The cgroups of an environment that exists, made by an earlier daemon perhaps.

        Raises InvalidRequest for an id of another form, and EnvironmentNotFound if there are none, except
        where the mode is `none`.
        """
        cgroup = self._cgroup(environment_id)
        if cgroup._all and not any(map(os.path.isdir, cgroup._all)):
            raise EnvironmentNotFound(f"environment {environment_id} has no cgroups")
        return cgroup

    def close(self) -> None:
        """Remove the parent cgroups where they are empty. A daemon that ends for good calls this."""
        for parent in self._parents:
            with contextlib.suppress(OSError):
                os.rmdir(parent)

    def list(self) -> list[str]:
        """Ids of the environments that have a cgroup left in any hierarchy."""
        names = {name for parent in self._parents if os.path.isdir(parent) for name in os.listdir(parent)}
        ids = (name.removeprefix("skerry-") for name in names if name.startswith("skerry-"))
        return sorted(filter(_ENVIRONMENT_ID.fullmatch, ids))

    def _cgroup(self, environment_id: str) -> Cgroup:
        if not _ENVIRONMENT_ID.fullmatch(environment_id):
            raise InvalidRequest(f"not an environment id: {environment_id!r}", hint="12 of a-z and 0-9")
        return Cgroup(environment_id, self._places, f"skerry-{environment_id}")


def cpu_quota(millicores: int) -> tuple[int, int]:
    """(quota, period) in µs: 100 ms periods, or 1 s ones where the quota would be under the kernel's 1 ms."""
    period = 100_000 if millicores >= 10 else 1_000_000
    return millicores * period // 1000, period


def _io_max(device: str, operations: int, bandwidth: int) -> str:
    iops, bps = operations or "max", bandwidth or "max"
    return f"{device} rbps={bps} wbps={bps} riops={iops} wiops={iops}"


def _open_counter(path: str) -> int:
    if path.endswith(_PEAKS):
        with contextlib.suppress(PermissionError):
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)  # v2 resets the peak for the fd that writes
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _number(raw: bytes | None) -> int | None:
    return int(raw) if raw else None


def _failed(step: str, path: str, error: OSError) -> LaunchFailed:
    hints = {
        errno.EACCES: FIX,
        errno.EPERM: FIX,
        errno.EROFS: "the cgroup filesystem is mounted read-only; mount it writable",
        errno.EEXIST: "an environment with this id has left its cgroup behind; remove that first",
        errno.ENOENT: "the parent cgroup is gone; restart the daemon",
        errno.EINVAL: "the limit is above that of a cgroup further up, or the kernel does not take it",
        errno.ENOSPC: "the kernel cannot make more cgroups; delete environments",
        errno.EAGAIN: "cgroup.max.descendants further up is reached; raise it, or delete environments",
    }
    return LaunchFailed(
        f"cannot {step} {path}: {error.strerror}",
        hint=hints.get(error.errno or 0, "the kernel's log may say more"),
        detail={"step": f"cgroup: {step}", "path": path, "errno": error.errno},
    )
