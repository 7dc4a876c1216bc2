"""What the backends have in common that build an environment on this machine with the native helper.

Each has a process on the host that is its first, cgroups, and as root a range of user ids and a file system for the
workspace. What is inside differs: see `namespace` and `oci`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from skerry.backends.base import ImageSource, Instance, InstanceSpec, Layer, Sample
from skerry.backends.blanks import REFILL_AFTER, Blank, Blanks
from skerry.backends.enforcement import memory_size
from skerry.backends.instances import InstanceDirectory, Running, list_directories, not_made
from skerry.backends.machine import Machine
from skerry.errors import EnvironmentNotFound, InvalidRequest, LaunchFailed, PlatformError
from skerry.failpoints import hit
from skerry.host import mounts, plan, readback, uids
from skerry.host.cgroups import Cgroup
from skerry.host.launcher import step_failed
from skerry.host.network import identity
from skerry.host.processes import below_root
from skerry.host.volumes import SUBDIR, device_of
from skerry.images.store import Image
from skerry.models import Usage
from skerry.policy import Limits, Policy

Descriptors = list[int]
Paths = list[str]
Ready = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class Live:
    cgroup: Cgroup
    running: Running
    uid_base: int | None
    network: int | None = None
    """A descriptor, without root."""
    device: str | None = None
    """The loop device of a workspace on disk."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about an environment that the kernel does not report."""

    policy: Policy
    workspace: str
    shared: Paths
    """Paths whose locks and watches other environments share."""


class LocalBackend(ABC):
    name: str
    isolation: str
    gates = True
    images: ImageSource | None = None
    ahead = True

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._rootful = machine.rootful
        self._cgroups = machine.cgroups
        self._volumes = machine.volumes
        self._instances = machine.instances
        self._live: dict[str, Live] = {}
        self._facts: dict[str, Facts] = {}
        self._blanks = Blanks(machine, self.blank_steps)
        machine.enter(self.written)

    # What a backend does in its own way.

    @abstractmethod
    def blank_steps(self, uid_base: int | None, cgroup: Cgroup) -> bytes:
        """What comes before everything that depends on an image or a policy."""

    @abstractmethod
    def root_steps(self, root: plan.Root, spec: InstanceSpec) -> bytes:
        """How the image becomes the root, of what `trees` gives."""

    @abstractmethod
    def first(self, spec: InstanceSpec, undo: contextlib.ExitStack) -> tuple[Descriptors, Ready]:
        """The first descriptors for `rest_steps`, and what to wait for when all steps are done."""

    @abstractmethod
    def rest_steps(self, spec: InstanceSpec, workspace: plan.Workspace) -> bytes:
        """How the rest is made, of what `first` gives, a mounted workspace and layers."""

    async def inherited_network(self, directory: InstanceDirectory, facts: Mapping[str, Any]) -> int | None:
        """For `Live.network` of an instance that an earlier daemon started."""
        return None

    def charged(self, limits: Limits) -> Limits:
        """What of the host's resources an environment with these limits may take."""
        return limits

    # The contract.

    def path_rules(self) -> str:
        return readback.path_rules()

    def reserve(self) -> str:
        return self._blanks.reserve()

    async def start(self, spec: InstanceSpec) -> Instance:
        policy = spec.policy
        kind = self.kind(spec)
        blank = await self._blanks.take(spec.environment_id)
        hit("create.taken")
        with contextlib.ExitStack() as undo:
            undo.callback(blank.end)
            if kind == "disk":
                self._machine.promises.make(blank.id, policy.limits.disk, self._machine.written)
                undo.callback(self._machine.promises.drop, blank.id)
            root = await self._root(spec.image)
            with contextlib.ExitStack() as descriptors:
                blank.launch.send(self.root_steps(root, spec), self.trees(root, blank, descriptors))
            # From here on the helper works beside us.
            fds, ready = self.first(spec, undo)
            with contextlib.ExitStack() as descriptors:
                workspace = await self.workspace(kind, policy, blank, fds, descriptors)
                device = self.device(fds[-1]) if workspace.volume else None
                self._layers(spec.layers, fds, descriptors)
                blank.launch.send(self.rest_steps(spec, workspace), fds)
            hit("create.sent")
            blank.launch.keep()
            hit("create.kept")
            blank.cgroup.apply(self.charged(policy.limits))
            if device is not None:
                self._machine.disk_shares.give(device, blank.cgroup)
            network = None if blank.network is None else identity(blank.network)
            facts = {"workspace": kind, "shared": root.shared, "network": network}
            blank.directory.note(facts)
            hit("create.noted")
            await blank.launch.done()
            await ready()
            shared = [*root.shared, *(why for step, why in blank.launch.weaker if step == "own")]
            if shared != root.shared:
                blank.directory.note({**facts, "shared": shared})
            self._live[blank.id] = Live(
                blank.cgroup, Running(blank.launch.pid), blank.uid_base, blank.network, device
            )
            self._facts[blank.id] = Facts(policy, kind, shared)
            undo.pop_all()
        blank.close()
        if self._volumes is not None and device is not None:
            limits = policy.limits
            asyncio.get_running_loop().call_later(
                REFILL_AFTER, self._volumes.want, limits.disk, limits.inodes
            )
        return Instance(blank.id, kind, "/workspace")

    def disk(self, policy: Policy) -> int:
        return policy.limits.disk if self.workspace_kind(policy) == "disk" else 0

    def settle(self, environment_id: str, policy: Policy) -> None:
        live, facts = self.get(environment_id), self._facts[environment_id]
        if policy.limits != facts.policy.limits:
            live.cgroup.apply(self.charged(policy.limits))
        self._facts[environment_id] = replace(facts, policy=policy)

    def share(self, environment_id: str, group: str) -> None:
        if (live := self._live.get(environment_id)) is not None:
            self._machine.cpu_shares.add(group, environment_id, live.cgroup)

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
        self._live[id_] = live = Live(cgroup, running, record.uid_base)
        cgroup.weigh(1)
        live.device = self._device(running)
        if live.device is not None:
            self._machine.disk_shares.give(live.device, cgroup)
        self._facts[id_] = Facts(spec.policy, facts["workspace"], facts["shared"])
        if facts["workspace"] == "disk":
            self._machine.promises.keep(id_, spec.policy.limits.disk)
        live.network = await self.inherited_network(directory, facts)
        return Instance(id_, facts["workspace"], "/workspace")

    def gate(self, environment_id: str, name: str) -> str:
        return InstanceDirectory(self._instances, environment_id).gate(name)

    async def deliver(
        self, environment_id: str, files: Mapping[str, bytes], links: Mapping[str, str]
    ) -> None:
        await asyncio.to_thread(InstanceDirectory(self._instances, environment_id).deliver, files, links)

    async def stop(self, environment_id: str) -> None:
        self._blanks.forget(environment_id)
        self._machine.cpu_shares.remove(environment_id)
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
        self._machine.promises.drop(environment_id)
        if live is not None:
            live.running.handle.close()
        if last is not None and last.network is not None:
            os.close(last.network)

    def _hurry(self, live: Live) -> None:
        """Lift the write-back limit, so that an environment ends sooner."""
        if live.device is not None:
            self._machine.disk_shares.lift(live.device)

    def alive(self, environment_id: str) -> bool:
        live = self._live.get(environment_id)
        return live is not None and not live.running.handle.ended()

    async def wait(self, environment_id: str) -> None:
        await self.get(environment_id).running.handle.wait()

    async def list(self) -> list[str]:
        found = {*list_directories(self._instances), *self._cgroups.list()}
        return sorted(id_ for id_ in found if id_ not in self._machine.unused)

    async def usage(self, environment_id: str, *, io: bool = True) -> Usage:
        return self.get(environment_id).cgroup.usage(io=io)

    def sample(self, environment_id: str) -> Sample:
        cpu, oom_kills = self.get(environment_id).cgroup.sample()
        return Sample(None if cpu is None else cpu / 1e9, oom_kills)

    def reset_peak(self, environment_id: str) -> None:
        self.get(environment_id).cgroup.reset_peak()

    def prepared(self) -> int:
        return len(self._blanks)

    async def close(self) -> None:
        await self._blanks.close()
        await self._machine.leave(self.written)

    # Parts of starting.

    def kind(self, spec: InstanceSpec) -> str:
        """See Instance.workspace. Raises InvalidRequest."""
        return "program" if spec.program else self.workspace_kind(spec.policy)

    def workspace_kind(self, policy: Policy) -> str:
        """`disk` or `memory`. `auto` takes disk only where its limits hold. Raises InvalidRequest."""
        reason = "needs root" if self._volumes is None else self._volumes.unavailable()
        if policy.workspace == "auto":
            return "memory" if reason else "disk"
        if policy.workspace == "disk" and self._rootful and reason:
            raise InvalidRequest(
                f"a disk workspace is not possible here: {reason}", hint="ask for workspace 'memory'"
            )
        return policy.workspace

    def written(self) -> int:
        """Bytes that its workspaces on disk hold now."""
        total = 0
        for id_, facts in self._facts.items():
            live = self._live.get(id_)
            if facts.workspace == "disk" and live is not None:
                with contextlib.suppress(OSError):  # it has just ended
                    # More is what nobody has promised.
                    total += min(self.stored(live), facts.policy.limits.disk)
        return total

    def stored(self, live: Live) -> int:
        """Bytes that its workspace on disk holds now. Raises OSError."""
        place = below_root(live.running.handle.pid, "workspace")
        try:
            found = os.statvfs(place)
        finally:
            os.close(place)
        return (found.f_blocks - found.f_bfree) * found.f_frsize

    def device(self, volume: int) -> str | None:
        """The loop device of a volume, if it has one."""
        return device_of(volume)

    async def _volume(self, policy: Policy, uid_base: int | None) -> int:
        assert self._volumes is not None
        assert uid_base is not None
        owner = uid_base + plan.UID
        size, inodes = policy.limits.disk, policy.limits.inodes
        fd = self._volumes.take_ready(size, inodes, owner, owner)
        if fd is None:
            fd = await asyncio.to_thread(self._volumes.take, size, inodes, owner, owner)
        return fd

    async def workspace(
        self, kind: str, policy: Policy, blank: Blank, fds: Descriptors, descriptors: contextlib.ExitStack
    ) -> plan.Workspace:
        """What /workspace will be; a mount that is sent along goes to the end of `fds`."""
        if kind == "program":
            directory = blank.directory.place("workspace", 0o755)
            if self._rootful:
                fds.append(self.copy_tree(directory, descriptors))
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

    def trees(self, root: plan.Root, blank: Blank, descriptors: contextlib.ExitStack) -> Descriptors:
        """With the powers of root, copies of the image's mounts; else the helper makes them. Raises LaunchFailed."""
        found: Descriptors = []
        if not self._rootful:
            return found
        for path, below in root.sources:
            found.append(self.copy_tree(path, descriptors, recursive=below))
        # Files of an image belong to the environment's users, files of the host stay nobody's. A file system without
        # id-mapped mounts shows its files as nobody's too: less pretty, no less safe.
        with contextlib.suppress(OSError):
            mounts.map_ids(found[0], blank.user_namespace)
        return found

    def _layers(self, layers: tuple[Layer, ...], fds: Descriptors, descriptors: contextlib.ExitStack) -> None:
        """With the powers of root, their mounts at the end of `fds`; else the helper makes them."""
        if self._rootful:
            fds += [self.copy_tree(layer.source, descriptors) for layer in layers]

    def copy_tree(self, path: str, descriptors: contextlib.ExitStack, *, recursive: bool = False) -> int:
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
            found = self._machine.host_roots.known()
            if found is None:
                found = await asyncio.to_thread(self._machine.host_roots.current)
        except OSError as error:
            raise not_made("a copy of the host's /etc", error) from error
        return plan.Root(tree=found[0], binds=found[1])

    def get(self, environment_id: str) -> Live:
        live = self._live.get(environment_id)
        if live is None:
            raise EnvironmentNotFound(f"no environment {environment_id} runs here")
        return live

    def _left_behind(self, environment_id: str) -> Live | None:
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
        return Live(cgroup, running, record.uid_base if record else None, device=self._device(running))

    def _device(self, running: Running) -> str | None:
        """The loop device of its workspace; None for other workspaces."""
        if self._volumes is not None:
            with contextlib.suppress(OSError):  # it has ended
                place = below_root(running.handle.pid, "workspace")
                try:
                    device = device_of(place)
                finally:
                    os.close(place)
                return device if device.startswith("7:") else None
        return None
