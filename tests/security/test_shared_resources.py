"""Resources that the kernel counts for the whole host, or for one user of it: docs/resources.toml has them all."""

from __future__ import annotations

import ctypes
import json
import os
from contextlib import ExitStack
from pathlib import Path

import pytest

import skerry
from skerry.backends.blanks import READY
from skerry.daemon.doctor import FILE_SIZE
from skerry.host import uids
from tests.security.box import LIMITS, PROBES, Box, Boxes, Running, own_kernel

PYTHON = ["python3", "-S", "-c"]
HOLD = (PROBES / "limits.py").read_text()


@pytest.mark.needs("host_kernel")
def test_terminals_of_an_environment_are_bounded(boxes: Boxes, mode: str) -> None:
    code = """
import os
count = 0
try:
    while True:
        os.openpty()
        count += 1
except OSError as error:
    print(count)
"""
    assert boxes(mode).run([*PYTHON, code]).text == "64"


def test_open_files_are_charged_to_the_environments_memory(boxes: Boxes) -> None:
    """So that the memory limit bounds its share of the host's file table."""
    code = """
import os, signal, sys
for _ in range(40):
    read, write = os.pipe()
    if os.fork() == 0:
        for _ in range(int(sys.argv[1])):
            os.open("/tmp", os.O_RDONLY)
        os.write(write, b"x")
        signal.pause()
    os.read(read, 1)
os.write(1, b"held")
signal.pause()
"""
    used = {}
    for count in (10, 900):
        with boxes.fresh("rootful") as box:
            box.start([*PYTHON, code, str(count)]).until("held")
            used[count] = box.keeper.call("usage", id=box.id)["memory"]
    assert used[900] - used[10] > 40 * 890 * FILE_SIZE


# What the kernel counts for each user


def hold(box: Box) -> Running:
    """Use up the per-user limits of an environment, until it ends."""
    running = box.start([*PYTHON, f"{HOLD}\nos.write(1, b'held')\nsignal.pause()"])
    running.until("held")
    return running


def found(box: Box) -> dict[str, int]:
    answer: dict[str, int] = json.loads(box.run([*PYTHON, HOLD], stdin=b"").text)
    return answer


def pending_of_root() -> int:
    """Signals that are pending for the host's root, as the kernel counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("SigQ:")).split()[1].partition("/")[0])


def test_environments_at_their_per_user_limits_leave_others_theirs(boxes: Boxes) -> None:
    """Five hold more inotify instances (128) and message queues (800 KiB) than the host gives to one user.

    Without `confine`, because Landlock refuses message queues where the kernel has it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with ExitStack() as stack:
        alone = found(stack.enter_context(boxes.fresh("rootful", without=["confine"])))
        assert alone["instances"] == 32
        assert alone["queues"] >= 3
        assert alone["signals"] > 1000
        before = pending_of_root()
        for _ in range(5):
            hold(stack.enter_context(boxes.fresh("rootful", without=["confine"])))
        assert found(stack.enter_context(boxes.fresh("rootful", without=["confine"]))) == alone
        assert pending_of_root() - before < alone["signals"]
        instance = libc.inotify_init1(0)
        assert instance >= 0, os.strerror(ctypes.get_errno())
        os.close(instance)
        queue = libc.mq_open(b"/skerry-test", os.O_CREAT | os.O_RDWR, 0o600, None)
        assert queue >= 0, os.strerror(ctypes.get_errno())
        os.close(queue)
        assert libc.mq_unlink(b"/skerry-test") == 0


def test_without_an_own_creator_roots_signals_are_charged(boxes: Boxes) -> None:
    """What the test above relies on."""
    with boxes.fresh("rootful", without=["owner"]) as box:
        before = pending_of_root()
        hold(box)
        assert pending_of_root() - before > 1000


@pytest.mark.needs("host_kernel", "own_limits")
def test_every_environment_of_a_daemon_has_a_creator_of_its_own(client: skerry.Client) -> None:
    """Those that were prepared before anybody asked, and those that were not."""
    with ExitStack() as stack:
        environments = [
            stack.enter_context(skerry.Environment(workspace="memory", client=client))
            for _ in range(READY + 2)
        ]
        rows = [{row["name"]: row for row in env.info().enforced} for env in environments]
    if rows[0]["users"]["value"].startswith("one user"):
        assert not any(row["user_limits"]["enforced"] for row in rows)
        return
    assert all(row["user_limits"]["enforced"] for row in rows)
    owners = {int(row["user_limits"]["value"]) for row in rows}
    assert len(owners) == len(environments)
    assert all(uids.OWNERS <= owner < uids.FIRST for owner in owners)


# Process 1, which may have the workload's own user


IOPRIO_SET = 251 if os.uname().machine == "x86_64" else 30


def scheduling(pid: int) -> tuple[str, str, str]:
    """Limits, priority and policy, and processors of a process, as the host sees them."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = Path(f"/proc/{pid}/status").read_text()
    return (
        Path(f"/proc/{pid}/limits").read_text(),
        f"nice {fields[16]} policy {fields[38]} I/O {ctypes.CDLL(None).syscall(IOPRIO_SET + 1, 1, pid)}",
        next(line for line in status.splitlines() if line.startswith("Cpus_allowed:")),
    )


CHANGES = """
import ctypes, errno, os, resource
libc = ctypes.CDLL(None, use_errno=True)
target = int(os.environ["TARGET"])
param = ctypes.byref(ctypes.c_int(0))
group = os.getpgid(target)
calls = {
    "limits": lambda: libc.prlimit(target, 7, ctypes.byref((ctypes.c_ulong * 2)(16, 16)), None),
    "nice": lambda: libc.setpriority(0, target, 19),
    "nice of its group": lambda: libc.setpriority(1, group, 19),
    "scheduler": lambda: libc.sched_setscheduler(target, 5, param),
    "parameters": lambda: libc.sched_setparam(target, param),
    "processors": lambda: libc.sched_setaffinity(target, 8, ctypes.byref(ctypes.c_ulong(1))),
    "I/O of its group": lambda: libc.syscall(IOPRIO_SET, 2, group, 3 << 13),
    "I/O": lambda: libc.syscall(IOPRIO_SET, 1, target, 3 << 13),
}
if target == 1:
    calls["nice of a user"] = lambda: libc.setpriority(2, os.getuid(), 19)
    calls["I/O of a user"] = lambda: libc.syscall(IOPRIO_SET, 3, os.getuid(), 3 << 13)
for name, call in calls.items():
    print(name, "ok" if call() == 0 else errno.errorcode[ctypes.get_errno()], sep=": ")
""".replace("IOPRIO_SET", str(IOPRIO_SET))


def test_limits_and_scheduling_of_process_1_are_not_the_workloads(boxes: Boxes, mode: str) -> None:
    with boxes.fresh(mode) as box:
        before = scheduling(box.pid)
        answers = box.run([*PYTHON, CHANGES], env={"TARGET": "1"}).text.splitlines()
        assert len(answers) == 10
        assert all(answer.endswith(": EPERM") for answer in answers), answers
        assert scheduling(box.pid) == before
        reading = "import resource; print(resource.prlimit(1, resource.RLIMIT_CORE))"
        assert own_kernel(mode) or box.run([*PYTHON, reading]).code == 0


@pytest.mark.needs("users")
@pytest.mark.needs("host_kernel")
def test_limits_and_scheduling_of_supervisors_are_not_the_workloads(boxes: Boxes, mode: str) -> None:
    """As root: they have another user. Without root there is one user."""
    with boxes.fresh(mode) as box:
        code = f"import os\nos.environ['TARGET'] = str(os.getppid())\n{CHANGES}"
        answers = box.run([*PYTHON, code]).text.splitlines()
        assert len(answers) == 8
        assert all(answer.endswith(": EPERM") for answer in answers), answers


@pytest.mark.needs("host_kernel")
def test_limits_and_scheduling_of_ones_own_processes_are(boxes: Boxes, mode: str) -> None:
    """By number, too: threads are pinned that way, and `prlimit --pid $$` asks for a parent."""
    code = f"""
import os, threading
os.environ["TARGET"] = str(os.getpid())
exec({CHANGES!r})
thread = threading.Thread(target=lambda: os.sched_setaffinity(threading.get_native_id(), {{0}}))
thread.start()
thread.join()
"""
    done = boxes(mode).run([*PYTHON, code])
    answers = done.text.splitlines()
    assert len(answers) == 8, done.stderr.decode()
    assert all(answer.endswith(": ok") for answer in answers), answers
    assert done.stderr == b""


def test_a_negative_oom_score_of_the_daemon_cannot_be_had_inside(boxes: Boxes) -> None:
    code = """
for score in (-500, -1, 0):
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(str(score))
        print("set")
    except PermissionError:
        print("refused")
"""
    keeper = boxes("rootful").keeper
    own = Path(f"/proc/{keeper.pid}/oom_score_adj")
    try:
        own.write_text("-500")
    except PermissionError:
        pytest.skip("this root has no CAP_SYS_RESOURCE; tests/vm has a machine whose root does")
    try:
        with boxes.fresh("rootful") as box:
            assert Path(f"/proc/{box.pid}/oom_score_adj").read_text() == "0\n"
            assert box.run([*PYTHON, code]).text.split() == ["refused", "refused", "set"]
    finally:
        own.write_text("0")


# What is not there


def test_huge_pages_are_refused_however_they_are_asked_for(boxes: Boxes, mode: str) -> None:
    """Outside of the memory limit: the host's pool would be used, if it has one."""
    code = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_long
def told(result): print("ok" if result >= 0 else errno.errorcode[ctypes.get_errno()])
told(libc.mmap(None, ctypes.c_size_t(1 << 21), 3, 0x40022, -1, ctypes.c_long(0)))
told(libc.memfd_create(b"huge", 4))
told(libc.shmget(0, ctypes.c_size_t(1 << 21), 0o5600))
told(libc.mmap(None, ctypes.c_size_t(1 << 21), 3, 0x22, -1, ctypes.c_long(0)))
"""
    assert boxes(mode).run([*PYTHON, code]).text.split() == ["ENOMEM", "EINVAL", "EPERM", "ok"]


FILTER = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
allow = ctypes.create_string_buffer(bytes.fromhex("06000000 0000ff7f"))
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
program = Program(1, ctypes.addressof(allow))
def told(result): print("ok" if result == 0 else errno.errorcode[ctypes.get_errno()])
told(libc.prctl(22, 2, ctypes.byref(program)))
told(libc.syscall(SECCOMP, 1, 0, ctypes.byref(program)))
""".replace("SECCOMP", "317" if os.uname().machine == "x86_64" else "277")


@pytest.mark.needs("host_kernel")
def test_seccomp_filters_need_the_profile_that_names_them(boxes: Boxes, mode: str) -> None:
    """Their machine code takes space that is one for the whole host."""
    for profile, answer in (
        ("default", "EINVAL"),
        ("debug", "EINVAL"),
        ("strict", "EINVAL"),
        ("filters", "ok"),
    ):
        assert boxes(mode, profile=profile).run([*PYTHON, FILTER]).text.split() == [answer] * 2


# Kernel memory


CHARGED = {
    "pipe buffers": (
        """
for _ in range(200):
    read, write = os.pipe()
    os.set_blocking(write, False)
    os.write(write, bytes(65536))
""",
        200 * 65536,
    ),
    "unix socket buffers": (
        """
import socket
for _ in range(100):
    one, other = socket.socketpair()
    one.setblocking(False)
    held.append((one, other))
    try:
        while True:
            one.send(bytes(65536))
    except BlockingIOError:
        pass
""",
        100 * 65536,
    ),
    "System V messages": (
        """
for _ in range(1000):
    queue = libc.msgget(0, 0o1600)
    for _ in range(2):
        assert libc.msgsnd(queue, ctypes.create_string_buffer(bytes([1] * 8) + bytes(8000)), 8000, 0) == 0
""",
        1000 * 2 * 8000,
    ),
    "epoll watches": (
        """
import select
files = [os.eventfd(0) for _ in range(300)]
for _ in range(200):
    poll = select.epoll()
    held.append(poll)
    for file in files:
        poll.register(file)
""",
        300 * 200 * 64,
    ),
    "directory entries": (
        """
for number in range(50000):
    try:
        os.stat(f"/tmp/none-{number}")
    except OSError:
        pass
for number in range(20000):
    os.symlink("x" * 100, f"/tmp/link-{number}")
""",
        20000 * 500,
    ),
    "System V shared memory": (
        """
part = libc.shmget(0, ctypes.c_size_t(16 << 20), 0o1600)
libc.shmat.restype = ctypes.c_void_p
address = libc.shmat(part, None, 0)
ctypes.memset(address, 1, 16 << 20)
libc.shmctl(part, 0, None)
""",
        16 << 20,
    ),
}


@pytest.mark.parametrize("what", CHARGED)
def test_kernel_memory_is_charged_to_the_environment(boxes: Boxes, what: str) -> None:
    code, size = CHARGED[what]
    used = []
    # Whoever reads a file first is charged for its page cache: the first environment does, and is not counted.
    for body in ("", "", code):
        start = "import ctypes, os, signal\nlibc = ctypes.CDLL(None)\nheld = []"
        program = f"{start}\n{body}\nos.write(1, b'held')\nsignal.pause()"
        with boxes.fresh("rootful") as box:
            box.start([*PYTHON, program]).until("held")
            used.append(box.keeper.call("usage", id=box.id)["memory"])
    assert used[2] - used[1] > size * 0.9


def test_socket_memory_is_limited_for_each_environment(boxes: Boxes) -> None:
    """On cgroup v1 it is no part of the memory limit, but has one of its own; v2 charges it with all else."""
    code = """
import os, signal, socket
server = socket.create_server(("127.0.0.1", 0))
held = []
for _ in range(300):
    one = socket.create_connection(server.getsockname())
    one.setblocking(False)
    held += [one, server.accept()[0]]
    try:
        while True:
            one.send(bytes(1 << 20))
    except BlockingIOError:
        pass
os.write(1, b"held")
signal.pause()
"""
    with boxes.fresh("rootful") as box:
        found = list(Path("/sys/fs/cgroup/memory").glob(f"skerry-*/skerry-{box.id}"))
        if not found:
            pytest.skip("the memory controller is on cgroup v2 here")
        box.start([*PYTHON, code]).until("held")
        used = int((found[0] / "memory.kmem.tcp.usage_in_bytes").read_text())
        # Every socket may go a little beyond, so that connections get on.
        assert LIMITS["memory"] // 16 < used < LIMITS["memory"] // 8 * 2
