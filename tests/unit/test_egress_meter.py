"""What holds an environment to its limits of the network."""

from __future__ import annotations

import pytest

from skerry.egress.limits import NOTED_EVERY, SURPLUS_MAX, ConnectionTotal, Meter, Traffic
from skerry.errors import InvalidRequest
from skerry.policy import GIB, KIB, MIB, Limits


@pytest.fixture
def total(monkeypatch: pytest.MonkeyPatch) -> ConnectionTotal:
    monkeypatch.setattr("resource.getrlimit", lambda _: (4000, 4000))
    return ConnectionTotal()


def fill(meter: Meter) -> int:
    """Take all places that there are; how many those were."""
    count = 0
    while not meter.enter(count):
        count += 1
    return count


def test_places_up_to_the_limit(total: ConnectionTotal) -> None:
    meter = Meter(Limits(connections=3), Traffic(), total)
    assert fill(meter) == 3
    assert meter.enter(3).startswith("its limit of 3 connections at once is reached")
    meter.leave()
    assert meter.enter(2) == ""


def test_nobody_gets_all_places_of_a_daemon(total: ConnectionTotal) -> None:
    assert fill(Meter(Limits(connections=65536), Traffic(), total)) == 500
    assert fill(Meter(Limits(connections=65536), Traffic(), total)) == 250
    assert fill(Meter(Limits(connections=100), Traffic(), total)) == 100
    assert total.room == 150


def test_greedy_ones_get_the_same(total: ConnectionTotal) -> None:
    meters = [Meter(Limits(connections=65536), Traffic(), total) for _ in range(9)]
    counts = [0] * 9
    for _ in range(1000):
        for number, meter in enumerate(meters):
            counts[number] += not meter.enter(counts[number])
    assert counts == [100] * 9
    assert total.room == 100


def test_those_who_are_told_why_take_places_too(total: ConnectionTotal) -> None:
    count = 0
    while Meter(Limits(connections=1), Traffic(), total).enter_surplus(count):
        count += 1
    assert count == SURPLUS_MAX
    for _ in range(1000):  # environments, each with one that cannot be served
        Meter(Limits(connections=1), Traffic(), total).enter_surplus(0)
    assert total.room == 0


def test_many_hold_no_more_than_some(total: ConnectionTotal) -> None:
    held = []
    for total.count in (0, 1, 128, 256, 1000, 5000, 1_000_000):
        held.append(Meter(Limits(), Traffic(), total).piece())
    assert held == [256 * KIB] * 3 + [128 * KIB, 33554, 6710, 4 * KIB]


def test_the_kernel_holds_less_for_each_of_many(total: ConnectionTotal) -> None:
    held = []
    for total.count in (1, 16, 17, 64, 128, 1000, 5000):
        held.append(Meter(Limits(), Traffic(), total).buffer())
    assert held == [0, 0] + [512 * KIB] * 2 + [256 * KIB, 33554, 32 * KIB]


def test_bytes_up_to_the_limit() -> None:
    traffic = Traffic(sent=400)
    meter = Meter(Limits(traffic=1000), traffic)
    assert meter.count(300, 300)
    assert traffic == Traffic(700, 300)
    assert meter.spent()
    assert not meter.count(1, 0)
    assert traffic == Traffic(700, 300)


def test_what_does_not_fit_ends_it() -> None:
    meter = Meter(Limits(traffic=1000), Traffic())
    assert not meter.spent()
    assert not meter.count(1001, 0)
    assert not meter.count(1, 0), "nor does less, afterwards"
    assert meter.spent()
    meter.change(Limits(traffic=1001))
    assert meter.count(1001, 0)


def test_what_was_used_is_noted_now_and_then() -> None:
    noted: list[Traffic] = []
    traffic = Traffic()
    meter = Meter(Limits(traffic=6400), traffic, note=lambda: noted.append(Traffic(traffic.sent, 0)))
    for _ in range(30):
        meter.count(10, 0)
    assert noted == [Traffic(100), Traffic(200), Traffic(300)]
    assert not meter.count(6400, 0)
    assert not meter.count(6400, 0)
    assert noted[3:] == [Traffic(300)], "when it is used up, once"
    meter.change(Limits(traffic=GIB << 20))
    meter.count(NOTED_EVERY - 1, 0)
    assert len(noted) == 4
    meter.count(1, 0)
    assert len(noted) == 5


def test_limits_of_the_network() -> None:
    assert (Limits().connections, Limits().traffic) == (1024, 100 * GIB)
    found = Limits.parse({"connections": 10, "traffic": "1m"})
    assert (found.connections, found.traffic) == (10, MIB)
    again = found.changed({"traffic": 5, "connections": None})
    assert (again.connections, again.traffic) == (10, 5)


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"connections": 0}, "between 1 and 65536"),
        ({"connections": 65537}, "between 1 and 65536"),
        ({"connections": True}, "a whole number"),
        ({"connections": "5"}, "a whole number"),
        ({"traffic": 0}, "between 1 byte and 1 EiB"),
        ({"traffic": -1}, "between 1 byte and 1 EiB"),
        ({"traffic": "much"}, "not a size"),
        ({"traffic": 1.5}, "traffic must be a number of bytes"),
    ],
)
def test_what_is_no_limit(limits: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        Limits.parse(limits)
