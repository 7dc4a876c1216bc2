"""The kernel of virtual machines, and the RAM disk that they boot from."""

from __future__ import annotations

import lzma
import os
from pathlib import Path

import pytest

from skerry.errors import IsolationUnavailable
from skerry.host import initrd
from skerry.host.initrd import Archive, Kernel


def module(modules: Path, name: str, *needs: str, packed: bool = False) -> None:
    place = modules / "kernel" / "drivers"
    place.mkdir(parents=True, exist_ok=True)
    content = b"\x7fELF " + name.encode() + b"\0depends=" + ",".join(needs).encode() + b"\0"
    if packed:
        (place / f"{name}.ko.xz").write_bytes(lzma.compress(content))
    else:
        (place / f"{name}.ko").write_bytes(content)


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    path, modules = tmp_path / "vmlinuz-6.1.0-9-cloud-amd64", tmp_path / "6.1.0-9-cloud-amd64"
    path.write_bytes(b"kernel")
    module(modules, "virtio_mmio", "virtio", "virtio-ring")
    module(modules, "virtio")
    module(modules, "virtio-ring", packed=True)
    module(modules, "virtio_console", "virtio_ring", "virtio")
    module(modules, "virtiofs", "fuse", "virtio")
    module(modules, "fuse")
    module(modules, "virtio_net", "virtio", "net_failover")
    module(modules, "net_failover")
    (modules / "modules.builtin").write_text("kernel/drivers/block/virtio_blk.ko\n")
    return Kernel(path, modules)


def names(contents: list[bytes]) -> list[str]:
    return [content.split(b"\0")[0].removeprefix(b"\x7fELF ").decode() for content in contents]


def test_modules_come_behind_what_they_need_and_once(kernel: Kernel) -> None:
    order = names(initrd.load_order(kernel, initrd.DRIVERS))
    assert order == ["virtio", "virtio-ring", "virtio_mmio", "virtio_console", "fuse", "virtiofs"]


def test_driver_that_a_kernel_lacks_is_named(kernel: Kernel) -> None:
    with pytest.raises(IsolationUnavailable, match="lacks the driver virtio_gpu"):
        initrd.load_order(kernel, ["virtio_gpu"])


def test_ram_disk_is_made_once_for_the_same_contents(kernel: Kernel, tmp_path: Path) -> None:
    first = initrd.prepare(kernel, str(tmp_path / "boot"))
    assert initrd.prepare(kernel, str(tmp_path / "boot")) == first
    assert (first / "kernel").read_bytes() == b"kernel"
    kernel.path.write_bytes(b"another")
    assert initrd.prepare(kernel, str(tmp_path / "boot")) != first


def test_only_machines_with_a_network_load_its_drivers(kernel: Kernel, tmp_path: Path) -> None:
    disk = (initrd.prepare(kernel, str(tmp_path / "boot")) / "initrd").read_bytes()
    for name in (b"modules/05", b"network/00", b"network/01"):
        assert name + b"\0" in disk
    assert b"modules/06\0" not in disk
    parts = disk.split(b"network/0")
    assert b"ELF virtio_net" not in parts[0]
    assert (b"ELF net_failover" in parts[1], b"ELF virtio_net" in parts[2]) == (True, True)


def test_old_versions_are_removed(kernel: Kernel, tmp_path: Path) -> None:
    for number in range(initrd.KEPT + 2):
        kernel.path.write_bytes(b"%d" % number)
        initrd.prepare(kernel, str(tmp_path / "boot"))
    assert len(os.listdir(tmp_path / "boot")) == initrd.KEPT


def test_archive_pads_headers_and_contents() -> None:
    archive = Archive()
    archive.file("name", b"abc", 0o644)
    data = archive.end()
    assert data[:6] == b"070701"
    assert data[110:115] == b"name\0"
    assert data[116:120] == b"abc\0"
    assert data[120:126] == b"070701"
    assert len(data) % 4 == 0


def test_operator_names_the_kernel(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(initrd.KERNEL, str(kernel.path))
    monkeypatch.setenv(initrd.MODULES, str(kernel.modules))
    assert initrd.find_kernel() == kernel
    assert initrd.find_kernel().release == "6.1.0-9-cloud-amd64"
    monkeypatch.setenv(initrd.MODULES, "/nowhere")
    with pytest.raises(IsolationUnavailable, match="/nowhere/kernel is missing"):
        initrd.find_kernel()


def test_latest_of_several_kernels_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(initrd.KERNEL, raising=False)
    monkeypatch.setattr(initrd, "_BOOT", tmp_path)
    with pytest.raises(IsolationUnavailable, match="apt-get install linux-image-cloud-amd64"):
        initrd.find_kernel()
    modules = tmp_path / "modules"
    (modules / "kernel").mkdir(parents=True)
    monkeypatch.setenv(initrd.MODULES, str(modules))
    for release in ("6.1.0-9", "6.1.0-56", "5.10.0-99"):
        (tmp_path / f"vmlinuz-{release}-cloud-amd64").touch()
    assert initrd.find_kernel().path.name == "vmlinuz-6.1.0-56-cloud-amd64"
