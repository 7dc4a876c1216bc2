"""A virtual machine for one environment, as data: its definition, QEMU's arguments, and the steps on both sides of it.

The monitor is in an environment that has nothing but what it needs. Its first process is the native helper, which
starts the monitor and a file server, and passes connections on to the machine; in the machine the native helper is the
first process, too, and the guest is its child (see native/launch.c).

The environment's root, a directory that all of them share and none can write:

    /usr, /lib, ...   the host's programs    /export/rootfs     the image
    /boot             kernel, RAM disk       /export/layers     what can only be read below /run
    /ctl              the servers' sockets   /program           a workspace that can only be read
    /dev, /proc

The machine has /export, and /program if there is one, from a file server each (virtio-fs), a disk for the workspace if
it is to be on disk, a network device if it is to have a network, a serial port, and nothing else.
"""

from __future__ import annotations

import functools
import math
import os
import subprocess
from dataclasses import dataclass

from skerry.errors import LaunchFailed
from skerry.host import plan
from skerry.host.launcher import HELPER, Step, encode_steps
from skerry.host.netlink import MAC, MACHINE_ADDRESSES
from skerry.policy import MIB, Limits

MONITOR = "/usr/bin/qemu-system-x86_64"
SERVER = "/usr/lib/qemu/virtiofsd"
LINKED = ("bin", "lib", "lib32", "lib64", "sbin")
"""Where programs look for their libraries; links into /usr."""
_DIRECTORIES = (
    "boot",
    "ctl",
    "dev",
    "export/layers",
    "export/rootfs",
    "kvm",
    "proc",
    "program",
    "usr",
)

_DEVICE_LINKS = (("kvm", "/kvm/kvm"),)
_SYSCTLS = (("net/ipv4/tcp_orphan_retries", "4"),)
"""Six seconds instead of a hundred. What the daemon has closed and a machine does not confirm counts against a limit of
the host's."""

KERNEL_MEMORY = 64 * MIB
"""What the machine has for its kernel, beside a 32nd of the rest for its page tables."""
_TRANSLATIONS = 64
"""MiB for translated code, without KVM."""
_SERVER_FILES = 1 << 20
"""The server keeps a descriptor for each file that the machine's kernel remembers."""

# Descriptors that `native/machine.c` has at these numbers, and those of the monitor.
COUNTER_FD, DISK_FD = 8, 9
_MONITOR_WIRE, _MONITOR_DISK, _MONITOR_TAP, _SERVED = 3, 4, 5, 3
_SERVED_DIRECTORIES = {"export": "always", "program": "auto"}
"""By tag, how long the machine remembers what it has seen: what comes into /program later must be found."""
_SERVER_LACKS = ("chown", "dac_override", "fowner", "fsetid", "setgid", "setuid", "mknod", "setfcap")

# Slots of `monitor_steps`.
_LOG, _ANSWERS, _STEPS, _COUNTER, _FILTER, _FIRST = range(6)

# Without a clock chip its driver would look for one for a second.
_KERNEL_LINE = (
    "initcall_blacklist=cmos_init tsc=reliable cryptomgr.notests console=ttyS0 quiet loglevel=3 panic=-1 reboot=t"
    " cgroup_no_v1=all rdinit=/init -- boot"
)
_NETWORK_WITHOUT = ",".join(
    f"{name}=off"
    for name in (
        *("ctrl_vq", "ctrl_rx", "ctrl_rx_extra", "ctrl_vlan", "ctrl_mac_addr", "ctrl_guest_offloads"),
        *("guest_announce", "mq"),
    )
)
"""What the device could do beside passing frames on."""
_GROUP = "/cgroups/skerry"
_DISK_OPTIONS = "nobarrier,discard,noinit_itable,errors=remount-ro"


@dataclass(frozen=True, slots=True)
class VirtualMachine:
    """What any monitor needs to know of a machine."""

    cpus: int
    memory: int
    disk: bool
    program: bool = False
    network: bool = False
    kernel: str = "/boot/kernel"
    initrd: str = "/boot/initrd"
    line: str = _KERNEL_LINE
    disk_operations: int = 0
    """Each second; 0: no limit. Reads and writes are counted apart."""
    disk_bytes: int = 0

    @classmethod
    def of(
        cls,
        limits: Limits,
        *,
        disk: bool = False,
        program: bool = False,
        network: bool = False,
        disk_operations: int,
        disk_bytes: int,
    ) -> VirtualMachine:
        memory = (limits.memory + KERNEL_MEMORY + limits.memory // 32 + MIB - 1) // MIB * MIB
        return cls(
            min(math.ceil(limits.cpus), os.cpu_count() or 1),
            memory,
            disk,
            program,
            network,
            disk_operations=disk_operations,
            disk_bytes=disk_bytes,
        )

    @property
    def directories(self) -> list[str]:
        """The tags of those that it gets from a server."""
        return ["export", "program"] if self.program else ["export"]

    def qemu(self, accelerator: str) -> list[str]:
        """The arguments of QEMU, `kvm` or `tcg`."""
        kvm = accelerator == "kvm"
        size = f"{self.memory // MIB}M"
        sandbox = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
        found = [
            *(
                MONITOR,
                "-nodefaults",
                "-no-user-config",
                "-no-reboot",
                "-display",
                "none",
                "-sandbox",
                sandbox,
            ),
            *(
                "-machine",
                "microvm,rtc=off,memory-backend=ram",
                "-global",
                "virtio-mmio.force-legacy=false",
                "-m",
                size,
                "-smp",
                str(self.cpus),
            ),
            *("-object", f"memory-backend-memfd,id=ram,size={size},share=on"),
            *("-accel", "kvm" if kvm else f"tcg,thread=multi,tb-size={_TRANSLATIONS}"),
            # Emulated, a `rep movsb` moves a byte at a time: the kernel shall use larger units.
            *("-cpu", "host" if kvm else "max,-erms,-fsrm"),
            *("-kernel", self.kernel, "-initrd", self.initrd),
            *("-append", self.line if kvm else f"tsc_early_khz={tick_rate()} {self.line}"),
            *("-chardev", "stdio,id=log,signal=off", "-serial", "chardev:log"),
            *("-chardev", f"socket,id=wire,fd={_MONITOR_WIRE}"),
            *("-device", "virtio-serial-device", "-device", "virtserialport,chardev=wire"),
        ]
        for tag in self.directories:
            found += ["-chardev", f"socket,id={tag},path=/ctl/{tag}"]
            found += ["-device", f"vhost-user-fs-device,chardev={tag},tag={tag}"]
        if self.disk:
            given = {
                **{f"iops-{way}": self.disk_operations for way in ("read", "write")},
                **{f"bps-{way}": self.disk_bytes for way in ("read", "write")},
            }
            limits = "".join(f",throttling.{name}={value}" for name, value in given.items() if value)
            kind = "format=raw,cache=unsafe,discard=unmap,detect-zeroes=unmap"
            found += ["-add-fd", f"fd={_MONITOR_DISK},set=1"]
            found += ["-drive", f"if=none,id=disk,file=/dev/fdset/1,auto-read-only=off,{kind}{limits}"]
            found += ["-device", "virtio-blk-device,drive=disk"]
        if self.network:
            found += ["-netdev", f"tap,id=net,fd={_MONITOR_TAP}"]
            found += ["-device", f"virtio-net-device,netdev=net,mac={MAC.hex(':')},{_NETWORK_WITHOUT}"]
        return found


@functools.cache
def tick_rate() -> int:
    """Ticks of the CPU's counter in a millisecond. Without KVM a machine has no clock to find it out by.

    Takes 50 ms the first time. Raises LaunchFailed.
    """
    told = subprocess.run([HELPER, "ticks"], capture_output=True, text=True, check=False)
    if told.returncode != 0:
        raise LaunchFailed("the rate of the CPU's counter cannot be measured")
    return int(told.stdout)


def make_base(path: str) -> None:
    """The root of such environments. Raises OSError."""
    for name in _DIRECTORIES:
        os.makedirs(f"{path}/{name}", mode=0o755, exist_ok=True)
    for name in LINKED:
        if os.path.islink(f"/{name}") and not os.path.lexists(f"{path}/{name}"):
            os.symlink(os.readlink(f"/{name}").lstrip("/"), f"{path}/{name}")


def make_least_image(path: str) -> None:
    """The least that can be the root of a machine. Raises OSError."""
    for name in ("dev", "proc", "run", "tmp", "workspace"):
        os.makedirs(f"{path}/{name}", mode=0o755, exist_ok=True)


def blank_steps(uid_base: int, tasks_files: list[str], cgroup: str | None) -> bytes:
    """As plan.blank_steps, with all of /proc and with capabilities, which only the server keeps for a moment."""
    return plan.blank_steps(
        uid_base,
        tasks_files,
        cgroup,
        for_runtime=True,
        files=_SERVER_FILES,
        links=_DEVICE_LINKS,
        sysctls=_SYSCTLS,
    )


def root_steps(root: plan.Root, *, kvm: bool) -> bytes:
    """To send along: the base, what `root.sources` names, the kernel's directory, /usr, if `kvm` the device."""
    targets = [
        "export/rootfs",
        *(f"export/rootfs/{target.lstrip('/')}" for _, target in root.binds),
        "boot",
        "usr",
        *(["kvm"] if kvm else []),
    ]
    if len(targets) + 1 > plan.SLOTS:
        raise LaunchFailed(f"the image has {len(root.binds) + 1} parts, more than {plan.SLOTS - 3}")
    return encode_steps(
        [
            ("newroot", "0"),
            *(("place", str(slot), target) for slot, target in enumerate(targets, 1)),
            ("move", "dev"),
            ("move", "proc"),
        ]
    )


def monitor_steps(definition: VirtualMachine, accelerator: str, layers: tuple[str, ...]) -> bytes:
    """The steps after `root_steps`.

    To send along: the log, the pipe for answers, the machine's steps, the counter, the seccomp program, then the tap
    if it has a network, the disk or the mount of a workspace that can only be read, if there is one, and the mounts of
    the layers.
    """
    tap = str(_FIRST) if definition.network else "-"
    slot = _FIRST + definition.network
    disk = str(slot) if definition.disk else "-"
    steps: list[Step] = [("tmpfs", "ctl", "mode=0755,size=64k,nr_inodes=16", "noexec")]
    if definition.program:
        steps.append(("place", str(slot), "program"))
    slot += definition.program or definition.disk
    if layers:
        steps.append(("tmpfs", "export/layers", "mode=0755,size=4k,nr_inodes=64", "noexec"))
    for number, name in enumerate(layers, slot):
        steps += [("dir", f"export/layers/{name}", "0755"), ("place", str(number), f"export/layers/{name}")]
    serve = [step for tag in definition.directories for step in _serve(tag)]
    slots = (str(_ANSWERS), str(_LOG), str(_STEPS), str(_COUNTER), disk, tap)
    return encode_steps(
        [
            *steps,
            ("enter",),
            *serve,
            ("bounding",),
            ("drop", str(plan.UID), str(plan.GID), "0"),
            ("allow", "/", "ro"),
            ("allow", "/dev", "rw"),
            ("allow", "/kvm", "rw"),
            ("confine", str(_FILTER)),
            ("machine", *slots, *definition.qemu(accelerator)),
        ]
    )


def _serve(tag: str) -> list[Step]:
    lacks = ":".join(f"-{name}" for name in _SERVER_LACKS)
    cache = _SERVED_DIRECTORIES[tag]
    options = f"source=/{tag},sandbox=chroot,modcaps={lacks},cache={cache},log_level=err"
    server = (SERVER, "-f", f"--fd={_SERVED}", "--rlimit-nofile=0", "-o", options)
    return [
        ("serve", str(_LOG), f"/ctl/{tag}", *server),
        ("chown", f"/ctl/{tag}", str(plan.UID), str(plan.GID)),
    ]


def inner_steps(
    workspace: plan.Workspace,
    limits: Limits,
    orphan: float,
    profile: str,
    layers: tuple[str, ...],
    *,
    network: bool,
) -> bytes:
    """The steps in the machine: those of an environment of namespaces, on the machine's own kernel."""
    disk: list[Step] = []
    if workspace.volume is not None:
        disk = [
            ("mount", "ext4", "/dev/vda", "/disk", "noatime", _DISK_OPTIONS),
            ("chown", f"/disk/{workspace.volume}", str(plan.UID), str(plan.GID)),
        ]
    tags = ["export", "program"] if workspace == PROGRAM else ["export"]
    device: list[Step] = [("drivers", "/network"), ("interface", "eth0", *MACHINE_ADDRESSES.values())]
    resolver: list[Step] = [("tree", "2", "/resolv.conf", "ro"), ("place", "2", "etc/resolv.conf")]
    begin: list[Step] = [
        ("listen", "/guest.sock"),
        *(device if network else []),
        *(("mount", "virtiofs", tag, f"/{tag}", "ro", "") for tag in tags),
        *disk,
        ("write", f"{_GROUP}/memory.max", str(limits.memory)),
        ("write", f"{_GROUP}/pids.max", str(limits.pids)),
        ("write", f"{_GROUP}/cgroup.procs", "0"),
    ]
    root: list[Step] = [
        ("tree", "0", "/export/rootfs", "ro"),
        ("newroot", "0"),
        ("move", "dev"),
        ("move", "proc"),
        *(resolver if network else []),
        ("open", "0", f"/profiles/{profile}"),
        *([("tree", "1", "/disk", "")] if disk else []),
    ]
    sources = tuple((name, f"/export/layers/{name}") for name in layers)
    rest = plan.Plan(workspace, limits, True, orphan, layers=sources, named=True)
    return encode_steps(begin) + plan.stage() + encode_steps(root) + rest.encode()


PROGRAM = plan.Workspace(directory="/program", read_only=True)
"""The workspace of a machine that `deliver` brings a program to."""
