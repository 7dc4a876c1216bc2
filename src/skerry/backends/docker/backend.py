"""Environments of a Docker Engine, through its API: isolation `namespace`, or `gvisor` with its runtime `runsc`.

The engine makes the namespaces, cgroups and mounts of `container`; inside, the guest is process 1, as everywhere. It
comes with a volume, so that an image needs nothing of it. Where the engine is on this machine and this is root, the
kernel tells all that it tells of other environments, and the guest's socket is reached directly. Of an engine that is
elsewhere we know what its API says, and a `relay` connects us.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import hashlib
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from skerry.backends.base import Capabilities, ImageSource, Instance, InstanceSpec, Sample
from skerry.backends.docker import container, report
from skerry.backends.docker.container import Bind, Container
from skerry.backends.docker.containers import Containers, LiveContainer
from skerry.backends.docker.engine import CONFLICT, NOT_FOUND, Endpoint, EngineClient, EngineRefused
from skerry.backends.docker.images import EngineImages
from skerry.backends.docker.probe import look_at
from skerry.backends.docker.relay import Relays
from skerry.backends.docker.roots import Roots
from skerry.backends.docker.stock import Stock
from skerry.backends.enforcement import memory_size
from skerry.backends.instances import InstanceDirectory, connect_inside, list_directories
from skerry.backends.machine import Machine
from skerry.errors import (
    EnvironmentNotFound,
    GuestFailed,
    InvalidRequest,
    IsolationUnavailable,
    LaunchFailed,
    PlatformError,
    SkerryError,
)
from skerry.failpoints import hit
from skerry.host import injected, readback
from skerry.host.network import Sockets, catch_all_of
from skerry.ids import new_id
from skerry.images.references import Allowed
from skerry.images.store import HOST, Image
from skerry.models import Enforcement, Usage
from skerry.policy import MIB, Limits, Policy

PROBE_SECONDS = 60.0
OVERHEAD, THREADS = 128 * MIB, 256
"""Memory and threads for gVisor itself, beside what the environment may use."""


class DockerBackend:
    name = "docker"
    isolation = "namespace"
    runtime = ""
    """Of the engine; its default, if empty."""
    gvisor = False
    gates = True
    ahead = False  # a trial leaves an image in the engine, which is not ours

    def __init__(self, machine: Machine, endpoint: Endpoint | None = None) -> None:
        """The engine is at `endpoint`, or where the environment variables say. Raises InvalidRequest."""
        self._machine = machine
        self._engine = EngineClient(endpoint or Endpoint.from_environment())
        self._home = hashlib.sha256(os.fsencode(machine.home)).hexdigest()[:12]
        self.images: ImageSource | None = EngineImages(self._engine, Allowed.from_environment())
        self._stock = Stock(self._engine, self._home, gvisor=self.gvisor)
        self._containers = Containers(self._engine, self._home)
        self._relays = Relays(self._engine)
        self._live: dict[str, LiveContainer] = {}
        self._folder = f"{machine.home}/docker"
        """There from the first probe on: without it, this home has no containers."""
        self._roots = Roots(machine, self._engine, self._stock, self._folder, gvisor=self.gvisor)
        self._rootful = machine.rootful
        self._local: bool | None = None
        """True if the engine's processes and files are this machine's; None: not known yet."""
        machine.enter(self.written)

    async def capabilities(self) -> Capabilities:
        if reason := self._engine.endpoint.trouble():
            return Capabilities(False, reason)
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                info = await look_at(self._engine, self.runtime, gvisor=self.gvisor)
                await self._try()
        except SkerryError as error:
            return Capabilities(False, str(error))
        except TimeoutError:
            where = self._engine.endpoint.host
            return Capabilities(
                False, f"the Docker Engine at {where} starts nothing within {PROBE_SECONDS:g} s"
            )
        return Capabilities(
            True,
            rootless="name=rootless" in info.get("SecurityOptions", ()),
            detail=f"Docker Engine {info['ServerVersion']} at {self._engine.endpoint.host}",
        )

    async def _try(self) -> None:
        """Start the smallest environment there is. Raises SkerryError."""
        base = self._roots.base()
        self._stock.forget()
        image = Image("", "base", "rootfs", Path(base), {}, 0, 0.0, "")
        id_ = new_id()
        self._machine.unused.add(id_)  # the reaper finds no row of it
        try:
            await self.start(InstanceSpec(id_, image, Policy(workspace="memory")))
            self._local = self._live[id_].running is not None
        finally:
            await self.stop(id_)
            self._machine.unused.discard(id_)

    def path_rules(self) -> str:
        if self.gvisor:
            return "gVisor has no Landlock"
        return "nothing is known of the engine's kernel" if self._local is False else readback.path_rules()

    def reserve(self) -> str:
        return new_id()

    async def start(self, spec: InstanceSpec) -> Instance:
        id_, policy = spec.environment_id, spec.policy
        kind = "program" if spec.program else self._workspace_kind(policy)
        if id_ in self._live:
            raise LaunchFailed(f"environment {id_} runs already")
        if spec.layers or spec.program:
            self._require_local("packages and programs are directories of the daemon")
        if spec.image.kind == HOST:
            self._require_local("the image 'host' shows files of the daemon's machine")
        directory = InstanceDirectory(self._machine.instances, id_)
        try:
            binds = self._roots.layers(spec.layers)
            directory.make()
            if spec.program:
                binds.append(Bind(directory.place("workspace", 0o755), "/workspace"))
            hit("create.taken")
            try:
                made = await self._create(spec, kind, binds)
            except EngineRefused as error:
                if error.answer != NOT_FOUND:
                    raise
                self._stock.forget()  # somebody has removed the image: once more, with everything made anew
                made = await self._create(spec, kind, binds)
            hit("create.sent")
            await self._containers.run(made)
            live = self._live[id_] = await self._containers.look(id_, policy)
            directory.note({})  # the next daemon tells by it what was lost from what was never there
            hit("create.noted")
        except BaseException as error:
            if isinstance(error, EngineRefused) and error.answer == CONFLICT:
                raise  # the container of that name is another one
            if isinstance(error, EngineRefused):
                self._stock.forget()  # what the engine had of us may be gone
            with contextlib.suppress(SkerryError):  # then the next sweep finds it
                await asyncio.shield(self.stop(id_))
            raise
        return Instance(id_, kind, "/workspace", variables=live.variables)

    async def _create(self, spec: InstanceSpec, kind: str, binds: builtins.list[Bind]) -> str:
        """Make a container; returns the engine's id. Raises EngineRefused, LaunchFailed, IsolationUnavailable."""
        id_, policy = spec.environment_id, spec.policy
        root = await self._roots.of(spec.image)
        return await self._containers.create(
            Container(
                environment_id=id_,
                labels={
                    container.ENVIRONMENT: id_,
                    container.HOME: self._home,
                    container.BACKEND: self.name,
                    container.WORKSPACE: kind,
                    container.SHARED: json.dumps(root.shared),
                },
                image=root.image,
                volume=await self._stock.volume(root.image),
                limits=policy.limits,
                charged=self._charged(policy.limits),
                profile=policy.profile,
                orphan=spec.orphan,
                memory=memory_size(policy) if kind == "memory" else 0,
                binds=[*root.binds, *binds],
                volumes=root.volumes,
                gvisor=self.gvisor,
                runtime=self.runtime,
            )
        )

    def _require_local(self, why: str) -> None:
        """Raises InvalidRequest."""
        if not self._local:
            raise InvalidRequest(
                f"{why}, and the Docker Engine at {self._engine.endpoint.host} is on another machine",
                hint="use an image that was built or imported, without packages; or backend 'namespace'",
            )

    def _charged(self, limits: Limits) -> Limits:
        if not self.gvisor:
            return limits
        return replace(limits, memory=limits.memory + OVERHEAD, pids=2 * limits.pids + THREADS)

    def _workspace_kind(self, policy: Policy) -> str:
        """Raises InvalidRequest."""
        if policy.workspace == "disk":
            raise InvalidRequest(
                f"backend {self.name!r} has no workspaces on disk",
                hint="ask for workspace 'memory', or for backend 'namespace' or 'oci' of a daemon that runs as root",
            )
        return "memory"

    def disk(self, policy: Policy) -> int:
        self._workspace_kind(policy)
        return 0

    def written(self) -> int:
        return 0

    def fixed(self, policy: Policy) -> tuple[object, ...]:
        limits = policy.limits
        by_kernel = bool(self._local) and self._rootful
        return (
            policy.profile,
            self._workspace_kind(policy),
            limits.disk,
            limits.inodes,
            limits.fds,
            limits.memory,
            limits.pids,
            None if by_kernel else limits.millicores,
        )

    def settle(self, environment_id: str, policy: Policy) -> None:
        live = self._get(environment_id)
        if live.cgroup is not None and policy.limits != live.policy.limits:
            live.cgroup.apply(self._charged(policy.limits))
        live.policy = policy

    def share(self, environment_id: str, group: str) -> None:
        live = self._live.get(environment_id)
        if live is not None and live.cgroup is not None and self._rootful:
            self._machine.cpu_shares.add(group, environment_id, live.cgroup)

    async def adopt(self, spec: InstanceSpec) -> Instance:
        id_ = spec.environment_id
        try:
            live = self._live[id_] = await self._containers.look(id_, spec.policy)
        except EnvironmentNotFound as error:
            if InstanceDirectory(self._machine.instances, id_).noted() is None:
                raise LaunchFailed(f"the start of environment {id_} was not finished") from error
            raise
        if live.running is not None:
            self._local = True
        if live.cgroup is not None and self._rootful:
            live.cgroup.weigh(1)
        return Instance(id_, live.workspace, "/workspace", variables=live.variables)

    async def connect(self, environment_id: str) -> socket.socket:
        live = self._live.get(environment_id)
        if live is not None:
            return await self._connect(live)
        try:
            live = await self._containers.look(environment_id, Policy())
        except (EnvironmentNotFound, PlatformError) as error:
            raise GuestFailed(f"the guest cannot be reached: {error.message}") from error
        try:
            return await self._connect(live)
        finally:
            live.close()

    async def _connect(self, live: LiveContainer) -> socket.socket:
        if live.running is not None and self._rootful and not self.gvisor:
            return connect_inside(live.running.handle.pid, injected.SOCKET)
        # Inside gVisor the socket belongs to root, and root there is nobody on the host.
        user = "0:0" if self.gvisor else container.RELAY_USER
        id_, running = live.container, live.running
        ended = self._containers.await_end(id_) if running is None else running.handle.wait()
        return await self._relays.open(id_, user, ended)

    async def open_network(self, environment_id: str) -> Sockets:
        live = self._get(environment_id)
        if self.gvisor:
            raise IsolationUnavailable(
                "its kernel has no network", hint="ask for backend 'oci', or for network 'none'"
            )
        if live.running is None or not self._rootful:
            raise IsolationUnavailable(
                "its network is out of reach: that takes a daemon that runs as root on the engine's machine",
                hint="ask for network 'none', or run the daemon there",
            )
        return await asyncio.to_thread(catch_all_of, self._machine.helper, live.running.handle.pid)

    def gate(self, environment_id: str, name: str) -> str:
        return InstanceDirectory(self._machine.instances, environment_id).gate(name)

    async def deliver(
        self, environment_id: str, files: Mapping[str, bytes], links: Mapping[str, str]
    ) -> None:
        directory = InstanceDirectory(self._machine.instances, environment_id)
        await asyncio.to_thread(directory.deliver, files, links)

    async def stop(self, environment_id: str) -> None:
        live = self._live.get(environment_id)
        self._machine.cpu_shares.remove(environment_id)
        try:
            await self._containers.remove(environment_id)
        except IsolationUnavailable:
            # Nothing of it runs on, at least; the engine's record of it is removed when it answers again.
            if live is not None and live.running is not None and self._rootful:
                await live.running.kill()
            raise
        hit("delete.killed")
        await asyncio.to_thread(InstanceDirectory(self._machine.instances, environment_id).remove)
        hit("delete.directory")
        self._live.pop(environment_id, None)
        if live is not None:
            live.close()

    def alive(self, environment_id: str) -> bool:
        live = self._live.get(environment_id)
        if live is None:
            return False
        if live.running is not None:
            return not live.running.handle.ended()
        return live.watch is not None and not live.watch.done()

    async def wait(self, environment_id: str) -> None:
        live = self._get(environment_id)
        if live.running is not None:
            await live.running.handle.wait()
        elif live.watch is not None:
            await asyncio.wait((live.watch,))

    async def list(self) -> list[str]:
        if not await asyncio.to_thread(os.path.isdir, self._folder):
            return []
        found = {*list_directories(self._machine.instances), *await self._containers.list(self.name)}
        return sorted(id_ for id_ in found if id_ not in self._machine.unused)

    def enforced(self, environment_id: str) -> builtins.list[Enforcement]:
        live = self._get(environment_id)
        pid = live.running.handle.pid if live.running is not None else None
        rows = report.limits_of(live.config) if live.cgroup is None else live.cgroup.enforced()
        if self.gvisor:
            rows = report.without_overhead(rows, live.policy.limits, OVERHEAD)
        return rows + report.protections_of(
            live.policy, live.workspace, live.shared, live.config, pid=pid, gvisor=self.gvisor
        )

    async def usage(self, environment_id: str, *, io: bool = True) -> Usage:
        live = self._get(environment_id)
        if live.cgroup is not None:
            return live.cgroup.usage(io=io)
        params = {"stream": "0", "one-shot": "1"}
        return report.usage_of(
            await self._engine.call("GET", f"containers/{live.container}/stats", params=params)
        )

    def sample(self, environment_id: str) -> Sample:
        live = self._get(environment_id)
        if live.cgroup is None:
            return Sample(None, 0)
        cpu, oom_kills = live.cgroup.sample()
        return Sample(None if cpu is None else cpu / 1e9, oom_kills)

    def reset_peak(self, environment_id: str) -> None:
        live = self._get(environment_id)
        if live.cgroup is not None:
            live.cgroup.reset_peak()

    def prepared(self) -> int:
        return 0

    async def close(self) -> None:
        await self._relays.close()
        for live in self._live.values():
            live.close()
        await self._stock.close()
        await self._engine.close()
        await self._machine.leave(self.written)

    def _get(self, environment_id: str) -> LiveContainer:
        live = self._live.get(environment_id)
        if live is None:
            raise EnvironmentNotFound(f"no environment {environment_id} runs here")
        return live


class DockerGvisorBackend(DockerBackend):
    name = "docker-runsc"
    isolation = "gvisor"
    runtime = "runsc"
    gvisor = True
