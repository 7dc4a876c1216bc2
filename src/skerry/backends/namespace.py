"""Environments of Linux namespaces, cgroups, Landlock and seccomp: isolation `namespace`.

As root every environment gets a range of user ids of its own and its workspace a file system of its own. Without
root there is one user inside, which is the caller outside, and what the kernel lets a plain user enforce.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
from dataclasses import dataclass

from skerry.backends.base import Capabilities, Instance, InstanceSpec, Sample
from skerry.backends.instances import InstanceDirectory, Record, Running, list_directories
from skerry.errors import EnvironmentNotFound, InvalidRequest, LaunchFailed, PlatformError
from skerry.host import plan, seccomp, uids
from skerry.host.cgroups import Cgroup, CgroupManager
from skerry.host.launcher import FIRST_EXTRA_FD, Helper, attempt, launch
from skerry.host.processes import start_time
from skerry.host.readback import protections
from skerry.host.volumes import SUBDIR, Volumes
from skerry.images.hostroot import HostRoots
from skerry.images.store import Image
from skerry.models import Enforcement, Usage
from skerry.policy import Limits, Policy

Rows = list[Enforcement]


@dataclass(slots=True)
class _Live:
    cgroup: Cgroup
    running: Running
    uid_base: int | None


class NamespaceBackend:
    name = "namespace"

    def __init__(self, home: str) -> None:
        """Raises IsolationUnavailable when the native helper was not built."""
        self._instances = f"{home}/instances"
        self._rootful = os.geteuid() == 0
        self._helper = Helper()
        # The parent cgroup is this home's alone, so that sweeping never touches another daemon's environments.
        self._cgroups = CgroupManager.detect(f"skerry-{hashlib.sha256(os.fsencode(home)).hexdigest()[:12]}")
        self._volumes = Volumes(f"{home}/volumes") if self._rootful else None
        if self._volumes is not None and not self._volumes.unavailable():
            self._volumes.want(Limits().disk, Limits().inodes)
        self._host_roots = HostRoots(f"{home}/host")
        self._filters: dict[str, int] = {}
        self._live: dict[str, _Live] = {}
        os.makedirs(self._instances, mode=0o700, exist_ok=True)

    def capabilities(self) -> Capabilities:
        reason = ""
        try:
            attempt(self._helper, plan.probe_steps())
        except LaunchFailed as error:
            reason = str(error)
        return Capabilities("namespace", not reason, reason, rootless=not self._rootful)

    async def start(self, spec: InstanceSpec) -> Instance:
        id_, policy = spec.environment_id, spec.policy
        kind = self._workspace_kind(policy)
        filter_fd = self._filter(policy.profile)
        directory = InstanceDirectory(self._instances, id_)
        async with contextlib.AsyncExitStack() as undo:
            directory.make()
            undo.callback(directory.remove)
            cgroup = self._cgroups.create(id_, policy.limits)
            undo.callback(cgroup.remove)
            uid_base = uids.claim() if self._rootful else None
            if uid_base is not None:
                undo.callback(uids.release, uid_base)
            mount_fd = await self._volume(policy, uid_base) if kind == "disk" and self._volumes else None
            try:
                workspace = self._workspace(kind, policy, directory, mount_fd)
                steps = plan.Plan(
                    root=self._root(spec.image),
                    workspace=workspace,
                    limits=policy.limits,
                    uid_base=uid_base,
                    tasks_files=cgroup.join.tasks_files,
                    cgroup=cgroup.join.into_dir,
                    rlimits=self._cgroups.mode == "none",
                ).encode()
                with directory.listen() as listener:
                    extra = [] if mount_fd is None else [mount_fd]
                    pid = await launch(self._helper, steps, listener, filter_fd, extra)
            finally:
                if mount_fd is not None:
                    os.close(mount_fd)
            running = Running(pid)
            undo.push_async_callback(running.kill)
            directory.save(Record(pid, start_time(pid), uid_base))
            if uid_base is not None:
                uids.settle(uid_base, pid)
            enforced = self._enforced(policy, cgroup, pid, kind)
            undo.pop_all()
        self._live[id_] = _Live(cgroup, running, uid_base)
        if mount_fd is not None and self._volumes is not None:
            self._volumes.want(policy.limits.disk, policy.limits.inodes)
        return Instance(id_, kind, "/workspace", enforced)

    async def connect(self, environment_id: str) -> socket.socket:
        return InstanceDirectory(self._instances, environment_id).connect()

    async def stop(self, environment_id: str) -> None:
        live = self._live.get(environment_id) or self._left_behind(environment_id)
        if live is not None:
            await live.running.kill()
            # Everything inside died with its process 1; this is for what is still on its way out.
            live.cgroup.kill()
            live.cgroup.remove()
            if live.uid_base is not None:
                uids.release(live.uid_base)
        await asyncio.to_thread(InstanceDirectory(self._instances, environment_id).remove)
        self._live.pop(environment_id, None)
        if live is not None:
            live.running.handle.close()

    async def wait(self, environment_id: str) -> None:
        await self._get(environment_id).running.handle.wait()

    async def list(self) -> list[str]:
        return sorted({*list_directories(self._instances), *self._cgroups.list()})

    async def usage(self, environment_id: str, *, io: bool = True) -> Usage:
        return self._get(environment_id).cgroup.usage(io=io)

    def sample(self, environment_id: str) -> Sample:
        cpu, oom_kills = self._get(environment_id).cgroup.sample()
        return Sample(None if cpu is None else cpu / 1e9, oom_kills)

    def reset_peak(self, environment_id: str) -> None:
        self._get(environment_id).cgroup.reset_peak()

    async def close(self) -> None:
        if self._volumes is not None:
            await asyncio.to_thread(self._volumes.close)
        for fd in self._filters.values():
            os.close(fd)
        self._filters.clear()
        self._cgroups.close()
        self._helper.close()

    # Parts of starting.

    def _workspace_kind(self, policy: Policy) -> str:
        """`disk` or `memory`. `auto` takes disk only where its limits hold. Raises InvalidRequest."""
        reason = "needs root" if self._volumes is None else self._volumes.unavailable()
        if policy.workspace == "auto":
            return "memory" if reason else "disk"
        if policy.workspace == "disk" and self._rootful and reason:
            raise InvalidRequest(
                f"a disk workspace is not possible here: {reason}", hint="ask for workspace 'memory'"
            )
        return policy.workspace

    async def _volume(self, policy: Policy, uid_base: int | None) -> int:
        assert self._volumes is not None
        assert uid_base is not None
        owner = uid_base + plan.UID
        size, inodes = policy.limits.disk, policy.limits.inodes
        fd = self._volumes.take_ready(size, inodes, owner, owner)
        if fd is None:
            fd = await asyncio.to_thread(self._volumes.take, size, inodes, owner, owner)
        return fd

    def _workspace(
        self, kind: str, policy: Policy, directory: InstanceDirectory, mount_fd: int | None
    ) -> plan.Workspace:
        if mount_fd is not None:
            return plan.Workspace(mount_fd=FIRST_EXTRA_FD, mount_subdirectory=SUBDIR)
        if kind == "disk":
            path = f"{directory.path}/workspace"
            os.mkdir(path, 0o755)
            return plan.Workspace(directory=path)
        return plan.Workspace(memory=_memory_size(policy))

    def _root(self, image: Image) -> plan.Root:
        if image.rootfs is not None:
            return plan.Root(tree=str(image.rootfs))
        tree, binds = self._host_roots.current()
        return plan.Root(tree=tree, binds=binds)

    def _filter(self, profile: str) -> int:
        """A descriptor of the compiled profile. Raises InvalidRequest for an unknown one."""
        program = seccomp.compile_profile(profile)
        if profile not in self._filters:
            fd = os.memfd_create(f"skerry-{profile}", os.MFD_CLOEXEC)
            os.write(fd, program)
            self._filters[profile] = fd
        return self._filters[profile]

    def _enforced(self, policy: Policy, cgroup: Cgroup, pid: int, kind: str) -> Rows:
        limits = policy.limits
        rows = cgroup.enforced()
        if self._cgroups.mode == "none":
            rows += [
                Enforcement("memory_per_process", True, str(limits.memory), "RLIMIT_DATA"),
                Enforcement("pids_of_user", True, str(limits.pids), "RLIMIT_NPROC, in this user namespace"),
            ]
        rows.append(Enforcement("fds", True, str(limits.fds), "RLIMIT_NOFILE of each process"))
        if kind == "memory":
            size = str(_memory_size(policy))
            rows.append(Enforcement("disk", True, size, "size of the tmpfs at /workspace"))
            rows.append(Enforcement("inodes", True, str(limits.inodes), "nr_inodes of the tmpfs"))
        elif self._rootful:
            rows.append(Enforcement("disk", True, str(limits.disk), "a file system of that size"))
            rows.append(Enforcement("inodes", True, str(limits.inodes), "a file system with so many inodes"))
        else:
            rows.append(
                Enforcement("disk", False, "", "without root only each file is limited (RLIMIT_FSIZE)")
            )
            rows.append(Enforcement("inodes", False, "", "without root a directory has no inode limit"))
        rows.append(Enforcement("network", True, "none", "a network namespace with loopback alone"))
        users = "65536 ids of its own" if self._rootful else "one user: the caller"
        rows.append(Enforcement("users", True, users, "a user namespace"))
        return rows + protections(pid, policy.profile)

    def _get(self, environment_id: str) -> _Live:
        live = self._live.get(environment_id)
        if live is None:
            raise EnvironmentNotFound(f"no environment {environment_id} runs here")
        return live

    def _left_behind(self, environment_id: str) -> _Live | None:
        """What an earlier daemon left of an environment, adopted so far as is needed to end it."""
        record = InstanceDirectory(self._instances, environment_id).load()
        try:
            cgroup = self._cgroups.open(environment_id)
        except (EnvironmentNotFound, InvalidRequest):
            cgroup = None
        running = Running.from_record(record) if record is not None else None
        if cgroup is not None:
            cgroup.kill()
            if running is None:
                cgroup.remove()
        if record is not None and record.uid_base is not None and running is None:
            uids.release(record.uid_base)
        if running is None:
            return None
        if cgroup is None:
            raise PlatformError(f"environment {environment_id} runs without its cgroups")
        return _Live(cgroup, running, record.uid_base if record else None)


def _memory_size(policy: Policy) -> int:
    """A workspace in memory never takes more than half of the memory limit."""
    return min(policy.limits.disk, policy.limits.memory // 2)
