"""Environments of Linux namespaces, cgroups, Landlock and seccomp: isolation `namespace`.

As root every environment gets a range of user ids of its own and its workspace a file system of its own. Without
root there is one user inside, which is the caller outside, and what the kernel lets a plain user enforce.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from skerry.backends.base import Capabilities, InstanceSpec
from skerry.backends.enforcement import process_limits, shared_files, workspace_limits
from skerry.backends.handover import handed_over
from skerry.backends.instances import InstanceDirectory
from skerry.backends.local import Descriptors, Live, LocalBackend, Ready
from skerry.backends.machine import Machine
from skerry.errors import EnvironmentNotFound, IsolationUnavailable, LaunchFailed
from skerry.host import mounts, plan
from skerry.host.cgroups import Cgroup
from skerry.host.launcher import try_steps
from skerry.host.network import Sockets, catch_all, catch_all_of
from skerry.host.readback import protections, user_limits
from skerry.models import Enforcement
from skerry.policy import Policy

ASKED_AT_ONCE = 32
"""Guests asked for their network at once; each takes a thread."""

Rows = list[Enforcement]


class NamespaceBackend(LocalBackend):
    name = "namespace"
    isolation = "namespace"

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self._asking = asyncio.Semaphore(ASKED_AT_ONCE)

    async def capabilities(self) -> Capabilities:
        reason = ""
        try:
            try_steps(self._machine.helper, plan.probe_steps())
        except LaunchFailed as error:
            reason = str(error)
        return Capabilities(not reason, reason, rootless=not self._rootful)

    def blank_steps(self, uid_base: int | None, cgroup: Cgroup) -> bytes:
        return plan.blank_steps(uid_base, cgroup.join.tasks_files, cgroup.join.into_dir)

    def root_steps(self, root: plan.Root, spec: InstanceSpec) -> bytes:
        return plan.image_steps(root, self._rootful)

    def first(self, spec: InstanceSpec, undo: ExitStack) -> tuple[Descriptors, Ready]:
        return [self._machine.filter(spec.policy.profile)], _nothing_more

    def rest_steps(self, spec: InstanceSpec, workspace: plan.Workspace) -> bytes:
        layers = tuple((layer.name, layer.source) for layer in spec.layers)
        no_cgroups = self._cgroups.mode == "none"
        rest = plan.Plan(workspace, spec.policy.limits, self._rootful, spec.orphan, no_cgroups, layers)
        return rest.encode()

    def fixed(self, policy: Policy) -> tuple[object, ...]:
        limits, kind = policy.limits, self.workspace_kind(policy)
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
        before = self._facts.get(environment_id)
        super().settle(environment_id, policy)
        if before is not None and policy.limits.memory != before.policy.limits.memory:
            self._resize_tmpfs(self.get(environment_id), policy.limits.memory)

    def _resize_tmpfs(self, live: Live, memory: int) -> None:
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

    async def connect(self, environment_id: str) -> socket.socket:
        return InstanceDirectory(self._instances, environment_id).connect()

    async def inherited_network(self, directory: InstanceDirectory, facts: Mapping[str, Any]) -> int | None:
        if self._rootful:
            return None
        async with self._asking:
            return await handed_over(directory, facts.get("network"))

    async def open_network(self, environment_id: str) -> Sockets:
        live = self.get(environment_id)
        if live.network is None and not self._rootful:
            raise IsolationUnavailable(
                "its network cannot be entered: its guest did not hand it over to this daemon",
                hint="create a new environment",
            )

        helper = self._machine.helper
        if live.network is None:
            return await asyncio.to_thread(catch_all_of, helper, live.running.handle.pid)
        return await asyncio.to_thread(catch_all, helper, live.network, rootful=False)

    def enforced(self, environment_id: str) -> Rows:
        live, facts = self.get(environment_id), self._facts[environment_id]
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


async def _nothing_more() -> None:
    """Its guest listens before the helper says that all steps are done."""
