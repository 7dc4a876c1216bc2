"""The kernel of virtual machines and the initial RAM disk that they boot from.

The kernel is one of the host's packages, or the operator's. The RAM disk holds the native helper as the first process,
the drivers that such a machine needs, as modules in the order in which they are loaded, and the seccomp programs.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from skerry.errors import IsolationUnavailable
from skerry.host import seccomp
from skerry.host.launcher import HELPER
from skerry.host.trees import remove_tree

KERNEL, MODULES = "SKERRY_KERNEL", "SKERRY_KERNEL_MODULES"
DRIVERS = ("virtio_mmio", "virtio_console", "virtio_blk", "virtiofs")
NETWORK_DRIVERS = ("virtio_net",)
RESOLVER = "192.0.2.1"
"""Any address will do, as long as it is not the machine's: all queries are intercepted."""
KEPT = 3
"""Versions that stay on disk, the latest ones."""
_INSTALL = f"install one (Debian: `apt-get install linux-image-cloud-amd64`), or set {KERNEL} to its path"
_BOOT = Path("/boot")
_DIRECTORIES = ("cgroups", "dev", "disk", "export", "modules", "network", "proc", "profiles", "program")
_MODULE_NAME = re.compile(r"(.+)\.ko(?:\.gz|\.xz)?")


@dataclass(frozen=True, slots=True)
class Kernel:
    path: Path
    modules: Path
    """The directory of its modules."""

    @property
    def release(self) -> str:
        return self.modules.name


def find_kernel() -> Kernel:
    """What the operator has set, or the latest of Debian's kernels for machines. Raises IsolationUnavailable."""
    if given := os.environ.get(KERNEL):
        path = Path(given)
    else:
        found = sorted(_BOOT.glob("vmlinuz-*-cloud-amd64"), key=_version)
        if not found:
            raise IsolationUnavailable(f"there is no kernel for virtual machines: {_INSTALL}")
        path = found[-1]
    release = path.name.partition("-")[2]
    modules = Path(os.environ.get(MODULES) or f"/lib/modules/{release}")
    for needed in (path, modules / "kernel"):
        if not needed.exists():
            raise IsolationUnavailable(
                f"the kernel for virtual machines is not complete: {needed} is missing;"
                f" {MODULES} is the directory of its modules"
            )
    return Kernel(path, modules)


def _version(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.name)]


def prepare(kernel: Kernel, directory: str) -> Path:
    """A directory with `kernel` and `initrd`; made when there is none for just these contents.

    Raises OSError, IsolationUnavailable.
    """
    contents = _initrd(kernel)
    with open(kernel.path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(contents)
    place = Path(directory) / digest.hexdigest()[:32]
    if place.exists():
        os.utime(place)
        return place
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".staging-", dir=directory))
    try:
        shutil.copyfile(kernel.path, staging / "kernel")
        (staging / "initrd").write_bytes(contents)
        for path, mode in ((staging, 0o755), (staging / "kernel", 0o644), (staging / "initrd", 0o644)):
            path.chmod(mode)
        staging.rename(place)
    except BaseException:
        remove_tree(staging)
        raise
    _forget(Path(directory))
    return place


def _forget(directory: Path) -> None:
    versions = sorted(directory.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in versions[KEPT:]:
        remove_tree(old)


def _initrd(kernel: Kernel) -> bytes:
    """Raises OSError, IsolationUnavailable."""
    archive = Archive()
    for name in _DIRECTORIES:
        archive.directory(name)
    archive.device("dev/console", 5, 1)
    archive.file("init", HELPER.read_bytes(), 0o755)
    modules = load_order(kernel, (*DRIVERS, *NETWORK_DRIVERS))
    first = len(load_order(kernel, DRIVERS))
    for directory, part in (("modules", modules[:first]), ("network", modules[first:])):
        for number, module in enumerate(part):
            archive.file(f"{directory}/{number:02}", module, 0o644)
    archive.file("resolv.conf", f"nameserver {RESOLVER}\n".encode(), 0o644)
    for profile in seccomp.profile_names():
        archive.file(f"profiles/{profile}", seccomp.compile_profile(profile), 0o644)
    return archive.end()


def load_order(kernel: Kernel, names: Iterable[str]) -> list[bytes]:
    """Modules and what they depend on, each behind what it needs. Raises OSError, IsolationUnavailable."""
    there = {
        match[1].replace("-", "_"): path
        for path in (kernel.modules / "kernel").rglob("*.ko*")
        if (match := _MODULE_NAME.fullmatch(path.name))
    }
    listed = kernel.modules / "modules.builtin"
    builtin = (
        {Path(line).stem.replace("-", "_") for line in listed.read_text().split()}
        if listed.exists()
        else set()
    )
    order: dict[str, bytes] = {}

    def add(name: str) -> None:
        if name in order or name in builtin:
            return
        if name not in there:
            raise IsolationUnavailable(f"the kernel {kernel.release} lacks the driver {name}", hint=_INSTALL)
        content = _unpacked(there[name])
        for needed in _depends(content):
            add(needed)
        order[name] = content

    for name in names:
        add(name)
    return list(order.values())


def _depends(module: bytes) -> list[str]:
    found = re.search(rb"\0depends=([^\0]*)\0", module)
    return [name.replace("-", "_") for name in found[1].decode().split(",") if name] if found else []


def _unpacked(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix == ".xz":
        return lzma.decompress(data)
    return gzip.decompress(data) if path.suffix == ".gz" else data


class Archive:
    """A cpio archive, as the kernel takes it for an initial RAM disk."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._count = 0

    def directory(self, name: str) -> None:
        self._add(name, stat.S_IFDIR | 0o755)

    def device(self, name: str, major: int, minor: int) -> None:
        self._add(name, stat.S_IFCHR | 0o600, device=(major, minor))

    def file(self, name: str, content: bytes, mode: int) -> None:
        self._add(name, stat.S_IFREG | mode, content)

    def end(self) -> bytes:
        self._add("TRAILER!!!", 0)
        return b"".join(self._parts)

    def _add(self, name: str, mode: int, content: bytes = b"", device: tuple[int, int] = (0, 0)) -> None:
        self._count += 1
        path = name.encode() + b"\0"
        numbers = (self._count, mode, 0, 0, 1, 0, len(content), 0, 0, *device, len(path), 0)
        head = b"070701" + b"".join(b"%08X" % number for number in numbers) + path
        self._parts += [_padded(head), _padded(content)]


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)
