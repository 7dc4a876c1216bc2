"""Environments with a virtual machine each: what holds inside, what holds the monitor, and what is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from skerry.backends import microvm
from skerry.backends.base import InstanceSpec
from skerry.backends.machine import Machine
from skerry.backends.microvm import MicrovmBackend
from skerry.egress.addresses import Address, Ranges
from skerry.egress.limits import Meter, Traffic
from skerry.egress.proxy import Proxy, Witness
from skerry.egress.rules import Rules
from skerry.errors import IsolationUnavailable, LaunchFailed
from skerry.fairness import budget
from skerry.guest.channel import Channel
from skerry.host import vm
from skerry.images.store import ImageStore
from skerry.policy import MIB, Limits, Policy
from tests import machines, support
from tests.conformance.harness import Box, Result, finish
from tests.integration.daemon import Daemon, started

pytestmark = [pytest.mark.root, pytest.mark.slow]

LIMITS = Limits(memory=192 * MIB, disk=64 * MIB, pids=40, inodes=1000)
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")

HUNGRY = "python3 -c 'x = [bytes([7]) * (16 << 20) for _ in range(30)]; print(len(x))'"
"""More than the machine has, a part at a time."""

TRIED = ("93.184.216.34", "10.0.0.1", "192.0.2.1", "2606:2800:220:1::34")
REACH = f"""
import json, socket
answers, name = [], 0
for host in {TRIED!r}:
    with socket.create_connection((host, 80)) as s:
        s.sendall(b"GET / HTTP/1.1\\r\\nhost: x\\r\\n\\r\\n")
        answers.append(s.makefile().readline())
try:
    socket.getaddrinfo("no.example", 80)
except socket.gaierror as error:
    name = error.errno
devices = sorted(line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line)
print(json.dumps({{"answers": answers, "name": name, "devices": devices}}))
"""

FILES_OF_BLANKS = 20
"""At most, of those that are kept ready."""

T = TypeVar("T")


class Place:
    """A backend with one environment, on a loop of its own."""

    def __init__(self, home: Path, runner: asyncio.Runner) -> None:
        self.home, self._runner = home, runner
        self.backend = MicrovmBackend(Machine(str(home)), machines.kernel())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def spec(self, **policy: Any) -> InstanceSpec:
        image = ImageStore(self.home / "images").get("host")
        return InstanceSpec(self.backend.reserve(), image, Policy(limits=LIMITS, **policy))

    async def open(self, **policy: Any) -> Box:
        spec = self.spec(**policy)
        instance = await self.backend.start(spec)
        return Box(
            self.backend, instance, await Channel.open(await self.backend.connect(spec.environment_id))
        )

    async def close(self) -> None:
        for id_ in await self.backend.list():
            await self.backend.stop(id_)
        await self.backend.close()


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with support.temporary_home() as home, asyncio.Runner() as runner:
        found = Place(home, runner)
        try:
            if not (capabilities := runner.run(found.backend.capabilities())).available:
                support.missing(capabilities.reason)
            yield found
        finally:
            runner.run(found.close())


@pytest.fixture(scope="module")
def box(place: Place) -> Iterator[Box]:
    box = place.run(place.open())
    yield box
    place.run(box.channel.close())
    place.run(place.backend.stop(box.id))


async def never(name: str) -> list[Address]:
    """Resolves nothing: nothing is allowed."""
    raise AssertionError(name)


def sh(place: Place, box: Box, script: str, **options: Any) -> Result:
    return place.run(box.sh(script, **options))


def processes(home: Path, environment_id: str) -> dict[str, int]:
    """Pids on the host, by the name of the program."""
    first = os.readlink(home / "instances" / environment_id / "process").split()[0]
    children = Path(f"/proc/{first}/task/{first}/children").read_text().split()
    return {Path(f"/proc/{pid}/comm").read_text().strip(): int(pid) for pid in (first, *children)}


def setting(pid: int, name: str) -> str:
    """A sysctl of a process's network."""
    entered = ["nsenter", "--net", "--target", str(pid), "--", "cat", f"/proc/sys/{name}"]
    return subprocess.run(entered, check=True, capture_output=True, text=True).stdout.strip()


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


@pytest.mark.requirement("F1")
def test_workload_is_confined_by_a_kernel_of_its_own(place: Place, box: Box) -> None:
    inside = sh(
        place, box, "uname -r; id -u; grep -E '^(Cap|NoNew|Seccomp:)' /proc/self/status"
    ).stdout.decode()
    release, uid, *rows = inside.splitlines()
    assert release != os.uname().release
    assert uid == "1000"
    found = dict(row.split(":\t") for row in rows)
    assert {value for name, value in found.items() if name.startswith("Cap")} == {"0" * 16}
    assert (found["NoNewPrivs"], found["Seccomp"]) == ("1", "2")
    assert sh(place, box, "touch /x /usr/x /etc/x; ls -d /x /usr/x /etc/x").stdout == b""
    assert sh(place, box, "sed 1,2d /proc/net/dev | cut -d: -f1").stdout.split() == [b"lo"]
    assert sh(place, box, "ls -d /export /cgroups /disk /sys/* /dev/vd* /dev/vport*").stdout == b""


def test_monitor_is_confined_like_an_environment(place: Place, box: Box) -> None:
    found = processes(place.home, box.id)
    assert set(found) == {"skerry-machine", "qemu-system-x86", "virtiofsd"}
    base = place.backend.get(box.id).uid_base
    assert base is not None
    for name, pid in found.items():
        row = status(pid)
        uids = {int(uid) for uid in row["Uid"].split()}
        assert uids == {base if name == "virtiofsd" else base + 1000}, name
        assert {row[f"Cap{kind}"] for kind in ("Inh", "Prm", "Eff", "Amb")} == {"0" * 16}, name
        assert (row["NoNewPrivs"], row["Seccomp"]) == ("1", "2"), name
        for kind in NAMESPACES:
            ours, its = os.readlink(f"/proc/self/ns/{kind}"), os.readlink(f"/proc/{pid}/ns/{kind}")
            assert its != ours, (name, kind)


def test_monitor_sees_no_files_but_what_it_needs(place: Place, box: Box) -> None:
    found = processes(place.home, box.id)
    inside = {*vm.LINKED, "boot", "ctl", "dev", "export", "kvm", "proc", "program", "usr"}
    assert set(os.listdir(f"/proc/{found['qemu-system-x86']}/root")) <= inside
    assert set(os.listdir(f"/proc/{found['virtiofsd']}/root")) == {"layers", "rootfs"}
    for name in ("qemu-system-x86", "virtiofsd"):
        root = f"/proc/{found[name]}/root"
        rows = Path(f"/proc/{found[name]}/mountinfo").read_text().splitlines()
        assert rows, root
        kinds = {row.split(" - ")[1].split()[0]: row.split()[5] for row in rows}
        assert all(
            "ro" in options.split(",") for kind, options in kinds.items() if kind in ("ext4", "overlay")
        )


@pytest.mark.requirement("R55")
def test_memory_limit_kills_one_process_and_is_counted(place: Place, box: Box) -> None:
    before = place.backend.sample(box.id).oom_kills
    result = sh(place, box, HUNGRY)
    assert result.code == 128 + signal.SIGKILL
    assert place.backend.sample(box.id).oom_kills == before + 1
    assert sh(place, box, "echo alive").stdout == b"alive\n"


def test_disk_and_inode_limits_are_exact(place: Place, box: Box) -> None:
    free = sh(place, box, "stat -f -c '%a %S %d' /workspace").stdout.split()
    assert (int(free[0]) * int(free[1]), int(free[2])) == (LIMITS.disk, LIMITS.inodes)
    result = sh(
        place, box, "head -c 100m /dev/zero > big; stat -c %s big; rm big; echo x > small && cat small"
    )
    size, small = result.stdout.split()
    assert LIMITS.disk - MIB < int(size) <= LIMITS.disk
    assert small == b"x"
    assert b"No space left" in result.stderr


def test_environment_ends_with_its_monitor(place: Place) -> None:
    async def check() -> None:
        box = await place.open(workspace="memory")
        try:
            os.kill(processes(place.home, box.id)["qemu-system-x86"], signal.SIGKILL)
            async with asyncio.timeout(20):
                await place.backend.wait(box.id)
            assert not place.backend.alive(box.id)
        finally:
            await box.channel.close()
            await place.backend.stop(box.id)

    place.run(check())


def test_network_leads_to_the_daemon_alone(place: Place) -> None:
    """By IPv4 and IPv6, by names and without, for an environment that may reach nothing."""

    async def check() -> None:
        box = await place.open(workspace="memory", network="allowlist", allow=("example.com",))
        try:
            monitor = processes(place.home, box.id)["qemu-system-x86"]
            kinds = {os.readlink(f"/proc/{monitor}/fd/{fd}") for fd in os.listdir(f"/proc/{monitor}/fd")}
            assert "/dev/net/tun" in kinds
            assert setting(monitor, "net/ipv4/tcp_orphan_retries") == "4"
            sockets = await place.backend.open_network(box.id)
            rules = Rules.parse("allowlist", (), Ranges())
            meter, flow = Meter(LIMITS, Traffic()), budget().flow()
            proxy = Proxy(rules, sockets.tcp, sockets.udp, Witness(), never, meter, flow)
            try:
                result = await box.run("python3", "-c", REACH)
            finally:
                await proxy.close()
            found = json.loads(result.stdout or result.stderr)
            assert found["devices"] == ["eth0", "lo"]
            assert found["name"] == socket.EAI_NONAME
            assert all(answer.startswith("HTTP/1.1 403 ") for answer in found["answers"]), found
            assert {(each.host, each.port) for each in proxy.denials} == {
                ("no.example", 0),
                *((host, 80) for host in TRIED),
            }
        finally:
            await box.channel.close()
            await place.backend.stop(box.id)

    place.run(check())


def test_network_has_to_be_there_from_the_start(place: Place, box: Box) -> None:
    with pytest.raises(IsolationUnavailable, match="without a network") as refused:
        place.run(place.backend.open_network(box.id))
    assert "create it with the network" in refused.value.hint


def test_machine_that_never_answers_is_ended_at_the_deadline(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(microvm, "START_SECONDS", 0.5)
    spec = place.spec(workspace="memory")
    with pytest.raises(LaunchFailed, match=r"did not start within 0\.5 s"):
        place.run(place.backend.start(spec))
    assert spec.environment_id not in place.run(place.backend.list())


def test_machine_whose_kernel_fails_tells_why(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_init(cls: type[vm.VirtualMachine], *_: Any, **__: Any) -> vm.VirtualMachine:
        return cls(1, 256 * MIB, disk=False, line="console=ttyS0 panic=-1 reboot=t rdinit=/none root=/none")

    monkeypatch.setattr(vm.VirtualMachine, "of", classmethod(without_init))
    with pytest.raises(LaunchFailed, match="the virtual machine ended") as failed:
        place.run(place.backend.start(place.spec(workspace="memory")))
    assert "panic" in str(failed.value)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cycles", [2, pytest.param(30, marks=pytest.mark.soak)])
def test_cycles_leave_nothing(place: Place, cycles: int) -> None:
    """What the home's leaks are is looked at when it is closed."""

    async def cycle(number: int) -> None:
        box = await place.open(workspace="disk" if number % 2 else "memory")
        running = processes(place.home, box.id)
        await finish(await box.start("true"))
        await box.channel.close()
        await place.backend.stop(box.id)
        assert not {str(pid) for pid in running.values()} & set(os.listdir("/proc"))
        assert box.id not in os.listdir(place.home / "instances")

    before, open_files = place.run(place.backend.list()), 0
    for number in range(cycles):
        place.run(cycle(number))
        if number == cycles // 2:  # what is kept ready is there by then
            open_files = len(os.listdir("/proc/self/fd"))
    assert place.run(place.backend.list()) == before
    assert len(os.listdir("/proc/self/fd")) <= open_files + FILES_OF_BLANKS


@pytest.fixture
def daemon_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in machines.settings().items():
        monkeypatch.setenv(name, value)


@pytest.mark.requirement("R75")
@pytest.mark.usefixtures("daemon_settings")
@pytest.mark.soak
def test_next_daemon_takes_over_and_tells_why_one_ended(home: Path) -> None:
    with started(home) as first:
        info = created(first)
        assert (info["isolation"], info["backend"]) == ("microvm", "microvm")
        first.execute(info["environment_id"], "echo kept > file")
        first.kill()
    with started(home) as second:
        ref = info["environment_id"]
        assert second.execute(ref, "cat file; uname -r")["stdout"].startswith("kept\n")
        killed = second.execute(ref, HUNGRY)
        assert killed["outcome"] == "oom_killed"
        os.kill(processes(home, ref)["qemu-system-x86"], signal.SIGKILL)
        deadline = time.monotonic() + 20
        while (info := second.call("GET", f"/environments/{ref}"))["state"] != "ended":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert info["ended_reason"]
        problem = second.call("POST", f"/environments/{ref}/execute", {"command": "true"}, expect=410)
        assert problem["code"] == "environment_ended"


def created(daemon: Daemon) -> dict[str, Any]:
    body = {"isolation": "microvm", "memory": LIMITS.memory}
    code, _, answer = daemon.raw("POST", "/environments", body)
    if code == 501:
        support.missing(answer.decode())
    found: dict[str, Any] = daemon.call("GET", "/environments")["environments"][0]
    return found
