"""Write the generated parts of SECURITY.md: shared resources (docs/resources.toml), /proc (docs/proc.toml), and what a
program sees of the host on each backend (docs/rungs.json, by probe_rungs.py).

python scripts/generate_security.py            write it
python scripts/generate_security.py --check    fail when SECURITY.md is stale

Fails for a row that lacks a field, has neither a test nor a note, or names a test that does not exist.
"""

from __future__ import annotations

import ast
import json
import sys
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from skerry.host import plan

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "docs" / "resources.toml"
TARGET = ROOT / "SECURITY.md"
PROC = ROOT / "docs" / "proc.toml"
RUNGS = ROOT / "docs" / "rungs.json"
MARKER = "<!-- {}: written by scripts/generate_security.py from docs/{} -->\n"
END = "<!-- end of {} -->\n"
FIELDS = {"name": str, "charged": str, "limit": str, "by": str, "tests": list, "note": str}
OPTIONAL = {"tests", "note"}

Row = dict[str, Any]


def main() -> int:
    sections: dict[str, list[Row]] = tomllib.loads(SOURCE.read_text())
    wrong = [
        f"{row.get('name', '?')}: {fault}"
        for rows in sections.values()
        for row in rows
        for fault in faults(row)
    ]
    if wrong:
        print("docs/resources.toml:", *wrong, sep="\n  ", file=sys.stderr)
        return 1
    text = wanted = TARGET.read_text()
    for name, source, content in (
        ("resources", SOURCE, table(sections)),
        ("proc", PROC, proc(tomllib.loads(PROC.read_text()))),
        ("rungs", RUNGS, rungs(json.loads(RUNGS.read_text()))),
    ):
        before, begin, rest = wanted.partition(MARKER.format(name, source.name))
        _, end, after = rest.partition(END.format(name))
        if not begin or not end:
            print(f"SECURITY.md lacks the markers of {name}", file=sys.stderr)
            return 1
        wanted = before + begin + content + end + after
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(wanted)
        return 0
    if text == wanted:
        return 0
    print("SECURITY.md is stale; run python scripts/generate_security.py", file=sys.stderr)
    return 1


def faults(row: Row) -> list[str]:
    """What is wrong with a row, in words."""
    found = [f"unknown field {name}" for name in sorted(row.keys() - FIELDS.keys())]
    for name, kind in FIELDS.items():
        if name not in row:
            found += [] if name in OPTIONAL else [f"has no {name}"]
        elif not isinstance(row[name], kind) or not row[name]:
            found.append(f"{name} must be a {kind.__name__} that is not empty")
    if "tests" not in row and "note" not in row:
        found.append("has neither a test nor a note that says why")
    return found + [f"there is no test {test}" for test in row.get("tests", ()) if not exists(test)]


def exists(node_id: str) -> bool:
    """True if the file has a test function of that name."""
    path, _, name = node_id.partition("::")
    return name in tests_in(path)


@cache
def tests_in(path: str) -> frozenset[str]:
    file = ROOT / path
    if not file.is_file():
        return frozenset()
    nodes = ast.parse(file.read_text()).body
    functions = (node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(name for name in functions if name.startswith("test_"))


def table(sections: dict[str, list[Row]]) -> str:
    lines = ["| resource | charged to | limit | enforced by | tests and notes |", "|---|---|---|---|---|"]
    for title, rows in sections.items():
        lines.append(f"| **{title}** | | | | |")
        for row in rows:
            tests = "".join(f"`{test.removeprefix('tests/')}` " for test in row.get("tests", ()))
            words = (row["name"], row["charged"], row["limit"], row["by"], tests + row.get("note", ""))
            lines.append("| " + " | ".join(word.strip().replace("|", "\\|") for word in words) + " |")
    return "\n".join(lines) + "\n"


def proc(sections: dict[str, dict[str, Any]]) -> str:
    def names(files: Iterable[str]) -> str:
        return ", ".join(f"`{name}`" for name in sorted(files))

    lines = ["| | files below `/proc` |", "|---|---|"]
    lines.append(f"| **masked**: reads as empty | {names(plan.MASKED)} |")
    for section in sections.values():
        why = f". {section['why']}" if "why" in section else ""
        lines.append(f"| **shown**: {section['title']}{why} | {names(section['files'])} |")
    return "\n".join(lines) + "\n"


def rungs(columns: dict[str, dict[str, str]]) -> str:
    titles = [name if " " in name else f"`{name}`" for name in columns]
    lines = [f"| seen by a program | {' | '.join(titles)} |", "|---|" + "---|" * len(titles)]
    for row in next(iter(columns.values())):
        cells = (column.get(row, "") for column in columns.values())
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
