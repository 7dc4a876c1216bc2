"""Environments of an OCI runtime: `runsc`, with a kernel of their own (isolation `gvisor`).

The runtime itself is confined: it runs in the namespaces and cgroups of an environment, as the root of a range of user
ids that the host knows as nobody in particular. Whoever gets out of it is still inside. It needs no engine, but root.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import re
import shutil
import socket
from asyncio.subprocess import DEVNULL, PIPE
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from skerry.backends.answers import Answers
from skerry.backends.base import Capabilities, InstanceSpec
from skerry.backends.blanks import Blank
from skerry.backends.enforcement import workspace_limits
from skerry.backends.instances import InstanceDirectory, Running, connect_inside, not_made
from skerry.backends.local import Descriptors, Facts, LocalBackend, Ready
from skerry.backends.machine import Machine
from skerry.errors import GuestFailed, IsolationUnavailable, SkerryError
from skerry.host import bundle, injected, mounts, plan
from skerry.host.cgroups import Cgroup
from skerry.host.network import Sockets, catch_all_of
from skerry.ids import new_id
from skerry.images.store import Image
from skerry.models import Enforcement
from skerry.policy import MIB, Limits, Policy

OVERHEAD = 128 * MIB
"""Memory for the runtime itself, beside what the environment may use."""
THREADS = 256
"""Threads of the runtime itself, beside those for each inside."""
THREADS_EACH = 4
"""Threads outside for each inside: two of gVisor's platform, and those that wait in the kernel for it."""
START_SECONDS, PROBE_SECONDS = 30.0, 10.0
PLATFORMS = ("systrap", "ptrace")
"""How gVisor gets at the system calls of what runs in it, the fastest first. `kvm` needs a device that the confined
runtime may not open."""
_OPTIONS = ("--ignore-cgroups", "--host-uds", "create", "--host-fifo", "open", "--overlay2", "none")
_INSTALL = "install runsc (Debian: `apt-get install -t bookworm-backports runsc`; else see gvisor.dev)"


class OciBackend(LocalBackend):
    name = "oci"
    isolation = "gvisor"

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self._base = f"{machine.home}/oci/base"
        self._guest = f"{machine.home}/oci/guest"
        self._prepared = False
        self._runtime = ""
        self._platform = PLATFORMS[0]
        self.release = ""
        """What the runtime says of its version."""

    async def capabilities(self) -> Capabilities:
        if not self._rootful:
            return Capabilities(False, "it needs a daemon that runs as root")
        self._runtime = shutil.which("runsc") or ""
        if not self._runtime:
            return Capabilities(False, f"runsc is not installed: {_INSTALL}")
        reasons = []
        for self._platform in PLATFORMS:
            try:
                async with asyncio.timeout(PROBE_SECONDS):
                    self.release = await _release(self._runtime)
                    await self._try()
                return Capabilities(True, detail=self._kernel())
            except (SkerryError, OSError, TimeoutError) as error:
                why = str(error) or f"no answer within {PROBE_SECONDS:g} s"
                reasons.append(f"{self._platform}: {why}")
        return Capabilities(False, f"{self._runtime} starts nothing ({'; '.join(reasons)})")

    async def _try(self) -> None:
        """Start the smallest environment there is. Raises SkerryError."""
        self._prepare()
        image = Image("", "", "rootfs", Path(self._guest), {}, 0, 0.0, "")
        id_ = new_id()
        self._machine.unused.add(id_)  # the reaper finds no row of it
        try:
            await self.start(InstanceSpec(id_, image, Policy(workspace="memory")))
        finally:
            await self.stop(id_)
            self._machine.unused.discard(id_)

    def blank_steps(self, uid_base: int | None, cgroup: Cgroup) -> bytes:
        assert uid_base is not None
        return bundle.blank_steps(uid_base, cgroup.join.tasks_files, cgroup.join.into_dir)

    def root_steps(self, root: plan.Root, spec: InstanceSpec) -> bytes:
        return bundle.root_steps(root, tuple(layer.name for layer in spec.layers))

    def trees(self, root: plan.Root, blank: Blank, descriptors: ExitStack) -> Descriptors:
        self._prepare()
        base = self.copy_tree(self._base, descriptors)
        guest = self.copy_tree(self._guest, descriptors)
        for fd in (base, guest):  # else what is root's belongs to nobody, inside
            with contextlib.suppress(OSError):
                mounts.map_ids(fd, blank.user_namespace)
        return [
            base,
            *super().trees(root, blank, descriptors),
            guest,
            self.copy_tree(self._runtime, descriptors),
        ]

    def _prepare(self) -> None:
        """Raises LaunchFailed."""
        if self._prepared:
            return
        try:
            bundle.make_base(self._base)
            os.makedirs(self._guest, mode=0o755, exist_ok=True)
            for name, (content, mode) in injected.files(gvisor=True).items():
                _write(f"{self._guest}/{name}", content, mode)
        except OSError as error:
            raise not_made(self._guest, error) from error
        self._prepared = True

    def first(self, spec: InstanceSpec, undo: ExitStack) -> tuple[Descriptors, Ready]:
        answers = Answers("the runtime")
        undo.callback(answers.close)
        return [answers.log, answers.sender], partial(answers.ready, START_SECONDS)

    def rest_steps(self, spec: InstanceSpec, workspace: plan.Workspace) -> bytes:
        policy = spec.policy
        network = "none" if policy.network == "none" else "host"
        runtime = (*_OPTIONS, "--platform", self._platform, "--network", network)
        names = tuple(layer.name for layer in spec.layers)
        rest = bundle.Bundle(
            workspace, policy.limits, spec.orphan, policy.profile, names, runtime, policy.network == "none"
        )
        return rest.encode()

    def charged(self, limits: Limits) -> Limits:
        return replace(limits, memory=limits.memory + OVERHEAD, pids=THREADS_EACH * limits.pids + THREADS)

    def fixed(self, policy: Policy) -> tuple[object, ...]:
        limits, kind = policy.limits, self.workspace_kind(policy)
        return (
            policy.profile,
            kind,
            limits.disk,
            limits.inodes,
            limits.fds,
            limits.memory,
            limits.pids,
            policy.network == "none",
        )

    async def connect(self, environment_id: str) -> socket.socket:
        record = InstanceDirectory(self._instances, environment_id).load()
        if record is None or (running := Running.from_record(record)) is None:
            raise GuestFailed("the guest cannot be reached: its processes are gone")
        try:
            return connect_inside(running.handle.pid, bundle.SOCKET)
        finally:
            running.handle.close()

    async def open_network(self, environment_id: str) -> Sockets:
        live, policy = self.get(environment_id), self._facts[environment_id].policy
        if policy.network == "none":
            raise IsolationUnavailable(
                "it was created without a network, and its kernel has none",
                hint="create it with the network that it will need",
            )

        return await asyncio.to_thread(catch_all_of, self._machine.helper, live.running.handle.pid)

    def path_rules(self) -> str:
        return "gVisor has no Landlock"

    def enforced(self, environment_id: str) -> list[Enforcement]:
        live, facts = self.get(environment_id), self._facts[environment_id]
        limits = facts.policy.limits
        with_runtime = "with {} for the runtime; at it the environment ends"
        rows = []
        for row in live.cgroup.enforced():
            if row.name == "memory":
                by = f"{row.by}, {with_runtime.format(f'{OVERHEAD // MIB} MiB more')}"
                row = replace(row, value=str(limits.memory), by=by)
            elif row.name == "pids":
                row = replace(row, value=str(limits.pids), by="a cgroup of the environment's own kernel")
            rows.append(row)
        rows.append(Enforcement("fds", True, str(limits.fds), "RLIMIT_NOFILE of each process"))
        rows += self._workspace_rows(facts)
        if facts.workspace == "disk" and live.device is not None:
            rows += live.cgroup.io_limits(live.device)
        return [
            *rows,
            Enforcement("network", True, "none", "the environment's own kernel has loopback alone")
            if facts.policy.network == "none"
            else Enforcement("network", True, "none", "a network namespace of the host with loopback alone"),
            Enforcement("users", True, "65536 ids of its own", "a user namespace, for the runtime too"),
            Enforcement("kernel", True, self._kernel(), "system calls are answered by a process of its own"),
            Enforcement("seccomp", True, facts.policy.profile, "a filter in the environment's own kernel"),
            Enforcement("no_new_privs", True, "on", "a flag of every process inside"),
            Enforcement("capabilities", True, "on", "an empty bounding set of every process inside"),
            Enforcement("landlock", False, "", "gVisor has none"),
        ]

    def _kernel(self) -> str:
        return f"gVisor {self.release}{_age(self.release)}, platform {self._platform}"

    def _workspace_rows(self, facts: Facts) -> list[Enforcement]:
        rows = workspace_limits(facts.workspace, facts.policy, rootful=True)
        if facts.workspace != "memory":
            return rows
        unlimited = Enforcement("inodes", False, "", "gVisor counts none; they take memory, which is limited")
        return [unlimited if row.name == "inodes" else row for row in rows]


async def _release(runtime: str) -> str:
    """Raises OSError."""
    asked = await asyncio.create_subprocess_exec(
        runtime, "--version", stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL
    )
    said, _ = await asked.communicate()
    return said.decode(errors="replace").partition("\n")[0].removeprefix("runsc version ")


def _write(path: str, content: bytes, mode: int) -> None:
    """Environments of an earlier daemon may use the file that was there. Raises OSError."""
    with open(f"{path}.new", "wb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(content)
    os.rename(f"{path}.new", path)


def _age(release: str) -> str:
    """` (27 months old)` of a release that is named after its day."""
    found = re.search(r"(20\d\d)(\d\d)\d\d", release)
    if found is None:
        return ""
    today = datetime.date.today()
    months = 12 * (today.year - int(found[1])) + today.month - int(found[2])
    return f" ({months} months old)"
