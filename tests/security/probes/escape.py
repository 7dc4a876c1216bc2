"""Ways out, tried from inside. Called as `escape.py NAME ARGUMENTS...`; prints what NAME() returned, as JSON.

An attack returns "done", or the name of the errno that stopped it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import signal
import socket
import stat
import struct
import sys
from collections.abc import Callable

LIBC = ctypes.CDLL(None, use_errno=True)
X86 = os.uname().machine == "x86_64"
NR = (
    {
        "pivot_root": 155,
        "name_to_handle_at": 303,
        "open_by_handle_at": 304,
        "keyctl": 250,
        "process_vm_writev": 311,
    }
    if X86
    else {
        "pivot_root": 41,
        "name_to_handle_at": 264,
        "open_by_handle_at": 265,
        "keyctl": 219,
        "process_vm_writev": 271,
    }
)
NR |= {
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "pidfd_getfd": 438,
}

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18


def check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result


def call(name: str, *arguments: object) -> int:
    wide = (ctypes.c_long(each) if isinstance(each, int) else each for each in arguments)
    return check(LIBC.syscall(ctypes.c_long(NR[name]), *wide))


def verdict(attack: Callable[..., object], *arguments: object) -> str:
    try:
        attack(*arguments)
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error.errno))
    return "done"


def nest(flags: int = 0) -> None:
    """A user namespace of one's own would give all capabilities in it: get one, if that is possible."""
    uid, gid = os.getuid(), os.getgid()
    with contextlib.suppress(OSError):
        check(LIBC.unshare(NEWUSER | flags))
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def mount(source: bytes, target: bytes, kind: bytes, flags: int = 0) -> None:
    check(LIBC.mount(source, target, kind, ctypes.c_ulong(flags), None))


# ---- mounts ----


def mount_tmpfs() -> str:
    nest(NEWNS)
    return verdict(lambda: mount(b"none", b"/tmp", b"tmpfs"))


def mount_proc() -> str:
    """A fresh /proc, without the masks."""

    def attack() -> None:
        nest(NEWNS | NEWPID)
        child = os.fork()
        if child == 0:
            os._exit(errno.EPERM if verdict(lambda: mount(b"proc", b"/tmp", b"proc")) != "done" else 0)
        _, status = os.waitpid(child, 0)
        if status:
            raise OSError(os.waitstatus_to_exitcode(status), "")

    return verdict(attack)


def mount_sysfs() -> str:
    nest(NEWNS | NEWNET)
    return verdict(lambda: mount(b"sysfs", b"/tmp", b"sysfs"))


def mount_cgroup() -> str:
    """The first step of the release_agent escape."""
    nest(NEWNS | NEWCGROUP)
    return verdict(lambda: mount(b"cgroup2", b"/tmp", b"cgroup2"))


def mount_cgroup_v1() -> str:
    nest(NEWNS | NEWCGROUP)
    data = ctypes.c_char_p(b"memory")
    return verdict(lambda: check(LIBC.mount(b"cgroup", b"/tmp", b"cgroup", ctypes.c_ulong(0), data)))


def bind_mount() -> str:
    nest(NEWNS)
    return verdict(lambda: mount(b"/usr", b"/tmp", b"", MS_BIND | MS_REC))


def remount_writable() -> str:
    """Of /usr, which is the host's."""
    nest(NEWNS)
    return verdict(lambda: mount(b"none", b"/usr", b"", MS_REMOUNT | MS_BIND))


def uncover() -> str:
    """What is below a mask of /proc."""
    nest(NEWNS)
    return verdict(lambda: check(LIBC.umount2(b"/proc/kallsyms", 2)))


def mount_and_unmount() -> str:
    """One's own mount can be undone, where mounting is possible at all."""
    nest(NEWNS)

    def attack() -> None:
        mount(b"none", b"/tmp", b"tmpfs")
        check(LIBC.umount2(b"/tmp", 0))

    return verdict(attack)


def new_mount_api() -> str:
    nest(NEWNS)

    def attack() -> None:
        context = call("fsopen", b"tmpfs", 0)
        call("fsconfig", context, 6, None, None, 0)
        made = call("fsmount", context, 0, 0)
        call("move_mount", made, b"", -100, b"/tmp", 4)

    return verdict(attack)


def open_tree() -> str:
    nest(NEWNS)
    return verdict(lambda: call("open_tree", -100, b"/", 0x8001))


def pivot_root() -> str:
    nest(NEWNS)

    def attack() -> None:
        with contextlib.suppress(OSError):
            mount(b"none", b"/", b"", MS_REC | MS_PRIVATE)
            mount(b"none", b"/tmp", b"tmpfs")
        os.makedirs("/tmp/old", exist_ok=True)
        call("pivot_root", b"/tmp", b"/tmp/old")

    return verdict(attack)


def double_chroot() -> object:
    """The classic: chroot below an open directory, then walk up from there. Where it leads to, by its names."""
    nest()
    os.makedirs("/tmp/jail", exist_ok=True)
    above = os.open("/", os.O_RDONLY)
    said = verdict(lambda: os.chroot("/tmp/jail"))
    if said != "done":
        return said
    os.fchdir(above)
    for _ in range(64):
        os.chdir("..")
    os.chroot(".")
    return sorted(os.listdir("/"))


# ---- namespaces and handles ----


def set_namespace() -> str:
    nest(NEWUTS)
    with open("/proc/self/ns/uts") as file:
        return verdict(lambda: check(LIBC.setns(file.fileno(), NEWUTS)))


def hostname() -> str:
    nest(NEWUTS)
    return verdict(lambda: socket.sethostname("elsewhere"))


def handles() -> dict[str, str]:
    """A handle of /usr, which is a directory of the host's file system, turned into one of that file system's root."""
    handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128))
    mount_id = ctypes.c_int()
    named = verdict(lambda: call("name_to_handle_at", -100, b"/usr", handle, ctypes.byref(mount_id), 0))
    guess = ctypes.create_string_buffer(struct.pack("Ii", 8, 1) + struct.pack("II", 2, 0))
    place = os.open("/usr", os.O_RDONLY)
    return {"name": named, "open": verdict(lambda: call("open_by_handle_at", place, guess, os.O_RDONLY))}


def keyring() -> str:
    return verdict(lambda: call("keyctl", 0, ctypes.c_long(-3), ctypes.c_long(1)))


# ---- the guest and the supervisor ----


def process_files(pid: str) -> dict[str, str]:
    """What of another process's files in /proc can be opened."""
    pid = str(os.getppid()) if pid == "parent" else pid
    names = ("exe", "cwd", "root", "fd", "fdinfo", "environ", "maps", "mem", "auxv", "ns/mnt")
    links = {"exe", "cwd", "root", "ns/mnt"}
    return {name: verdict(os.readlink if name in links else look, f"/proc/{pid}/{name}") for name in names}


def look(path: str) -> None:
    if os.path.isdir(path):
        os.listdir(path)
    else:
        os.close(os.open(path, os.O_RDONLY))


def write_memory(pid: str) -> dict[str, str]:
    """Into another process: its file, the call (to an address where nothing is), and a tracer."""
    pid = str(os.getppid()) if pid == "parent" else pid
    buffer = ctypes.create_string_buffer(8)
    ours, theirs = struct.pack("PN", ctypes.addressof(buffer), 8), struct.pack("PN", 8, 8)
    traced = verdict(lambda: check(LIBC.ptrace(16, int(pid), None, None)))  # PTRACE_ATTACH
    if traced == "done":
        os.waitpid(int(pid), 0x40000000)
        check(LIBC.ptrace(17, int(pid), None, None))
    return {
        "mem": verdict(lambda: os.close(os.open(f"/proc/{pid}/mem", os.O_RDWR))),
        "process_vm_writev": verdict(lambda: call("process_vm_writev", int(pid), ours, 1, theirs, 1, 0)),
        "ptrace": traced,
        "pidfd_getfd": verdict(lambda: call("pidfd_getfd", os.pidfd_open(int(pid)), 0, 0)),
    }


def state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def signals(pid: str) -> dict[str, object]:
    """Every signal to `pid`, and to a child of our own."""
    child = os.fork()
    if child == 0:
        signal.pause()
    os.kill(child, signal.SIGSTOP)
    os.waitpid(child, os.WUNTRACED)
    stopped = state_of(child)
    target = os.getppid() if pid == "parent" else int(pid)
    sent = {number: verdict(os.kill, target, number) for number in range(1, 65)}
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return {"child": stopped, "answers": sorted(set(sent.values())), "state": state_of(target)}


def helper_of(pid: str) -> dict[str, object]:
    """What can be done to the program that runs as `pid`: the helper, which all environments are started from."""
    fd = os.open(f"/proc/{pid}/exe", os.O_RDONLY)
    path = f"/proc/self/fd/{fd}"
    return {
        "name": os.readlink(path),
        "seals": fcntl.fcntl(fd, fcntl.F_GET_SEALS),
        "mode": oct(os.fstat(fd).st_mode & 0o777),
        "write": verdict(lambda: os.write(os.open(path, os.O_WRONLY), b"#!/bin/sh\n")),
        "truncate": verdict(lambda: os.truncate(path, 0)),
        "chmod": verdict(lambda: os.fchmod(fd, 0)),
    }


# ---- what is seen ----


def descriptors() -> dict[str, str]:
    """Our own, but the one that the listing uses."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    return found


def pids() -> list[int]:
    return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())


def exists(*paths: str) -> list[str]:
    return [path for path in paths if os.path.lexists(path)]


def top() -> list[str]:
    """What is in the highest directory that can be reached from where we are."""
    for _ in range(64):
        os.chdir("..")
    try:
        return sorted(os.listdir("."))
    except PermissionError:
        return ["refused"]


def sockets() -> list[str]:
    """All sockets in the file system that can be seen."""
    found = []
    for folder, _, names in os.walk("/"):
        if folder.startswith("/proc"):
            continue
        for name in names:
            path = f"{folder}/{name}"
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.lstat(path).st_mode):
                    found.append(path)
    return found


def connect_unix(path: str) -> str:
    with socket.socket(socket.AF_UNIX) as sock:
        return verdict(lambda: sock.connect(path.replace("@", "\0")))


def connect_loopback(port: str) -> str:
    with socket.socket() as sock:
        sock.settimeout(5)
        return verdict(lambda: sock.connect(("127.0.0.1", int(port))))


def writable_settings() -> list[str]:
    """Everything below /proc/sys, and all else in /proc that is not a process's, that can be opened for writing."""
    found = []
    for folder, folders, names in os.walk("/proc"):
        if folder == "/proc":
            folders[:] = [
                name for name in folders if not name.isdigit() and name not in ("self", "thread-self", "net")
            ]
        for name in names:
            path = f"{folder}/{name}"
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
                null = stat.S_ISCHR(os.fstat(fd).st_mode)  # a mask
                os.close(fd)
                if not null:
                    found.append(path)
    return found


def open_to_write(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY))


def keep_mode(path: str) -> None:
    os.chmod(path, os.stat(path).st_mode & 0o777)


def open_for_writing(*paths: str) -> dict[str, str]:
    return {path: verdict(open_to_write, path) for path in paths}


def change_mode(*paths: str) -> dict[str, str]:
    """To what they have: of a read-only mount the kernel says so first."""
    return {path: verdict(keep_mode, path) for path in paths}


def proc() -> dict[str, str]:
    """The beginning of every file below /proc that can be read, but for those of processes; by its path there."""
    found = {}
    for top in ("/proc", "/proc/net/"):
        for directory, below, files in os.walk(top):
            if directory == "/proc":
                below[:] = [name for name in below if not name.isdigit()]
            for name in files:
                path = os.path.join(directory, name)
                with contextlib.suppress(OSError):
                    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                    try:
                        found[path.removeprefix("/proc/")] = os.read(fd, 4096).decode("latin-1")
                    finally:
                        os.close(fd)
    return found


def sizes(*paths: str) -> dict[str, int]:
    """How much can be read of each; -1: nothing at all, because it does not exist or is refused."""
    found = {}
    for path in paths:
        try:
            if os.path.isdir(path):
                found[path] = len(os.listdir(path))
            else:
                fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                found[path] = len(os.read(fd, 4096))
                os.close(fd)
        except OSError:
            found[path] = -1
    return found


def pointers(*extra: str) -> list[str]:
    """Files below /proc (and `extra` ones) that show an address of the kernel's."""
    address = re.compile(rb"(?<![0-9a-f])ffff[89a-f][0-9a-f]{11}(?![0-9a-f])")
    places = [f"{folder}/{name}" for folder, _, names in os.walk("/proc/self") for name in names]
    places += [f"{folder}/{name}" for folder, _, names in os.walk("/proc/net/") for name in names]
    places += [f"/proc/{name}" for name in os.listdir("/proc") if os.path.isfile(f"/proc/{name}")]
    found = []
    for path in [*places, *extra]:
        with contextlib.suppress(OSError):
            if path.endswith(("/mem", "/pagemap", "/maps", "/smaps", "/auxv", "/environ", "/cmdline")):
                continue  # memory of our own, and what we were given
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            if address.search(re.sub(rb"(?m)^(Sig|Shd|x86|untag)\w+:.*", b"", os.read(fd, 1 << 20))):  # masks
                found.append(path)
            os.close(fd)
    return found


def watch_programs(folder: str, last: str) -> list[str]:
    """The names of what is opened in a folder, by whomever, until `last` is."""
    fd = check(LIBC.inotify_init1(0))
    check(LIBC.inotify_add_watch(fd, folder.encode(), 0x20))  # IN_OPEN
    print("watching", file=sys.stderr, flush=True)
    found: set[str] = set()
    while last not in found:
        data = os.read(fd, 65536)
        while data:
            size = struct.unpack_from("iIII", data)[3]
            found.add(data[16 : 16 + size].rstrip(b"\0").decode())
            data = data[16 + size :]
    return sorted(found)


def lock(path: str) -> str:
    return verdict(fcntl.flock, os.open(path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
