"""A virtual machine as data."""

from __future__ import annotations

import os
import struct

import pytest

from skerry.host import plan, vm
from skerry.host.vm import VirtualMachine
from skerry.policy import MIB, Limits

LIMITS = Limits(cpus=1.5, memory=256 * MIB, pids=64, fds=128)


@pytest.fixture(autouse=True)
def rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vm, "tick_rate", lambda: 2_600_000)


def definition(*, disk: bool = False, program: bool = False, network: bool = False) -> VirtualMachine:
    return VirtualMachine.of(
        LIMITS, disk=disk, program=program, network=network, disk_operations=4000, disk_bytes=MIB
    )


def inside(
    workspace: plan.Workspace,
    profile: str = "default",
    layers: tuple[str, ...] = (),
    *,
    network: bool = False,
) -> list[list[str]]:
    """The steps in the machine."""
    return steps(vm.inner_steps(workspace, LIMITS, 60.0, profile, layers, network=network))


def steps(encoded: bytes) -> list[list[str]]:
    found, at = [], 0
    while at < len(encoded):
        (count,) = struct.unpack_from("<H", encoded, at)
        parts = encoded[at + 2 :].split(b"\0", count)
        found.append([part.decode() for part in parts[:count]])
        at += 2 + sum(len(part) + 1 for part in parts[:count])
    return found


def test_machine_has_the_limit_of_memory_beside_its_kernel_and_whole_cpus() -> None:
    made = definition()
    assert made.memory >= LIMITS.memory + vm.KERNEL_MEMORY
    assert made.memory % MIB == 0
    assert made.cpus == min(2, os.cpu_count() or 1)


def test_machine_has_no_device_that_is_not_named() -> None:
    arguments = definition(disk=True).qemu("tcg")
    assert {"-nodefaults", "-no-user-config"} <= set(arguments)
    devices = [arguments[at + 1].split(",")[0] for at, word in enumerate(arguments) if word == "-device"]
    assert devices == ["virtio-serial-device", "virtserialport", "vhost-user-fs-device", "virtio-blk-device"]
    assert not any("net" in word for word in devices)


def test_network_device_only_passes_frames_on_and_has_the_tap_by_a_descriptor() -> None:
    arguments = definition(network=True).qemu("tcg")
    assert arguments[arguments.index("-netdev") + 1] == "tap,id=net,fd=5"
    (device,) = [word for word in arguments if word.startswith("virtio-net-device")]
    assert {"ctrl_vq=off", "mq=off", "mac=02:00:00:00:00:02"} <= set(device.split(","))


def test_only_a_machine_with_a_network_has_its_driver_its_address_and_a_resolver() -> None:
    workspace = plan.Workspace(memory=MIB)
    more = [step for step in inside(workspace, network=True) if step not in inside(workspace)]
    assert more == [
        ["drivers", "/network"],
        ["interface", "eth0", "192.0.2.2", "2001:db8::2"],
        ["tree", "2", "/resolv.conf", "ro"],
        ["place", "2", "etc/resolv.conf"],
    ]


def test_tap_comes_before_the_disk_and_the_layers() -> None:
    made = definition(disk=True, network=True)
    machine = next(step for step in steps(vm.monitor_steps(made, "tcg", ("a",))) if step[0] == "machine")
    assert machine[5:7] == ["6", "5"]
    assert ["place", "7", "export/layers/a"] in steps(vm.monitor_steps(made, "tcg", ("a",)))
    alone = next(step for step in steps(vm.monitor_steps(definition(), "tcg", ())) if step[0] == "machine")
    assert alone[5:7] == ["-", "-"]


def test_disk_has_limits_and_is_known_by_a_descriptor_alone() -> None:
    arguments = definition(disk=True).qemu("tcg")
    drive = arguments[arguments.index("-drive") + 1].split(",")
    assert "file=/dev/fdset/1" in drive
    assert {"throttling.iops-write=4000", f"throttling.bps-read={MIB}"} <= set(drive)
    assert "-drive" not in definition().qemu("tcg")


def test_emulated_machine_is_told_how_fast_its_counter_is() -> None:
    assert any(word.startswith("tsc_early_khz=2600000 ") for word in definition().qemu("tcg"))
    assert not any("tsc_early_khz" in word for word in definition().qemu("kvm"))


def test_arguments_fit_into_a_step() -> None:
    encoded = vm.monitor_steps(definition(disk=True, network=True), "tcg", ("a", "b"))
    assert max(len(step) for step in steps(encoded)) <= 96


def test_monitor_is_started_last_and_without_privileges() -> None:
    order = [step[0] for step in steps(vm.monitor_steps(definition(program=True), "tcg", ()))]
    assert order.index("serve") < order.index("bounding") < order.index("drop") < order.index("confine")
    assert order[-1] == "machine"


def test_workload_is_confined_in_the_machine_as_it_is_without_one() -> None:
    inner = inside(plan.Workspace(memory=MIB), "strict", ("layer",))
    names = [step[0] for step in inner]
    assert ["open", "0", "/profiles/strict"] in inner
    assert ["write", "/cgroups/skerry/pids.max", "64"] in inner
    assert ["write", "/cgroups/skerry/memory.max", str(LIMITS.memory)] in inner
    assert names.count("bound") == 2  # before and after it gets a user namespace
    assert names.index("enter") < names.index("users") < names.index("drop") < names.index("confine")
    assert names[-1] == "guest"
    assert ["tree", "2", "/export/layers/layer", "ro"] in inner


def test_program_has_a_server_of_its_own() -> None:
    arguments = definition(program=True).qemu("tcg")
    assert any(word.endswith("tag=program") for word in arguments)
    assert not any(word.endswith("tag=program") for word in definition().qemu("tcg"))
    mounts = [step for step in inside(vm.PROGRAM) if step[0] == "mount"]
    assert [step[2:4] for step in mounts] == [["export", "/export"], ["program", "/program"]]


def test_workspace_on_disk_belongs_to_the_user() -> None:
    inner = inside(plan.Workspace(volume="w"))
    assert ["chown", "/disk/w", "1000", "1000"] in inner
    assert ["volume", "1", "workspace", "w"] in inner
