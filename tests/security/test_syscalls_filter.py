"""The compiled programs on the real kernel: what is refused, what still works, and whose answer it was.

Every call is made in a child of its own, under the profile and under a program that allows everything. Where
the bare kernel happens to give the very errno of the profile (to an unprivileged user, or for a feature that
was not built), a third program is asked: the profile with a number of our own in place of every errno. So
each case shows, on every machine, that it is the filter that answers.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from skerry.host import seccomp
from tests import support

ARCH = os.uname().machine
TABLE = Path(seccomp.__file__).parent / "profiles/syscalls" / f"{ARCH}.tbl"
NUMBERS = {name: int(n) for n, name in re.findall(r"^(\d+) (\w+)$", TABLE.read_text(), re.M)}

RETURN, ERRNO, USER_NOTIF, ALLOW = 0x06, 0x00050000, 0x7FC00000, 0x7FFF0000
MARK = 4000  # an errno that the kernel never gives
PERMISSIVE = struct.pack("<HBBI", RETURN, 0, 0, ALLOW)
NEW_LISTENER = 8

BAD = 8  # a pointer to nowhere
HIGH = 0xDEADBEEF << 32  # what a caller may put in front of an int

LIBC = ctypes.CDLL(None, use_errno=True)


def syscall(number: int, *args: int) -> int:
    ctypes.set_errno(0)
    return int(LIBC.syscall(ctypes.c_long(number), *[ctypes.c_ulong(arg & (1 << 64) - 1) for arg in args]))


def install(program: bytes, flags: int = 0) -> int:
    """Confine the calling thread; the listener's fd if one was asked for."""

    code = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(code)))
    LIBC.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    result = syscall(NUMBERS["seccomp"], 1, flags, ctypes.addressof(header))
    if result < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    return result


def marked(program: bytes) -> bytes:
    """`program` with MARK in place of every errno."""

    def change(op: int, if_true: int, if_false: int, operand: int) -> bytes:
        if op == RETURN and operand & 0xFFFF0000 == ERRNO:
            operand = ERRNO | MARK
        return struct.pack("<HBBI", op, if_true, if_false, operand)

    return b"".join(change(*instruction) for instruction in struct.iter_unpack("<HBBI", program))


def in_child(action: Callable[[], int]) -> int:
    """What `action` returns in a child (an errno, 0 for success), or minus the signal that killed it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            os.setsid()  # vhangup must not find a terminal
            me = os.getpid()
            result = action()
            if os.getpid() == me:  # not what a clone that was let through has made
                os.write(writer, struct.pack("i", result))
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        reply = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return -os.WTERMSIG(status)
    return int(struct.unpack("i", reply)[0])


def attempt(program: bytes, number: int, *args: int) -> int:
    def action() -> int:
        install(program)
        return ctypes.get_errno() if syscall(number, *args) == -1 else 0

    return in_child(action)


# --- refused -----------------------------------------------------------------------------------------------

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
STREAM, DGRAM, RAW, PACKET = 1, 2, 3, 10

# Arguments are such that the bare kernel, even as root, does nothing lasting: nowhere pointers, bad fds.
REFUSED: dict[str, list[tuple[str, tuple[int, ...]]]] = {
    "EPERM": [
        ("mount", (0, 0, 0, 0, 0)),
        ("umount2", (BAD, 0)),
        ("pivot_root", (BAD, BAD)),
        ("chroot", (BAD,)),
        ("fsopen", (BAD, 0)),
        ("fsconfig", (-1, 0, 0, 0, 0)),
        ("fsmount", (-1, 0, 0)),
        ("fspick", (-1, BAD, 0)),
        ("move_mount", (-1, BAD, -1, BAD, 0)),
        ("open_tree", (-1, BAD, 0)),
        ("open_tree_attr", (-1, BAD, 0, BAD, 0)),
        ("mount_setattr", (-1, BAD, 0, 0, 0)),
        ("unshare", (0,)),
        ("unshare", (NEWUSER,)),
        ("unshare", (NEWNS,)),
        ("unshare", (0x80,)),  # CLONE_NEWTIME
        ("setns", (-1, 0)),
        *[("clone", (flag | 17, 0)) for flag in (NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET)],
        ("clone", (HIGH | NEWUSER | 17, 0)),
        ("clone", (NEWUSER | NEWNS | NEWPID | 17, 0)),
        ("name_to_handle_at", (-100, BAD, BAD, BAD, 0)),
        ("open_by_handle_at", (-1, BAD, 0)),
        ("fanotify_init", (0, 0)),
        ("fanotify_mark", (-1, 0, 0, -1, BAD)),
        ("init_module", (0, 0, BAD)),
        ("finit_module", (-1, BAD, 0)),
        ("delete_module", (BAD, 0)),
        ("kexec_load", (0, 0, 0, 0xFFFF)),
        ("kexec_file_load", (-1, -1, 0, 0, 0x80000000)),
        ("reboot", (0, 0, 0, 0)),
        ("bpf", (99999, 0, 0)),
        ("perf_event_open", (BAD, 0, -1, -1, 0)),
        ("add_key", (BAD, BAD, 0, 0, 0)),
        ("request_key", (BAD, BAD, 0, 0)),
        ("keyctl", (0, -3, 0, 0, 0)),
        ("userfaultfd", (1,)),
        ("ptrace", (0, 0, 0, 0)),
        ("process_vm_readv", (0, 0, 0, 0, 0, 0)),
        ("process_vm_writev", (0, 0, 0, 0, 0, 0)),
        ("pidfd_getfd", (-1, 0, 0)),
        ("kcmp", (0, 0, 0, 0, 0)),
        ("lookup_dcookie", (0, BAD, 0)),
        ("settimeofday", (BAD, 0)),
        ("clock_settime", (999, BAD)),
        ("adjtimex", (BAD,)),
        ("clock_adjtime", (999, BAD)),
        ("swapon", (BAD, 0)),
        ("swapoff", (BAD,)),
        ("quotactl", (0, BAD, 0, 0)),
        ("quotactl_fd", (-1, 0, 0, 0)),
        ("acct", (BAD,)),
        ("iopl", (0,)),
        ("ioperm", (0, 0, 0)),
        ("modify_ldt", (0, BAD, 0)),
        ("syslog", (10, 0, 0)),
        ("vhangup", ()),
        ("sethostname", (BAD, -1)),
        ("setdomainname", (BAD, -1)),
        ("sync", ()),
        ("remap_file_pages", (0, 0, 1, 0, 0)),
        ("ustat", (0, BAD)),
        ("sysfs", (3,)),
        ("uselib", (BAD,)),
        ("mknod", (BAD, 0o020666, 0x103)),
        ("mknodat", (-100, BAD, 0o020666, 0x103)),
        ("mknodat", (-100, BAD, 0o060666, 0x800)),
        ("mknodat", (-100, BAD, HIGH | 0x10000 | 0o020666, 0x103)),
        ("personality", (0x40000,)),
        ("personality", (0x400000,)),
        ("personality", (HIGH | 0x40000,)),
        ("sched_setscheduler", (0, 1, BAD)),
        ("sched_setscheduler", (0, 6, BAD)),
        ("ioctl", (-1, 0x5412, BAD)),  # TIOCSTI
        ("ioctl", (-1, HIGH | 0x5412, BAD)),
        ("ioctl", (-1, 0x541C, BAD)),  # TIOCLINUX
        ("ioctl", (-1, 0x5423, BAD)),  # TIOCSETD
        *[("socket", (family, kind, 0)) for family in (2, 10) for kind in (RAW, RAW | 0x80000, PACKET)],
        ("socket", (HIGH | 2, HIGH | RAW, HIGH | 1)),
    ],
    "ENOSYS": [
        ("clone3", (BAD, 88)),
        ("sched_setattr", (0, BAD, 0)),
        ("io_uring_setup", (1, BAD)),
        ("io_uring_enter", (-1, 0, 0, 0, 0, 0)),
        ("io_uring_register", (-1, 0, 0, 0)),
        ("memfd_secret", (0,)),
        ("process_madvise", (-1, 0, 0, 0, 0)),
        ("io_setup", (0, BAD)),
        ("io_destroy", (BAD,)),
        ("io_submit", (BAD, 0, 0)),
        ("get_mempolicy", (0, 0, 0, 0, 0)),
        ("set_mempolicy", (99, 0, 0)),
        ("mbind", (0, 0, 99, 0, 0, 0)),
        ("migrate_pages", (0, 0, 0, 0)),
        ("move_pages", (0, 0, 0, 0, 0, 0)),
        ("cachestat", (-1, BAD, BAD, 0)),
        ("statmount", (BAD, BAD, 0, 0)),
        ("listmount", (BAD, BAD, 0, 0)),
        ("lsm_list_modules", (BAD, BAD, 0)),
        ("file_setattr", (-1, BAD, BAD, 0, 0)),
    ],
    "EAFNOSUPPORT": [
        *[("socket", (family, RAW, 0)) for family in (15, 17, 21, 29, 30, 31, 38, 40, 43, 44)],
        ("socket", (38, 5, 0)),  # AF_ALG, SOCK_SEQPACKET
        ("socket", (40, STREAM, 0)),  # AF_VSOCK
        ("socket", (HIGH | 17, HIGH | RAW, 0)),  # AF_PACKET
        ("socketpair", (2, STREAM, 0, BAD)),
        ("socketpair", (30, STREAM, 0, BAD)),
    ],
    "EPROTONOSUPPORT": [
        *[("socket", (16, RAW, protocol)) for protocol in (4, 6, 9, 12, 15, 16, 21)],  # 9 is NETLINK_AUDIT
        ("socket", (HIGH | 16, RAW, HIGH | 9)),
        *[("socket", (family, STREAM, protocol)) for family in (2, 10) for protocol in (132, 262)],
        ("socket", (2, DGRAM, 1)),
    ],
    "ENOPROTOOPT": [
        ("setsockopt", (-1, 6, 31, BAD, 0)),
        # SO_ATTACH_FILTER, SO_ATTACH_BPF, SO_ATTACH_REUSEPORT_CBPF, SO_ATTACH_REUSEPORT_EBPF
        *[("setsockopt", (-1, 1, option, BAD, 0)) for option in (26, 50, 51, 52)],
    ],
    "ENOTTY": [("ioctl", (-1, request, BAD)) for request in (0x40086602, 0x401C5820, 0x800C6613, 0xAE01)],
    "EINVAL": [
        *[("prctl", (option, 0, 0, 0, 0)) for option in (35, 62)],
        ("prctl", (22, 2, BAD, 0, 0)),  # PR_SET_SECCOMP
        ("memfd_create", (BAD, 4)),
    ],
    "ENOMEM": [("mmap", (0, 1 << 21, 3, 0x40022, -1, 0))],
}
CASES = [
    (call, args, getattr(errno, expected))
    for expected, calls in REFUSED.items()
    for call, args in calls
    if call in NUMBERS  # some are of one architecture alone
]
STRICT_CASES = [
    ("socket", (1, STREAM, 0), errno.EPERM),
    ("socket", (2, STREAM, 0), errno.EPERM),
    ("socket", (16, RAW, 0), errno.EPERM),
    ("connect", (-1, BAD, 0), errno.EPERM),
    ("bind", (-1, BAD, 0), errno.EPERM),
    ("listen", (-1, 1), errno.EPERM),
    ("inotify_init1", (0,), errno.EPERM),
    ("shmget", (0, 0, 0), errno.EPERM),
    ("semget", (0, 0, 0), errno.EPERM),
    ("msgget", (1, 0), errno.EPERM),
    ("mq_open", (BAD, 0, 0, 0), errno.EPERM),
    ("memfd_create", (BAD, 0), errno.ENOSYS),
    ("seccomp", (1, 0, BAD), errno.ENOSYS),
    ("prctl", (22, 2, BAD, 0, 0), errno.EINVAL),
    ("setsockopt", (-1, 1, 26, BAD, 0), errno.ENOPROTOOPT),  # SO_ATTACH_FILTER
]


def check_refused(profile: str, number: int, args: tuple[int, ...], expected: int) -> None:
    program = seccomp.compile_profile(profile)
    assert attempt(program, number, *args) == expected
    if attempt(PERMISSIVE, number, *args) == expected:
        assert attempt(marked(program), number, *args) == MARK


@pytest.mark.parametrize(("call", "args", "expected"), CASES)
def test_refused(call: str, args: tuple[int, ...], expected: int) -> None:
    check_refused("default", NUMBERS[call], args, expected)


@pytest.mark.parametrize(("call", "args", "expected"), STRICT_CASES)
def test_refused_by_strict(call: str, args: tuple[int, ...], expected: int) -> None:
    check_refused("strict", NUMBERS[call], args, expected)


@pytest.mark.parametrize("number", [471 + 1, 512, 547, 1000, 0x3FFFFFFF, -1])
def test_unknown_number(number: int) -> None:
    check_refused("default", number, (), errno.ENOSYS)


def test_a_listener_inside_cannot_overrule() -> None:
    """A filter of the sandboxed code that asks a listener of its own does not lift a refusal."""
    ask = b"".join(
        struct.pack("<HBBI", *instruction)
        for instruction in (
            (0x20, 0, 0, 0),
            (0x15, 0, 1, NUMBERS["unshare"]),
            (RETURN, 0, 0, USER_NOTIF),
            (RETURN, 0, 0, ALLOW),
        )
    )

    def unshare_under(program: bytes) -> int:
        def action() -> int:
            install(program)
            os.close(install(ask, NEW_LISTENER))  # when nobody listens any more the answer is ENOSYS
            return ctypes.get_errno() if syscall(NUMBERS["unshare"], 0) == -1 else 0

        return in_child(action)

    assert unshare_under(PERMISSIVE) == errno.ENOSYS
    assert unshare_under(seccomp.compile_profile("filters")) == errno.EPERM


# --- killed ------------------------------------------------------------------------------------------------

only_x86_64 = pytest.mark.skipif(ARCH != "x86_64", reason="an ABI of x86_64")


@only_x86_64
@pytest.mark.parametrize("profile", seccomp.profile_names())
def test_i386_calls_kill(profile: str) -> None:
    def i386_getpid(program: bytes) -> int:
        def action() -> int:
            page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
            page.write(bytes.fromhex("b814000000 cd80 c3"))  # mov eax, 20; int 0x80; ret
            entry = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
            install(program)
            return 0 if entry() == os.getpid() else errno.ENOSYS

        return in_child(action)

    assert i386_getpid(seccomp.compile_profile(profile)) == -signal.SIGSYS
    assert i386_getpid(PERMISSIVE) != -signal.SIGSYS


@only_x86_64
@pytest.mark.parametrize("profile", seccomp.profile_names())
@pytest.mark.parametrize("number", [0, 39, 520])
def test_x32_numbers_kill(profile: str, number: int) -> None:
    assert attempt(seccomp.compile_profile(profile), 0x40000000 | number, -1, BAD) == -signal.SIGSYS
    assert attempt(PERMISSIVE, 0x40000000 | number, -1, BAD) != -signal.SIGSYS


# --- allowed -----------------------------------------------------------------------------------------------

ALLOWED: list[tuple[str, tuple[int, ...]]] = [
    ("read", (-1, BAD, 1)),
    ("openat", (-1, BAD, 0, 0)),
    ("openat2", (-1, BAD, BAD, 24)),
    ("statx", (-1, BAD, 0, 0, BAD)),
    ("getdents64", (-1, BAD, 1)),
    ("fchownat", (-1, BAD, -1, -1, 0)),
    ("fchmodat2", (-1, BAD, 0, 0)),
    ("renameat2", (-1, BAD, -1, BAD, 0)),
    ("copy_file_range", (-1, 0, -1, 0, 0, 0)),
    ("splice", (-1, 0, -1, 0, 1, 0)),
    ("close_range", (4000, 4000, 0)),
    ("pipe2", (BAD, 0)),
    ("epoll_create1", (0,)),
    ("eventfd2", (0, 0)),
    ("inotify_init1", (0,)),
    ("memfd_create", (BAD, 0)),
    ("membarrier", (0, 0, 0)),
    ("mseal", (1, 1, 0)),
    ("rseq", (BAD, 0, 0, 0)),
    ("set_robust_list", (0, 24)),
    ("futex_waitv", (BAD, 1, 0, 0, 0)),
    ("clone", (17, 0)),
    ("clone", (HIGH | 17, 0)),
    ("fork", ()),
    ("execveat", (-1, BAD, 0, 0, 0)),
    ("wait4", (-1, 0, 1, 0)),
    ("waitid", (0, 0, 0, 5, 0)),
    ("pidfd_open", (0, 0)),
    ("pidfd_send_signal", (-1, 0, 0, 0)),
    ("getppid", ()),
    ("setresuid", (-1, -1, -1)),
    ("setresgid", (-1, -1, -1)),
    ("setgroups", (-1, BAD)),
    ("capset", (BAD, BAD)),
    ("prctl", (38, 1, 0, 0, 0)),
    ("prctl", (24, 999, 0, 0, 0)),
    ("prctl", (15, BAD, 0, 0, 0)),
    ("seccomp", (2, 0, BAD)),
    ("landlock_create_ruleset", (0, 0, 1)),
    ("landlock_restrict_self", (-1, 0)),
    ("prlimit64", (0, 7, 0, 0)),
    ("setpriority", (0, 0, 0)),
    ("sched_setaffinity", (0, 0, BAD)),
    ("sched_setscheduler", (0, 0, BAD)),
    ("personality", (0xFFFFFFFF,)),
    ("personality", (HIGH | 0xFFFFFFFF,)),
    ("personality", (0,)),
    ("mknodat", (-100, BAD, 0o010600, 0)),
    ("ioctl", (-1, 0x5401, BAD)),
    ("ioctl", (-1, 0x80045430, BAD)),
    ("ioctl", (-1, 0x40049409, BAD)),
    ("shmget", (0, 0, 0)),
    ("mq_open", (BAD, 0, 0, 0)),
    ("getrandom", (BAD, 0, 0)),
    ("timer_create", (0, BAD, BAD)),
    ("socketpair", (1, STREAM, 0, BAD)),
    ("socket", (HIGH | 1, HIGH | STREAM, 0)),
    *[("socket", (family, kind, 0)) for family in (1, 2, 10) for kind in (STREAM, DGRAM | 0x80800)],
    ("socket", (2, STREAM, 6)),
    ("socket", (2, DGRAM, 17)),
    ("socket", (16, RAW, 0)),
    ("setsockopt", (-1, 1, 2, BAD, 4)),
]


@pytest.mark.parametrize(("call", "args"), [case for case in ALLOWED if case[0] in NUMBERS])
@pytest.mark.parametrize("profile", ["default", "debug"])
def test_allowed(profile: str, call: str, args: tuple[int, ...]) -> None:
    """The answer is the bare kernel's, even in a program that would mark every errno of the filter."""
    program = marked(seccomp.compile_profile(profile))
    assert attempt(program, NUMBERS[call], *args) == attempt(PERMISSIVE, NUMBERS[call], *args)


@pytest.mark.parametrize(
    ("call", "args"),
    [
        ("ptrace", (0, 0, 0, 0)),
        ("process_vm_readv", (0, 0, 0, 0, 0, 0)),
        ("process_vm_writev", (0, 0, 0, 0, 0, 0)),
        ("pidfd_getfd", (-1, 0, 0)),
        ("kcmp", (0, 0, 0, 0, 0)),
        ("personality", (0x40000,)),
    ],
)
def test_allowed_by_debug_alone(call: str, args: tuple[int, ...]) -> None:
    bare = attempt(PERMISSIVE, NUMBERS[call], *args)
    assert attempt(marked(seccomp.compile_profile("debug")), NUMBERS[call], *args) == bare
    assert attempt(marked(seccomp.compile_profile("default")), NUMBERS[call], *args) == MARK


# --- programs ----------------------------------------------------------------------------------------------


def run(profile: str, where: Path, *argv: str, exit_code: int = 0) -> str:
    """What a program prints that runs under a profile, in `where`. Skips if the machine does not have it."""
    program = support.require(argv[0])
    compiled = seccomp.compile_profile(profile)
    done = subprocess.run(
        [program, *argv[1:]],
        cwd=where,
        env={"PATH": os.environ["PATH"], "HOME": str(where), "TMPDIR": str(where)},
        preexec_fn=lambda: install(compiled) and None,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == exit_code, done.stdout
    return done.stdout


BASH = r"""
set -euo pipefail
mkfifo pipe; (printf 'b\na\n' > pipe) & sort < pipe; wait
diff <(seq 3) <(printf '1\n2\n3\n')
cp -a pipe copy; ln -s pipe link; touch -d 2020-01-01 old; chmod 600 old; tar cf t.tar old; xz -k t.tar; sync
timeout 5 nice -n 5 sleep 0.01; cat <<<"$(ls | wc -l)"
"""
PYTHON = """
import asyncio, ctypes, mmap, multiprocessing, sqlite3, subprocess, threading

def square(n): return n * n

async def main():
    child = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1)
    assert (await child.communicate(b"x"))[0] == b"x"
    assert await asyncio.to_thread(square, 3) == 9

if __name__ == "__main__":
    threads = [threading.Thread(target=square, args=(1,)) for _ in range(8)]
    [t.start() for t in threads]; [t.join() for t in threads]
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            assert pool.map(square, range(4)) == [0, 1, 4, 9]
    asyncio.run(main())
    sqlite3.connect("a.db").execute("create table t (x)")
    assert subprocess.run(["id", "-u"], capture_output=True, check=True).stdout
    mmap.mmap(-1, 4096)
    print("python works")
"""
PYTHON_NETWORK = """
import socket, threading, multiprocessing.shared_memory
server = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=lambda: server.accept()[0].sendall(b"hi")).start()
assert socket.create_connection(server.getsockname()).recv(2) == b"hi"
assert socket.getaddrinfo("127.0.0.1", 80)
assert socket.if_nameindex() is not None
memory = multiprocessing.shared_memory.SharedMemory(create=True, size=10); memory.close(); memory.unlink()
print("network works")
"""
NODE = """
const { Worker, isMainThread } = require("worker_threads");
if (isMainThread) {
  require("fs").writeFileSync("n.txt", require("crypto").randomBytes(16));
  require("child_process").exec("cat n.txt | wc -c", (e, out) => {
    if (e) throw e;
    new Worker(__filename).on("exit", () => require("fs").promises.stat("n.txt").then(
      s => console.log("node works", out.trim(), s.size)));
  });
}
"""
GO = """
package main

import ("fmt"; "os/exec"; "sync")

func main() {
	var wg sync.WaitGroup
	for i := 0; i < 100; i++ { wg.Add(1); go func() { defer wg.Done() }() }
	wg.Wait()
	out, err := exec.Command("echo", "go works").Output()
	if err != nil { panic(err) }
	fmt.Print(string(out))
}
"""
C = """
#include <pthread.h>
#include <stdio.h>
static void *body(void *x) { return x; }
int main(void) { pthread_t t; pthread_create(&t, 0, body, 0); pthread_join(t, 0); puts("c works"); return 0; }
"""
JAVA = """
class Main {
  public static void main(String[] a) throws Exception {
    Thread t = new Thread(() -> System.out.println("java works")); t.start(); t.join();
  }
}
"""
GIT = """
set -eu
git init -q one; cd one; git config user.email a@example.com; git config user.name a
echo x > x; git add x; git commit -qm x; git gc -q; git clone -q . ../two; git -C ../two log --format=%s
"""
SERVER = """
const http = require("http");
const server = http.createServer((q, r) => r.end("served")).listen(0, "127.0.0.1", () =>
  http.get({ port: server.address().port }, r => r.on("data", d => {
    console.log(`${d}`);
    server.close();
  })));
require("fs").watch(".").close();
"""

everyday = pytest.mark.parametrize("profile", ["default", "strict", "debug", "filters"])


@everyday
def test_bash_runs(profile: str, tmp_path: Path) -> None:
    assert run(profile, tmp_path, "bash", "-c", BASH) == "a\nb\n6\n"


@everyday
def test_python_runs(profile: str, tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(PYTHON)
    assert run(profile, tmp_path, sys.executable, "main.py") == "python works\n"


@everyday
def test_node_runs(profile: str, tmp_path: Path) -> None:
    (tmp_path / "main.js").write_text(NODE)
    assert run(profile, tmp_path, "node", "main.js") == "node works 16 16\n"


@everyday
def test_c_compiles_and_runs(profile: str, tmp_path: Path) -> None:
    (tmp_path / "main.c").write_text(C)
    (tmp_path / "Makefile").write_text("run: main\n\t@./main\nmain: main.c\n\t@cc -pthread -o main main.c\n")
    assert run(profile, tmp_path, "make", "-s", "-j2") == "c works\n"


@pytest.mark.slow
@everyday
def test_go_builds_and_runs(profile: str, tmp_path: Path) -> None:
    (tmp_path / "main.go").write_text(GO)
    assert run(profile, tmp_path, "go", "run", "main.go") == "go works\n"


@everyday
def test_java_compiles_and_runs(profile: str, tmp_path: Path) -> None:
    (tmp_path / "Main.java").write_text(JAVA)
    run(profile, tmp_path, "javac", "Main.java")
    assert run(profile, tmp_path, "java", "-cp", ".", "Main") == "java works\n"


@everyday
def test_git_runs(profile: str, tmp_path: Path) -> None:
    assert run(profile, tmp_path, "sh", "-c", GIT) == "x\n"


def test_python_serves_and_connects(tmp_path: Path) -> None:
    assert run("default", tmp_path, sys.executable, "-c", PYTHON_NETWORK) == "network works\n"


def test_node_serves_and_watches(tmp_path: Path) -> None:
    assert run("default", tmp_path, "node", "-e", SERVER) == "served\n"


def test_npm_runs_a_script(tmp_path: Path) -> None:
    (tmp_path / "package.json").write_text(
        '{"name": "a", "version": "1.0.0", "scripts": {"hi": "echo npm works"}}'
    )
    assert run("default", tmp_path, "npm", "run", "--silent", "hi") == "npm works\n"


def test_python_makes_a_venv(tmp_path: Path) -> None:
    run("default", tmp_path, sys.executable, "-m", "venv", "--without-pip", "v")
    assert run("default", tmp_path, str(tmp_path / "v/bin/python"), "-c", "print(1)") == "1\n"


def test_a_debugger_attaches_under_debug_alone(tmp_path: Path) -> None:
    (tmp_path / "main.c").write_text(C)
    run("debug", tmp_path, "cc", "-g", "-pthread", "-o", "main", "main.c")
    debugger = ("gdb", "-q", "-batch", "-ex", "break body", "-ex", "run", "-ex", "backtrace", "./main")
    assert "ptrace: Operation not permitted" in run("default", tmp_path, *debugger, exit_code=1)
    output = run("debug", tmp_path, *debugger)
    assert "#0  body" in output
    assert "disabling address space randomization" not in output
