"""Reads the protections of a running environment back from the kernel, for its report."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import sys

from skerry.models import Enforcement

_LANDLOCK_CREATE_RULESET = 444
_LANDLOCK_ASK_VERSION = 1
_NS_GET_OWNER_UID = 0xB704
_STATUS = {
    "no_new_privs": ("NoNewPrivs", "1", "no_new_privs: setuid programs and file capabilities have no effect"),
    "seccomp": ("Seccomp", "2", "a seccomp filter"),
    "capabilities": (
        "CapBnd",
        "0000000000000000",
        "an empty bounding set: nothing inside can gain a capability",
    ),
}


@functools.cache
def landlock() -> tuple[int, str]:
    """(the ABI that this kernel has, or 0, and why not)."""
    libc = ctypes.CDLL(None, use_errno=True)
    abi = libc.syscall(
        _LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(_LANDLOCK_ASK_VERSION)
    )
    return (abi, "") if abi >= 1 else (0, os.strerror(ctypes.get_errno()))


def path_rules() -> str:
    """Why this kernel cannot limit one command to paths; empty if it can. Before ABI 3 files could be truncated."""
    abi, reason = landlock()
    return (
        ""
        if abi >= 3
        else f"this kernel has Landlock ABI {abi}, not 3 (Linux 6.2){': ' * bool(reason)}{reason}"
    )


def user_limits(pid: int) -> Enforcement:
    """Whom the kernel charges for what it counts for each user: inotify, message queues, signals, namespaces."""
    counted = "inotify, message queues and pending signals are counted for"
    shared = Enforcement(
        "user_limits", False, "", f"{counted} the daemon's user: its environments share them"
    )
    if os.geteuid() != 0:
        return shared
    try:
        fd = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        try:
            owner = int.from_bytes(fcntl.ioctl(fd, _NS_GET_OWNER_UID, bytes(4)), sys.byteorder)
        finally:
            os.close(fd)
    except OSError as error:
        return Enforcement("user_limits", False, by=f"cannot be read back: {error.strerror}")
    if owner == 0:
        return shared
    return Enforcement("user_limits", True, str(owner), f"{counted} an id that no other environment has")


def protections(pid: int, profile: str) -> list[Enforcement]:
    """Rows for process `pid`, which everything inside descends from."""
    try:
        with open(f"/proc/{pid}/status") as file:
            status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    except OSError as error:
        return [Enforcement(name, False, by=f"cannot be read back: {error.strerror}") for name in _STATUS]
    rows = []
    for name, (key, wanted, by) in _STATUS.items():
        value = status.get(key, "").strip()
        on = value == wanted
        shown = profile if name == "seccomp" and on else "on" if on else f"{key} is {value or 'unknown'}"
        rows.append(Enforcement(name, on, shown, by if on else "the kernel says otherwise"))
    abi, reason = landlock()
    if abi:
        rows.append(
            Enforcement("landlock", True, f"ABI {abi}", "a ruleset; the kernel does not show it again")
        )
    else:
        rows.append(Enforcement("landlock", False, "", f"this kernel has none: {reason}"))
    return rows
