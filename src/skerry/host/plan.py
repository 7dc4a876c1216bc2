"""The lists of steps that make an environment: all policy of the namespace backend, as data for native/launch.c.

There are three. `blank_steps` makes what every environment has: namespaces, /dev and /proc. It can be done before
anybody asks for an environment. `image_steps` gives it a root, `Plan` a workspace and limits.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

from skerry.errors import LaunchFailed
from skerry.host import uids
from skerry.host.launcher import Step, encode_steps
from skerry.policy import MIB, Limits

UID = GID = 1000
"""`appuser` inside."""
RUN = "/run"

USERS = "65536"

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

MASKED = (
    *("acpi", "asound", "bus", "driver", "dynamic_debug", "fs", "irq", "pressure", "scsi", "tty"),
    *(
        "allocinfo",
        "bootconfig",
        "buddyinfo",
        "cgroups",
        "lock_stat",
        "locks",
        "mdstat",
        "pagetypeinfo",
        "schedstat",
    ),
    *("swaps", "vmstat", "zoneinfo"),
    *("kcore", "kmsg", "keys", "key-users", "kallsyms", "kpagecount", "kpageflags", "kpagecgroup", "modules"),
    *("sysrq-trigger", "timer_list", "timer_stats", "latency_stats", "sched_debug", "iomem", "ioports"),
    *("vmallocinfo", "slabinfo", "config.gz", "cmdline", "interrupts", "softirqs", "diskstats", "partitions"),
    "sys/kernel/random/boot_id",
)
"""Below /proc: what tells of the host or of other environments, or lets one act on it. docs/proc.toml has the rest."""

LANDLOCK: tuple[Step, ...] = (
    ("allow", "/", "ro"),
    *(("allow", path, "rw") for path in ("/workspace", "/tmp", "/dev", "/proc", RUN)),  # noqa: S108
)

# What the kernel counts for all environments together, or for all of one caller: the most that one gets of it.
TERMINALS = 64
INOTIFY = {"instances": 32, "watches": 32768}
PENDING_SIGNALS = 1024
MESSAGE_QUEUES = 256 * 1024

SHM_INODES, RUN_INODES = 4096, 512

RLIMIT_CORE, RLIMIT_NOFILE, RLIMIT_SIGPENDING, RLIMIT_MSGQUEUE = 4, 7, 11, 12
NO_DUMPS = "1"
"""Of RLIMIT_CORE. 0 would only keep files from being written: a core_pattern with a pipe is run all the same."""
GUEST_FDS = 16384

SLOTS = 64
"""The helper's places for descriptors."""
_FILTER_SLOT, _WORKSPACE_SLOT = 0, 1


@dataclass(frozen=True, slots=True)
class Root:
    """The root file system: an image's tree, and parts of the host mounted on it."""

    tree: str
    binds: tuple[tuple[str, str], ...] = ()
    """(source, target)"""

    @property
    def sources(self) -> list[tuple[str, bool]]:
        """(path on the host, whether with what is mounted below), the tree first."""
        return [(self.tree, False), *((source, os.path.isdir(source)) for source, _ in self.binds)]

    @property
    def shared(self) -> list[str]:
        """The parts that an environment cannot have for its own: see `own` in native/launch.c."""
        return [source for source, _ in self.binds if _holds_mounts(source)]


@dataclass(frozen=True, slots=True)
class Workspace:
    """One of: a file system of its own, of which a subdirectory is seen; a directory of the host; or memory."""

    volume: str | None = None
    directory: str | None = None
    memory: int = 0
    read_only: bool = False
    """Of a directory: if rootful, its mount is sent along."""


@dataclass(frozen=True, slots=True)
class Plan:
    workspace: Workspace
    limits: Limits
    rootful: bool
    orphan: float
    """Seconds without a daemon after which it ends by itself."""
    rlimits: bool = False
    """Without cgroups: what rlimits can do must do."""
    layers: tuple[tuple[str, str], ...] = ()
    """Name below RUN, and directory of the host: what can only be read."""
    named: bool = False
    """In a virtual machine: all directories are found by their names, and nobody else has them. Its volume is in the
    slot of the workspace."""

    def encode(self) -> bytes:
        """The steps as the helper reads them, after `image_steps`.

        Descriptors to send along: the seccomp program, the workspace's volume if it has one, and if rootful, the
        mounts of a workspace that can only be read and of the layers.
        """
        return encode_steps(
            [
                *self._writable(),
                ("enter",) if self.rootful else ("pivot",),
                *(((("users", USERS), ("bound",))) if self.named else ()),
                ("drop", str(UID), str(GID), str(CAPABILITIES_KEPT if self.rootful else 0)),
                *LANDLOCK,
                ("confine", str(_FILTER_SLOT)),
                guest_step(
                    self.limits,
                    self.orphan,
                    switch=self.rootful,
                    processes=str(self.limits.pids - _OTHER_USERS * self.rootful),
                    data=str(self.limits.memory) if self.rlimits else "-",
                    file_size=str(self.limits.disk) if self.workspace.directory is not None else "-",
                ),
            ]
        )

    def _writable(self) -> list[Step]:
        limits = self.limits
        owner = f"uid={UID},gid={GID}"
        inodes = f"nr_inodes={limits.inodes}"
        sizes = tmpfs_sizes(limits.memory, workspace_in_memory=self.workspace.memory > 0)
        steps: list[Step] = [
            ("tmpfs", "dev/shm", f"mode=1777,size={sizes['dev/shm']},nr_inodes={SHM_INODES}", "noexec"),
            ("tmpfs", "tmp", f"mode=1777,size={sizes['tmp']},{inodes}", ""),
            ("tmpfs", RUN.lstrip("/"), f"{owner},mode=0700,size=4m,nr_inodes={RUN_INODES}", "noexec"),
        ]
        if self.workspace.volume is not None:
            steps.append(("volume", str(_WORKSPACE_SLOT), "workspace", self.workspace.volume))
        elif self.workspace.directory is not None:
            if not self._sent:
                flags = "ro" if self.workspace.read_only else ""
                steps.append(("tree", str(_WORKSPACE_SLOT), self.workspace.directory, flags))
            steps.append(("place", str(_WORKSPACE_SLOT), "workspace"))
        else:
            size = f"size={self.workspace.memory},nr_inodes={limits.inodes + 1}"  # one is its root
            steps.append(("tmpfs", "workspace", f"{owner},mode=0755,{size}", ""))
        return steps + self._layer_steps()

    @property
    def _sent(self) -> bool:
        """True if the workspace's mount is sent as a descriptor."""
        sent = self.rootful and not self.named
        return self.workspace.volume is not None or (sent and self.workspace.read_only)

    def _layer_steps(self) -> list[Step]:
        by_name = self.named or not self.rootful
        first = _WORKSPACE_SLOT + (self._sent or by_name)
        steps: list[Step] = []
        for slot, (name, source) in enumerate(self.layers, first):
            target = f"{RUN.lstrip('/')}/{name}"
            if by_name:
                steps.append(("tree", str(slot), source, "ro"))
            steps += [("dir", target, "0755"), ("place", str(slot), target)]
            if not self.named:
                steps.append(("own", target))
        return steps


def guest_step(
    limits: Limits,
    orphan: float,
    *,
    switch: bool,
    processes: str = "-",
    data: str = "-",
    file_size: str = "-",
    strangers: bool = False,
    gvisor: bool = False,
) -> Step:
    """The end of a list: become the guest of an environment with a root of its own."""
    return (
        "guest",
        "workspace=/workspace",
        "tmp=/tmp",
        f"run={RUN}",
        f"uid={UID}",
        f"gid={GID}",
        f"switch={int(switch)}",
        f"fds={limits.fds}",
        f"processes={processes}",
        f"data={data}",
        f"file_size={file_size}",
        f"orphan_ms={int(orphan * 1000)}",
        f"strangers={int(strangers)}",
        f"gvisor={int(gvisor)}",
    )


def tmpfs_sizes(memory: int, *, workspace_in_memory: bool) -> dict[str, int]:
    """Bytes by mount point. All tmpfs together stay below the memory limit: filling them ends in ENOSPC, not OOM."""
    return {"tmp": memory // (4 if workspace_in_memory else 2), "dev/shm": min(64 * MIB, memory // 8)}


_OTHER_USERS = 1
"""Processes that are not the workload's user's, at least: the supervisor of each execution. RLIMIT_NPROC is what they
leave of the cgroup's limit. A fork that it refuses costs microseconds; the cgroup refuses one after the copy of the
memory map (ADR 28)."""


def blank_steps(
    uid_base: int | None,
    tasks_files: list[str],
    cgroup: str | None,
    *,
    for_runtime: bool = False,
    files: int = GUEST_FDS,
    links: tuple[tuple[str, str], ...] = (),
    sysctls: tuple[tuple[str, str], ...] = (),
) -> bytes:
    """What comes before everything that depends on an image or a policy.

    `uid_base` is the first id of the host's range; None: without root, a single user. `for_runtime` leaves all of
    /proc to be seen, and capabilities: see `host.bundle`. `files` is the limit of open files, `links` are more of
    them in /dev, `sysctls` more settings of the namespaces.
    """
    if uid_base is not None:
        ids = f"0 {uid_base} {USERS}"
        process: list[Step] = [("mode", "rootful"), ("map", ids, ids), ("owner", str(uids.owner(uid_base)))]
    else:
        process = [("mode", "rootless"), ("map", f"{UID} {os.geteuid()} 1", f"{GID} {os.getegid()} 1")]
    if cgroup:
        process.append(("cgroup", cgroup))
    process += [("tasks", path) for path in tasks_files]
    # With the image's parts as descriptors, nothing of the host's mounts is needed any more.
    leave: list[Step] = [] if uid_base is None else [("pivot",)]
    prepared = stage(for_runtime=for_runtime, files=files, links=links, sysctls=sysctls)
    return encode_steps(process) + prepared + encode_steps(leave)


@functools.cache
def stage(
    *,
    for_runtime: bool = False,
    files: int = GUEST_FDS,
    links: tuple[tuple[str, str], ...] = (),
    sysctls: tuple[tuple[str, str], ...] = (),
) -> bytes:
    """The part of a blank that is the same for all, and in a virtual machine: /dev, /proc and limits."""
    devices = list(enumerate(_DEVICES))
    cover = [("readonly", "proc/sys"), *(("mask", f"proc/{name}") for name in MASKED)]
    return encode_steps(
        [
            *(("tree", str(slot), f"/dev/{name}", "dev") for slot, name in devices),
            ("stage",),
            ("dir", "dev", "0755"),
            ("dir", "proc", "0555"),
            ("tmpfs", "dev", "mode=0755,size=64k,nr_inodes=64", "noexec"),
            *(("file", f"dev/{name}", "") for name in _DEVICES),
            *(("symlink", f"dev/{name}", target) for name, target in (*_LINKS, *links)),
            ("dir", "dev/pts", "0755"),
            ("dir", "dev/shm", "0755"),
            *(("place", str(slot), f"dev/{name}") for slot, name in devices),
            ("devpts", "dev/pts", str(TERMINALS)),
            ("seal", "dev"),
            ("proc", "proc"),
            *(("sysctl", f"user/max_inotify_{name}", str(value)) for name, value in INOTIFY.items()),
            *(("sysctl", name, value) for name, value in sysctls),
            *([] if for_runtime else cover),
            ("hostname", "skerry"),
            ("loopback",),
            ("rlimit", str(RLIMIT_CORE), NO_DUMPS),
            ("rlimit", str(RLIMIT_NOFILE), str(files)),
            ("rlimit", str(RLIMIT_SIGPENDING), str(PENDING_SIGNALS)),
            ("rlimit", str(RLIMIT_MSGQUEUE), str(MESSAGE_QUEUES)),
            *([] if for_runtime else [("bound",)]),
            # Late, so that an idle environment is not charged for what its namespaces cost the kernel.
            ("join",),
        ]
    )


@functools.lru_cache(maxsize=32)
def image_steps(root: Root, rootful: bool) -> bytes:
    """How the parts of one image become the root; made once for each and kept.

    If `rootful`, `root.sources` are to be sent along as descriptors; else the helper finds them by their names.
    """
    if len(root.sources) > SLOTS:
        raise LaunchFailed(f"the image has {len(root.sources)} parts, more than {SLOTS}")
    named = [
        ("tree", str(slot), path, "ro,rec" if below else "ro")
        for slot, (path, below) in enumerate(root.sources)
    ]
    targets = [target.lstrip("/") for _, target in root.binds]
    return encode_steps(
        [
            *(() if rootful else named),
            ("newroot", "0"),
            ("own", "."),
            *(("place", str(slot), target) for slot, target in enumerate(targets, 1)),
            *(("own", target.lstrip("/")) for source, target in root.binds if not _holds_mounts(source)),
            ("move", "dev"),
            ("move", "proc"),
        ]
    )


@functools.lru_cache(maxsize=32)
def _holds_mounts(source: str) -> bool:
    """An overlay shows neither what is mounted below a directory nor a single file."""
    with open("/proc/self/mountinfo") as file:
        points = [line.split(" ")[4] for line in file]
    return not os.path.isdir(source) or any(point.startswith(f"{source}/") for point in points)


def probe_steps() -> bytes:
    """The least that an environment needs: namespaces of this user, and nothing in them."""
    ids = f"{UID} {os.geteuid()} 1", f"{GID} {os.getegid()} 1"
    guest = ("guest", "workspace=/", "tmp=/", "run=/", f"uid={UID}", f"gid={GID}")
    return encode_steps([("mode", "rootless"), ("map", *ids), guest])


def bare_steps(workspace: str, tmp: str, run: str, limits: Limits, orphan: float = 0) -> bytes:
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
        "orphan_ms": str(int(orphan * 1000)),
    }
    guest = ("guest", *(f"{key}={value}" for key, value in settings.items()))
    return encode_steps([("mode", "bare"), ("rlimit", str(RLIMIT_CORE), NO_DUMPS), guest])
