"""What the benchmarks make of their samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import neighbours, report
from benchmarks.measure import Subject, Summary, summarize, take_turns


def summary(seconds: float) -> Summary:
    return Summary(seconds, seconds, seconds, 1)


GOOD_TIMES = {
    "docker_run": summary(0.250),
    "docker_exec": summary(0.044),
    "python": summary(0.010),
    "fresh": summary(0.010),
    "run": summary(0.002),
    "execute": summary(0.002),
    "session": summary(0.001),
    "cli": summary(0.080),
    "pooled_fresh": summary(0.004),
    "bare_print": summary(0.010),
    "code_python": summary(0.010),
    "bare_go": summary(0.101),
    "code_go": summary(0.300),
}
GOOD_RESULTS: dict[str, Any] = {
    "idle_bytes": 1023 * 1024,
    "many": {"alive": 500},
    "code": {"per_second": 150.0},
}


def missed(results: dict[str, Any], times: dict[str, Summary]) -> list[str]:
    return [promise for promise, kept, _ in report.targets(results, times) if not kept]


def test_promises_that_are_just_kept() -> None:
    assert missed(GOOD_RESULTS, GOOD_TIMES) == []


@pytest.mark.parametrize(
    ("key", "seconds"),
    [
        ("fresh", 0.0101),
        ("run", 0.00201),
        ("execute", 0.00201),
        ("cli", 0.0801),
        ("code_go", 0.31),
        ("session", 0.00101),
    ],
)
def test_a_little_slower_misses_one(key: str, seconds: float) -> None:
    assert len(missed(GOOD_RESULTS, {**GOOD_TIMES, key: summary(seconds)})) == 1


@pytest.mark.requirement("R117")
def test_start_and_clean_up_are_measured() -> None:
    """The tools were documented with containers that start in 1 to 2 s, and are removed in less than 1."""
    times = json.loads((Path(report.__file__).parent / "results.json").read_text())["times"]
    assert 0 < times["fresh"]["p95"] < 0.1
    assert 0 < times["delete"]["p95"] < 0.1


def test_what_was_not_measured_is_not_kept() -> None:
    assert len(missed({}, {})) == 11
    assert len(missed({"idle_bytes": None, "many": None}, GOOD_TIMES)) == 3


def test_subjects_take_turns_and_the_first_round_does_not_count() -> None:
    turns: list[str] = []

    def subject(name: str) -> Subject:
        def once() -> dict[str, float]:
            turns.append(name)
            return {name: float(len(turns))}

        return Subject(once)

    times = take_turns([subject("a"), subject("b")], 2, lambda _: None)
    assert turns == ["a", "b", "a", "b", "a", "b"]
    assert (times["a"].samples, times["b"].samples) == (2, 2)


def test_a_percentile_is_a_sample() -> None:
    assert summarize([float(n) for n in range(100)]) == Summary(49.5, 94.0, 98.0, 100)
    assert summarize([3.0]) == Summary(3.0, 3.0, 3.0, 1)


def test_every_door_has_its_table() -> None:
    taken = {"median": 0.001, "p95": 0.002, "p99": 0.003, "samples": 9}
    doors = {"TCP": {"alone": {"read": taken}, "together": {"read": {**taken, "per_second": 1234.5}}}}
    (alone, together) = report.service({"doors": doors})
    assert alone == ("TCP, one client", [("read", "1.00 ms", "2.00 ms", "3.00 ms", "")])
    assert together == ("TCP, 50 clients at once", [("read", "1.00 ms", "2.00 ms", "3.00 ms", "1,234")])
    results = {"doors": doors, "machine": "", "notes": "", "missing": {}}
    assert "| read | 1.00 ms | 2.00 ms | 3.00 ms | 1,234 |" in report.markdown(results, {})


def test_the_ratios_to_llm_sandbox() -> None:
    others = {
        "llm_sandbox_fresh": summary(0.250),
        "llm_sandbox_command": summary(0.050),
        "llm_sandbox_code": summary(0.400),
        "code_cold": summary(0.040),
    }
    assert report.beside_llm_sandbox({**GOOD_TIMES, **others}) == [
        "Beside llm-sandbox Skerry is faster: a fresh sandbox to its first output 25× and, from a pool, 62.5×, "
        "a command in a live one 25×, a Python program that runs once 10× and, from a pool, 40×."
    ]
    assert report.beside_llm_sandbox(GOOD_TIMES) == []


def test_the_way_out_in_one_sentence() -> None:
    direct = {"download": 2 << 30, "upload": 3 << 30, "trip": 2e-5, "connect": 3e-4, "together": 1.4}
    proxy = {"download": 1 << 30, "upload": 1 << 30, "trip": 6e-5, "connect": 5e-4, "together": 1.6}
    egress = {
        "direct": direct,
        "proxy": proxy,
        "first": {"tried": 1000, "open": 1000, "bytes": 20 << 20},
        "again": {"tried": 1000, "open": 1000, "bytes": 0},
        "attempts": {"tried": 10_000, "open": 1024, "bytes": 1 << 19},
    }
    speed, crowds = report.facts({"missing": {}, "egress": egress})
    assert "download 1024 (2048) MiB/s" in speed
    assert "1,000 at once in 1.6 (1.4) s" in speed
    assert (
        "1,000 connections out of an environment take 20.0 MiB of the daemon's memory, and 0.0 MiB more"
        in crowds
    )
    assert "Of 10,000 at once 1,024 are let through, with 0.5 MiB more" in crowds


def cell(attack: str, attackers: int, p99: float, peak: int = 1, refused: int = 0) -> dict[str, Any]:
    times = {"median": 0.001, "p95": p99, "p99": p99, "samples": 50}
    found = dict.fromkeys(neighbours.CALLS, times)
    more = {"peak_bytes": peak, "answered": True, "refused": ["command: busy"] * refused}
    return {"attack": attack, "attackers": attackers, **found, **more}


def test_attacks_are_compared_with_as_many_burners() -> None:
    burners = [cell(neighbours.YARDSTICK, 1, 0.010), cell(neighbours.YARDSTICK, 4, 0.100)]
    held = [cell("frames", 1, 0.020), cell("frames", 4, 0.200)]
    assert neighbours.missed([*burners, *held]) == []
    assert "| frames | 4 | 1.0 / 200 (2.0×) |" in neighbours.markdown([*burners, *held])
    broken = [
        cell("frames", 1, 0.021),
        cell("output", 4, 0.1, peak=300_000_000),
        cell("fsync", 4, 0.1, refused=1),
    ]
    found = neighbours.missed([*burners, *broken])
    assert len(found) == len(neighbours.CALLS) + 2
    no_answer = {**cell("frames", 4, 0.1), "answered": False, **dict.fromkeys(neighbours.CALLS)}
    assert neighbours.missed([*burners, no_answer]) == ["frames × 4: no answer"]
    failed = {"attack": "frames", "failed": "OSError: gone"}
    assert neighbours.missed([failed]) == ["frames × ?: OSError: gone"]
    assert "OSError: gone" in neighbours.markdown([failed])
