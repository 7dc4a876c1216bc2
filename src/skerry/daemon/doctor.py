"""What this machine can do, found out by trying: `skerry doctor`.

Each check does the thing itself in small: starts namespaces, makes a cgroup with limits and reads them back,
mounts a volume, and last starts a whole environment and runs a command in it.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import http.client
import json
import os
import platform
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from skerry._version import VERSION
from skerry.backends.base import Backend, InstanceSpec
from skerry.backends.docker.backend import DockerBackend, DockerGvisorBackend
from skerry.backends.machine import Machine
from skerry.backends.microvm import MicrovmBackend
from skerry.backends.namespace import NamespaceBackend
from skerry.backends.oci import OciBackend
from skerry.backends.registry import strength
from skerry.daemon.watchdog import STALL
from skerry.errors import SkerryError
from skerry.guest.channel import Channel
from skerry.guest.start import Start
from skerry.host import plan, seccomp
from skerry.host.cgroups import CgroupManager
from skerry.host.launcher import Helper, try_steps
from skerry.host.readback import landlock
from skerry.host.volumes import Volumes
from skerry.images import definition, preflight
from skerry.images.store import ImageStore
from skerry.models import Enforcement
from skerry.policy import Limits, Policy, format_size
from skerry.settings import Home

OK, WARNING, FAILURE = "ok", "warning", "failure"
SPACE_WANTED = 4 << 30
FILE_SIZE = 184
"""Bytes of the kernel's smallest struct file, on 64 bits."""
ENVIRONMENT_ID = "doctor000000"
ANSWER_SECONDS = 5.0
STALL_MAX = 1.0
"""Seconds. Others notice a stall of the daemon that is longer."""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    status: str
    found: str
    fix: str = ""
    isolation: str = ""
    """That it has shown to work."""

    def told(self) -> dict[str, str]:
        return {"name": self.name, "status": self.status, "found": self.found, "fix": self.fix}


def run(home: Home) -> dict[str, object]:
    """All checks. The result is the answer of `skerry doctor --json`."""
    checks = list(_checks(home))
    given = [check.isolation for check in checks if check.isolation]
    return {
        "version": VERSION,
        "isolation": max(given, key=strength, default="none"),
        "checks": [check.told() for check in checks],
    }


def _checks(home: Home) -> Iterator[Check]:
    yield _kernel()
    yield _guarded("helper", FAILURE, _helper)
    yield _guarded("user namespaces", FAILURE, _user_namespaces)
    yield _guarded("cgroups", WARNING, _cgroups)
    yield _guarded("seccomp", FAILURE, _seccomp)
    yield _landlock()
    yield _guarded("kernel limits", WARNING, _kernel_limits)
    yield _guarded("home", FAILURE, lambda: _home(home))
    yield _guarded("disk workspaces", WARNING, _volumes)
    yield _guarded("image building", WARNING, lambda: _image_building(home))
    yield from _environment()
    yield from _stronger()
    yield _guarded("event loop", WARNING, lambda: _event_loop(home))


def _guarded(name: str, otherwise: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except SkerryError as error:
        return Check(name, otherwise, error.message, error.hint)
    except OSError as error:
        return Check(name, otherwise, str(error))


def _kernel() -> Check:
    system = os.uname()
    found = f"{system.sysname} {system.release}, {system.machine}"
    if system.sysname != "Linux":
        return Check("kernel", FAILURE, found, "Skerry needs Linux 5.12 or newer (a virtual machine will do)")
    return Check("kernel", OK, found)


def _helper() -> Check:
    helper = Helper()
    helper.close()
    return Check("helper", OK, "the native helper is built")


def _user_namespaces() -> Check:
    helper = Helper()
    try:
        try_steps(helper, plan.probe_steps())
    finally:
        helper.close()
    who = "root" if os.geteuid() == 0 else f"uid {os.geteuid()}"
    return Check(
        "user namespaces", OK, f"{who} can make user, mount, pid, net, ipc, uts and cgroup namespaces"
    )


def _cgroups() -> Check:
    manager = CgroupManager.detect("skerry-doctor")
    try:
        if manager.mode == "none":
            return Check(
                "cgroups", WARNING, f"no limits on CPU and total memory: {manager.reason}", _delegation()
            )
        cgroup = manager.create(ENVIRONMENT_ID)
        try:
            cgroup.apply(Limits())
            missing = [row.name for row in cgroup.enforced() if not row.enforced]
        finally:
            cgroup.remove()
    finally:
        manager.close()
    if missing:
        return Check(
            "cgroups",
            WARNING,
            f"{manager.mode}, without {', '.join(missing)}: {manager.reason}",
            _delegation(),
        )
    return Check("cgroups", OK, f"{manager.mode}: CPU, memory, swap and pids are limited")


def _delegation() -> str:
    if os.geteuid() == 0:
        return "mount the cpu, memory and pids controllers (in a container: give it its own writable cgroup)"
    return (
        "have a cgroup v2 subtree delegated to this user: systemd-run --user --scope -p Delegate=yes skerry serve, "
        "or run the daemon as root"
    )


def _seccomp() -> Check:
    sizes = {name: len(seccomp.compile_profile(name)) // 8 for name in seccomp.profile_names()}
    return Check("seccomp", OK, f"profiles {', '.join(sizes)} compile for {platform.machine()}")


def _landlock() -> Check:
    abi, reason = landlock()
    if not abi:
        return Check(
            "landlock", WARNING, f"not available: {reason}", "boot with lsm=landlock,... (one layer less)"
        )
    return Check("landlock", OK, f"ABI {abi}")


def _kernel_limits() -> Check:
    """Whether the sysctls are large enough for all default environments that fit into memory, each at its limits."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    count = max(1, memory // Limits().memory)
    small = [
        (name, value, wanted)
        for name, wanted in _wanted_sysctls(count, rootful=os.geteuid() == 0).items()
        if (value := _sysctl(name)) is not None and value < wanted
    ]
    if not small:
        return Check("kernel limits", OK, f"large enough for {count} environments at their default limits")
    return Check(
        "kernel limits",
        WARNING,
        f"too small for {count} environments at their default limits, which is what fits into memory: "
        + ", ".join(f"{name} is {value}" for name, value, _ in small),
        "sysctl " + " ".join(f"{name}={wanted}" for name, _, wanted in small),
    )


def _wanted_sysctls(count: int, *, rootful: bool) -> dict[str, int]:
    """The least value of each sysctl for `count` environments.

    What the kernel counts for each user is one environment's as root; without root they share one user.
    """
    limits, of_user = Limits(), 1 if rootful else count
    kinds = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
    # 16 bytes of machine code for each instruction of 8: a comparison and a jump take 13 on x86-64.
    filter_size = 2 * len(seccomp.compile_profile("default"))
    return {
        "kernel.pid_max": count * limits.pids,
        "kernel.threads-max": count * limits.pids,
        "kernel.pty.max": count * plan.TERMINALS + (_sysctl("kernel.pty.reserve") or 0),
        # Open files are charged to the environment's memory; one takes at least this much of it.
        "fs.file-max": count * limits.memory // FILE_SIZE,
        "fs.inotify.max_user_instances": of_user * plan.INOTIFY["instances"],
        "fs.inotify.max_user_watches": of_user * plan.INOTIFY["watches"],
        "net.core.bpf_jit_limit": count * filter_size,
        **{f"user.max_{kind}_namespaces": of_user for kind in kinds},
    }


def _sysctl(name: str) -> int | None:
    """Its value; None if this kernel does not have it or this user may not read it."""
    try:
        return int(Path("/proc/sys", *name.split(".")).read_text())
    except (OSError, ValueError):
        return None


def _home(home: Home) -> Check:
    home.prepare()
    free = shutil.disk_usage(home.path).free
    if free < SPACE_WANTED:
        return Check(
            "home", WARNING, f"{home.path}: {format_size(free)} free", "free space, or set SKERRY_HOME"
        )
    return Check("home", OK, f"{home.path}: {format_size(free)} free")


def _volumes() -> Check:
    if os.geteuid() != 0:
        return Check(
            "disk workspaces",
            WARNING,
            "without root a workspace with limits is in memory (half of the memory limit at most)",
            "run the daemon as root for disk workspaces with exact limits",
        )
    with tempfile.TemporaryDirectory(prefix="skerry-doctor-") as directory:
        volumes = Volumes(directory)
        try:
            reason = volumes.unavailable()
        finally:
            volumes.close()
    if reason:
        return Check(
            "disk workspaces", WARNING, f"in memory only: {reason}", "apt install e2fsprogs; modprobe loop"
        )
    return Check("disk workspaces", OK, "loop devices and ext4 work")


def _image_building(home: Home) -> Check:
    preflight.check(definition.find("dev").suite, Path(home.path))
    return Check("image building", OK, "everything that a build needs is there")


def _event_loop(home: Home) -> Check:
    """The longest stall of the daemon that runs, as its metrics tell it."""
    connection = http.client.HTTPConnection("localhost", timeout=ANSWER_SECONDS)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(ANSWER_SECONDS)
    try:
        connection.sock.connect(home.socket)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    except (FileNotFoundError, ConnectionRefusedError):
        return Check("event loop", OK, "no daemon runs")
    finally:
        connection.close()
    found = re.search(r'^skerry_loop_longest_stall_seconds\{where="(.*)"\} (\S+)$', text, re.MULTILINE)
    if found is None:
        return Check("event loop", WARNING, "the daemon that runs does not tell", "restart it")
    where, seconds = found[1], float(found[2])
    if not seconds:
        return Check("event loop", OK, f"the daemon has not stalled for {STALL:g} s or more")
    text = f"the longest stall of the daemon was {seconds:.2f} s{f', in {where}' if where else ''}"
    if seconds < STALL_MAX:
        return Check("event loop", OK, text)
    return Check(
        "event loop", WARNING, text, "its log says when (`event loop stalled`); see docs/observability.md"
    )


def _stronger() -> Iterator[Check]:
    """The other backends, each tried. They are options, so that it is fine without."""
    with tempfile.TemporaryDirectory(prefix="skerry-doctor-") as directory:
        for kind in (OciBackend, DockerBackend, DockerGvisorBackend, MicrovmBackend):
            yield _guarded(kind.name, OK, functools.partial(_try, kind, directory))


def _try(kind: Callable[[Machine], Backend], directory: str) -> Check:
    async def probe() -> Check:
        backend = kind(Machine(directory))
        try:
            found = await backend.capabilities()
        finally:
            await backend.close()
        gives = f"isolation `{backend.isolation}`"
        text = f"{gives}: {found.detail}" if found.available else f"{gives} is not available: {found.reason}"
        return Check(backend.name, OK, text, isolation=backend.isolation if found.available else "")

    return asyncio.run(probe())


def _environment() -> Iterator[Check]:
    """A real one, and what it says of itself where only trying tells."""
    enforced: dict[str, Enforcement] = {}

    def start() -> Check:
        with tempfile.TemporaryDirectory(prefix="skerry-doctor-") as directory:
            seconds = asyncio.run(_start_one(directory, enforced))
        text = f"started, ran a command and removed in {seconds * 1000:.0f} ms"
        return Check("environment", OK, text, isolation=NamespaceBackend.isolation)

    yield _guarded("environment", FAILURE, start)
    if (row := enforced.get("shared_files")) is not None:
        if row.enforced:
            yield Check("overlay", OK, "shared files have locks and watches of their own in each environment")
        else:
            yield Check("overlay", WARNING, row.by, "Linux 5.11 or newer, and no mounts below /usr")
    if (row := enforced.get("open_network")) is not None:
        if row.enforced:
            yield Check("network", OK, "environments can have one, with the daemon as the only way out")
        else:
            yield Check(
                "network",
                WARNING,
                f"only `none`: {row.by}",
                "a kernel with nf_tables, nft_nat, nft_redir, nft_ct and nft_limit",
            )


async def _start_one(directory: str, enforced: dict[str, Enforcement]) -> float:
    backend = NamespaceBackend(Machine(directory))
    began = time.monotonic()
    try:
        image = ImageStore(Path(directory, "images")).get("host")
        await backend.start(InstanceSpec(ENVIRONMENT_ID, image, Policy(workspace="memory")))
        enforced |= {row.name: row for row in backend.enforced(ENVIRONMENT_ID)}
        try:
            (await backend.open_network(ENVIRONMENT_ID)).close()
            enforced["open_network"] = Enforcement("open_network", True, "", "")
        except SkerryError as error:
            enforced["open_network"] = Enforcement("open_network", False, "", error.message)
        channel = await Channel.open(await backend.connect(ENVIRONMENT_ID))
        process = await channel.start(Start(argv=["/bin/sh", "-c", "exit 0"]))
        end = await process.wait()
        await channel.close()
        if end.code != 0:
            raise SkerryError(
                f"a shell inside ended with {end.code}", hint="is /bin/sh of this host readable to all?"
            )
    finally:
        await backend.stop(ENVIRONMENT_ID)
        await backend.close()
    return time.monotonic() - began


def _print(report: dict[str, object], checks: list[dict[str, str]]) -> None:
    marks = {OK: "ok     ", WARNING: "warning", FAILURE: "FAILURE"}
    for check in checks:
        print(f"{marks[check['status']]}  {check['name']:<16} {check['found']}")
        if check["fix"]:
            print(f"{'':9}{'':<16} fix: {check['fix']}")
    print(f"\nThe strongest isolation that works here: {report['isolation']}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="skerry doctor")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    report = run(Home())
    checks: list[dict[str, str]] = report["checks"]  # type: ignore[assignment]
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        _print(report, checks)
    return 1 if any(check["status"] == FAILURE for check in checks) else 0


if __name__ == "__main__":
    sys.exit(main())
