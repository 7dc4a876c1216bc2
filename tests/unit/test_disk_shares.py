"""The limits of the disk, divided between the environments that are busy with it."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from skerry.host import disk_shares
from skerry.host.disk_shares import CALM, LEAST, LEAST_OPERATIONS, DiskShares

MIB = 1 << 20
TOTAL = 64 * MIB


class Machine:
    """A cgroup and devices, as files."""

    def __init__(self, place: Path) -> None:
        self.home = place / "volumes"
        self.cgroup, self.devices = place / "cgroup", place / "devices"
        self.limits: dict[str, int] = {}
        self.direct: list[tuple[str, int, bool]] = []
        """What was switched to direct I/O, and back."""
        for folder in (self.home, self.cgroup, self.devices):
            folder.mkdir()
        (self.cgroup / "release_agent").touch()
        self.file = self.cgroup / "blkio.throttle.write_bps_device"
        self.file.touch()
        self._uses = 0

    def attach(self, device: str, *, to: Path | None = None) -> None:
        self._uses += 1
        folder = self.devices / device
        (folder / "loop").mkdir(parents=True, exist_ok=True)
        (folder / "loop/backing_file").write_text(f"{to or self.home}/#1 (deleted)\n")
        (folder / "diskseq").write_text(f"{self._uses}\n")
        self.written(device, 0)

    def detach(self, device: str) -> None:
        (self.devices / device / "loop/backing_file").unlink()

    def written(self, device: str, size: int) -> None:
        self.did(device, reads=0, writes=0, size=size)

    def did(self, device: str, reads: int, writes: int, size: int = 0) -> None:
        """All that was done on a device so far."""
        (self.devices / device / "stat").write_text(f"{reads} 2 3 4 {writes} 6 {size // 512} 8 9 10 11\n")

    def write(self, path: str, value: str) -> None:
        assert path == str(self.file)
        device, limit = value.split()
        self.limits[device] = int(limit)
        if limit == "0":
            del self.limits[device]

    def start(self, bandwidth: int = TOTAL, operations: int = 0, *, v1: bool = True) -> DiskShares:
        cgroups = str(self.cgroup) if v1 else ""
        return DiskShares(
            str(self.home), operations, bandwidth, cgroups=cgroups, devices=str(self.devices), cores=2
        )


class Environment:
    """What was set last in its cgroup."""

    limits: tuple[str, int, int]

    def limit_io(self, device: str, operations: int, bandwidth: int) -> None:
        self.limits = device, operations, bandwidth


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path)
    monkeypatch.setattr(disk_shares, "write", machine.write)
    monkeypatch.setattr(disk_shares, "set_direct_io", lambda *words: machine.direct.append(words))
    monkeypatch.setattr(disk_shares, "IDLE_TICK", 3600.0)  # the tests look when they want
    return machine


def test_those_that_write_share_the_limit(machine: Machine) -> None:
    limit = machine.start()
    for device in ("7:0", "7:1", "7:2"):
        machine.attach(device)
        limit.add(device)
    assert machine.limits == dict.fromkeys(("7:0", "7:1", "7:2"), TOTAL)
    for device in ("7:0", "7:1"):
        machine.written(device, 100 * MIB)
    limit.look()
    assert machine.limits == dict.fromkeys(("7:0", "7:1", "7:2"), TOTAL // 2)
    machine.written("7:0", 200 * MIB)
    limit.look()
    assert set(machine.limits.values()) == {TOTAL}
    limit.close()
    assert machine.limits == {}


def test_many_get_something_each(machine: Machine) -> None:
    limit = machine.start()
    devices = [f"7:{number}" for number in range(100)]
    for device in devices:
        machine.attach(device)
        limit.add(device)
        machine.written(device, 100 * MIB)
    limit.look()
    assert set(machine.limits.values()) == {LEAST}
    limit.close()


def test_device_that_others_use_next_is_not_limited(machine: Machine, tmp_path: Path) -> None:
    limit = machine.start()
    for device in ("7:0", "7:1", "7:2"):
        machine.attach(device)
        limit.add(device)
    machine.detach("7:0")
    machine.attach("7:1", to=tmp_path / "elsewhere")
    limit.look()
    assert machine.limits == {"7:2": TOTAL}
    machine.attach("7:2")  # by us again
    limit.add("7:2")
    limit.look()
    assert machine.limits == {"7:2": TOTAL}
    limit.close()


def test_what_an_earlier_daemon_left_is_taken_over(machine: Machine, tmp_path: Path) -> None:
    machine.attach("7:0")
    machine.attach("7:1", to=tmp_path / "elsewhere")
    machine.attach("7:2")
    machine.detach("7:2")
    machine.attach("8:0", to=tmp_path / "elsewhere")
    machine.limits = {"7:0": 5, "7:1": 5, "7:2": 5, "8:0": 5}
    machine.file.write_text("7:0 5\n7:1 5\n7:2 5\n8:0 5\n")
    limit = machine.start()
    assert machine.limits == {"7:0": TOTAL, "7:1": 5, "8:0": 5}
    limit.close()
    assert machine.limits == {"7:1": 5, "8:0": 5}


def test_nothing_is_done_without_a_limit_or_a_root_cgroup(machine: Machine) -> None:
    machine.attach("7:0")
    for limit in (machine.start(0), machine.start(v1=False)):
        limit.add("7:0")
        limit.close()
    (machine.cgroup / "release_agent").unlink()
    machine.start().add("7:0")
    assert machine.limits == {}


def test_thread_ends_with_the_last_device(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_shares, "IDLE_TICK", 0.01)
    limit = machine.start()
    assert limit._thread is None
    for _ in range(2):
        machine.attach("7:0")
        limit.add("7:0")
        thread = limit._thread
        assert thread is not None
        machine.detach("7:0")
        thread.join(30)
        assert limit._thread is None
        assert machine.limits == {}


@pytest.mark.parametrize("v1", [True, False])
def test_environments_that_are_busy_share_operations_and_bytes(machine: Machine, v1: bool) -> None:
    limit = machine.start(operations=4000, v1=v1)
    environments = {f"7:{number}": Environment() for number in range(5)}
    for device, environment in environments.items():
        machine.attach(device)
        limit.give(device, environment)
        assert environment.limits == (device, 4000, TOTAL)
    busy = list(environments)[:4]
    for round_ in (1, 2):  # the second time within what each has by then
        for device in busy:
            machine.did(device, reads=500 * round_, writes=500 * round_)
        machine.did("7:4", reads=0, writes=0, size=100 * MIB * round_)
        assert limit.look()
    for device, environment in environments.items():
        assert environment.limits == (device, 2000, TOTAL)  # 4000 for each of two cores
    for device in environments:
        machine.did(device, reads=2000, writes=2000, size=500 * MIB)
    assert limit.look()
    assert environments["7:4"].limits == ("7:4", 1600, TOTAL // 5)
    assert not limit.look()
    assert environments["7:4"].limits == ("7:4", 4000, TOTAL)
    limit.close()


def test_one_alone_has_no_more_than_its_own_limit(machine: Machine) -> None:
    limit, environment = machine.start(operations=4000), Environment()
    machine.attach("7:0")
    limit.give("7:0", environment)
    machine.did("7:0", reads=0, writes=5000)
    limit.look()
    assert environment.limits == ("7:0", 4000, TOTAL)
    limit.close()


def test_many_get_some_operations_each(machine: Machine) -> None:
    limit, environment = machine.start(operations=4000), Environment()
    for number in range(100):
        machine.attach(f"7:{number}")
        limit.give(f"7:{number}", environment)
        machine.did(f"7:{number}", reads=0, writes=5000)
    limit.look()
    assert environment.limits[1] == LEAST_OPERATIONS
    limit.close()


def test_what_has_ended_is_not_limited_any_more(machine: Machine) -> None:
    limit, ended, other = machine.start(operations=4000), Environment(), Environment()
    for number, environment in enumerate((ended, other)):
        machine.attach(f"7:{number}")
        limit.give(f"7:{number}", environment)
    limit.add("7:0")
    limit.lift("7:0")
    assert machine.limits == {}
    machine.did("7:1", reads=0, writes=0, size=100 * MIB)
    machine.did("7:0", reads=0, writes=0, size=100 * MIB)
    limit.look()
    assert ended.limits == ("7:0", 4000, TOTAL)
    limit.close()


@pytest.mark.parametrize("seen", [True, False])
def test_device_that_another_environment_has_next_is_shared_with_that(machine: Machine, seen: bool) -> None:
    limit, ended, other = machine.start(operations=4000, v1=False), Environment(), Environment()
    machine.attach("7:0")
    limit.give("7:0", ended)
    machine.attach("7:0")
    if seen:
        limit.look()
        machine.did("7:0", reads=0, writes=0, size=100 * MIB)
        assert not limit.look()  # nobody has it
    limit.give("7:0", other)
    machine.attach("7:1")
    limit.give("7:1", Environment())
    for round_ in (2, 3):
        for device in ("7:0", "7:1"):
            machine.did(device, reads=0, writes=0, size=100 * MIB * round_)
        assert limit.look()
    assert (ended.limits, other.limits) == (("7:0", 4000, TOTAL), ("7:0", 4000, TOTAL // 2))
    limit.close()


def test_without_limits_nothing_is_set(machine: Machine) -> None:
    limit, environment = machine.start(0, 0), Environment()
    machine.attach("7:0")
    limit.give("7:0", environment)
    assert not hasattr(environment, "limits")
    limit.close()


def test_what_cannot_be_read_stays_as_it_is(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as while the daemon has no descriptor left."""
    limit, environment = machine.start(), Environment()
    machine.attach("7:0")
    limit.give("7:0", environment)
    with monkeypatch.context() as patch:
        patch.setattr(disk_shares, "_text", _too_many)
        assert not limit.look()
    machine.written("7:0", 100 * MIB)
    assert limit.look()
    limit.close()


def test_an_environment_is_limited_whatever_is_known_of_its_device(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, environment = machine.start(operations=4000), Environment()
    monkeypatch.setattr(disk_shares, "_text", _too_many)
    limit.give("7:0", environment)
    assert environment.limits == ("7:0", 4000, TOTAL)
    limit.close()


def _too_many(path: str) -> str:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_volume_attached_during_close_is_left_alone(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for device in ("7:0", "7:1", "7:2"):
        machine.attach(device)
    shares = machine.start()
    machine.attach("7:3")
    attaching = [threading.Thread(target=shares.add, args=("7:3",)) for _ in range(2)]

    def write(path: str, value: str) -> None:
        machine.write(path, value)
        if attaching and value.endswith(" 0"):
            thread = attaching.pop()
            thread.start()
            thread.join(0.2)  # it waits for the close to finish, unless nothing makes it wait

    monkeypatch.setattr(disk_shares, "write", write)
    threads = list(attaching)
    shares.close()
    for thread in threads:
        thread.join()
    assert machine.limits == {}


def test_device_that_is_streamed_to_uses_direct_io_until_that_ends(machine: Machine) -> None:
    for device in ("7:0", "7:1"):
        machine.attach(device)
    shares = machine.start()
    machine.did("7:0", reads=0, writes=64, size=32 * MIB)
    machine.did("7:1", reads=0, writes=8192, size=32 * MIB)  # small writes, as syncs make them
    shares.look()
    assert machine.direct == [("/dev/7:0", 1, True)]
    for _ in range(CALM - 1):
        shares.look()
    assert len(machine.direct) == 1
    shares.look()
    assert machine.direct[1:] == [("/dev/7:0", 1, False)]
    shares.look()
    assert len(machine.direct) == 2
    shares.close()
