"""The container of an environment, as data for the engine: all policy of the docker backends."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skerry.host import injected, plan
from skerry.host.cgroups import cpu_quota
from skerry.policy import MIB, Limits

HOSTNAME = "skerry"
ENVIRONMENT, HOME, BACKEND, WORKSPACE, SHARED = (
    f"skerry.{name}" for name in ("environment", "home", "backend", "workspace", "shared")
)
"""Labels."""
RELAY_USER = "65534:65534"
"""Not the workload's, which could signal and trace a relay of its own user."""
_ENGINES_MASKED = ("/proc/asound", "/proc/acpi", "/proc/scsi", "/sys/firmware")
"""What engines mask by themselves and must be named when more is masked; the rest is in plan.MASKED."""
_READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
_ROOTS_CAPABILITIES = ("SETGID", "SETPCAP", "SETUID")
"""Of the guest's start in a kernel that is not the host's."""


@dataclass(frozen=True, slots=True)
class Bind:
    """A file or directory of the engine's machine, to be read only."""

    source: str
    target: str
    beside: str = ""
    """An empty directory. With it, an overlay of both: its locks and watches reach no other environment."""


@dataclass(frozen=True, slots=True)
class Container:
    environment_id: str
    labels: dict[str, str]
    image: str
    volume: str
    """With injected.files."""
    limits: Limits
    """Of what is inside."""
    charged: Limits
    """As the engine enforces them."""
    profile: str
    orphan: float
    memory: int
    """Bytes of a workspace in memory; 0: it is one of `binds`."""
    binds: Sequence[Bind] = ()
    volumes: Sequence[str] = ()
    """That the image declares. An engine gives each a directory on its disk, which has no limit; with us they are empty
    and read-only."""
    gvisor: bool = False
    runtime: str = ""

    @property
    def name(self) -> str:
        return container_name(self.environment_id)

    def body(self) -> dict[str, Any]:
        """What `containers/create` takes."""
        return {
            "Image": self.image,
            "Entrypoint": self._init(),
            "Cmd": [],
            "User": "0:0" if self.gvisor else f"{plan.UID}:{plan.GID}",
            "WorkingDir": "/",
            "Hostname": HOSTNAME,
            "Labels": self.labels,
            "Healthcheck": {"Test": ["NONE"]},  # the image's would be run by the engine
            "AttachStdin": False,
            "NetworkDisabled": False,
            "HostConfig": self._host_config(),
        }

    def _init(self) -> list[str]:
        if self.gvisor:
            return injected.init_as_root(self.profile, self.limits, self.orphan, users=False)
        return injected.init_as_user(self.profile, self.limits, self.orphan)

    def _host_config(self) -> dict[str, Any]:
        quota, period = cpu_quota(self.charged.millicores)
        ulimits = {
            "core": int(plan.NO_DUMPS),
            "nofile": plan.GUEST_FDS,
            "sigpending": plan.PENDING_SIGNALS,
            "msgqueue": plan.MESSAGE_QUEUES,
        }
        sizes = plan.tmpfs_sizes(self.limits.memory, workspace_in_memory=self.memory > 0)
        found: dict[str, Any] = {
            "NetworkMode": "none",
            "IpcMode": "private",
            "PidMode": "",
            "CgroupnsMode": "private",
            "Privileged": False,
            "ReadonlyRootfs": True,
            "CapDrop": ["ALL"],
            "CapAdd": list(_ROOTS_CAPABILITIES) if self.gvisor else [],
            "SecurityOpt": ["no-new-privileges"],
            "Memory": self.charged.memory,
            "MemorySwap": self.charged.memory,
            "CpuQuota": quota,
            "CpuPeriod": period,
            "PidsLimit": self.charged.pids,
            "Ulimits": [{"Name": name, "Soft": value, "Hard": value} for name, value in ulimits.items()],
            "Tmpfs": self._tmpfs(sizes),
            "Mounts": self._mounts(),
            "MaskedPaths": sorted({*_ENGINES_MASKED, "/sys", *(f"/proc/{name}" for name in plan.MASKED)}),
            "ReadonlyPaths": list(_READ_ONLY),
            "Dns": ["127.0.0.1"],
            "DnsSearch": ["."],
            "LogConfig": {"Type": "none"},
            "RestartPolicy": {"Name": "no"},
            "Init": False,
        }
        if self.runtime:
            found["Runtime"] = self.runtime
        return found

    def _tmpfs(self, sizes: Mapping[str, int]) -> dict[str, str]:
        owner = f"uid={plan.UID},gid={plan.GID}"

        def inodes(number: int) -> str:
            # gVisor has no limit of inodes: they take memory, which is limited.
            return "" if self.gvisor else f",nr_inodes={number}"

        root = "mode=0700" if self.gvisor else f"mode=0711,{owner}"
        found = {
            **dict.fromkeys(map(posixpath.normpath, self.volumes), "ro,size=4k"),
            "/tmp": f"exec,mode=1777,size={sizes['tmp']}{inodes(self.limits.inodes)}",  # noqa: S108
            "/dev/shm": f"mode=1777,size={sizes['dev/shm']}{inodes(plan.SHM_INODES)}",  # noqa: S108
            plan.RUN: f"{owner},mode=0700,size={4 * MIB}{inodes(plan.RUN_INODES)}",
            injected.CONTROL: f"{root},size=64k",
        }
        if self.memory:
            found["/workspace"] = f"exec,{owner},mode=0755,size={self.memory}{inodes(self.limits.inodes)}"
        return found

    def _mounts(self) -> list[dict[str, Any]]:
        guest = {
            "Type": "volume",
            "Source": self.volume,
            "Target": injected.GUEST,
            "ReadOnly": True,
            "VolumeOptions": {"NoCopy": True},
        }
        own = [] if self.gvisor else [_terminals()]
        return [guest, *own, *(_overlay(bind) if bind.beside else _bind(bind) for bind in self.binds)]


def container_name(environment_id: str) -> str:
    return f"skerry-{environment_id}"


def _bind(bind: Bind) -> dict[str, Any]:
    return {
        "Type": "bind",
        "Source": bind.source,
        "Target": bind.target,
        "ReadOnly": True,
        "BindOptions": {"NonRecursive": True, "Propagation": "rprivate"},
    }


def _terminals() -> dict[str, Any]:
    """In place of the engine's, which has no limit of its own: the host's is one for all."""
    return _volume(
        "/dev/pts", "devpts", f"nosuid,noexec,newinstance,ptmxmode=0666,mode=0620,max={plan.TERMINALS}"
    )


def _overlay(bind: Bind) -> dict[str, Any]:
    """As a volume without a name, which goes with its container: the engine's own overlays are for images alone."""
    # An overlay without an upper directory can only be read.
    return _volume(bind.target, "overlay", f"lowerdir={bind.source}:{bind.beside}")


def _volume(target: str, kind: str, settings: str) -> dict[str, Any]:
    """A file system of the kernel's, in a volume without a name, which goes with its container."""
    options = {"type": kind, "device": kind, "o": settings}
    return {
        "Type": "volume",
        "Target": target,
        "VolumeOptions": {"NoCopy": True, "DriverConfig": {"Name": "local", "Options": options}},
    }


def binds_of(source: str, target: str, empty: str) -> list[Bind]:
    """A directory, if possible as an overlay with an `empty` one; else with a bind for each mount below it.

    An engine cannot make these read-only all at once.
    """
    if not os.path.isdir(source):
        return [Bind(source, target)]
    with open("/proc/self/mountinfo", errors="surrogateescape") as file:
        points = sorted({line.split(" ")[4] for line in file})
    below = source.rstrip("/") + "/"
    mounted = [point for point in points if point.startswith(below)]
    separators = set(",:\\")
    if empty and not mounted and separators.isdisjoint(source + empty):
        return [Bind(source, target, empty)]
    inside = target.rstrip("/")
    return [
        Bind(source, target),
        *(Bind(point, f"{inside}/{point.removeprefix(below)}") for point in mounted),
    ]
