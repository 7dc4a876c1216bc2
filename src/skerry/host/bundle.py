"""The steps and the bundle with which an OCI runtime gets a guest inside, as data for native/launch.c and the runtime.

The runtime is the first process of an environment that has nothing but what it needs: the bundle, the image below
/rootfs, its own program and somewhere to keep its state. It starts the native helper in the role `init`, which takes
the last steps and becomes the guest; `R` on its stdout says so.

The environment's root, a directory that all of them share and none can write:

    /runtime    the runtime's program        /rootfs     the image
    /guest      what init needs              /workspace  the workspace, if it is a mount
    /bundle     config.json                  /layers     what can only be read below /run
    /places     mount points that an image lacks
    /ctl        the guest's socket           /state, /tmp, /dev, /proc
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from skerry.errors import LaunchFailed
from skerry.host import injected, plan
from skerry.host.launcher import Step, encode_steps
from skerry.policy import Limits

SOCKET = "ctl/guest.sock"
_DIRECTORIES = (
    "bundle",
    "ctl",
    "dev",
    "guest",
    "layers",
    "places",
    "proc",
    "rootfs",
    "state",
    "tmp",
    "workspace",
)
_FIRST = 2
"""The slots before those of the workspace and the layers: the log and the answers."""
_CAPABILITIES = ("CAP_DAC_OVERRIDE", "CAP_KILL", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_ADMIN")
"""What init has until it becomes the guest."""
_TMP_INODES = 4096


def make_base(path: str) -> None:
    """The root of such environments. Raises OSError."""
    os.makedirs(path, mode=0o755, exist_ok=True)
    for name in _DIRECTORIES:
        os.makedirs(f"{path}/{name}", mode=0o755, exist_ok=True)
    with open(f"{path}/runtime", "wb"):
        pass


def blank_steps(uid_base: int, tasks_files: list[str], cgroup: str | None) -> bytes:
    """As plan.blank_steps, but with all of /proc and with capabilities, for a runtime makes namespaces of its own."""
    return plan.blank_steps(uid_base, tasks_files, cgroup, for_runtime=True)


def root_steps(root: plan.Root, layers: tuple[str, ...]) -> bytes:
    """To send along: the base, what `root.sources` names, the guest's things and the runtime's program."""
    targets = [*(f"rootfs/{target.lstrip('/')}" for _, target in root.binds), "guest", "runtime"]
    if len(targets) + 2 > plan.SLOTS:
        raise LaunchFailed(f"the image has {len(root.binds) + 1} parts, more than {plan.SLOTS - 3}")
    # A runtime can mount only on what is there, and no image has these.
    places = [
        injected.INSIDE,
        injected.GUEST,
        injected.CONTROL,
        plan.RUN,
        *(f"{plan.RUN}/{name}" for name in layers),
    ]
    return encode_steps(
        [
            ("newroot", "0"),
            ("tmpfs", "places", "mode=0755,size=4k,nr_inodes=64", "noexec"),
            *(("dir", f"places{place}", "0755") for place in places),
            ("place", "1", "rootfs"),
            ("complete", "rootfs", "places"),
            *(("place", str(slot), target) for slot, target in enumerate(targets, 2)),
            ("move", "dev"),
            ("move", "proc"),
        ]
    )


@dataclass(frozen=True, slots=True)
class Bundle:
    workspace: plan.Workspace
    limits: Limits
    orphan: float
    profile: str
    layers: tuple[str, ...]
    runtime: tuple[str, ...]
    """The arguments of the runtime's program, without those that name the bundle."""
    own_network: bool
    """False: the runtime uses the network namespace that it is in."""

    def encode(self) -> bytes:
        """The steps after `root_steps`.

        To send along: the log, the pipe for answers, and the mounts of the workspace and the layers.
        """
        steps: list[Step] = [
            ("tmpfs", "tmp", f"mode=1777,size=16m,nr_inodes={_TMP_INODES}", ""),
            ("tmpfs", "state", "mode=0700,size=4m,nr_inodes=64", "noexec"),
            ("tmpfs", "ctl", "mode=0700,size=64k,nr_inodes=16", "noexec"),
            ("tmpfs", "bundle", "mode=0755,size=256k,nr_inodes=4", "noexec"),
            ("file", "bundle/config.json", json.dumps(self.config())),
        ]
        slot = _FIRST
        if self.workspace.volume is not None:
            steps.append(("volume", str(slot), "workspace", self.workspace.volume))
            slot += 1
        elif self.workspace.directory is not None:
            steps.append(("place", str(slot), "workspace"))
            slot += 1
        if self.layers:
            steps.append(("tmpfs", "layers", "mode=0755,size=4k,nr_inodes=64", "noexec"))
        for number, name in enumerate(self.layers, slot):
            steps += [("dir", f"layers/{name}", "0755"), ("place", str(number), f"layers/{name}")]
        run = ("--root", "/state", *self.runtime, "run", "--bundle", "/bundle", "skerry")
        steps += [("enter",), ("exec", "1", "0", "/runtime", *run)]
        return encode_steps(steps)

    def config(self) -> dict[str, Any]:
        """config.json of the bundle."""
        capabilities = dict.fromkeys(("bounding", "effective", "permitted"), _CAPABILITIES)
        namespaces = ["pid", "ipc", "uts", "mount", *(["network"] if self.own_network else [])]
        files = {"type": "RLIMIT_NOFILE", "hard": plan.GUEST_FDS, "soft": plan.GUEST_FDS}
        return {
            "ociVersion": "1.0.2",
            "process": {
                "user": {"uid": 0, "gid": 0},
                "args": injected.init_as_root(self.profile, self.limits, self.orphan),
                "cwd": "/",
                "capabilities": capabilities,
                "rlimits": [files],
                "noNewPrivileges": True,
            },
            "root": {"path": "/rootfs", "readonly": True},
            "hostname": "skerry",
            "mounts": self._mounts(),
            "linux": {
                "namespaces": [{"type": kind} for kind in namespaces],
                "resources": {"memory": {"limit": self.limits.memory}},
            },
        }

    def _mounts(self) -> list[dict[str, Any]]:
        owner = (f"uid={plan.UID}", f"gid={plan.GID}")
        sizes = plan.tmpfs_sizes(self.limits.memory, workspace_in_memory=self.workspace.memory > 0)
        found = [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": injected.CGROUPS, "type": "cgroup", "source": "cgroup"},
            _tmpfs("/dev/shm", sizes["dev/shm"], "mode=1777", "noexec"),  # noqa: S108
            _tmpfs("/tmp", sizes["tmp"], "mode=1777"),  # noqa: S108
            _tmpfs(plan.RUN, 4 << 20, "mode=0700", "noexec", *owner),
            _bind(injected.GUEST, "/guest", "ro"),
            _bind(injected.CONTROL, "/ctl", "rw", "noexec"),
            *(_bind(f"{plan.RUN}/{name}", f"/layers/{name}", "ro") for name in self.layers),
        ]
        if self.workspace.memory:
            found.append(_tmpfs("/workspace", self.workspace.memory, "mode=0755", *owner))
        else:
            found.append(_bind("/workspace", "/workspace", "ro" if self.workspace.read_only else "rw"))
        return found


def _tmpfs(destination: str, size: int, *options: str) -> dict[str, Any]:
    kinds = ["nosuid", "nodev", f"size={size}", *options]
    return {"destination": destination, "type": "tmpfs", "source": "tmpfs", "options": kinds}


def _bind(destination: str, source: str, *options: str) -> dict[str, Any]:
    kinds = ["bind", "nosuid", "nodev", *options]
    return {"destination": destination, "type": "bind", "source": source, "options": kinds}
