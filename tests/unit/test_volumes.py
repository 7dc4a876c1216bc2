"""What volumes do without a kernel's help: refusals, copies, templates, and what is kept ready."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from skerry.errors import DiskFull, InvalidRequest, LaunchFailed
from skerry.host import mounts, volumes
from skerry.host.volumes import Volumes
from skerry.policy import GIB, MIB

ME = (os.geteuid(), os.getegid())


class Made(Volumes):
    """Volumes that are plain directories with the right subdirectory, made when `allowed` says so."""

    def __init__(self, directory: Path, *, spare: int = 2) -> None:
        super().__init__(str(directory / "volumes"), spare=spare)
        self.allowed = threading.Semaphore(0)
        self.asked = threading.Semaphore(0)
        self.made: list[tuple[int, int]] = []
        self.broken = False
        self._plain = directory / "plain"
        (self._plain / volumes.SUBDIR).mkdir(parents=True)
        self._reason = ""

    def _make(self, kind: tuple[int, int]) -> int:
        self.asked.release()
        self.allowed.acquire()
        if self.broken:
            raise LaunchFailed("broken")
        self.made.append(kind)
        return os.open(self._plain, os.O_RDONLY | os.O_CLOEXEC)

    def ready(self) -> int:
        """Wait for one that is ready."""
        while (volume := self.take_ready(MIB, 100, *ME)) is None:
            os.sched_yield()
        return volume


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    made = Made(tmp_path)
    yield made
    made.allowed.release(100)
    made.close()


def space(free: int, total: int) -> os.statvfs_result:
    return os.statvfs_result(
        (4096, 4096, total // 4096, free // 4096, free // 4096, 1000, 1000, 1000, 0, 255)
    )


@pytest.mark.parametrize(
    ("free", "total", "refused"),
    [
        (511 * MIB, 4 * GIB, True),
        (513 * MIB, 4 * GIB, False),
        (4 * GIB, 100 * GIB, True),
        (6 * GIB, 100 * GIB, False),
        (9 * GIB, 4096 * GIB, True),
        (11 * GIB, 4096 * GIB, False),
    ],
)
def test_a_disk_that_is_nearly_full_is_left_alone(
    made: Made, monkeypatch: pytest.MonkeyPatch, free: int, total: int, refused: bool
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: space(free, total))
    made.allowed.release()
    if not refused:
        os.close(made.take(MIB, 100, *ME))
        return
    with pytest.raises(DiskFull, match="free"):
        made.take(MIB, 100, *ME)
    with pytest.raises(DiskFull):
        made.take_ready(MIB, 100, *ME)
    assert made.made == []


def test_a_full_disk_does_not_mean_that_volumes_do_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: space(0, GIB))
    assert Volumes(str(tmp_path)).unavailable() == ""


@pytest.mark.parametrize("size", [0, MIB - 1, 1024 * GIB + 1])
def test_sizes_that_no_volume_can_have(made: Made, size: int) -> None:
    for call in (made.take, made.take_ready):
        with pytest.raises(InvalidRequest):
            call(size, 100, *ME)
    with pytest.raises(InvalidRequest):
        made.want(size, 100)


def test_the_directory_is_private(tmp_path: Path) -> None:
    Volumes(str(tmp_path / "home" / "volumes"))
    assert (tmp_path / "home" / "volumes").stat().st_mode & 0o777 == 0o700


def test_a_start_removes_all_but_finished_templates_of_this_version(tmp_path: Path) -> None:
    for name in ("v1-256-16.ext4", "v0-256-16.ext4", "new-abc"):
        (tmp_path / name).touch()
    Volumes(str(tmp_path))
    assert os.listdir(tmp_path) == ["v1-256-16.ext4"]


def test_the_templates_used_last_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(self: Volumes, kind: tuple[int, int], path: str) -> None:
        Path(path).touch()

    monkeypatch.setattr(Volumes, "_make_template", make)
    made = Volumes(str(tmp_path))
    for number in range(16):
        os.utime(made._template((256, number)), (number, number))
    made._template((256, 0))
    made._template((256, 99))
    kept = {name.split("-")[2] for name in os.listdir(tmp_path)}
    assert kept == {f"{number}.ext4" for number in (0, *range(2, 16), 99)}


def test_a_missing_program_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    made = Volumes(str(tmp_path))
    assert "mkfs.ext4 is missing" in made.unavailable()
    assert "e2fsprogs" in made.unavailable()
    assert os.listdir(tmp_path) == []


def test_a_failing_program_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 1, b"", b"no such thing\n")
    )
    with pytest.raises(LaunchFailed, match="no such thing") as caught:
        Volumes(str(tmp_path)).take(MIB, 100, *ME)
    assert caught.value.detail == {"step": "mkfs.ext4", "exit_code": 1}


@pytest.mark.parametrize(("code", "hint"), [(errno.EPERM, "root"), (errno.ENOENT, "modprobe loop")])
def test_what_the_kernel_refuses_comes_with_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, hint: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(volumes, "_run", lambda *_: None)
    monkeypatch.setattr(mounts, "Loop", refuse)
    made = Volumes(str(tmp_path))
    with pytest.raises(LaunchFailed) as caught:
        made.take(MIB, 100, *ME)
    assert caught.value.detail == {"step": "volume: loop device", "errno": errno.errorcode[code]}
    assert hint in made.unavailable()


def test_a_copy_has_the_same_data_and_the_same_holes(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    with source.open("wb") as file:
        file.truncate(64 * MIB)
        for offset in (0, 5 * MIB, 40 * MIB + 8192):
            os.pwrite(file.fileno(), os.urandom(70_000), offset)
        os.fsync(file.fileno())
    with source.open("rb") as one, target.open("wb") as other:
        volumes._copy(one.fileno(), other.fileno())
        os.fsync(other.fileno())
    assert source.read_bytes() == target.read_bytes()
    assert target.stat().st_blocks <= source.stat().st_blocks < 64 * MIB / 512


def test_ready_ones_are_handed_out_and_replaced(made: Made) -> None:
    assert made.take_ready(MIB, 100, *ME) is None
    made.want(MIB, 100)
    made.allowed.release(2)
    taken = [made.ready(), made.ready()]
    assert made.take_ready(MIB, 100, *ME) is None
    assert made.take_ready(MIB, 101, *ME) is None
    made.want(MIB, 100)
    made.allowed.release(1)
    taken.append(made.ready())
    assert made.made == [(256, 100)] * 3
    for volume in taken:
        assert not os.get_inheritable(volume)
        os.close(volume)


def test_never_more_than_the_spare_ones_are_kept(made: Made) -> None:
    made.want(MIB, 100)
    for _ in range(2):
        made.allowed.release()
        made.asked.acquire()
    made.allowed.release(100)
    while len(made._ready.get((256, 100), ())) < 2:
        os.sched_yield()
    made.want(MIB, 100)
    made.want(2 * MIB, 100)
    made.asked.acquire()  # the thread has seen the first of the two
    assert len(made._ready[256, 100]) == 2


def test_neither_taking_nor_wanting_waits_for_one_in_the_making(made: Made) -> None:
    made.want(MIB, 100)
    made.asked.acquire()
    assert made.take_ready(MIB, 100, *ME) is None
    made.want(MIB, 200)
    assert made.made == []


def test_a_kind_that_nobody_asked_for_lately_is_given_up(made: Made) -> None:
    made.allowed.release(100)
    made.want(MIB, 100)
    while len(made._ready.get((256, 100), ())) < 2:
        os.sched_yield()
    for inodes in (200, 300, 400, 500):
        made.want(MIB, inodes)
    while (256, 100) in made._ready:
        os.sched_yield()
    assert made.take_ready(MIB, 100, *ME) is None


def test_after_a_failure_it_is_tried_again_when_wanted_again(made: Made) -> None:
    made.broken = True
    made.want(MIB, 100)
    made.allowed.release()
    while made._wanted:
        os.sched_yield()
    made.broken = False
    made.allowed.release(2)
    made.want(MIB, 100)
    os.close(made.ready())


def test_close_gives_up_what_is_ready_and_ends_the_thread(made: Made) -> None:
    made.allowed.release(100)
    made.want(MIB, 100)
    while len(made._ready.get((256, 100), ())) < 2:
        os.sched_yield()
    waiting = list(made._ready[256, 100])
    made.close()
    for volume in waiting:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(volume)
    assert made._thread is not None
    assert not made._thread.is_alive()
    made.want(MIB, 100)
    assert made.take_ready(MIB, 100, *ME) is None
