"""Formats and judges the noisy-neighbour table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CALLS = ("command", "read", "create")
YARDSTICK = "CPU burners"
"""The attack that every other is compared with."""
GIVE_UP = 30.0
"""Seconds after which a call of the neighbour counts as unanswered."""
RATIO_MAX = 2.0
PEAK_MAX = 300_000_000

Cell = dict[str, Any]


def markdown(cells: Sequence[Cell]) -> str:
    """Each call: median / 99th percentile in ms, and the ratio of the latter to that beside CPU burners."""
    burners = yardsticks(cells)
    lines = [
        f"| attack | attackers | {' | '.join(CALLS)} | samples | daemon, peak | refused |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for cell in cells:
        if "failed" in cell:
            lines.append(f"| {cell['attack']} | | {cell['failed']} | | | | | |")
            continue
        base = _base(cell, burners)
        shown = [_shown(cell, base.get(call), call) for call in CALLS]
        samples = "/".join(str(cell[call]["samples"] if cell[call] else 0) for call in CALLS)
        refused = len(cell["refused"]) if cell["answered"] else "?"
        peak = f"{cell['peak_bytes'] / (1 << 20):.0f} MiB"
        row = (cell["attack"], cell["attackers"], *shown, samples, peak, refused)
        lines.append(f"| {' | '.join(map(str, row))} |")
    return "\n".join(lines)


def yardsticks(cells: Sequence[Cell]) -> dict[int, Cell]:
    return {cell["attackers"]: cell for cell in cells if cell["attack"] == YARDSTICK and "failed" not in cell}


def _base(cell: Cell, burners: dict[int, Cell]) -> dict[str, Any]:
    """The burners measured in turn with this cell, else those of the whole table."""
    found: dict[str, Any] = cell.get("beside") or burners.get(cell["attackers"], {})
    return found


def _shown(cell: Cell, base: dict[str, float] | None, call: str) -> str:
    if not cell["answered"]:
        return f"no answer in {GIVE_UP:.0f} s"
    found = cell[call]
    if found is None:
        return "none"
    text = f"{_ms(found['median'])} / {_ms(found['p99'])}"
    if base is None or cell["attack"] == YARDSTICK:
        return text
    return f"{text} ({found['p99'] / base['p99']:.1f}×)"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f}" if seconds < 0.1 else f"{seconds * 1000:.0f}"


def missed(cells: Sequence[Cell]) -> list[str]:
    """Cells that miss the target: p99 within 2× of the burners, daemon under 300 MB, nothing refused."""
    burners = yardsticks(cells)
    broken = []
    for cell in cells:
        where = f"{cell['attack']} × {cell.get('attackers', '?')}"
        if "failed" in cell:
            broken.append(f"{where}: {cell['failed']}")
            continue
        if not cell["answered"]:
            broken.append(f"{where}: no answer")
        if cell["refused"]:
            broken.append(f"{where}: {len(cell['refused'])} refused, such as {cell['refused'][0]}")
        if cell["peak_bytes"] >= PEAK_MAX:
            broken.append(f"{where}: the daemon had {cell['peak_bytes'] / 1e6:.0f} MB")
        for call in CALLS:
            base = _base(cell, burners).get(call)
            if base and cell[call] and cell[call]["p99"] > RATIO_MAX * base["p99"]:
                broken.append(
                    f"{where}: p99 of {call} {cell[call]['p99'] / base['p99']:.1f}× that of the burners"
                )
    return broken
