"""The `host` image: a read-only view of this machine's own programs, and of nothing else.

What is shown is a list of names that are known to be harmless; whatever is not on it (accounts, keys, homes,
sockets, the machine's identity and settings) is not there. Shell profiles and package managers' settings are
left out as well: people keep tokens in them.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import json
import os
import stat
import sys
from dataclasses import dataclass

from skerry.images import normalize

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PYTHON = "/opt/skerry-python"
"""Where the interpreter that runs Skerry appears when the host has no other."""

_TREES = ("usr", "nix/store", "gnu/store")
_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC = (
    # the dynamic linker, and what chooses between versions of programs
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "alternatives",
    # certificate authorities, without private keys
    "ca-certificates",
    "crypto-policies",
    "pki/ca-trust",
    "pki/tls/cert.pem",
    "pki/tls/certs",
    "pki/tls/openssl.cnf",
    "ssl/cert.pem",
    "ssl/certs",
    "ssl/openssl.cnf",
    # names, times and kinds of things
    "gai.conf",
    "localtime",
    "mime.types",
    "protocols",
    "services",
    "terminfo",
    "timezone",
    # which system this is
    "alpine-release",
    "debian_version",
    "fedora-release",
    "os-release",
    "redhat-release",
    # languages and libraries that keep a part of themselves here
    "fonts",
    "inputrc",
    "java*",
    "perl",
    "php/*/cli",
    "php/*/mods-available",
    "python3*",
)
_NSSWITCH = "passwd: files\ngroup: files\nhosts: files dns\nservices: files\nprotocols: files\n"
_LISTED = ("", "etc", "etc/os-release", "etc/pki", "etc/pki/tls", "etc/ssl", "usr/bin", "usr/local/bin")
"""Where a name that appears or goes changes the view; what is cached holds until then."""
_NIX_PROFILES = ("run/current-system/sw/bin", "run/current-system/profile/bin")


@dataclass(frozen=True, slots=True)
class HostView:
    """What to put into an empty root. Parents of targets are plain directories, root's, 0755."""

    binds: tuple[tuple[str, str], ...]
    """(real path on the host, path inside), each a file or a directory, to be mounted read-only."""
    symlinks: tuple[tuple[str, str], ...]
    """(path inside, target)."""
    files: tuple[tuple[str, str], ...]
    """(path inside, content): generated, 0644."""
    env: dict[str, str]
    digest: str
    """`sha256:` of all of the above and of the system's release."""


def host_view(root: str = "/") -> HostView:
    """What the `host` image shows of the system at `root`, as it is now. Nothing in it is missing there."""
    base = "/" if root == "/" else os.path.realpath(root)
    return _view(base, tuple(_stamp(f"{base}/{name}") for name in _LISTED))


def _stamp(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


@functools.lru_cache(maxsize=1)
def _view(base: str, _stamps: tuple[int, ...]) -> HostView:
    names = [name for name in (*_TREES, *_SYSTEM) if os.path.exists(os.path.join(base, name))]
    for pattern in _ETC:
        names += [f"etc/{name}" for name in sorted(glob.glob(pattern, root_dir=f"{base}/etc"))]
    real = {name: os.path.relpath(os.path.realpath(os.path.join(base, name)), base) for name in names}
    shown = [name for name in names if real[name] == name and _mountable(os.path.join(base, name))]
    # A symlink to something that is shown stays one; a symlink to anything else is not followed.
    symlinks = [
        (f"/{name}", os.path.relpath(real[name], os.path.dirname(name)))
        for name in names
        if name not in shown and _within(real[name], shown)
    ]
    binds = [(os.path.join(base, name), f"/{name}") for name in shown]
    path = [PATH]
    for name in _NIX_PROFILES:
        profile = os.path.realpath(os.path.join(base, name))
        if os.path.isdir(profile) and _within(inside := os.path.relpath(profile, base), shown):
            path.append(f"/{inside}")
    python = _own_python(base)
    if python is not None:
        binds.append((python, PYTHON))
        path.append(f"{PYTHON}/bin")
    files = _files("/bin/bash" if os.path.exists(f"{base}/bin/bash") else "/bin/sh")
    env = {"PATH": ":".join(path)}
    described = json.dumps([binds, symlinks, files, env, _release(base)])
    digest = f"sha256:{hashlib.sha256(described.encode()).hexdigest()}"
    return HostView(tuple(binds), tuple(symlinks), files, env, digest)


def _within(name: str, shown: list[str]) -> bool:
    return any(name == other or name.startswith(f"{other}/") for other in shown)


def _mountable(path: str) -> bool:
    mode = os.stat(path).st_mode
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def _release(base: str) -> str:
    try:
        with open(f"{base}/etc/os-release", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _files(shell: str) -> tuple[tuple[str, str], ...]:
    nobody = "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin"
    return (
        ("/etc/group", normalize.group("nogroup:x:65534:\n")),
        ("/etc/hostname", f"{normalize.HOSTNAME}\n"),
        ("/etc/hosts", normalize.HOSTS),
        ("/etc/nsswitch.conf", _NSSWITCH),
        ("/etc/passwd", normalize.passwd(nobody, shell)),
        ("/etc/resolv.conf", ""),
    )


def _own_python(base: str) -> str | None:
    """The interpreter that runs Skerry, when the host has none and it lives in a directory of its own."""
    if any(os.path.exists(f"{base}/{name}") for name in ("usr/bin/python3", "usr/local/bin/python3")):
        return None
    prefix = os.path.realpath(sys.base_prefix)
    home = os.path.realpath(os.path.expanduser("~"))
    holds_home = os.path.commonpath([prefix, home]) == prefix
    return None if holds_home or not os.path.exists(f"{prefix}/bin/python3") else prefix
