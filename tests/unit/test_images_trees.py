"""Trees are removed whole, however deep, and nothing outside them is touched."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from skerry.host import trees
from skerry.host.trees import Step, open_in_root, remove_tree, walk


def make_deep(top: Path, levels: int) -> None:
    top.mkdir()
    fd = os.open(top, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=fd)
        os.close(os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
        child = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = child
    os.close(fd)


def test_5000_levels(tmp_path: Path) -> None:
    make_deep(tmp_path / "deep", 5000)
    remove_tree(tmp_path / "deep")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_100000_files(tmp_path: Path) -> None:
    for i in range(100):
        folder = tmp_path / "many" / str(i)
        folder.mkdir(parents=True)
        (folder / "file").touch()
        fd = os.open(folder, os.O_RDONLY)
        for j in range(1000):
            os.link("file", str(j), src_dir_fd=fd, dst_dir_fd=fd)
        os.close(fd)
    remove_tree(tmp_path / "many")
    assert not (tmp_path / "many").exists()


def test_missing_file_and_symlink(tmp_path: Path) -> None:
    remove_tree(tmp_path / "missing")
    (tmp_path / "file").touch()
    remove_tree(tmp_path / "file")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    (tmp_path / "link").symlink_to("kept")
    remove_tree(tmp_path / "link")
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept" / "file").exists()


def test_odd_names_and_kinds(tmp_path: Path) -> None:
    top = tmp_path / "odd"
    top.mkdir()
    os.mkdir(os.fsencode(top) + b"/\xff\n")
    os.mkfifo(os.fsencode(top) + b"/\xff\n/fifo")
    (top / "dangling").symlink_to("/nowhere")
    remove_tree(top)
    assert not top.exists()


def test_symlinks_inside_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").touch()
    (tmp_path / "top" / "a").mkdir(parents=True)
    (tmp_path / "top" / "a" / "link").symlink_to(tmp_path / "outside")
    remove_tree(tmp_path / "top")
    assert (tmp_path / "outside" / "precious").exists()


def at_enter(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Call `act` after a directory was listed and before it is opened."""
    real = trees.open_child

    def racing(dir_fd: int, name: str | bytes, flags: int) -> int:
        if name == "swapped":
            act()
        return real(dir_fd, name, flags)

    monkeypatch.setattr(trees, "open_child", racing)


def test_symlink_swapped_in_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").touch()
    swapped = tmp_path / "top" / "swapped"
    swapped.mkdir(parents=True)

    def swap() -> None:
        if not swapped.is_symlink():
            swapped.rmdir()
            swapped.symlink_to(tmp_path / "outside")

    at_enter(monkeypatch, swap)
    remove_tree(tmp_path / "top")
    assert (tmp_path / "outside" / "precious").exists()
    assert not (tmp_path / "top").exists()


def test_directory_moved_away_is_not_climbed_out_of(tmp_path: Path) -> None:
    """After `top/a/b` moved elsewhere, `..` of it is a directory that the walk has no business in."""
    outside = tmp_path / "outside"
    (outside / "a").mkdir(parents=True)
    (outside / "precious").touch()
    (tmp_path / "top" / "a" / "b").mkdir(parents=True)
    fd = os.open(tmp_path / "top", os.O_RDONLY)
    try:
        visits = walk(fd)
        assert [next(visits).name for _ in range(2)] == ["a", "b"]
        (tmp_path / "top" / "a" / "b" / "c").touch()
        assert next(visits).name == "c"
        (tmp_path / "top" / "a" / "b").rename(outside / "b")
        with pytest.raises(OSError, match="moved away"):
            next(visits)
    finally:
        os.close(fd)


def test_walk_order_is_by_name(tmp_path: Path) -> None:
    for name in ("b", "a", "C"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").touch()
    (tmp_path / "z").touch()
    fd = os.open(tmp_path, os.O_RDONLY)
    steps = [(v.step, v.name) for v in walk(fd)]
    os.close(fd)
    assert steps[:4] == [(Step.ENTRY, "z"), (Step.ENTER, "C"), (Step.ENTRY, "x"), (Step.LEAVE, "C")]
    assert [name for step, name in steps if step is Step.ENTER] == ["C", "a", "b"]


def test_walk_leaks_no_descriptor(tmp_path: Path) -> None:
    make_deep(tmp_path / "deep", 50)
    before = len(os.listdir("/proc/self/fd"))
    fd = os.open(tmp_path / "deep", os.O_RDONLY)
    visits = walk(fd)
    for _ in range(20):
        next(visits)
    visits.close()  # type: ignore[attr-defined]
    os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before


def test_open_in_root_stays_inside(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    (root / "etc" / "file").write_text("inside")
    (tmp_path / "file").write_text("outside")
    (root / "absolute").symlink_to("/etc")
    (root / "climbing").symlink_to("../../../../../../etc")
    (root / "magic").symlink_to("/proc/self/root/etc")
    fd = os.open(root, os.O_RDONLY)
    try:
        for path in (b"etc/file", b"/etc/file", b"absolute/file", b"climbing/file", b"../../etc/file"):
            found = open_in_root(fd, path, os.O_RDONLY)
            assert os.read(found, 10) == b"inside"
            os.close(found)
        with pytest.raises(FileNotFoundError):
            open_in_root(fd, b"magic/hostname", os.O_RDONLY)
        with pytest.raises(FileNotFoundError):
            open_in_root(fd, b"../file", os.O_RDONLY)
    finally:
        os.close(fd)


_AS_NOBODY = """
import os, sys
from pathlib import Path
from skerry.host.trees import remove_tree
os.setgroups([]); os.setgid(65534); os.setuid(65534)
top = Path(sys.argv[1]) / "top"
(top / "closed" / "inner").mkdir(parents=True)
(top / "closed" / "inner" / "file").touch()
(top / "closed" / "inner" / "file").chmod(0)
(top / "closed" / "inner").chmod(0)
(top / "closed").chmod(0o500)
top.chmod(0o000)
remove_tree(top)
assert not top.exists()
"""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_odd_modes_as_plain_user(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder == Path("/tmp"):
            break
        folder.chmod(0o777)
    source = Path(trees.__file__).parents[2]
    subprocess.run(
        [sys.executable, "-c", _AS_NOBODY, str(tmp_path)], check=True, env={"PYTHONPATH": str(source)}
    )


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts")
def test_mount_inside_is_left_alone(tmp_path: Path) -> None:
    """A bind mount of the same filesystem has the same device number: only the kernel can tell."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    mounted = tmp_path / "top" / "mounted"
    mounted.mkdir(parents=True)
    subprocess.run(["mount", "--bind", outside, mounted], check=True)
    try:
        with pytest.raises(OSError, match="Invalid cross-device link"):
            remove_tree(tmp_path / "top")
    finally:
        subprocess.run(["umount", mounted], check=True)
    assert (outside / "precious").exists()
