"""Rows of an environment's enforcement report that follow from how it was started."""

from __future__ import annotations

from collections.abc import Iterable

from skerry.models import Enforcement
from skerry.policy import Limits, Policy


def memory_size(policy: Policy) -> int:
    """Bytes of a workspace in memory: never more than half of the memory limit."""
    return min(policy.limits.disk, policy.limits.memory // 2)


def process_limits(limits: Limits) -> list[Enforcement]:
    """Without cgroups: limits of each process, or of the user."""
    return [
        Enforcement("memory_per_process", True, str(limits.memory), "RLIMIT_DATA"),
        Enforcement("pids_of_user", True, str(limits.pids), "RLIMIT_NPROC, in this user namespace"),
    ]


def workspace_limits(workspace: str, policy: Policy, *, rootful: bool) -> list[Enforcement]:
    limits = policy.limits
    if workspace == "program":
        return [Enforcement("workspace", True, "read-only", "a mount that cannot be written")]
    if workspace == "memory":
        return [
            Enforcement("disk", True, str(memory_size(policy)), "size of the tmpfs at /workspace"),
            Enforcement("inodes", True, str(limits.inodes), "nr_inodes of the tmpfs"),
        ]
    if rootful:
        return [
            Enforcement("disk", True, str(limits.disk), "a file system of that size"),
            Enforcement("inodes", True, str(limits.inodes), "a file system with so many inodes"),
        ]
    return [
        Enforcement("disk", False, "", "without root only each file is limited (RLIMIT_FSIZE)"),
        Enforcement("inodes", False, "", "without root a directory has no inode limit"),
    ]


def shared_files(shared: Iterable[str]) -> Enforcement:
    """`shared` are the parts of the root whose locks and watches reach other environments."""
    if listed := ", ".join(shared):
        return Enforcement("shared_files", False, "", f"others can lock and watch: {listed}")
    by = "an overlay: locks and watches do not reach others"
    return Enforcement("shared_files", True, "own", by)
