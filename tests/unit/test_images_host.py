"""The `host` image shows programs and nothing that is anybody's business."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from skerry.images.host import PYTHON, host_view

SENSITIVE = """
/root /home /var /run /srv /mnt /media /boot /proc /sys /dev /tmp /opt /lost+found
/etc/shadow /etc/shadow- /etc/gshadow /etc/passwd /etc/group /etc/sudoers /etc/sudoers.d /etc/ssh /etc/ssl/private
/etc/pki/tls/private /etc/pki/entitlement /etc/hostname /etc/hosts /etc/resolv.conf /etc/machine-id /etc/fstab
/etc/crypttab /etc/krb5.conf /etc/krb5.keytab /etc/X11 /etc/docker /etc/containerd /etc/kubernetes /etc/rancher
/etc/environment /etc/environment.d /etc/profile /etc/profile.d /etc/bash.bashrc /etc/security /etc/pam.d /etc/cron.d
/etc/crontab /etc/apt /etc/pip.conf /etc/npmrc /etc/gitconfig /etc/wgetrc /etc/netrc /etc/maven /etc/ldap /etc/samba
/etc/wireguard /etc/openvpn /etc/ppp /etc/NetworkManager /etc/wpa_supplicant /etc/letsencrypt /etc/nginx /etc/apache2
/etc/mysql /etc/postgresql /etc/redis /etc/aws /etc/boto.cfg /etc/google /etc/default /etc/systemd /etc/init.d
/etc/subuid /etc/subgid /etc/exports /etc/rsyncd.secrets /etc/sasldb2 /etc/exim4 /etc/postfix /etc/ld.so.preload
""".split()  # noqa: SIM905


def make(root: Path, *paths: str) -> None:
    for path in paths:
        target = root / path
        if path.endswith("/"):
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(f"content of {path}")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    make(path, "usr/bin/python3", "usr/lib/os-release", "usr/sbin/", "etc/ld.so.cache", "etc/alternatives/")
    for name in ("bin", "sbin", "lib"):
        (path / name).symlink_to(f"usr/{name}")
    (path / "etc/os-release").symlink_to("../usr/lib/os-release")
    return path


def targets(root: Path) -> list[str]:
    view = host_view(str(root))
    return sorted([t for _, t in view.binds] + [p for p, _ in view.symlinks] + [p for p, _ in view.files])


GENERATED = [
    "/etc/group",
    "/etc/hostname",
    "/etc/hosts",
    "/etc/nsswitch.conf",
    "/etc/passwd",
    "/etc/resolv.conf",
]


def test_a_merged_usr(root: Path) -> None:
    view = host_view(str(root))
    assert view.binds == (
        (f"{root}/usr", "/usr"),
        (f"{root}/etc/ld.so.cache", "/etc/ld.so.cache"),
        (f"{root}/etc/alternatives", "/etc/alternatives"),
    )
    assert view.symlinks == (
        ("/bin", "usr/bin"),
        ("/sbin", "usr/sbin"),
        ("/lib", "usr/lib"),
        ("/etc/os-release", "../usr/lib/os-release"),
    )


def test_real_directories_are_mounted(root: Path) -> None:
    (root / "bin").unlink()
    make(root, "bin/sh", "lib64/ld.so")
    view = host_view(str(root))
    assert (f"{root}/bin", "/bin") in view.binds
    assert (f"{root}/lib64", "/lib64") in view.binds


def test_only_what_is_listed_is_shown(root: Path) -> None:
    before = targets(root)
    make(root, *(path[1:] for path in SENSITIVE if not (root / path[1:]).exists()))
    make(root, "etc/ssl/certs/ca.pem", "etc/python3.99/sitecustomize.py")
    assert targets(root) == sorted([*before, "/etc/ssl/certs", "/etc/python3.99"])


@pytest.mark.parametrize(
    "target", ["../root/secret", "/root/secret", "../etc/shadow", "../var/lib/x", "../../outside"]
)
def test_symlinks_to_what_is_not_shown_are_left_out(root: Path, target: str) -> None:
    make(root, "root/secret", "etc/shadow", "var/lib/x", "../outside")
    before = targets(root)
    for name in ("services", "timezone", "python3"):
        (root / "etc" / name).symlink_to(target)
    (root / "lib32").symlink_to(target.removeprefix("../"))
    assert targets(root) == before


def test_symlinks_within_etc_need_a_shown_target(root: Path) -> None:
    make(root, "etc/pki/tls/certs/ca.pem", "etc/pki/tls/private/key.pem")
    (root / "etc/ssl").mkdir()
    (root / "etc/ssl/certs").symlink_to("../pki/tls/certs")
    (root / "etc/ssl/cert.pem").symlink_to("../pki/tls/private/key.pem")
    view = host_view(str(root))
    assert ("/etc/ssl/certs", "../pki/tls/certs") in view.symlinks
    assert "/etc/ssl/cert.pem" not in targets(root)


def test_sockets_and_devices_are_left_out(root: Path) -> None:
    before = targets(root)
    os.mkfifo(root / "etc/services")
    os.mknod(root / "etc/timezone", stat.S_IFSOCK | 0o666)
    assert targets(root) == before


def test_the_view_follows_the_host(root: Path) -> None:
    one = host_view(str(root))
    assert host_view(str(root)) is one
    make(root, "etc/services")
    two = host_view(str(root))
    assert two.digest != one.digest
    assert "/etc/services" in [t for _, t in two.binds]
    (root / "usr/lib/os-release").write_text("another release")
    assert host_view(str(root)).digest != two.digest


def test_a_nix_store_is_shown_with_its_profile(root: Path) -> None:
    make(root, "nix/store/abc-system/sw/bin/", "nix/var/secret", "run/")
    (root / "run/current-system").symlink_to("../nix/store/abc-system")
    view = host_view(str(root))
    assert (f"{root}/nix/store", "/nix/store") in view.binds
    assert view.env["PATH"].endswith(":/nix/store/abc-system/sw/bin")
    assert not [t for _, t in view.binds if t.startswith(("/nix/var", "/run"))]


def test_our_own_interpreter_only_where_there_is_none(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = root.parent / "home" / "uv" / "python"
    make(prefix, "bin/python3")
    monkeypatch.setattr(sys, "base_prefix", str(prefix))
    monkeypatch.setenv("HOME", str(root.parent / "home"))
    assert PYTHON not in targets(root)
    (root / "usr/bin/python3").unlink()
    view = host_view(str(root))
    assert (str(prefix), PYTHON) in view.binds
    assert view.env["PATH"].endswith(f":{PYTHON}/bin")


def test_a_home_is_never_shown_for_its_interpreter(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = root.parent / "home"
    make(home, "bin/python3", ".ssh/id_ed25519")
    (root / "usr/bin/python3").unlink()
    for prefix in (home, root.parent):
        make(prefix, "bin/python3")
        monkeypatch.setattr(sys, "base_prefix", str(prefix))
        monkeypatch.setenv("HOME", str(home))
        host_view.__globals__["_view"].cache_clear()
        assert PYTHON not in targets(root)


def test_accounts_are_generated(root: Path) -> None:
    files = dict(host_view(str(root)).files)
    assert sorted(files) == GENERATED
    assert [line.split(":")[0] for line in files["/etc/passwd"].splitlines()] == ["root", "nobody", "appuser"]
    assert files["/etc/resolv.conf"] == ""


# This machine


def test_this_machine_shows_nothing_sensitive() -> None:
    view = host_view()
    shown = [(source, target) for source, target in view.binds if target != PYTHON]
    for source, target in shown:
        assert os.path.realpath(source) == source
        assert stat.S_IFMT(os.stat(source).st_mode) in (stat.S_IFREG, stat.S_IFDIR)
        for secret in SENSITIVE:
            assert not f"{source}/".startswith(f"{secret}/"), (source, secret)
            assert not f"{secret}/".startswith(f"{source}/"), (source, secret)
        assert source == target
    for path, target in view.symlinks:
        reached = os.path.normpath(os.path.join(os.path.dirname(path), target))
        assert any(f"{reached}/".startswith(f"{inside}/") for _, inside in shown), (path, target)


def test_this_machine_shows_no_socket() -> None:
    for source, _ in host_view().binds:
        for folder, _, names in os.walk(source):
            for name in names:
                mode = os.lstat(os.path.join(folder, name)).st_mode
                assert not stat.S_ISSOCK(mode), (folder, name)
