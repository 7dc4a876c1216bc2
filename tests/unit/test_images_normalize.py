"""Every root filesystem gets its mount points and accounts, and an evil one gets nothing else out of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from skerry.images.digest import tree_digest
from skerry.images.normalize import normalize

DIRECTORIES = ("proc", "dev", "tmp", "workspace", "run", "etc", "sys")
FILES = ("passwd", "group", "hosts", "hostname", "resolv.conf")


@pytest.fixture
def rootfs(tmp_path: Path) -> Path:
    path = tmp_path / "rootfs"
    path.mkdir()
    return path


def check(rootfs: Path) -> None:
    for name in DIRECTORIES:
        assert (rootfs / name).is_dir()
        assert not (rootfs / name).is_symlink()
    for name in FILES:
        assert (rootfs / "etc" / name).is_file()
        assert not (rootfs / "etc" / name).is_symlink()
    assert "appuser:x:1000:1000:appuser:/workspace:" in (rootfs / "etc/passwd").read_text()
    assert (rootfs / "tmp").stat().st_mode & 0o7777 == 0o1777


def test_an_empty_root(rootfs: Path) -> None:
    normalize(rootfs)
    check(rootfs)
    assert (rootfs / "etc/passwd").read_text() == (
        "root:x:0:0:root:/root:/bin/sh\nappuser:x:1000:1000:appuser:/workspace:/bin/sh\n"
    )
    assert (rootfs / "etc/group").read_text() == "root:x:0:\nappuser:x:1000:\n"
    assert (rootfs / "etc/resolv.conf").read_text() == ""


def test_twice_is_once(rootfs: Path) -> None:
    normalize(rootfs)
    before = tree_digest(rootfs)
    normalize(rootfs)
    assert tree_digest(rootfs) == before


def test_accounts_are_kept_except_for_ours(rootfs: Path) -> None:
    (rootfs / "etc").mkdir()
    (rootfs / "etc/passwd").write_bytes(
        b"root:*:0:0::/root:/bin/zsh\nnode:x:1000:1000::/home/node:/bin/bash\n\xff\xfe:x:7:7:::\nappuser:x:5:5:::\nbroken\n"
    )
    (rootfs / "etc/group").write_text("root:*:0:\nnode:x:1000:\nstaff:x:50:appuser\n")
    normalize(rootfs)
    assert (rootfs / "etc/passwd").read_bytes() == (
        b"root:*:0:0::/root:/bin/zsh\n\xff\xfe:x:7:7:::\nbroken\nappuser:x:1000:1000:appuser:/workspace:/bin/sh\n"
    )
    assert (rootfs / "etc/group").read_text() == "root:*:0:\nstaff:x:50:appuser\nappuser:x:1000:\n"


@pytest.mark.parametrize("link", [None, "usr/bin", "/usr/bin"])
def test_bash_is_the_shell_where_there_is_one(rootfs: Path, link: str | None) -> None:
    (rootfs / "usr/bin").mkdir(parents=True)
    (rootfs / "usr/bin/bash").touch()
    if link is not None:
        (rootfs / "bin").symlink_to(link)
    normalize(rootfs)
    shell = "/bin/sh" if link is None else "/bin/bash"
    assert (rootfs / "etc/passwd").read_text().endswith(f":/workspace:{shell}\n")


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("name", DIRECTORIES)
def test_symlinks_to_the_host_are_replaced(rootfs: Path, name: str, relative: bool) -> None:
    outside = rootfs.parent / "outside"
    outside.mkdir(mode=0o700)
    (outside / "passwd").write_text("precious")
    (rootfs / name).symlink_to("../outside" if relative else outside)
    normalize(rootfs)
    check(rootfs)
    assert (outside / "passwd").read_text() == "precious"
    assert [p.name for p in outside.iterdir()] == ["passwd"]
    assert outside.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_file_symlinks_to_the_host_are_replaced_unread(rootfs: Path, name: str, relative: bool) -> None:
    outside = rootfs.parent / "outside"
    outside.write_text("precious:x:3:3:::\n")
    (rootfs / "etc").mkdir()
    (rootfs / "etc" / name).symlink_to("../../outside" if relative else outside)
    normalize(rootfs)
    check(rootfs)
    assert outside.read_text() == "precious:x:3:3:::\n"
    assert "precious" not in (rootfs / "etc" / name).read_text()


def test_a_symlink_inside_the_image_is_read(rootfs: Path) -> None:
    (rootfs / "etc").mkdir()
    (rootfs / "store").mkdir()
    (rootfs / "store/passwd").write_text("daemon:x:1:1:::\n")
    (rootfs / "etc/passwd").symlink_to("/store/passwd")
    normalize(rootfs)
    check(rootfs)
    assert "daemon:x:1:1:::" in (rootfs / "etc/passwd").read_text()
    assert (rootfs / "store/passwd").read_text() == "daemon:x:1:1:::\n"


def test_other_kinds_give_way(rootfs: Path) -> None:
    (rootfs / "tmp").touch()
    os.mkfifo(rootfs / "run")
    (rootfs / "etc/passwd/dir").mkdir(parents=True)
    os.mkfifo(rootfs / "etc/group")
    normalize(rootfs)
    check(rootfs)


def test_a_hard_linked_file_is_replaced_not_written(rootfs: Path) -> None:
    (rootfs / "etc").mkdir()
    (rootfs / "other").write_text("x:x:9:9:::\n")
    os.link(rootfs / "other", rootfs / "etc/passwd")
    normalize(rootfs)
    assert (rootfs / "other").read_text() == "x:x:9:9:::\n"


def test_places_of_the_running_system_are_empty_and_the_builders_network_is_gone(rootfs: Path) -> None:
    for name in ("proc", "sys", "dev", "run", "tmp"):
        (rootfs / name / "left").mkdir(parents=True)
    (rootfs / "workspace").mkdir()
    (rootfs / "workspace/kept").touch()
    (rootfs / "etc").mkdir()
    (rootfs / "etc/resolv.conf").write_text("nameserver 192.0.2.1\n")
    (rootfs / "etc/hostname").write_text("builder\n")
    normalize(rootfs)
    check(rootfs)
    for name in ("proc", "sys", "dev", "run", "tmp"):
        assert list((rootfs / name).iterdir()) == []
    assert (rootfs / "workspace/kept").exists()
    assert (rootfs / "etc/resolv.conf").read_text() == ""
    assert "builder" not in (rootfs / "etc/hostname").read_text()
