"""Volumes on the kernel at hand: limits exact to the byte and the inode, nothing left behind by anybody.

What a workload does is done by one: a user of a user namespace of its own, which sees the volume the way that
the launch helper shows it.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from skerry.errors import LaunchFailed
from skerry.host import mounts, volumes
from skerry.host.volumes import SUBDIR, Volumes
from skerry.policy import GIB, MIB
from tests import leaks, support

pytestmark = pytest.mark.root

BASE = 2_000_000_000
USER = BASE + 1000
PATIENCE = 30.0

INSIDE = """
import ctypes, errno, json, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "in the namespace")
    return result
check(libc.unshare(0x10000000 | 0x00020000))   # CLONE_NEWUSER | CLONE_NEWNS
print("unshared", flush=True)
sys.stdin.readline()
os.setresgid(0, 0, 0)
os.setresuid(0, 0, 0)
volume = int(sys.argv[1])
long = ctypes.c_long
def move_onto(mount, target):
    check(libc.syscall(long(429), long(mount), b"", long(target), b"", long(0x4 | 0x40)))
move_onto(volume, os.open("/mnt", os.O_PATH))
move_onto(check(libc.syscall(long(428), long(volume), b"w", long(1))), volume)
os.setresgid(1000, 1000, 1000)
os.setresuid(1000, 1000, 1000)
os.chdir("/mnt")
"""
"""Becomes user 1000 of a user range, with the volume's SUBDIR on /mnt of a mount namespace of its own."""


def inside(volume: int, code: str) -> Any:
    """Run code as the workload does; what it assigns to `answer`."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", f"{INSIDE}\n{code}\nprint(json.dumps(answer))", str(volume)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(volume,),
        text=True,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "unshared\n"
        for what in "uid", "gid":
            Path(f"/proc/{process.pid}/{what}_map").write_text(f"0 {BASE} 65536")
        process.stdin.write("\n")
        process.stdin.flush()
        answer = process.stdout.read()
    assert process.returncode == 0
    return json.loads(answer)


def room(volume: int) -> tuple[int, int]:
    space = os.statvfs(volume)
    return space.f_bavail * space.f_frsize, space.f_ffree


def rounded(size: int) -> int:
    return -(-size // 4096) * 4096


def loops_of(directory: Path) -> list[str]:
    return [loop for loop in leaks.loops() if f"({directory}/" in loop]


def eventually(condition: Callable[[], object]) -> None:
    """Wait for what the kernel or another thread does in its own time and tells nobody about."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "skerry-volumes"


@pytest.fixture
def made(directory: Path) -> Iterator[Volumes]:
    support.require("mkfs.ext4", "e2fsprogs")
    made = Volumes(str(directory))
    assert made.unavailable() == ""
    yield made
    made.close()
    eventually(lambda: not loops_of(directory))
    assert [name for name in os.listdir(directory) if not name.startswith("v1-")] == []


@pytest.fixture
def take(made: Volumes) -> Iterator[Callable[[int, int], int]]:
    taken: list[int] = []

    def take(size: int, inodes: int) -> int:
        taken.append(made.take(size, inodes, USER, USER))
        return taken[-1]

    yield take
    for volume in taken:
        os.close(volume)


Take = Callable[[int, int], int]


@pytest.mark.parametrize(
    ("size", "inodes"),
    [
        (MIB, 16),
        (MIB, 131072),
        (5 * MIB + 1, 33),
        (16 * MIB, 1000),
        (100 * MIB, 4097),
        (100_000_001, 70_001),
        (2 * GIB, 131072),
        (2 * GIB, 16),
        (100 * GIB, 1_000_003),
    ],
)
def test_the_kernel_shows_exactly_the_limits(take: Take, size: int, inodes: int) -> None:
    volume = take(size, inodes)
    assert room(volume) == (rounded(size), inodes)
    assert room(take(size, inodes)) == (rounded(size), inodes)
    answer = inside(volume, "s = os.statvfs('.'); answer = [s.f_bavail * s.f_frsize, s.f_ffree]")
    assert answer == [rounded(size), inodes]


def test_the_workspace_is_empty_and_the_users_own(take: Take) -> None:
    answer = inside(
        take(16 * MIB, 100),
        """
s = os.stat(".")
open("file", "w").write("mine")
answer = [s.st_uid, s.st_gid, s.st_mode & 0o7777, os.listdir("."), os.listdir(".."), os.stat("file").st_uid]
""",
    )
    assert answer[:3] == [1000, 1000, 0o755]
    assert answer[3] == ["file"]
    assert SUBDIR not in answer[4]
    assert answer[5] == 1000


def test_its_mode_does_not_depend_on_the_umask_of_its_making(take: Take) -> None:
    before = os.umask(0o177)
    try:
        volume = take(16 * MIB, 102)
    finally:
        os.umask(before)
    assert inside(volume, "answer = os.stat('.').st_mode & 0o7777") == 0o755


FILL = """
written, block = 0, b"x" * 65536
with open("big", "wb", buffering=0) as file:
    while block:
        try:
            written += file.write(block)
        except OSError as error:
            assert error.errno == errno.ENOSPC
            block = block[:len(block) // 2] if len(block) > 1 else b""
    os.fsync(file.fileno())
os.posix_fadvise(os.open("big", os.O_RDONLY), 0, 0, os.POSIX_FADV_DONTNEED)
with open("big", "rb") as file:
    while block := file.read(65536):
        assert block.count(b"x") == len(block)
answer = [written, os.stat("big").st_size]
"""


@pytest.mark.parametrize("size", [MIB, 16 * MIB + 4096, 300 * MIB])
def test_one_file_gets_all_the_bytes_and_not_one_more(take: Take, size: int) -> None:
    written, stored = inside(take(size, 16), FILL)
    assert written == stored
    assert size - max(size // 1000, 4096) <= stored <= size


def test_a_fallocated_file_gets_all_the_bytes_and_not_one_more(take: Take) -> None:
    code = """
file = os.open("big", os.O_RDWR | os.O_CREAT)
os.posix_fallocate(file, 0, 64 << 20)
try:
    os.posix_fallocate(file, 64 << 20, 4096)
    answer = "more"
except OSError as error:
    answer = error.errno == errno.ENOSPC
"""
    assert inside(take(64 * MIB, 16), code) is True


def test_many_small_files_do_not_get_more(take: Take) -> None:
    code = """
stored, number = 0, 0
while True:
    try:
        os.mkdir(f"d{number}")
        for name in range(100):
            with open(f"d{number}/{name}", "wb") as file:
                file.write(b"x" * 4096)
            stored += 4096
        number += 1
    except OSError as error:
        assert error.errno == errno.ENOSPC
        break
os.sync()
answer = stored
"""
    assert 16 * MIB * 0.95 <= inside(take(16 * MIB, 100_000), code) <= 16 * MIB


def test_it_holds_exactly_as_many_files(take: Take) -> None:
    code = """
count = 0
while True:
    try:
        os.close(os.open(f"file-{count}", os.O_CREAT | os.O_EXCL))
    except OSError as error:
        assert error.errno == errno.ENOSPC
        break
    count += 1
os.unlink("file-0")
os.mkdir("again")
answer = count
"""
    assert inside(take(16 * MIB, 5003), code) == 5003


def test_two_volumes_share_nothing(take: Take) -> None:
    one, other = take(16 * MIB, 100), take(16 * MIB, 100)
    assert inside(one, "open('a', 'w').write('one'); answer = os.listdir('.')") == ["a"]
    assert inside(other, "answer = os.listdir('.')") == []
    assert inside(take(16 * MIB, 100), "answer = os.listdir('.')") == []


def test_it_is_mounted_nosuid_nodev(take: Take) -> None:
    flags = os.statvfs(take(16 * MIB, 100)).f_flag
    assert flags & os.ST_NOSUID
    assert flags & os.ST_NODEV


def test_deleted_files_give_their_space_back(take: Take, monkeypatch: pytest.MonkeyPatch) -> None:
    backing: list[int] = []
    mount = Volumes._mount

    def remember(self: Volumes, file: int) -> int:
        backing.append(os.dup(file))
        return mount(self, file)

    monkeypatch.setattr(Volumes, "_mount", remember)
    volume = take(64 * MIB, 100)
    workspace = os.open(SUBDIR, os.O_RDONLY, dir_fd=volume)

    def used() -> int:
        ctypes.CDLL(None).syncfs(workspace)
        return os.fstat(backing[-1]).st_blocks * 512

    try:
        file = os.open("big", os.O_RDWR | os.O_CREAT, dir_fd=workspace)
        os.write(file, b"x" * 32 * MIB)
        os.close(file)
        assert used() > 32 * MIB
        os.unlink("big", dir_fd=workspace)
        assert used() < 2 * MIB
    finally:
        for file in workspace, *backing:
            os.close(file)


def test_a_host_disk_that_fills_up_harms_nobody_for_long(take: Take, monkeypatch: pytest.MonkeyPatch) -> None:
    """A volume plays the host's disk, and volumes on it promise more than it has."""
    monkeypatch.setenv("SKERRY_DISK_RESERVE", "1")
    disk = take(64 * MIB, 1000)
    crowded = Volumes(f"/proc/{os.getpid()}/fd/{disk}/{SUBDIR}/skerry-volumes")
    greedy = crowded.take(100 * MIB, 100, USER, USER)
    code = """
with open("big", "wb") as file:
    file.write(b"x" * (90 << 20))
    file.flush()
    try:
        os.fsync(file.fileno())
        answer = "stored"
    except OSError as error:
        answer = errno.errorcode[error.errno]
"""
    try:
        assert inside(greedy, code) in ("ENOSPC", "EIO")
        assert room(disk)[0] < MIB
    finally:
        os.close(greedy)
    assert room(disk)[0] > 60 * MIB
    modest = crowded.take(16 * MIB, 100, USER, USER)
    try:
        assert inside(modest, "open('a', 'w').write('b'); os.sync(); answer = open('a').read()") == "b"
    finally:
        os.close(modest)
        crowded.close()


def test_nothing_is_left_when_the_descriptor_is_closed(made: Volumes, directory: Path) -> None:
    before = leaks.mounts()
    taken = [made.take(16 * MIB, 100, USER, USER) for _ in range(12)]
    assert len(loops_of(directory)) == 12
    assert not [mount for mount in leaks.mounts() if "/dev/loop" in mount and mount not in before]
    numbers = {os.minor(os.stat(SUBDIR, dir_fd=volume).st_dev) for volume in taken}
    assert len(numbers) == 12
    for volume in taken:
        os.close(volume)
    eventually(lambda: not loops_of(directory))
    made.close()
    for number in numbers:
        assert number < volumes._loops_at_boot() or not Path(f"/sys/block/loop{number}").exists()


HOLDER = f"""
import sys
from skerry.host.volumes import Volumes
volumes = Volumes(sys.argv[1])
taken = [volumes.take({16 * MIB}, 100, {USER}, {USER}) for _ in range(3)]
volumes.want({16 * MIB}, 100)
while (ready := volumes.take_ready({16 * MIB}, 100, {USER}, {USER})) is None:
    pass
print("holding", flush=True)
sys.stdin.read()
"""


def test_nothing_is_left_of_a_killed_process(directory: Path) -> None:
    process = _start(HOLDER, directory)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holding\n"
        assert len(loops_of(directory)) >= 4
        process.send_signal(signal.SIGKILL)
    eventually(lambda: not loops_of(directory))
    assert [name for name in os.listdir(directory) if not name.startswith("v1-")] == []


def test_an_unfinished_template_is_removed_at_the_next_start(directory: Path) -> None:
    code = """
import os, signal, sys
from skerry.host import volumes
volumes._run = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
volumes.Volumes(sys.argv[1]).take(16 << 20, 100, 0, 0)
"""
    with _start(code, directory) as process:
        assert process.wait() == -signal.SIGKILL
    assert len(os.listdir(directory)) == 1
    Volumes(str(directory)).close()
    assert os.listdir(directory) == []


def _start(code: str, directory: Path) -> subprocess.Popen[str]:
    source = str(Path(volumes.__file__).parents[2])
    return subprocess.Popen(
        [sys.executable, "-c", code, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": source},
        text=True,
    )


def test_a_template_is_made_once(
    made: Volumes, take: Take, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(16 * MIB, 100)
    monkeypatch.setattr(volumes, "_run", None)
    take(16 * MIB, 100)
    again = Volumes(str(directory))
    os.close(again.take(16 * MIB, 100, USER, USER))
    again.close()


@pytest.mark.parametrize("damage", ["garbage", "another"])
def test_a_damaged_template_is_made_anew(made: Volumes, take: Take, directory: Path, damage: str) -> None:
    take(16 * MIB, 100)
    take(16 * MIB, 101)
    template = directory / "v1-4096-100.ext4"
    if damage == "garbage":
        template.write_bytes(os.urandom(MIB))
    else:
        os.replace(directory / "v1-4096-101.ext4", template)
    with pytest.raises(LaunchFailed):
        take(16 * MIB, 100)
    assert room(take(16 * MIB, 100)) == (16 * MIB, 100)


def test_many_threads_take_at_once(made: Volumes, take: Take, monkeypatch: pytest.MonkeyPatch) -> None:
    run, formatted = volumes._run, []

    def counting(program: str, *arguments: str) -> None:
        formatted.append(program)
        run(program, *arguments)

    monkeypatch.setattr(volumes, "_run", counting)
    with ThreadPoolExecutor(8) as threads:
        taken = list(threads.map(lambda _: take(16 * MIB, 100), range(32)))
    assert formatted == ["mkfs.ext4", "tune2fs"]
    assert len({os.stat(SUBDIR, dir_fd=volume).st_dev for volume in taken}) == 32
    assert {room(volume) for volume in taken} == {(16 * MIB, 100)}


def test_another_taking_the_free_loop_device_first_does_no_harm(
    made: Volumes, take: Take, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the question which device is free and its use, there is time for others to ask."""
    take(16 * MIB, 100)
    configure = fcntl.ioctl
    rivals: list[bytes] = []

    def ioctl(fd: int, request: int, argument: Any = 0) -> Any:
        if request == mounts._LOOP_CONFIGURE and not rivals:
            rivals.append(argument)
            configure(fd, request, argument)
        return configure(fd, request, argument)

    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    assert room(take(16 * MIB, 100)) == (16 * MIB, 100)
    assert rivals


def test_wanted_volumes_become_ready(made: Volumes, directory: Path) -> None:
    before = set(threading.enumerate())  # environments of other tests may have one as well
    assert made.take_ready(16 * MIB, 100, USER, USER) is None
    made.want(16 * MIB, 100)
    eventually(lambda: len(loops_of(directory)) == 2)
    taken: list[int] = []

    def one_more() -> bool:
        volume = made.take_ready(16 * MIB, 100, USER, USER)
        made.want(16 * MIB, 100)
        if volume is not None:
            taken.append(volume)
        return volume is not None

    for _ in range(6):
        eventually(one_more)
    for volume in taken:
        workspace = os.stat(SUBDIR, dir_fd=volume)
        assert (workspace.st_uid, workspace.st_gid) == (USER, USER)
        assert room(volume) == (16 * MIB, 100)
        os.close(volume)
    made.close()
    eventually(lambda: not loops_of(directory))
    assert not {thread for thread in threading.enumerate() if thread.name == "skerry-volumes"} - before


def test_an_unprivileged_user_is_told_why_not(as_nobody: support.Nobody) -> None:
    code = "import sys; from skerry.host.volumes import Volumes; print(Volumes(sys.argv[1]).unavailable())"
    done = as_nobody.run([as_nobody.python, "-c", code, str(as_nobody.home / "volumes")])
    assert "need root" in done.stdout
