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
from collections.abc import Mapping
from dataclasses import dataclass, replace

from skerry.backends.base import Capabilities, Instance, InstanceSpec, Layer, Sample
from skerry.backends.blanks import READY, REFILL_AFTER, Blank, Blanks
from skerry.backends.enforcement import memory_size, process_limits, shared_files, workspace_limits
from skerry.backends.handover import handed_over
from skerry.backends.instances import InstanceDirectory, Running, list_directories, not_made
from skerry.errors import (
    EnvironmentNotFound,
    InvalidRequest,
    IsolationUnavailable,
    LaunchFailed,
    PlatformError,
)
from skerry.failpoints import hit
from skerry.host import mounts, plan, seccomp, uids
from skerry.host.cgroups import Cgroup, CgroupManager
from skerry.host.cpu_shares import CpuShares
from skerry.host.crowds import Crowds
from skerry.host.disk_shares import DiskShares
from skerry.host.launcher import Helper, step_failed, try_steps
from skerry.host.network import Sockets, catch_all, identity, network_of
from skerry.host.readback import protections, user_limits
from skerry.host.space import Promises, io_limits
from skerry.host.volumes import SUBDIR, Volumes, device_of
from skerry.images.hostroot import HostRoots
from skerry.images.store import Image
from skerry.models import Enforcement, Usage
from skerry.policy import Limits, Policy

ASKED_AT_ONCE = 32
"""Guests asked for their network at once; each takes a thread."""

Rows = list[Enforcement]
Descriptors = list[int]
Paths = list[str]


@dataclass(slots=True)
class _Live:
    cgroup: Cgroup
    running: Running
    uid_base: int | None
    network: int | None = None
    """A descriptor, without root."""
    device: str | None = None
    """The loop device of a workspace on disk."""


@dataclass(frozen=True, slots=True)
class _Facts:
    """Facts about an environment that the kernel does not report."""

    policy: Policy
    workspace: str
    shared: Paths
    """Paths whose locks and watches other environments share."""


class NamespaceBackend:
    name = "namespace"

    def __init__(self, home: str) -> None:
        """Raises IsolationUnavailable when the native helper was not built."""
        self._instances = f"{home}/instances"
        self._rootful = os.geteuid() == 0
        self._helper = Helper()
        # The parent cgroup is this home's alone, so that sweeping never touches another daemon's environments.
        self._cgroups = CgroupManager.detect(f"skerry-{hashlib.sha256(os.fsencode(home)).hexdigest()[:12]}")
        self._crowds = Crowds(self._cgroups.unified)
        self._cpu_shares = CpuShares()
        self._disk_shares = DiskShares(f"{home}/volumes", *io_limits(), cgroups=self._cgroups.io_top)
        self._volumes = (
            Volumes(f"{home}/volumes", spare=READY, attached=self._attached) if self._rootful else None
        )
        if self._volumes is not None and not self._volumes.unavailable():
            self._volumes.want(Limits().disk, Limits().inodes)
        self._host_roots = HostRoots(f"{home}/host")
        self._filters: dict[str, int] = {}
        self._asking = asyncio.Semaphore(ASKED_AT_ONCE)
        self._live: dict[str, _Live] = {}
        self._facts: dict[str, _Facts] = {}
        self._promises = Promises(home)
        os.makedirs(self._instances, mode=0o700, exist_ok=True)
        self._blanks = Blanks(self._instances, self._helper, self._cgroups)
        if self._rootful:
            uids.sweep()

    def _attached(self, device: str) -> None:
        self._cgroups.prepare_io(device)
        self._disk_shares.add(device)

    def capabilities(self) -> Capabilities:
        reason = ""
        try:
            try_steps(self._helper, plan.probe_steps())
        except LaunchFailed as error:
            reason = str(error)
        return Capabilities("namespace", not reason, reason, rootless=not self._rootful)

    def reserve(self) -> str:
        return self._blanks.reserve()

    async def start(self, spec: InstanceSpec) -> Instance:
        policy = spec.policy
        kind = "program" if spec.program else self._workspace_kind(policy)
        filter_fd = self._filter(policy.profile)
        blank = await self._blanks.take(spec.environment_id)
        hit("create.taken")
        with contextlib.ExitStack() as undo:
            undo.callback(blank.end)
            if kind == "disk":
                self._promises.make(blank.id, policy.limits.disk, self._written)
                undo.callback(self._promises.drop, blank.id)
            root = await self._root(spec.image)
            with contextlib.ExitStack() as descriptors:
                blank.launch.send(
                    plan.image_steps(root, self._rootful), self._trees(root, blank, descriptors)
                )
            # From here on the helper works beside us.
            fds = [filter_fd]
            with contextlib.ExitStack() as descriptors:
                workspace = await self._workspace(kind, policy, blank, fds, descriptors)
                device = device_of(fds[-1]) if workspace.volume else None
                self._layers(spec.layers, fds, descriptors)
                rest = plan.Plan(
                    workspace,
                    policy.limits,
                    self._rootful,
                    spec.orphan,
                    self._cgroups.mode == "none",
                    tuple((layer.name, layer.source) for layer in spec.layers),
                )
                blank.launch.send(rest.encode(), fds)
            hit("create.sent")
            blank.launch.keep()
            hit("create.kept")
            blank.cgroup.apply(policy.limits)
            if device is not None:
                self._disk_shares.give(device, blank.cgroup)
            network = None if blank.network is None else identity(blank.network)
            facts = {"workspace": kind, "shared": root.shared, "network": network}
            blank.directory.note(facts)
            hit("create.noted")
            await blank.launch.done()
            shared = [*root.shared, *(why for step, why in blank.launch.weaker if step == "own")]
            if shared != root.shared:
                blank.directory.note({**facts, "shared": shared})
            self._live[blank.id] = _Live(
                blank.cgroup, Running(blank.launch.pid), blank.uid_base, blank.network, device
            )
            self._facts[blank.id] = _Facts(policy, kind, shared)
            undo.pop_all()
        blank.close()
        if self._volumes is not None and kind == "disk":
            limits = policy.limits
            asyncio.get_running_loop().call_later(
                REFILL_AFTER, self._volumes.want, limits.disk, limits.inodes
            )
        return Instance(blank.id, kind, "/workspace")

    def disk(self, policy: Policy) -> int:
        return policy.limits.disk if self._workspace_kind(policy) == "disk" else 0

    def fixed(self, policy: Policy) -> tuple[object, ...]:
        limits, kind = policy.limits, self._workspace_kind(policy)
        by_process = self._cgroups.mode == "none"
        return (
            policy.profile,
            kind,
            limits.disk,
            limits.inodes,
            limits.fds,
            # The sizes of /tmp and /dev/shm follow it, and only root can change these after the start.
            limits.memory if by_process or kind == "memory" or not self._rootful else None,
            limits.pids,
        )

    def settle(self, environment_id: str, policy: Policy) -> None:
        live, facts = self._get(environment_id), self._facts[environment_id]
        if policy.limits != facts.policy.limits:
            live.cgroup.apply(policy.limits)
        if policy.limits.memory != facts.policy.limits.memory:
            self._resize_tmpfs(live, policy.limits.memory)
        self._facts[environment_id] = replace(facts, policy=policy)

    def _resize_tmpfs(self, live: _Live, memory: int) -> None:
        """Raises EnvironmentNotFound, LaunchFailed."""
        handle = live.running.handle
        # Never a workspace in memory here: its entries only serve requests with the same memory limit.
        sizes = plan.tmpfs_sizes(memory, workspace_in_memory=False)
        try:
            root = os.open(f"/proc/{handle.pid}/root", os.O_PATH | os.O_CLOEXEC)
            try:
                if handle.ended():  # else the pid was its own when it was opened
                    raise EnvironmentNotFound("its processes are gone")
                for path, size in sizes.items():
                    mounts.resize_tmpfs(root, path, size)
            finally:
                os.close(root)
        except OSError as error:
            raise LaunchFailed(f"its tmpfs cannot be resized: {error.strerror}") from error

    def share(self, environment_id: str, group: str) -> None:
        if (live := self._live.get(environment_id)) is not None:
            self._cpu_shares.add(group, environment_id, live.cgroup)

    async def adopt(self, spec: InstanceSpec) -> Instance:
        id_ = spec.environment_id
        directory = InstanceDirectory(self._instances, id_)
        record, facts = directory.load(), directory.noted()
        if record is None or facts is None:
            raise LaunchFailed(f"the start of environment {id_} was not finished")
        if (running := Running.from_record(record)) is None:
            raise EnvironmentNotFound("its processes are gone")
        try:
            cgroup = self._cgroups.open(id_)
        except EnvironmentNotFound:
            running.handle.close()
            raise
        self._live[id_] = live = _Live(cgroup, running, record.uid_base)
        cgroup.weigh(1)
        live.device = self._device(running)
        if live.device is not None:
            self._disk_shares.give(live.device, cgroup)
        self._facts[id_] = _Facts(spec.policy, facts["workspace"], facts["shared"])
        if facts["workspace"] == "disk":
            self._promises.keep(id_, spec.policy.limits.disk)
        if not self._rootful:
            async with self._asking:
                live.network = await handed_over(directory, facts.get("network"))
        return Instance(id_, facts["workspace"], "/workspace")

    async def connect(self, environment_id: str) -> socket.socket:
        return InstanceDirectory(self._instances, environment_id).connect()

    async def open_network(self, environment_id: str) -> Sockets:
        live = self._get(environment_id)
        if live.network is None and not self._rootful:
            raise IsolationUnavailable(
                "its network cannot be entered: its guest did not hand it over to this daemon",
                hint="create a new environment",
            )

        def work() -> Sockets:
            if live.network is not None:
                return catch_all(self._helper, live.network, rootful=False)
            network = network_of(live.running.handle.pid)
            try:
                return catch_all(self._helper, network, rootful=True)
            finally:
                os.close(network)

        try:
            return await asyncio.to_thread(work)
        except OSError as error:
            raise IsolationUnavailable(f"its network cannot be entered: {error.strerror}") from error

    def gate(self, environment_id: str, name: str) -> str:
        return InstanceDirectory(self._instances, environment_id).gate(name)

    async def deliver(
        self, environment_id: str, files: Mapping[str, bytes], links: Mapping[str, str]
    ) -> None:
        await asyncio.to_thread(InstanceDirectory(self._instances, environment_id).deliver, files, links)

    async def stop(self, environment_id: str) -> None:
        self._blanks.forget(environment_id)
        self._cpu_shares.remove(environment_id)
        live = self._live.get(environment_id) or self._left_behind(environment_id)
        if live is not None:
            self._hurry(live)
            await live.running.kill()
            # Everything inside died with its process 1; this is for what is still on its way out.
            live.cgroup.kill()
            hit("delete.killed")
            live.cgroup.remove()
            hit("delete.cgroups")
            if live.uid_base is not None:
                uids.release(live.uid_base)
        await asyncio.to_thread(InstanceDirectory(self._instances, environment_id).remove)
        hit("delete.directory")
        last = self._live.pop(environment_id, None)  # of several at once, one closes what is closed once
        self._facts.pop(environment_id, None)
        self._promises.drop(environment_id)
        if live is not None:
            live.running.handle.close()
        if last is not None and last.network is not None:
            os.close(last.network)

    def _hurry(self, live: _Live) -> None:
        """Lift the write-back limit, so that an environment ends sooner."""
        if live.device is not None:
            self._disk_shares.lift(live.device)

    def alive(self, environment_id: str) -> bool:
        live = self._live.get(environment_id)
        return live is not None and not live.running.handle.ended()

    async def wait(self, environment_id: str) -> None:
        await self._get(environment_id).running.handle.wait()

    async def list(self) -> list[str]:
        found = {*list_directories(self._instances), *self._cgroups.list()}
        return sorted(id_ for id_ in found if id_ not in self._blanks)

    def enforced(self, environment_id: str) -> Rows:
        live, facts = self._get(environment_id), self._facts[environment_id]
        pid, limits = live.running.handle.pid, facts.policy.limits
        rows = live.cgroup.enforced()
        if self._cgroups.mode == "none":
            rows += process_limits(limits)
        rows.append(Enforcement("fds", True, str(limits.fds), "RLIMIT_NOFILE of each process"))
        rows += workspace_limits(facts.workspace, facts.policy, rootful=self._rootful)
        if facts.workspace == "disk" and live.device is not None:
            rows += live.cgroup.io_limits(live.device)
        rows.append(Enforcement("network", True, "none", "a network namespace with loopback alone"))
        users = "65536 ids of its own" if self._rootful else "one user: the caller"
        rows += [Enforcement("users", True, users, "a user namespace"), user_limits(pid)]
        return [*rows, shared_files(facts.shared), *protections(pid, facts.policy.profile)]

    async def usage(self, environment_id: str, *, io: bool = True) -> Usage:
        return self._get(environment_id).cgroup.usage(io=io)

    def sample(self, environment_id: str) -> Sample:
        cpu, oom_kills = self._get(environment_id).cgroup.sample()
        return Sample(None if cpu is None else cpu / 1e9, oom_kills)

    def reset_peak(self, environment_id: str) -> None:
        self._get(environment_id).cgroup.reset_peak()

    def prepared(self) -> int:
        return len(self._blanks)

    async def close(self) -> None:
        await self._blanks.close()
        await asyncio.to_thread(self._crowds.close)
        await asyncio.to_thread(self._cpu_shares.close)
        await asyncio.to_thread(self._disk_shares.close)
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

    def _written(self) -> int:
        """Bytes that the workspaces on disk hold now."""
        total = 0
        for id_, facts in self._facts.items():
            live = self._live.get(id_)
            if facts.workspace == "disk" and live is not None:
                with contextlib.suppress(OSError):  # it has just ended
                    # A mount point in a read-only root: nothing inside can put a link in its place.
                    found = os.statvfs(f"/proc/{live.running.handle.pid}/root/workspace")
                    total += (found.f_blocks - found.f_bfree) * found.f_frsize
        return total

    async def _volume(self, policy: Policy, uid_base: int | None) -> int:
        assert self._volumes is not None
        assert uid_base is not None
        owner = uid_base + plan.UID
        size, inodes = policy.limits.disk, policy.limits.inodes
        fd = self._volumes.take_ready(size, inodes, owner, owner)
        if fd is None:
            fd = await asyncio.to_thread(self._volumes.take, size, inodes, owner, owner)
        return fd

    async def _workspace(
        self, kind: str, policy: Policy, blank: Blank, fds: Descriptors, descriptors: contextlib.ExitStack
    ) -> plan.Workspace:
        """What /workspace will be; a mount that is sent along goes to the end of `fds`."""
        if kind == "program":
            directory = blank.directory.place("workspace", 0o755)
            if self._rootful:
                fds.append(self._copy_tree(directory, descriptors))
                with contextlib.suppress(OSError):  # then its files are nobody's, inside
                    mounts.map_ids(fds[-1], blank.user_namespace)
            return plan.Workspace(directory=directory, read_only=True)
        if kind == "disk" and self._volumes is not None:
            fds.append(await self._volume(policy, blank.uid_base))
            descriptors.callback(os.close, fds[-1])
            return plan.Workspace(volume=SUBDIR)
        if kind == "disk":
            return plan.Workspace(directory=blank.directory.place("workspace", 0o755))
        return plan.Workspace(memory=memory_size(policy))

    def _trees(self, root: plan.Root, blank: Blank, descriptors: contextlib.ExitStack) -> Descriptors:
        """With the powers of root, copies of the image's mounts; else the helper makes them. Raises LaunchFailed."""
        found: Descriptors = []
        if not self._rootful:
            return found
        for path, below in root.sources:
            found.append(self._copy_tree(path, descriptors, recursive=below))
        # Files of an image belong to the environment's users, files of the host stay nobody's. A file system without
        # id-mapped mounts shows its files as nobody's too: less pretty, no less safe.
        with contextlib.suppress(OSError):
            mounts.map_ids(found[0], blank.user_namespace)
        return found

    def _layers(self, layers: tuple[Layer, ...], fds: Descriptors, descriptors: contextlib.ExitStack) -> None:
        """With the powers of root, their mounts at the end of `fds`; else the helper makes them."""
        if self._rootful:
            fds += [self._copy_tree(layer.source, descriptors) for layer in layers]

    def _copy_tree(self, path: str, descriptors: contextlib.ExitStack, *, recursive: bool = False) -> int:
        """A mount of it that can only be read, open until `descriptors` are closed. Raises LaunchFailed."""
        try:
            fd = mounts.copy_tree(path, mounts.RDONLY | mounts.NOSUID | mounts.NODEV, recursive=recursive)
        except OSError as error:
            raise step_failed("tree", error.errno or 0, path) from error
        descriptors.callback(os.close, fd)
        return fd

    async def _root(self, image: Image) -> plan.Root:
        if image.rootfs is not None:
            return plan.Root(tree=str(image.rootfs))
        try:
            found = self._host_roots.known()
            if found is None:
                found = await asyncio.to_thread(self._host_roots.current)
        except OSError as error:
            raise not_made("a copy of the host's /etc", error) from error
        return plan.Root(tree=found[0], binds=found[1])

    def _filter(self, profile: str) -> int:
        """A descriptor of the compiled profile. Raises InvalidRequest for an unknown one."""
        program = seccomp.compile_profile(profile)
        if profile not in self._filters:
            fd = os.memfd_create(f"skerry-{profile}", os.MFD_CLOEXEC)
            os.write(fd, program)
            self._filters[profile] = fd
        return self._filters[profile]

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
        return _Live(cgroup, running, record.uid_base if record else None, device=self._device(running))

    def _device(self, running: Running) -> str | None:
        """The loop device of its workspace; None for other workspaces."""
        if self._volumes is not None:
            with contextlib.suppress(OSError):  # it has ended
                device = device_of(f"/proc/{running.handle.pid}/root/workspace")
                return device if device.startswith("7:") else None
        return None
