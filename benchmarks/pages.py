"""Writes measured tables into README.md and docs/benchmarks.md, between markers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.measure import Summary

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "benchmarks.md"


def write_speed(results: Mapping[str, Any], times: Mapping[str, Summary]) -> None:
    """Five numbers for the README, all tables for docs/benchmarks.md."""
    replace(README, "speed", report.headline(times))
    replace(PAGE, "speed", report.markdown(results, times))


def replace(page: Path, name: str, text: str) -> None:
    """Replaces the text between the markers `name: begin` and `name: end`. Raises ValueError if one is missing."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, found_begin, rest = page.read_text().partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"{page.name} has no markers for {name}")
    page.write_text(f"{before}{begin}{text.rstrip()}\n{end}{after}")
