"""What a command under an execution profile tries. Called as `profile.py NAME ARGUMENTS...`; prints JSON.

An attempt is "done", or the name of the errno that stopped it.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial

LIBC = ctypes.CDLL(None, use_errno=True)
ATTACH, DETACH = 16, 17


def outcome(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "done"


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result


def _write(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644))


def _open(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY))


def writes(*directories: str) -> dict[str, dict[str, str]]:
    """All ways to change something in each directory, which has a file `old`."""
    return {directory: _changes(directory) for directory in directories}


def _changes(directory: str) -> dict[str, str]:
    old, new = f"{directory}/old", f"{directory}/new-{os.getpid()}"
    attempts: dict[str, Callable[[], object]] = {
        "create": lambda: _write(new),
        "open": lambda: os.close(os.open(old, os.O_WRONLY)),
        "truncate": lambda: os.truncate(old, 0),
        "open to truncate": lambda: os.close(os.open(old, os.O_RDONLY | os.O_TRUNC)),
        "mkdir": lambda: os.mkdir(f"{new}.d"),
        "symlink": lambda: os.symlink("x", f"{new}.s"),
        "fifo": lambda: os.mkfifo(f"{new}.f"),
        "link": lambda: os.link(old, f"{new}.l"),
        "rename": lambda: os.rename(old, f"{new}.r"),
    }
    return {name: outcome(attempt) for name, attempt in attempts.items()}


def executes(*directories: str) -> dict[str, str]:
    """Running a copy of a program of the image, from each directory."""
    found = {}
    for directory in directories:
        path = f"{directory}/copy-{os.getpid()}"
        shutil.copyfile("/bin/true", path)
        os.chmod(path, 0o755)
        found[directory] = outcome(partial(subprocess.run, [path], check=True))
    return found


def memory_file() -> str:
    """Running a file that is on no file system."""

    def attempt() -> None:
        fd = os.memfd_create("copy", 0)
        with open("/bin/true", "rb") as source:
            os.write(fd, source.read())
        subprocess.run([f"/proc/self/fd/{fd}"], check=True, pass_fds=[fd])

    return outcome(attempt)


def sockets() -> dict[str, str]:
    kinds = {
        "unix": socket.AF_UNIX,
        "inet": socket.AF_INET,
        "inet6": socket.AF_INET6,
        "netlink": socket.AF_NETLINK,
    }
    found = {
        name: outcome(partial(socket.socket, family, socket.SOCK_DGRAM)) for name, family in kinds.items()
    }
    found["pair"] = outcome(socket.socketpair)
    found["datagram pair"] = outcome(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
    return found


def neighbour(number: str) -> dict[str, str]:
    """All ways to act through another process of the same user."""
    pid = int(number)

    def trace() -> None:
        _checked(LIBC.ptrace(ATTACH, pid, None, None))
        os.waitpid(pid, 0)
        _checked(LIBC.ptrace(DETACH, pid, None, None))

    def remote() -> None:
        word = ctypes.create_string_buffer(8)
        vector = (ctypes.c_void_p * 2)(ctypes.addressof(word), 8)
        there = (ctypes.c_void_p * 2)(_mapped(pid), 8)
        _checked(LIBC.process_vm_readv(pid, vector, 1, there, 1, 0))

    attempts: dict[str, Callable[[], object]] = {
        "trace": trace,
        "memory": lambda: os.close(os.open(f"/proc/{pid}/mem", os.O_RDWR)),
        "remote": remote,
        "root": lambda: os.listdir(f"/proc/{pid}/root"),
        "directory": lambda: os.listdir(f"/proc/{pid}/cwd"),
        "descriptor": lambda: os.close(os.open(f"/proc/{pid}/fd/1", os.O_WRONLY)),
        "signal": lambda: os.kill(pid, signal.SIGCONT),
    }
    return {name: outcome(attempt) for name, attempt in attempts.items()}


def _mapped(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/maps") as maps:
            return int(maps.readline().split("-")[0], 16)
    except OSError:
        return 0x1000


def shell_pipes() -> dict[str, str]:
    """Writing to what stateful shells read: their files in /run, and the pipes that they hold."""
    found = {path: outcome(partial(_write, path)) for path in ("/run/1.c", "/run/new")}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/comm") as comm:
                name = comm.read().strip()
        except OSError:
            continue
        if name == "bash" and int(pid) != os.getppid():
            for fd in (8, 9):
                place = f"/proc/{pid}/fd/{fd}"
                found[f"descriptor {fd}"] = outcome(partial(_open, place))
    return found


def filters() -> str:
    """Installing a seccomp filter that allows everything."""
    code = ctypes.create_string_buffer(b"\x06\0\0\0\0\0\xff\x7f", 8)
    program = ctypes.create_string_buffer(16)
    program[0] = b"\x01"
    ctypes.memmove(ctypes.addressof(program) + 8, ctypes.byref(ctypes.c_void_p(ctypes.addressof(code))), 8)
    number = 317 if os.uname().machine == "x86_64" else 277
    return outcome(lambda: _checked(LIBC.syscall(number, 1, 0, program)))


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
