"""Ways to more privileges, tried from inside. Called as `privilege.py NAME ARGUMENTS...`; prints JSON."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import stat
import struct
import sys
from collections.abc import Callable

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE = 56 if os.uname().machine == "x86_64" else 220
CLONE3 = 435
CAPSET = 126 if os.uname().machine == "x86_64" else 91
NEWUSER = 0x10000000


def verdict(attack: Callable[..., object], *arguments: object) -> str:
    try:
        attack(*arguments)
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error.errno))
    return "done"


def check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result


def status() -> dict[str, str]:
    """What the kernel says of us."""
    with open("/proc/self/status") as file:
        lines = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    names = (
        "CapInh",
        "CapPrm",
        "CapEff",
        "CapBnd",
        "CapAmb",
        "NoNewPrivs",
        "Seccomp",
        "Uid",
        "Gid",
        "Groups",
    )
    found = {name: " ".join(lines[name].split()) for name in names if name in lines}
    # gVisor tells the first not in the file, and has no securebits.
    found["NoNewPrivs"] = str(LIBC.prctl(39, 0, 0, 0, 0))
    return {**found, "securebits": hex(LIBC.prctl(27, 0, 0, 0, 0))}


def gain() -> dict[str, str]:
    """Everything that would lead to another user, group or capability."""
    header = struct.pack("Ii", 0x20080522, 0)
    full = struct.pack("6I", *[0xFFFFFFFF] * 2, 0, *[0x1FF] * 2, 0)
    other = 0 if os.getuid() else 5
    attempts: dict[str, Callable[[], object]] = {
        "setuid": lambda: os.setresuid(other, other, other),
        "setgid": lambda: os.setresgid(other, other, other),
        "setgroups": lambda: os.setgroups([0, 5]),
        "capset": lambda: check(LIBC.syscall(CAPSET, header, full)),
        "ambient": lambda: check(LIBC.prctl(47, 2, 21, 0, 0)),
        "securebits": lambda: check(LIBC.prctl(28, 0, 0, 0, 0)),
        "keepcaps": lambda: check(LIBC.prctl(8, 1, 0, 0, 0)),
        "no_new_privs": lambda: check(LIBC.prctl(38, 0, 0, 0, 0)),
    }
    return {name: in_child(attempt) for name, attempt in attempts.items()}


def in_child(action: Callable[[], object]) -> str:
    """The verdict of something that changes the process that does it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, verdict(action).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    return os.read(reader, 100).decode()


def clone(number: int, *arguments: object) -> None:
    parent = os.getpid()
    made = check(LIBC.syscall(ctypes.c_long(number), *arguments))
    if os.getpid() != parent and made == 0:
        os._exit(0)
    os.waitpid(made, 0)


def nested() -> dict[str, str]:
    """A user namespace, by each call that makes one."""
    arguments = struct.pack("11Q", NEWUSER, 0, 0, 0, 17, *[0] * 6)
    return {
        "unshare": in_child(lambda: check(LIBC.unshare(NEWUSER))),
        "clone": in_child(lambda: clone(CLONE, ctypes.c_ulong(NEWUSER | 17), *[ctypes.c_ulong(0)] * 4)),
        "clone3": in_child(lambda: clone(CLONE3, arguments, ctypes.c_ulong(88))),
    }


def devices() -> dict[str, str]:
    """Nodes for memory and for /dev/null, and the one that anybody may make on a bare kernel: a whiteout."""
    numbers = {"mem": os.makedev(1, 1), "null": os.makedev(1, 3), "whiteout": 0}
    return {
        name: verdict(os.mknod, f"/tmp/device-{name}", stat.S_IFCHR | 0o666, number)
        for name, number in numbers.items()
    } | {"block": verdict(os.mknod, "/tmp/device-disk", stat.S_IFBLK | 0o666, os.makedev(8, 0))}


def touch(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))


def writable(*folders: str) -> list[str]:
    """Where a file can be made."""
    return [folder for folder in folders if verdict(touch, f"{folder}/made-by-{os.getuid()}") == "done"]


def readable(path: str) -> str:
    return verdict(lambda: os.close(os.open(path, os.O_RDONLY)))


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
