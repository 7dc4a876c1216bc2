"""What a monitor that has been taken over can do to the host and to the daemon: a program of ours in its place."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from skerry.backends import microvm
from skerry.backends.base import InstanceSpec
from skerry.backends.machine import Machine
from skerry.backends.microvm import MicrovmBackend
from skerry.errors import LaunchFailed
from skerry.host import vm
from skerry.images.store import Image
from skerry.policy import Policy
from tests import machines, support

pytestmark = pytest.mark.root

PROBE = """
import ctypes, errno, json, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def tried(call):
    try:
        call()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"
def unshare():
    if libc.unshare(0):
        raise OSError(ctypes.get_errno(), "")
status = dict(line.strip("\\n").split(":\\t", 1) for line in open("/proc/self/status"))
print(json.dumps({
    "capabilities": [status[f"Cap{kind}"] for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")],
    "no_new_privs": status["NoNewPrivs"],
    "filters": status["Seccomp_filters"],
    "unshare": tried(unshare),
    "write": tried(lambda: open("/proc/self/comm", "w").close()),
    "raw": tried(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW)),
    "tun": tried(lambda: os.open("/dev/net/tun", os.O_RDWR)),
    "descriptors": sorted(int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")),
    "null": [fd for fd in (4, 5) if os.path.samefile(f"/proc/self/fd/{fd}", "/dev/null")],
}))
"""
MACHINE = """
import socket, struct
HELLO, STEPS, TELL, OOM, OPEN, DATA, CLOSE = range(1, 8)
wire = socket.socket(fileno=3)
stream = wire.makefile("rb")
def send(kind, serial, payload=b"", length=None):
    wire.sendall(struct.pack("<IBI", 5 + len(payload) if length is None else length, kind, serial) + payload)
def receive():
    length, kind, serial = struct.unpack("<IBI", stream.read(9))
    return kind, serial, stream.read(length - 5)
send(HELLO, 0)
assert receive()[0] == STEPS
send(TELL, 0, b"R")
while True:
    kind, serial, _ = receive()
    if kind == OPEN:
        {answer}
"""
"""A machine as far as the first process can tell. `answer` is what it does on each new connection."""
ENDS = {
    "a length below the least": "send(99, serial, b'', 4)",
    "a length above the most": "send(99, serial, b'', 192 * 1024 + 6)",
    "the largest length": "send(DATA, serial, b'', 0xFFFFFFFF)",
    "a second beginning": "send(HELLO, 0)",
}
IGNORED = {
    "data of an earlier connection": "send(DATA, serial - 1, b'earlier')",
    "data of a later connection": "send(DATA, serial + 1, b'later')",
    "the end of an earlier connection": "send(CLOSE, serial - 1)",
    "a kind that there is not": "send(99, serial, b'what')",
    "a connection of its own": "send(OPEN, serial + 1)",
    "an answer when it is up": "send(TELL, 0, b'E')",
    "a count that is too short": "send(OOM, 0, b'7 bytes')",
    "a count that is too long": "send(OOM, 0, b'9 bytes..')",
}

T = TypeVar("T")


class Stage:
    """A backend whose machines have a Python program as their monitor."""

    def __init__(self, home: Path, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch) -> None:
        self._runner, self._monkeypatch = runner, monkeypatch
        self.backend = MicrovmBackend(Machine(str(home)), machines.kernel())
        if reason := microvm.missing(machines.kernel()):
            support.missing(reason)
        self.backend._setup = self.backend._prepare("tcg", "")

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    async def start(self, program: str) -> str:
        self._monkeypatch.setattr(vm.VirtualMachine, "qemu", lambda *_: ["/usr/bin/python3", "-Ic", program])
        image = Image("", "", "rootfs", Path(self.backend._least), {}, 0, 0.0, "")
        id_ = self.backend.reserve()
        await self.backend.start(InstanceSpec(id_, image, Policy(workspace="memory")))
        return id_

    async def connect(self, id_: str) -> socket.socket:
        made = await self.backend.connect(id_)
        made.setblocking(False)
        return made

    async def close(self) -> None:
        for id_ in await self.backend.list():
            await self.backend.stop(id_)
        await self.backend.close()


@pytest.fixture
def stage(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    support.require("/usr/bin/python3", "python3")
    with asyncio.Runner() as runner:
        found = Stage(home, runner, monkeypatch)
        yield found
        runner.run(found.close())


def test_monitor_has_no_privileges_and_can_write_nothing(stage: Stage) -> None:
    with pytest.raises(LaunchFailed) as ended:
        stage.run(stage.start(PROBE))
    found = json.loads("{" + str(ended.value).partition("{")[2].rpartition("}")[0] + "}")
    assert found == {
        "capabilities": ["0" * 16] * 5,
        "no_new_privs": "1",
        "filters": "1",
        "unshare": "EPERM",
        "write": "EACCES",
        "raw": "EAFNOSUPPORT",
        "tun": "ENOENT",
        "descriptors": [0, 1, 2, 3, 4, 5],
        "null": [4, 5],
    }


def test_what_the_file_server_shows_cannot_be_written_by_any_user(stage: Stage) -> None:
    id_ = stage.run(stage.start(MACHINE.format(answer="pass")))
    root = f"/proc/{stage.backend.get(id_).running.handle.pid}/root/export/rootfs"
    assert sorted(os.listdir(root)) == ["dev", "proc", "run", "tmp", "workspace"]
    attempts: tuple[Callable[[], None], ...] = (
        lambda: os.mkdir(f"{root}/tmp/new"),
        lambda: os.chmod(f"{root}/tmp", 0o777),
        lambda: os.rmdir(f"{root}/tmp"),
    )
    for attempt in attempts:
        with pytest.raises(OSError, match="Read-only file system"):
            attempt()


@pytest.mark.parametrize("answer", ENDS.values(), ids=ENDS)
def test_machine_that_breaks_the_protocol_is_ended(stage: Stage, answer: str) -> None:
    async def check() -> None:
        id_ = await stage.start(MACHINE.format(answer=answer))
        with await stage.connect(id_):
            async with asyncio.timeout(20):
                await stage.backend.wait(id_)
        assert not stage.backend.alive(id_)

    stage.run(check())


@pytest.mark.parametrize("answer", IGNORED.values(), ids=IGNORED)
def test_connection_gets_its_own_bytes_alone(stage: Stage, answer: str) -> None:
    async def check() -> None:
        id_ = await stage.start(
            MACHINE.format(answer=f"{answer}; send(DATA, serial, struct.pack('<I', serial))")
        )
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(20):
            for serial in (1, 2, 3):
                with await stage.connect(id_) as connection:
                    assert await loop.sock_recv(connection, 100) == struct.pack("<I", serial)
        assert stage.backend.sample(id_).oom_kills == 0

    stage.run(check())
