"""How the mixed load is judged."""

from __future__ import annotations

from typing import Any

from tests.soak.load import STALE, Sample, growth

MIB = 1 << 20


def samples(**last: Any) -> list[Sample]:
    """Nine quiet moments, the last three with these values."""
    flat: dict[str, Any] = {"resident": 100 * MIB, "descriptors": 80, "threads": 10, "disk": MIB}
    flat |= {"database": 50 * MIB, "kept": 100_000}
    rows = dict.fromkeys(STALE, 0)
    early = [Sample(at=number, rows=rows, **flat) for number in range(6)]
    late = {"rows": rows, **flat, **last}
    return [*early, *(Sample(at=number, **late) for number in range(6, 9))]


def test_what_stays_within_five_percent_is_flat() -> None:
    assert growth(samples()) == []
    assert growth(samples(resident=104 * MIB, descriptors=84, threads=12)) == []


def test_each_kind_of_growth_is_told() -> None:
    assert len(growth(samples(resident=106 * MIB))) == 1
    assert len(growth(samples(descriptors=85))) == 1
    assert len(growth(samples(threads=13))) == 1
    assert len(growth(samples(disk=3 * MIB))) == 1
    assert len(growth(samples(database=53 * MIB))) == 1
    assert growth(samples(database=100 * MIB, kept=200_000)) == []
    assert growth(samples(rows={**dict.fromkeys(STALE, 0), "executions": 1})) == [
        "1 rows of executions should be gone"
    ]


def test_the_warm_up_does_not_count() -> None:
    warm = samples()
    warm[0].resident = warm[1].resident = 10 * MIB
    assert growth(warm) == []
