"""The list of steps that makes an environment: all policy of the namespace backend, as data for native/launch.c."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from skerry.host.launcher import Step
from skerry.policy import MIB, Limits

UID = GID = 1000
"""`appuser` inside."""
RUN = "/run"

CAPABILITIES_KEPT = 1 << 5 | 1 << 6 | 1 << 7
"""By the guest alone, in its own user namespace: kill, setgid, setuid."""

_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_LINKS = (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2"), ("ptmx", "pts/ptmx"))

_MASKED = (
    *("acpi", "asound", "scsi", "driver", "tty", "dynamic_debug", "pressure"),
    *("kcore", "kmsg", "keys", "key-users", "kallsyms", "kpagecount", "kpageflags", "kpagecgroup", "modules"),
    *("sysrq-trigger", "timer_list", "timer_stats", "latency_stats", "sched_debug", "iomem", "ioports"),
    *("vmallocinfo", "slabinfo", "config.gz", "cmdline", "interrupts", "softirqs", "diskstats", "partitions"),
)
"""Below /proc: what tells of the host, or lets one act on it."""
_READ_ONLY = ("bus", "fs", "irq", "sys")

RLIMIT_CORE, RLIMIT_NOFILE = 4, 7
GUEST_FDS = 16384


@dataclass(frozen=True, slots=True)
class Root:
    """What the environment sees as `/`: a stored tree, or an empty one with parts of the host in it."""

    tree: str | None = None
    binds: tuple[tuple[str, str], ...] = ()
    symlinks: tuple[tuple[str, str], ...] = ()
    files: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Workspace:
    """One of: a mount that the daemon prepared, a directory of the host, or memory."""

    mount_fd: int | None = None
    mount_subdirectory: str = ""
    directory: str | None = None
    memory: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    root: Root
    workspace: Workspace
    limits: Limits
    uid_base: int | None
    """The first id of the host's range; None: without root, a single user."""
    tasks_files: list[str] = field(default_factory=list)
    cgroup: str | None = None
    rlimits: bool = False
    """Without cgroups: what rlimits can do must do."""

    def steps(self) -> list[Step]:
        return [
            *self._process(),
            *self._sources(),
            *(("tasks", path) for path in self.tasks_files),
            *self._root(),
            *self._devices(),
            *self._proc(),
            *self._writable(),
            ("seal",),
            ("pivot",),
            ("hostname", "skerry"),
            ("loopback",),
            ("rlimit", str(RLIMIT_CORE), "0"),
            ("rlimit", str(RLIMIT_NOFILE), str(GUEST_FDS)),
            # Late, so that an idle environment is not charged for what its mounts cost the kernel.
            ("join",),
            ("drop", str(UID), str(GID), str(CAPABILITIES_KEPT if self.rootful else 0)),
            ("allow", "/", "ro"),
            *(("allow", path, "rw") for path in ("/workspace", "/tmp", "/dev", "/proc", RUN)),  # noqa: S108
            ("confine",),
            self._guest(),
        ]

    @property
    def rootful(self) -> bool:
        return self.uid_base is not None

    def _process(self) -> list[Step]:
        if self.uid_base is not None:
            ids = f"0 {self.uid_base} 65536"
            steps: list[Step] = [("mode", "rootful"), ("map", ids, ids)]
        else:
            steps = [("mode", "rootless"), ("map", f"{UID} {os.geteuid()} 1", f"{GID} {os.getegid()} 1")]
        return [*steps, ("cgroup", self.cgroup)] if self.cgroup else steps

    def _trees(self) -> list[tuple[str, str, str]]:
        """(source, target, flags) of everything that is bound from the host; the index is the slot."""
        trees = []
        if self.root.tree is not None:
            # Files of an image belong to the environment's users; files of the host stay nobody's.
            trees.append((self.root.tree, "", "ro,idmap"))
        trees += [(source, target, "ro,rec" if os.path.isdir(source) else "ro") for source, target in self.root.binds]
        trees += [(f"/dev/{name}", f"dev/{name}", "dev") for name in _DEVICES]
        if self.workspace.directory is not None:
            trees.append((self.workspace.directory, "workspace", ""))
        return trees

    def _sources(self) -> Iterable[Step]:
        return [("tree", str(slot), source, flags) for slot, (source, _, flags) in enumerate(self._trees())]

    def _place(self, target: str) -> Step:
        slot = next(slot for slot, tree in enumerate(self._trees()) if tree[1] == target)
        return ("place", str(slot), target)

    def _root(self) -> list[Step]:
        if self.root.tree is not None:
            return [("newroot", "tree", "0")]
        steps: list[Step] = [("newroot", "tmpfs", "mode=0755,size=4m,nr_inodes=4096")]
        made: set[str] = set()

        def parents(path: str) -> None:
            for end in (i for i, c in enumerate(path) if c == "/"):
                if path[:end] not in made:
                    made.add(path[:end])
                    steps.append(("dir", path[:end], "0755"))

        for name in ("dev", "proc", "run", "tmp", "workspace"):
            made.add(name)
            steps.append(("dir", name, "0755"))
        for source, target in self.root.binds:
            target = target.lstrip("/")
            parents(target)
            steps.append(("dir", target, "0755") if os.path.isdir(source) else ("file", target, ""))
            made.add(target)
        for path, link in self.root.symlinks:
            parents(path.lstrip("/"))
            steps.append(("symlink", path.lstrip("/"), link))
        for path, content in self.root.files:
            parents(path.lstrip("/"))
            steps.append(("file", path.lstrip("/"), content))
        return steps + [self._place(target) for _, target in self.root.binds]

    def _devices(self) -> list[Step]:
        return [
            ("tmpfs", "dev", "mode=0755,size=64k,nr_inodes=64", "noexec"),
            *(("file", f"dev/{name}", "") for name in _DEVICES),
            *(("symlink", f"dev/{name}", target) for name, target in _LINKS),
            ("dir", "dev/pts", "0755"),
            ("dir", "dev/shm", "0755"),
            *(self._place(f"dev/{name}") for name in _DEVICES),
            ("devpts", "dev/pts"),
        ]

    def _proc(self) -> list[Step]:
        return [
            ("proc", "proc"),
            *(("mask", f"proc/{name}") for name in _MASKED),
            *(("readonly", f"proc/{name}") for name in _READ_ONLY),
        ]

    def _writable(self) -> list[Step]:
        limits = self.limits
        owner = f"uid={UID},gid={GID}"
        inodes = f"nr_inodes={limits.inodes}"
        shared = min(64 * MIB, limits.memory // 4)
        steps: list[Step] = [
            ("tmpfs", "dev/shm", f"mode=1777,size={shared},nr_inodes=4096", "noexec"),
            ("tmpfs", "tmp", f"mode=1777,size={limits.memory // 2},{inodes}", ""),
            ("tmpfs", RUN.lstrip("/"), f"{owner},mode=0700,size=4m,nr_inodes=512", "noexec"),
        ]
        if self.workspace.mount_fd is not None:
            steps.append(("mountfd", str(self.workspace.mount_fd), "workspace", self.workspace.mount_subdirectory))
        elif self.workspace.directory is not None:
            steps.append(self._place("workspace"))
        else:
            steps.append(("tmpfs", "workspace", f"{owner},mode=0755,size={self.workspace.memory},{inodes}", ""))
        return steps

    def _guest(self) -> Step:
        limits = self.limits
        return (
            "guest",
            "workspace=/workspace",
            "tmp=/tmp",
            f"run={RUN}",
            f"uid={UID}",
            f"gid={GID}",
            f"switch={int(self.rootful)}",
            f"fds={limits.fds}",
            f"processes={limits.pids if self.rlimits else '-'}",
            f"data={limits.memory if self.rlimits else '-'}",
            f"file_size={limits.disk if self.workspace.directory is not None else '-'}",
        )


def bare_steps(workspace: str, tmp: str, run: str, limits: Limits) -> list[Step]:
    """The guest as an ordinary process, without isolation: for the fake backend."""
    return [
        ("mode", "bare"),
        ("rlimit", str(RLIMIT_CORE), "0"),
        (
            "guest",
            f"workspace={workspace}",
            f"tmp={tmp}",
            f"run={run}",
            f"uid={os.geteuid()}",
            f"gid={os.getegid()}",
            "switch=0",
            f"fds={limits.fds}",
            "processes=-",
            "data=-",
            "file_size=-",
        ),
    ]
