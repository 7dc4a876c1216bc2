"""The list of steps that makes an environment: all policy of the namespace backend, as data for native/launch.c."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field

from skerry.errors import LaunchFailed
from skerry.host.launcher import Step, encode_steps
from skerry.policy import MIB, Limits

UID = GID = 1000
"""`appuser` inside."""
RUN = "/run"

CAPABILITIES_KEPT = 1 << 5 | 1 << 6 | 1 << 7
"""By the guest alone, in its own user namespace: kill, setgid, setuid."""

_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_LINKS = (
    ("fd", "/proc/self/fd"),
    ("stdin", "fd/0"),
    ("stdout", "fd/1"),
    ("stderr", "fd/2"),
    ("ptmx", "pts/ptmx"),
)

_MASKED = (
    *("acpi", "asound", "scsi", "driver", "tty", "dynamic_debug", "pressure"),
    *("kcore", "kmsg", "keys", "key-users", "kallsyms", "kpagecount", "kpageflags", "kpagecgroup", "modules"),
    *("sysrq-trigger", "timer_list", "timer_stats", "latency_stats", "sched_debug", "iomem", "ioports"),
    *("vmallocinfo", "slabinfo", "config.gz", "cmdline", "interrupts", "softirqs", "diskstats", "partitions"),
)
"""Below /proc: what tells of the host, or lets one act on it."""
_READ_ONLY = ("bus", "fs", "irq", "sys")

# What the kernel counts for all environments together, or for all of one caller: the most that one gets of it.
_TERMINALS = 64
_INOTIFY = {"instances": 32, "watches": 32768}
_PENDING_SIGNALS = 1024
_MESSAGE_QUEUES = 256 * 1024

RLIMIT_CORE, RLIMIT_NOFILE, RLIMIT_SIGPENDING, RLIMIT_MSGQUEUE = 4, 7, 11, 12
NO_DUMPS = "1"
"""Of RLIMIT_CORE. 0 would only keep files from being written: a core_pattern with a pipe is run all the same."""
GUEST_FDS = 16384
WORKSPACE_SLOT = 63
"""The last of the helper's slots for mount trees."""


@dataclass(frozen=True, slots=True)
class Root:
    """What the environment sees as `/`: a tree of ours, and parts of the host that are mounted on it."""

    tree: str
    binds: tuple[tuple[str, str], ...] = ()
    """(source, target)"""


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

    def encode(self) -> bytes:
        """The steps as the helper reads them. What only depends on the image is made once and kept."""
        sources, view = _view(self.root)
        return b"".join(
            (encode_steps(self._process()), sources, encode_steps(self._own_sources()), view, self._rest())
        )

    def _rest(self) -> bytes:
        return encode_steps(
            [
                *self._writable(),
                ("seal", "dev"),
                ("pivot",),
                ("hostname", "skerry"),
                ("loopback",),
                ("rlimit", str(RLIMIT_CORE), NO_DUMPS),
                ("rlimit", str(RLIMIT_NOFILE), str(GUEST_FDS)),
                ("rlimit", str(RLIMIT_SIGPENDING), str(_PENDING_SIGNALS)),
                ("rlimit", str(RLIMIT_MSGQUEUE), str(_MESSAGE_QUEUES)),
                # Late, so that an idle environment is not charged for what its mounts cost the kernel.
                ("join",),
                ("drop", str(UID), str(GID), str(CAPABILITIES_KEPT if self.rootful else 0)),
                ("allow", "/", "ro"),
                *(("allow", path, "rw") for path in ("/workspace", "/tmp", "/dev", "/proc", RUN)),  # noqa: S108
                ("confine",),
                self._guest(),
            ]
        )

    @property
    def rootful(self) -> bool:
        return self.uid_base is not None

    def _process(self) -> list[Step]:
        if self.uid_base is not None:
            ids = f"0 {self.uid_base} 65536"
            steps: list[Step] = [("mode", "rootful"), ("map", ids, ids)]
        else:
            steps = [("mode", "rootless"), ("map", f"{UID} {os.geteuid()} 1", f"{GID} {os.getegid()} 1")]
        if self.cgroup:
            steps.append(("cgroup", self.cgroup))
        return steps + [("tasks", path) for path in self.tasks_files]

    def _own_sources(self) -> list[Step]:
        directory = self.workspace.directory
        return [] if directory is None else [("tree", str(WORKSPACE_SLOT), directory, "")]

    def _writable(self) -> list[Step]:
        limits = self.limits
        owner = f"uid={UID},gid={GID}"
        inodes = f"nr_inodes={limits.inodes}"
        # All that is in memory together stays below the memory limit, so that filling it cannot end the guest.
        temporary = limits.memory // (4 if self.workspace.memory else 2)
        shared = min(64 * MIB, limits.memory // 8)
        steps: list[Step] = [
            ("tmpfs", "dev/shm", f"mode=1777,size={shared},nr_inodes=4096", "noexec"),
            ("tmpfs", "tmp", f"mode=1777,size={temporary},{inodes}", ""),
            ("tmpfs", RUN.lstrip("/"), f"{owner},mode=0700,size=4m,nr_inodes=512", "noexec"),
        ]
        if self.workspace.mount_fd is not None:
            steps.append(
                ("mountfd", str(self.workspace.mount_fd), "workspace", self.workspace.mount_subdirectory)
            )
        elif self.workspace.directory is not None:
            steps.append(("place", str(WORKSPACE_SLOT), "workspace"))
        else:
            size = f"size={self.workspace.memory},nr_inodes={limits.inodes + 1}"  # one is its root
            steps.append(("tmpfs", "workspace", f"{owner},mode=0755,{size}", ""))
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


@functools.lru_cache(maxsize=32)
def _view(root: Root) -> tuple[bytes, bytes]:
    """(where its parts come from, how they are put together), for one image."""
    # (source, target, flags); the index is the slot. Files of an image belong to the environment's users, files of
    # the host stay nobody's.
    trees = [(root.tree, "", "ro,idmap")]
    for source, target in root.binds:
        trees.append((source, target, "ro,rec" if os.path.isdir(source) else "ro"))
    trees += [(f"/dev/{name}", f"dev/{name}", "dev") for name in _DEVICES]
    if len(trees) > WORKSPACE_SLOT:
        raise LaunchFailed(f"the image has {len(trees)} parts, more than {WORKSPACE_SLOT}")
    sources: list[Step] = [
        ("tree", str(slot), source, flags) for slot, (source, _, flags) in enumerate(trees)
    ]
    places: dict[str, Step] = {
        target: ("place", str(slot), target) for slot, (_, target, _) in enumerate(trees)
    }
    view: list[Step] = [
        ("newroot", "0"),
        *(places[target] for _, target in root.binds),
        ("tmpfs", "dev", "mode=0755,size=64k,nr_inodes=64", "noexec"),
        *(("file", f"dev/{name}", "") for name in _DEVICES),
        *(("symlink", f"dev/{name}", target) for name, target in _LINKS),
        ("dir", "dev/pts", "0755"),
        ("dir", "dev/shm", "0755"),
        *(places[f"dev/{name}"] for name in _DEVICES),
        ("devpts", "dev/pts", str(_TERMINALS)),
        ("proc", "proc"),
        *(("sysctl", f"user/max_inotify_{name}", str(value)) for name, value in _INOTIFY.items()),
        *(("mask", f"proc/{name}") for name in _MASKED),
        *(("readonly", f"proc/{name}") for name in _READ_ONLY),
    ]
    return encode_steps(sources), encode_steps(view)


def probe_steps() -> bytes:
    """The least that an environment needs: namespaces of this user, and nothing in them."""
    ids = f"{UID} {os.geteuid()} 1", f"{GID} {os.getegid()} 1"
    guest = ("guest", "workspace=/", "tmp=/", "run=/", f"uid={UID}", f"gid={GID}")
    return encode_steps([("mode", "rootless"), ("map", *ids), guest])


def bare_steps(workspace: str, tmp: str, run: str, limits: Limits) -> bytes:
    """The guest as an ordinary process, without isolation: for the fake backend."""
    settings = {
        "workspace": workspace,
        "tmp": tmp,
        "run": run,
        "uid": str(os.geteuid()),
        "gid": str(os.getegid()),
        "switch": "0",
        "fds": str(limits.fds),
        **dict.fromkeys(("processes", "data", "file_size"), "-"),
    }
    guest = ("guest", *(f"{key}={value}" for key, value in settings.items()))
    return encode_steps([("mode", "bare"), ("rlimit", str(RLIMIT_CORE), NO_DUMPS), guest])
