"""Environments with a virtual machine each: isolation `microvm`.

QEMU runs in the namespaces and cgroups of an environment, as a user without capabilities and under a seccomp filter.
A program that escapes from the machine is still in that environment. In the machine, its own kernel confines the
workload as the host's does on `namespace`. It needs root.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import platform
import re
import socket
import stat
import struct
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from skerry.backends.answers import Answers
from skerry.backends.base import Capabilities, Instance, InstanceSpec, Sample
from skerry.backends.blanks import Blank
from skerry.backends.enforcement import memory_size, workspace_limits
from skerry.backends.instances import InstanceDirectory, not_made
from skerry.backends.local import Descriptors, Live, LocalBackend, Ready
from skerry.backends.machine import Machine
from skerry.errors import IsolationUnavailable, LaunchFailed, SkerryError
from skerry.host import initrd, mounts, plan, seccomp, vm
from skerry.host.cgroups import Cgroup
from skerry.host.network import Sockets, catch_all_of, tap_of
from skerry.host.space import io_limits
from skerry.host.volumes import SUBDIR
from skerry.ids import new_id
from skerry.images.store import Image
from skerry.models import Enforcement, Usage
from skerry.policy import MIB, Limits, Policy

OVERHEAD = 192 * MIB
"""Memory on the host for the monitor and the file server, beside the machine's."""
THREADS = 256
"""Threads on the host."""
START_SECONDS = 90.0
"""Under emulation, beside others that start. With an idle CPU it takes two or three."""
PROBE_SECONDS = {"kvm": 5.0, "tcg": 60.0}
"""By accelerator, the better one first."""
_KVM = "/dev/kvm"
_TAP_CALLS = """
[[calls.ioctl]] # TUNGETIFF
when = [{ arg = 1, is = [0x8004_54D2] }]
then = "allow"
[[calls.ioctl]] # TUNSETOFFLOAD, to none
when = [{ arg = 1, is = [0x4004_54D0] }, { arg = 2, is = [0] }]
then = "allow"
[[calls.ioctl]] # all others of a tap
when = [{ arg = 1, mask = 0xFFC0, is = [0x54C0] }]
then = "ENOTTY"
"""
_PROFILES = {
    "tcg": f'extends = "filters"{_TAP_CALLS}',
    "kvm": f"""
extends = "filters"{_TAP_CALLS}
[[calls.ioctl]] # on the device
then = "allow"
""",
}
"""Of the monitor, which puts a filter of its own on top that takes away forks and new programs."""
LANDLOCK_3 = (6, 2)
"""The first Linux whose Landlock covers truncation."""
_INSTALL = "Debian: `apt-get install qemu-system-x86`"


@dataclass(frozen=True, slots=True)
class Setup:
    """What a machine boots with here."""

    boot: str
    """The directory of kernel and RAM disk."""
    release: str
    accelerator: str
    note: str
    """Why it is not a better one."""


class MicrovmBackend(LocalBackend):
    name = "microvm"
    isolation = "microvm"
    gates = False  # a pipe of the host is a pipe of its own in the machine

    def __init__(self, machine: Machine, kernel: initrd.Kernel | None = None) -> None:
        """`kernel` instead of the one that `initrd.find_kernel` finds."""
        super().__init__(machine)
        self._given = kernel
        self._base = f"{machine.home}/microvm/base"
        self._least = f"{machine.home}/microvm/least"
        self._setup: Setup | None = None
        """What new machines boot with; None while nothing is known to work."""
        self._tried: dict[str, Setup] = {}
        """Of machines that are probes."""
        self._counters: dict[str, int] = {}

    async def capabilities(self) -> Capabilities:
        if reason := missing(self._given):
            return Capabilities(False, reason)
        reasons: list[str] = []
        for accelerator, seconds in PROBE_SECONDS.items():
            try:
                async with asyncio.timeout(seconds):
                    setup = await asyncio.to_thread(self._prepare, accelerator, "; ".join(reasons))
                    await self._try(setup)
            except (SkerryError, TimeoutError) as error:
                reasons.append(f"{accelerator}: {str(error) or f'no answer within {seconds:g} s'}")
            else:
                self._setup = setup
                return Capabilities(True, detail=_how(setup))
        return Capabilities(False, f"no machine boots ({'; '.join(reasons)})")

    def path_rules(self) -> str:
        release = self._setup.release if self._setup is not None else ""
        found = re.match(r"(\d+)\.(\d+)", release)
        recent = found is not None and tuple(map(int, found.groups())) >= LANDLOCK_3
        return "" if recent else f"the machine's kernel {release} is older than Linux 6.2"

    async def _try(self, setup: Setup) -> None:
        """Start the smallest machine there is. Raises SkerryError."""
        id_ = new_id()
        self._machine.unused.add(id_)  # the reaper finds no row of it
        self._tried[id_] = setup
        try:
            image = Image("", "", "rootfs", Path(self._least), {}, 0, 0.0, "")
            await self.start(InstanceSpec(id_, image, Policy(workspace="memory")))
        finally:
            await self.stop(id_)
            del self._tried[id_]
            self._machine.unused.discard(id_)

    def _prepare(self, accelerator: str, note: str) -> Setup:
        """Raises LaunchFailed, IsolationUnavailable."""
        kernel = self._given or initrd.find_kernel()
        try:
            vm.make_base(self._base)
            vm.make_least_image(self._least)
            vm.tick_rate()
            place = initrd.prepare(kernel, f"{self._machine.home}/microvm/boot")
        except OSError as error:
            raise not_made(f"{self._machine.home}/microvm", error) from error
        return Setup(str(place), kernel.release, accelerator, note)

    def _setup_of(self, environment_id: str) -> Setup:
        """Raises IsolationUnavailable while it is not known whether a machine boots here."""
        if (setup := self._tried.get(environment_id) or self._setup) is None:
            raise IsolationUnavailable(
                "it was not tried yet whether a virtual machine boots", hint="try again"
            )
        return setup

    # How it is made.

    async def start(self, spec: InstanceSpec) -> Instance:
        self._setup_of(spec.environment_id)
        return await super().start(spec)

    def blank_steps(self, uid_base: int | None, cgroup: Cgroup) -> bytes:
        assert uid_base is not None
        return vm.blank_steps(uid_base, cgroup.join.tasks_files, cgroup.join.into_dir)

    def root_steps(self, root: plan.Root, spec: InstanceSpec) -> bytes:
        return vm.root_steps(root, kvm=self._setup_of(spec.environment_id).accelerator == "kvm")

    def trees(self, root: plan.Root, blank: Blank, descriptors: ExitStack) -> Descriptors:
        setup = self._setup_of(blank.id)
        base = self.copy_tree(self._base, descriptors)
        with contextlib.suppress(OSError):  # else what is root's belongs to nobody, inside
            mounts.map_ids(base, blank.user_namespace)
        return [
            base,
            *super().trees(root, blank, descriptors),
            self.copy_tree(setup.boot, descriptors),
            self.copy_tree("/usr", descriptors),
            *([_kvm(descriptors)] if setup.accelerator == "kvm" else []),
        ]

    def first(self, spec: InstanceSpec, undo: ExitStack) -> tuple[Descriptors, Ready]:
        answers = Answers("the virtual machine")
        undo.callback(answers.close)
        steps = answers.keep(os.memfd_create("skerry-steps", os.MFD_CLOEXEC))
        os.write(steps, self._inner_steps(spec))
        counter = answers.keep(os.memfd_create("skerry-counter", os.MFD_CLOEXEC))
        os.ftruncate(counter, 8)
        program = answers.keep(os.memfd_create("skerry-filter", os.MFD_CLOEXEC))
        os.write(program, monitor_filter(self._setup_of(spec.environment_id).accelerator))
        fds = [answers.log, answers.sender, steps, counter, program]
        return fds, functools.partial(answers.ready, START_SECONDS)

    def _inner_steps(self, spec: InstanceSpec) -> bytes:
        kind, policy = self.kind(spec), spec.policy
        workspace = {
            "program": vm.PROGRAM,
            "disk": plan.Workspace(volume=SUBDIR),
            "memory": plan.Workspace(memory=memory_size(policy)),
        }[kind]
        names = tuple(layer.name for layer in spec.layers)
        network = policy.network != "none"
        return vm.inner_steps(workspace, policy.limits, spec.orphan, policy.profile, names, network=network)

    def rest_steps(self, spec: InstanceSpec, workspace: plan.Workspace) -> bytes:
        names = tuple(layer.name for layer in spec.layers)
        disk, program = workspace.volume is not None, workspace.directory is not None
        network = spec.policy.network != "none"
        definition = self._definition(spec.policy.limits, disk=disk, program=program, network=network)
        accelerator = self._setup_of(spec.environment_id).accelerator
        return vm.monitor_steps(definition, accelerator, names)

    def _definition(self, limits: Limits, **has: bool) -> vm.VirtualMachine:
        operations, bandwidth = io_limits()
        return vm.VirtualMachine.of(limits, **has, disk_operations=operations, disk_bytes=bandwidth)

    async def workspace(
        self, kind: str, policy: Policy, blank: Blank, fds: Descriptors, descriptors: ExitStack
    ) -> plan.Workspace:
        """With the tap of its network before it."""
        if policy.network != "none":
            fds.append(await asyncio.to_thread(tap_of, self._machine.helper, blank.launch.pid))
            descriptors.callback(os.close, fds[-1])
        if kind != "disk":
            return await super().workspace(kind, policy, blank, fds, descriptors)
        assert self._volumes is not None
        fds.append(await asyncio.to_thread(self._volumes.file, policy.limits.disk, policy.limits.inodes))
        descriptors.callback(os.close, fds[-1])
        return plan.Workspace(volume=SUBDIR)

    def device(self, volume: int) -> str | None:
        return None

    def stored(self, live: Live) -> int:
        return os.stat(f"/proc/{live.running.handle.pid}/fd/{vm.DISK_FD}").st_blocks * 512

    def charged(self, limits: Limits) -> Limits:
        memory = self._definition(limits).memory + OVERHEAD
        return replace(limits, memory=memory, pids=THREADS)

    def fixed(self, policy: Policy) -> tuple[object, ...]:
        return (policy.profile, self.workspace_kind(policy), policy.limits, policy.network == "none")

    async def stop(self, environment_id: str) -> None:
        await super().stop(environment_id)
        if (counter := self._counters.pop(environment_id, None)) is not None:
            os.close(counter)

    # What is known of it.

    async def connect(self, environment_id: str) -> socket.socket:
        return InstanceDirectory(self._instances, environment_id).connect()

    async def open_network(self, environment_id: str) -> Sockets:
        live, policy = self.get(environment_id), self._facts[environment_id].policy
        if policy.network == "none":
            raise IsolationUnavailable(
                "it was created without a network, and its machine has none",
                hint="create it with the network that it will need",
            )
        pid = live.running.handle.pid
        return await asyncio.to_thread(catch_all_of, self._machine.helper, pid, machine=True)

    def sample(self, environment_id: str) -> Sample:
        return replace(super().sample(environment_id), oom_kills=self._oom_kills(environment_id))

    async def usage(self, environment_id: str, *, io: bool = True) -> Usage:
        usage = await super().usage(environment_id, io=io)
        return replace(usage, oom_kills=self._oom_kills(environment_id))

    def _oom_kills(self, environment_id: str) -> int:
        """What the machine's kernel says; that of the host never kills in there, since all memory fits."""
        try:
            if (counter := self._counters.get(environment_id)) is None:
                pid = self.get(environment_id).running.handle.pid
                counter = os.open(
                    f"/proc/{pid}/fd/{vm.COUNTER_FD}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
                )
                self._counters[environment_id] = counter
            return int(min(struct.unpack("<Q", os.pread(counter, 8, 0))[0], 1 << 31))
        except (OSError, struct.error):  # it has ended
            return 0

    def enforced(self, environment_id: str) -> list[Enforcement]:
        live, facts = self.get(environment_id), self._facts[environment_id]
        limits = facts.policy.limits
        inside = "in the machine's kernel"
        rows = [row for row in live.cgroup.enforced() if row.name not in ("memory", "pids")]
        charged = self.charged(limits).memory // MIB
        rows += [
            Enforcement("memory", True, str(limits.memory), f"a cgroup {inside}; on the host {charged} MiB"),
            Enforcement("pids", True, str(limits.pids), f"a cgroup {inside}"),
            Enforcement("fds", True, str(limits.fds), "RLIMIT_NOFILE of each process"),
            *workspace_limits(facts.workspace, facts.policy, rootful=True),
            Enforcement("network", True, "none", "a virtual machine without a network device")
            if facts.policy.network == "none"
            else Enforcement("network", True, "none", "a network device that leads to the daemon alone"),
            Enforcement("users", True, "65536 ids of its own", "a user namespace, for the monitor too"),
            self._kernel_row(live),
            Enforcement("seccomp", True, facts.policy.profile, f"a filter {inside}; another for the monitor"),
            Enforcement("no_new_privs", True, "on", "a flag of every process inside, and of the monitor"),
            Enforcement("capabilities", True, "on", "an empty bounding set of every process inside"),
            Enforcement("landlock", True, "on", f"rules {inside}"),
        ]
        if facts.workspace == "disk":
            operations, bandwidth = io_limits()
            by = "the monitor's, for reads and for writes"
            rows += [
                Enforcement("io_operations", operations > 0, str(operations or ""), by),
                Enforcement("io_bandwidth", bandwidth > 0, str(bandwidth or ""), by),
            ]
        return rows

    def _kernel_row(self, live: Live) -> Enforcement:
        """An earlier daemon may have started it, with another kernel or accelerator."""
        release = self._setup.release if self._setup is not None else "of its own"
        why = self._setup.note if self._setup is not None else ""
        return Enforcement("kernel", True, f"Linux {release}", _monitor(_accelerator_of(live), why))


def _accelerator_of(live: Live) -> str:
    """As the arguments of the running monitor say."""
    first = live.running.handle.pid
    with contextlib.suppress(OSError, ValueError, IndexError):
        for pid in Path(f"/proc/{first}/task/{first}/children").read_text().split():
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"-accel" in words:
                return words[words.index(b"-accel") + 1].decode(errors="replace").partition(",")[0]
    return ""


def missing(kernel: initrd.Kernel | None = None) -> str:
    """What this machine lacks, and what to do about it; nothing if it can be tried."""
    if os.geteuid() != 0:
        return "it needs a daemon that runs as root"
    if platform.machine() != "x86_64":
        return "it is made for x86_64"
    for program in (vm.MONITOR, vm.SERVER):
        if not os.access(program, os.X_OK):
            return f"{program} is missing: {_INSTALL}"
    if not os.path.islink("/lib"):
        return "it needs a host where /lib is a link to /usr/lib"
    try:
        kernel or initrd.find_kernel()
    except IsolationUnavailable as error:
        return str(error)
    return ""


@functools.cache
def monitor_filter(accelerator: str) -> bytes:
    """The seccomp program of QEMU with it."""
    return seccomp.parse_profile(_PROFILES[accelerator]).compile()


def _kvm(descriptors: ExitStack) -> int:
    """A mount with the device alone, for every user: the monitor runs as nobody in particular. Raises LaunchFailed."""
    try:
        device = os.stat(_KVM).st_rdev
        options: dict[str, str | None] = {"mode": "0755", "size": "4k", "nr_inodes": "4"}
        fd = mounts.mount_detached("tmpfs", "kvm", options, mounts.NOSUID | mounts.NOEXEC)
        descriptors.callback(os.close, fd)
        os.mknod("kvm", stat.S_IFCHR, device, dir_fd=fd)
        os.chmod("kvm", 0o666, dir_fd=fd)  # noqa: S103
    except OSError as error:
        raise LaunchFailed(f"{_KVM} cannot be used: {error.strerror}") from error
    return fd


def _monitor(accelerator: str, why: str) -> str:
    how = "QEMU with KVM" if accelerator == "kvm" else "QEMU without KVM, which is slow"
    return f"{how} ({why})" if why else how


def _how(setup: Setup) -> str:
    return f"Linux {setup.release} in {_monitor(setup.accelerator, setup.note)}"
