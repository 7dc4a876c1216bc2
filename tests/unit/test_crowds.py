"""Which environments count as a crowd."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from skerry.host import crowds
from skerry.host.crowds import BUSY, CROWD, SAMPLE, Crowds

MANY = BUSY * (os.cpu_count() or 1)


class Machine:
    """Cgroups and processes, as files."""

    def __init__(self, place: Path) -> None:
        self.parent, self.proc = place / "skerry", place / "proc"
        self.parent.mkdir()
        self.proc.mkdir()
        self.running(1)
        self._last = 0

    def running(self, count: int) -> None:
        (self.proc / "loadavg").write_text(f"0.00 0.01 0.05 {count}/4000 12345\n")

    def environment(self, name: str, states: str) -> Path:
        cgroup = self.parent / name
        cgroup.mkdir()
        (cgroup / "cgroup.freeze").write_text("0")
        threads = range(self._last + 1, self._last + 1 + len(states))
        self._last += len(states)
        (cgroup / "cgroup.threads").write_text("".join(f"{thread}\n" for thread in threads))
        for thread, state in zip(threads, states, strict=True):
            (self.proc / str(thread)).mkdir()
            (self.proc / str(thread) / "stat").write_text(f"{thread} (a) R b) {state} 1 1\n")
        return cgroup

    def start(self) -> Crowds:
        return Crowds(str(self.parent), proc=str(self.proc))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(crowds, "IDLE_TICK", 3600.0)  # the tests look when they want
    return Machine(tmp_path)


def found(machine: Machine) -> list[str]:
    watch = machine.start()
    try:
        return sorted(os.path.basename(place) for place in watch.look()[0])
    finally:
        watch.close()


def test_many_that_want_the_cpu_are_a_crowd(machine: Machine) -> None:
    machine.environment("runs", "R" * CROWD)
    machine.environment("waits-for-locks", "D" * CROWD)
    machine.environment("sleeps", "S" * 1000)
    machine.environment("few", "R" * (CROWD - 1))
    machine.running(MANY)
    assert found(machine) == ["runs", "waits-for-locks"]


def test_those_that_wait_in_the_kernel_are_counted(machine: Machine) -> None:
    machine.environment("runs", "R" * CROWD)
    machine.environment("waits", "D" * CROWD)
    machine.environment("few", "D" * (CROWD - 1))
    machine.running(MANY)
    watch = machine.start()
    assert watch.look()[1] == SAMPLE
    watch.close()


def test_nobody_is_looked_at_while_the_machine_has_time(machine: Machine) -> None:
    machine.environment("runs", "R" * CROWD)
    machine.running(MANY - 1)
    assert found(machine) == []


def test_what_cannot_be_read_is_no_crowd(machine: Machine) -> None:
    machine.environment("runs", "R" * CROWD)
    (machine.proc / "loadavg").unlink()
    assert found(machine) == []


def test_who_has_gone_meanwhile_does_not_matter(machine: Machine) -> None:
    machine.environment("runs", "R" * CROWD)
    (machine.environment("gone", "R" * CROWD) / "cgroup.threads").unlink()
    for thread in range(CROWD + 1, 2 * CROWD + 1):
        (machine.proc / str(thread) / "stat").unlink()
    machine.running(MANY)
    assert found(machine) == ["runs"]


def test_what_was_left_frozen_is_let_go(machine: Machine) -> None:
    cgroup = machine.environment("left", "S")
    (cgroup / "cgroup.freeze").write_text("1")
    machine.start().close()
    assert (cgroup / "cgroup.freeze").read_text() == "0"


def test_without_cgroups_there_is_nothing_to_do() -> None:
    Crowds(None).close()
