"""What a program sees of the machine that it runs on, as JSON: run inside an environment, and on the host beside it.

Python's standard library alone, and no arguments. See probe_rungs.py for what is made of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import select
import signal
import socket
import stat
import time
from collections.abc import Iterable
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
NUMBERS = 471
"""System calls from 0 on."""
PATIENCE = 0.3
"""Seconds for one call: some wait for a signal."""
ROUNDS = 20_000


def first_of_file(path: str, size: int = 65536) -> str:
    """The beginning of a file; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            return os.read(fd, size).decode(errors="replace")
        finally:
            os.close(fd)
    return ""


def field(path: str, name: str) -> str:
    """What follows `name` and a colon."""
    lines = (line.partition(":") for line in first_of_file(path).splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == name), "")


def kernel_log() -> str:
    """The beginning of the kernel's log, or the errno that stands in the way."""
    buffer = ctypes.create_string_buffer(4096)
    size = LIBC.klogctl(3, buffer, len(buffer))
    return buffer.raw[:size].decode(errors="replace") if size >= 0 else errno.errorcode[ctypes.get_errno()]


def mounts() -> list[str]:
    """The source of each."""
    lines = first_of_file("/proc/self/mountinfo", 1 << 20).splitlines()
    return [line.partition(" - ")[2].split(" ")[1] for line in lines]


def devices() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"block": [], "character": []}
    for folder, _, names in os.walk("/dev"):
        for name in names:
            with contextlib.suppress(OSError):
                mode = os.stat(f"{folder}/{name}", follow_symlinks=False).st_mode
                if stat.S_ISBLK(mode):
                    found["block"].append(name)
                if stat.S_ISCHR(mode) and folder != "/dev/pts":
                    found["character"].append(name)
    found["block"] += [line.split()[-1] for line in first_of_file("/proc/partitions").splitlines()[2:]]
    with contextlib.suppress(OSError):
        found["block"] += os.listdir("/sys/block")
    return {kind: sorted(set(names)) for kind, names in found.items()}


def readable(top: str) -> int:
    """Files below it, but for those of processes, of which something can be read."""
    count = 0
    for folder, below, names in os.walk(top):
        if folder == "/proc":
            below[:] = [name for name in below if not name.isdigit()]
        count += sum(bool(first_of_file(f"{folder}/{name}", 1)) for name in names)
    return count


def answering() -> int:
    """How many system calls answer something else than ENOSYS or EPERM, with arguments that all are -1.

    A child makes one after the other. When a call ends or stops it, that call has answered, and the next child goes on
    behind it.
    """
    count = number = 0
    while number < NUMBERS:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.setsid()
                make_calls(os.dup2(writer, 200), range(number, NUMBERS))
            finally:
                os._exit(0)
        os.close(writer)
        answered = said = 0
        while select.select([reader], [], [], PATIENCE)[0] and (data := os.read(reader, 4096)):
            said += len(data)
            answered += data.count(b"y")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.close(reader)
        os.waitpid(child, 0)
        cut_short = number + said < NUMBERS
        count += answered + cut_short
        number += said + cut_short
    return count


def make_calls(reply: int, numbers: Iterable[int]) -> None:
    me = os.getpid()
    for number in numbers:
        ctypes.set_errno(0)
        result = LIBC.syscall(ctypes.c_long(number), *[ctypes.c_long(-1)] * 6)
        if os.getpid() != me:  # what a fork has made
            os._exit(0)
        refused = result == -1 and ctypes.get_errno() in (errno.ENOSYS, errno.EPERM)
        os.write(reply, b"n" if refused else b"y")


def call_seconds() -> float:
    """Of getpid, which does nothing."""
    best = float("inf")
    getpid = 39 if os.uname().machine == "x86_64" else 172
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(ROUNDS):
            LIBC.syscall(getpid)
        best = min(best, time.perf_counter() - start)
    return best / (ROUNDS)


def main() -> dict[str, Any]:
    status = "/proc/self/status"
    ticks = first_of_file("/proc/stat").partition("\n")[0].split()[1:]
    return {
        "release": os.uname().release,
        "version": os.uname().version,
        "boot_id": first_of_file("/proc/sys/kernel/random/boot_id").strip(),
        "kernel_log": kernel_log(),
        "processor": field("/proc/cpuinfo", "model name"),
        "processors": os.cpu_count(),
        "memory": int((field("/proc/meminfo", "MemTotal") or "0").split()[0]) * 1024,
        "mounts": mounts(),
        "devices": devices(),
        "calls": answering(),
        "users": [int(line.split()[2]) for line in first_of_file("/proc/self/uid_map").splitlines()],
        "capabilities": [field(status, name) for name in ("CapPrm", "CapEff", "CapBnd")],
        "no_new_privileges": LIBC.prctl(39, 0, 0, 0, 0) == 1,
        "seccomp": field(status, "Seccomp"),
        "proc": readable("/proc"),
        "sys": readable("/sys"),
        "clock": first_of_file("/sys/devices/system/clocksource/clocksource0/current_clocksource").strip(),
        "uptime": float((first_of_file("/proc/uptime") or "0").split()[0]),
        "load": first_of_file("/proc/loadavg").split()[:3],
        "busy": sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"),
        "processes": sorted(int(name) for name in os.listdir("/proc") if name.isdigit()),
        "host_name": socket.gethostname(),
        "interfaces": [name for _, name in socket.if_nameindex()],
        "call_seconds": call_seconds(),
    }


if __name__ == "__main__":
    print(json.dumps(main()))
