"""What is enforced in a container, and what it uses, from the kernel or from the engine's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from skerry.backends.enforcement import shared_files, workspace_limits
from skerry.host.readback import protections, user_limits
from skerry.models import Enforcement, Usage
from skerry.policy import MIB, Limits, Policy

_BY = "as the Docker Engine says, which is on another machine"


def limits_of(config: Mapping[str, Any]) -> list[Enforcement]:
    """Rows of a HostConfig."""
    quota, period = config.get("CpuQuota") or 0, config.get("CpuPeriod") or 0
    memory, swap = config.get("Memory") or 0, config.get("MemorySwap") or 0
    pids = config.get("PidsLimit") or 0
    return [
        Enforcement("cpu", bool(quota and period), f"{quota / period:g}" if period else "", _BY),
        Enforcement("memory", memory > 0, str(memory), _BY),
        Enforcement("swap", memory > 0 and swap >= memory, str(swap - memory), _BY),
        Enforcement("pids", pids > 0, str(pids), _BY),
    ]


def without_overhead(rows: Sequence[Enforcement], limits: Limits, overhead: int) -> list[Enforcement]:
    """With what is left for the environment, of limits that hold for gVisor too."""
    found = []
    for row in rows:
        if row.name == "memory" and row.enforced:
            by = f"{row.by}, with {overhead // MIB} MiB more for the runtime; at it the environment ends"
            row = replace(row, value=str(limits.memory), by=by)
        elif row.name == "pids" and row.enforced:
            row = replace(row, value=str(limits.pids), by="a cgroup of the environment's own kernel")
        found.append(row)
    return found


def protections_of(
    policy: Policy,
    workspace: str,
    shared: Sequence[str],
    config: Mapping[str, Any],
    *,
    pid: int | None,
    gvisor: bool,
) -> list[Enforcement]:
    """The rows beside cpu, memory, swap and pids. `pid` is of the first process, if it is on this machine."""
    rows = [Enforcement("fds", True, str(policy.limits.fds), "RLIMIT_NOFILE of each process")]
    for row in workspace_limits(workspace, policy, rootful=True):
        if gvisor and row.name == "inodes":
            row = Enforcement("inodes", False, "", "gVisor counts none; they take memory, which is limited")
        rows.append(row)
    rows.append(Enforcement("network", True, "none", "a network namespace with loopback alone"))
    if gvisor:
        return [
            *rows,
            Enforcement("kernel", True, "gVisor", "system calls are answered by a process of its own"),
            Enforcement("seccomp", True, policy.profile, "a filter in the environment's own kernel"),
            Enforcement("no_new_privs", True, "on", "a flag of every process inside"),
            Enforcement("capabilities", True, "on", "an empty bounding set of every process inside"),
            Enforcement("landlock", False, "", "gVisor has none"),
        ]
    rows += [
        Enforcement(
            "users", False, "", "environments of one engine have the same user: uid 1000 of the host"
        ),
        shared_files(shared),
    ]
    if pid is not None:
        return [*rows, user_limits(pid), *protections(pid, policy.profile)]
    dropped, options = config.get("CapDrop") or (), config.get("SecurityOpt") or ()
    return [
        *rows,
        Enforcement("user_limits", False, "", "inotify, message queues and signals are counted for uid 1000"),
        Enforcement("no_new_privs", any("no-new-privileges" in each for each in options), "on", _BY),
        Enforcement("seccomp", True, policy.profile, "a filter that the guest has installed at its start"),
        Enforcement("capabilities", "ALL" in dropped, "on", _BY),
    ]


def usage_of(stats: Mapping[str, Any]) -> Usage:
    """Of an answer of the engine to `stats`."""
    memory, cpu = stats.get("memory_stats") or {}, stats.get("cpu_stats") or {}
    total = (cpu.get("cpu_usage") or {}).get("total_usage")
    blocks = (stats.get("blkio_stats") or {}).get("io_service_bytes_recursive")
    moved = dict.fromkeys(("read", "write"), 0)
    for entry in blocks or ():
        if (name := entry["op"].lower()) in moved:
            moved[name] += entry["value"]
    return Usage(
        cpu_seconds=None if total is None else total / 1e9,
        memory_bytes=memory.get("usage"),
        memory_peak_bytes=memory.get("max_usage"),
        pids=(stats.get("pids_stats") or {}).get("current"),
        io_read_bytes=None if blocks is None else moved["read"],
        io_write_bytes=None if blocks is None else moved["write"],
    )
