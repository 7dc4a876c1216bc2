"""Promises, tables and pages of the benchmarks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import neighbours_table, pages, promises, report
from benchmarks.measure import Subject, Summary, summarize, take_turns


def summary(seconds: float) -> Summary:
    return Summary(seconds, seconds, seconds, 1)


GOOD_TIMES = {
    "docker_run": summary(0.180),
    "docker_exec": summary(0.044),
    "python": summary(0.010),
    "fresh": summary(0.010),
    "run": summary(0.002),
    "execute": summary(0.002),
    "session": summary(0.010 / 6),
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
}


def missed(results: dict[str, Any], times: dict[str, Summary]) -> list[str]:
    return [verdict.what for verdict in promises.promises(results, times) if not verdict.kept]


def test_promises_just_kept() -> None:
    assert missed(GOOD_RESULTS, GOOD_TIMES) == []


def test_promises_are_those_of_the_specification() -> None:
    sections = (pages.ROOT / "SPECIFICATION.md").read_text().split("\n## ")
    stated = [
        row
        for section in sections
        if section.startswith(("Speed", "Size"))
        for row in re.findall(r"^\| (.+) \| (.+) \|$", section, re.MULTILINE)
        if row != ("promise", "value")
    ]
    assert [(verdict.what, verdict.value) for verdict in promises.promises({}, {})] == stated


def test_missed_goals_are_shown_apart() -> None:
    assert [verdict.kept for verdict in promises.goals({}, {})] == [False] * 4
    assert missed(GOOD_RESULTS, GOOD_TIMES) == []


def test_pages_show_the_stored_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = json.loads((Path(report.__file__).parent / "results.json").read_text())
    times = {key: Summary(**values) for key, values in results["times"].items()}
    for name in ("README", "PAGE"):
        committed = getattr(pages, name)
        copy = tmp_path / committed.name
        copy.write_text(committed.read_text())
        monkeypatch.setattr(pages, name, copy)
    pages.write_speed(results, times)
    assert pages.README.read_text() == (pages.ROOT / "README.md").read_text()
    assert pages.PAGE.read_text() == (pages.ROOT / "docs/benchmarks.md").read_text()


def test_page_without_markers_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- speed: begin -->\nno end\n")
    with pytest.raises(ValueError, match=r"page\.md has no markers for speed"):
        pages.replace(page, "speed", "text")
    assert page.read_text() == "<!-- speed: begin -->\nno end\n"


@pytest.mark.parametrize(
    ("key", "seconds"),
    [
        ("fresh", 0.0101),
        ("run", 0.00201),
        ("execute", 0.00201),
        ("cli", 0.0801),
        ("code_go", 0.31),
        ("session", 0.0017),
        ("pooled_fresh", 0.0041),
        ("code_python", 0.0101),
    ],
)
def test_slightly_slower_misses_one_promise(key: str, seconds: float) -> None:
    assert len(missed(GOOD_RESULTS, {**GOOD_TIMES, key: summary(seconds)})) == 1


def test_unmeasured_promise_is_missed() -> None:
    assert len(missed({}, {})) == 10
    assert len(missed({"idle_bytes": None, "many": None}, GOOD_TIMES)) == 2


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


def test_ratios_to_llm_sandbox() -> None:
    others = {
        "llm_sandbox_fresh": summary(0.250),
        "llm_sandbox_command": summary(0.050),
        "llm_sandbox_code": summary(0.400),
        "code_cold": summary(0.040),
    }
    assert report.beside_llm_sandbox({**GOOD_TIMES, **others}) == [
        "Faster than llm-sandbox: a fresh sandbox to its first output 25× and, from a pool, 62.5×, "
        "a command in a live one 25×, a Python program that runs once 10× and, from a pool, 40×."
    ]
    assert report.beside_llm_sandbox(GOOD_TIMES) == []


def test_egress_facts() -> None:
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
    assert "1,000 connections at once 1.6 (1.4) s" in speed
    assert (
        "1,000 connections out of an environment take 20.0 MiB of the daemon's memory, the same again 0.0 MiB"
        in crowds
    )
    assert "Of 10,000 attempts at once 1,024 succeed, for 0.5 MiB more" in crowds


def cell(attack: str, attackers: int, p99: float, peak: int = 1, refused: int = 0) -> dict[str, Any]:
    times = {"median": 0.001, "p95": p99, "p99": p99, "samples": 50}
    found = dict.fromkeys(neighbours_table.CALLS, times)
    more = {"peak_bytes": peak, "answered": True, "refused": ["command: busy"] * refused}
    return {"attack": attack, "attackers": attackers, **found, **more}


def test_attacks_are_compared_with_the_same_number_of_burners() -> None:
    burners = [cell(neighbours_table.YARDSTICK, 1, 0.010), cell(neighbours_table.YARDSTICK, 4, 0.100)]
    held = [cell("frames", 1, 0.020), cell("frames", 4, 0.200)]
    assert neighbours_table.missed([*burners, *held]) == []
    assert "| frames | 4 | 1.0 / 200 (2.0×) |" in neighbours_table.markdown([*burners, *held])
    broken = [
        cell("frames", 1, 0.021),
        cell("output", 4, 0.1, peak=300_000_000),
        cell("fsync", 4, 0.1, refused=1),
    ]
    found = neighbours_table.missed([*burners, *broken])
    assert len(found) == len(neighbours_table.CALLS) + 2
    no_answer = {**cell("frames", 4, 0.1), "answered": False, **dict.fromkeys(neighbours_table.CALLS)}
    assert neighbours_table.missed([*burners, no_answer]) == ["frames × 4: no answer"]
    failed = {"attack": "frames", "failed": "OSError: gone"}
    assert neighbours_table.missed([failed]) == ["frames × ?: OSError: gone"]
    assert "OSError: gone" in neighbours_table.markdown([failed])
