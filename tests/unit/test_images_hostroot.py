"""The copy of the host's small files that `host` environments stand on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from skerry.images import hostroot
from skerry.images.host import HostView


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small host: /usr and three things of /etc, one of them not for everybody."""
    base = tmp_path / "host"
    (base / "usr/bin").mkdir(parents=True)
    (base / "etc/ssl/certs").mkdir(parents=True)
    (base / "etc/timezone").write_text("Etc/UTC\n")
    (base / "etc/ssl/certs/ca.pem").write_text("public")
    (base / "etc/ssl/certs/link.pem").symlink_to("ca.pem")
    key = base / "etc/ssl/certs/key.pem"
    key.write_text("secret")
    key.chmod(0o600)
    closed = base / "etc/ssl/certs/closed"
    closed.mkdir(mode=0o700)
    (closed / "inner").write_text("secret")
    os.mkfifo(base / "etc/ssl/certs/pipe")
    names = ("usr", "etc/timezone", "etc/ssl/certs")
    view = HostView(
        binds=tuple((str(base / name), f"/{name}") for name in names),
        symlinks=(("/bin", "usr/bin"),),
        files=(("/etc/hosts", "127.0.0.1 localhost\n"),),
        env={},
        digest="sha256:0",
    )
    monkeypatch.setattr(hostroot, "host_view", lambda: view)
    return base


def test_small_parts_are_copied_and_large_ones_left_to_mount(host: Path, tmp_path: Path) -> None:
    root, binds = hostroot.HostRoots(str(tmp_path / "roots")).current()
    assert binds == ((str(host / "usr"), "/usr"),)
    assert Path(root, "etc/timezone").read_text() == "Etc/UTC\n"
    assert Path(root, "etc/hosts").read_text() == "127.0.0.1 localhost\n"
    assert os.readlink(Path(root, "bin")) == "usr/bin"
    assert os.readlink(Path(root, "etc/ssl/certs/link.pem")) == "ca.pem"
    assert sorted(os.listdir(root)) == ["bin", "dev", "etc", "proc", "run", "tmp", "usr", "workspace"]


def test_what_is_not_for_everybody_is_left_out(host: Path, tmp_path: Path) -> None:
    root, _ = hostroot.HostRoots(str(tmp_path / "roots")).current()
    assert sorted(os.listdir(Path(root, "etc/ssl/certs"))) == ["ca.pem", "link.pem"]


def test_a_change_on_the_host_makes_a_new_copy(host: Path, tmp_path: Path) -> None:
    roots = hostroot.HostRoots(str(tmp_path / "roots"))
    assert roots.known() is None
    first, _ = roots.current()
    assert roots.current()[0] == first
    assert roots.known() == roots.current()
    (host / "etc/timezone").write_text("Europe/Zurich\n")
    assert roots.known() is None
    second, _ = roots.current()
    assert second != first
    assert Path(second, "etc/timezone").read_text() == "Europe/Zurich\n"
    assert Path(first, "etc/timezone").read_text() == "Etc/UTC\n"  # environments may stand on it


def test_old_copies_go(host: Path, tmp_path: Path) -> None:
    roots = hostroot.HostRoots(str(tmp_path / "roots"))
    for number in range(hostroot.KEPT + 3):
        (host / "etc/timezone").write_text(f"zone {'x' * number}\n")
        current, _ = roots.current()
    kept = os.listdir(tmp_path / "roots")
    assert len(kept) == hostroot.KEPT
    assert Path(current).name in kept


def test_another_daemon_of_the_same_home_finds_the_copy(host: Path, tmp_path: Path) -> None:
    first, _ = hostroot.HostRoots(str(tmp_path / "roots")).current()
    stamp = os.stat(first).st_ino
    second, _ = hostroot.HostRoots(str(tmp_path / "roots")).current()
    assert (second, os.stat(second).st_ino) == (first, stamp)
