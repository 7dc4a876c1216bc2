"""The weight of a group, divided between its environments that are busy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from skerry.errors import LaunchFailed
from skerry.host import cpu_shares
from skerry.host.cpu_shares import PARTS_MAX, CpuShares


class Environment:
    """A cgroup whose CPU time the test sets."""

    def __init__(self) -> None:
        self.seconds: float | None = 0.0
        self.parts = 1
        self.weighed = 0
        self.gone = False

    def cpu_time(self) -> float | None:
        return self.seconds

    def weigh(self, parts: int) -> None:
        if self.gone:
            raise LaunchFailed("gone")
        self.parts = parts
        self.weighed += 1


class Machine:
    def __init__(self, proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._loadavg = proc / "loadavg"
        self.running(9)
        self._now = 1000.0
        monkeypatch.setattr(cpu_shares, "monotonic", lambda: self._now)
        self.shares = CpuShares(proc=str(proc), cores=2)
        self.environments: dict[str, Environment] = {}

    def running(self, count: int) -> None:
        self._loadavg.write_text(f"0.50 0.40 0.30 {count}/200 12345\n")

    def add(self, group: str, count: int) -> list[Environment]:
        found = [Environment() for _ in range(count)]
        for environment in found:
            name = f"{group}{len(self.environments)}"
            self.environments[name] = environment
            self.shares.add(group, name, environment)
        return found

    def work(self, *busy: Environment, share: float = 0.5) -> None:
        """A second goes by, in which the busy ones use so much of a core; then a look."""
        self._now += 1.0
        for environment in busy:
            assert environment.seconds is not None
            environment.seconds += share
        self.shares.look()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setattr(cpu_shares, "IDLE_TICK", 3600.0)  # the tests look when they want
    machine = Machine(tmp_path, monkeypatch)
    yield machine
    machine.shares.close()


def weights(environments: list[Environment]) -> set[int]:
    return {environment.parts for environment in environments}


def test_those_of_a_group_divide_the_weight_of_one(machine: Machine) -> None:
    many, one = machine.add("a", 16), machine.add("b", 1)
    machine.work()
    machine.work(*many, *one)
    assert (weights(many), weights(one)) == ({16}, {1})


def test_those_that_are_not_busy_weigh_no_more(machine: Machine) -> None:
    """Or a tenant would have its environments take turns."""
    many, _ = machine.add("a", 16), machine.add("b", 1)
    machine.work()
    machine.work(*many[:4])
    assert weights(many) == {4}


def test_a_new_one_weighs_what_its_group_does(machine: Machine) -> None:
    many, _ = machine.add("a", 8), machine.add("b", 1)
    machine.work()
    machine.work(*many)
    assert weights(machine.add("a", 1)) == {8}
    assert weights(machine.add("c", 1)) == {1}


def test_they_get_it_back(machine: Machine) -> None:
    many, _ = machine.add("a", 8), machine.add("b", 1)
    machine.work()
    machine.work(*many)
    machine.work(many[0])
    assert weights(many) == {1}


@pytest.mark.parametrize(
    ("busy", "parts"), [(1, 1), (2, 2), (3, 4), (5, 4), (6, 8), (11, 8), (12, 16), (500, PARTS_MAX)]
)
def test_weights_are_not_written_for_one_more_or_less(machine: Machine, busy: int, parts: int) -> None:
    many, _ = machine.add("a", 500), machine.add("b", 1)
    machine.work()
    machine.work(*many[:busy])
    assert weights(many) == {parts}
    machine.work(*many[:busy])
    assert {environment.weighed for environment in many} == {int(parts > 1)}


def test_who_uses_next_to_nothing_is_not_busy(machine: Machine) -> None:
    many, _ = machine.add("a", 8), machine.add("b", 1)
    machine.work()
    machine.work(*many, share=0.009)
    assert weights(many) == {1}
    machine.work(*many, share=0.011)
    assert weights(many) == {8}


def test_what_was_used_before_the_first_look_does_not_count(machine: Machine) -> None:
    many, _ = machine.add("a", 8), machine.add("b", 1)
    machine.work(*many)
    assert weights(many) == {1}


def test_nothing_is_done_while_there_is_cpu_for_all(machine: Machine) -> None:
    many, _ = machine.add("a", 8), machine.add("b", 1)
    machine.work()
    machine.running(2)
    machine.work(*many)
    assert weights(many) == {1}
    machine.running(3)
    machine.work(*many)
    assert weights(many) == {8}


def test_one_that_is_gone_or_cannot_tell_disturbs_nobody(machine: Machine) -> None:
    many, _ = machine.add("a", 8), machine.add("b", 1)
    machine.work()
    many[0].gone = True
    many[1].seconds = None
    machine.work(*many[2:])
    assert weights(many[1:]) == {8}
    machine.shares.remove("a0")
    machine.shares.remove("a0")
    machine.shares.remove("never there")


def test_a_group_that_comes_again_begins_anew(machine: Machine) -> None:
    many, _ = machine.add("a", 8), machine.add("b", 1)
    machine.work()
    machine.work(*many)
    for name in list(machine.environments):
        machine.shares.remove(name)
    assert weights(machine.add("a", 1)) == {1}


def test_one_tenant_alone_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its environments would all weigh the same whatever is done."""
    monkeypatch.setattr(cpu_shares, "IDLE_TICK", 0.001)
    monkeypatch.setattr(cpu_shares, "TICK", 0.001)
    looked = threading.Event()
    monkeypatch.setattr(CpuShares, "look", lambda _: looked.set())
    shares = CpuShares(proc=str(tmp_path), cores=2)

    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "skerry-cpu-shares"]

    shares.add("a", "1", Environment())
    assert not threads()
    shares.add("b", "2", Environment())
    assert looked.wait(60)
    (thread,) = threads()
    shares.remove("2")
    thread.join(60)
    assert not threads()
    looked.clear()
    shares.add("b", "3", Environment())
    assert looked.wait(60)
    shares.close()
    assert not threads()
    shares.add("c", "4", Environment())
    assert not threads()
