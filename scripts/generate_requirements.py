"""Write docs/requirements.md: every promise of docs/requirements.toml, and the tests that show it.

python scripts/generate_requirements.py            write it
python scripts/generate_requirements.py --check    fail when it is not what would be written
python scripts/generate_requirements.py --results FILE...    fail when a promise was not shown in this run

Results are those of `python -m tests` (tests/results.py). A promise is shown when one of its tests passed and none
failed: a skipped test shows nothing.

A test shows a promise when it is marked `@pytest.mark.requirement("R43")`, by itself or by its module's `pytestmark`.
Fails when a mark names a promise that there is not.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "docs" / "requirements.toml"
TARGET = ROOT / "docs" / "requirements.md"
HEAD = """\
# Requirements and their tests

<!-- Written by scripts/generate_requirements.py from requirements.toml and the marks of the tests. -->

Of {all} promises {shown} are shown by a test on real parts; the others have no test that names them yet.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/requirements.md.")
    parser.add_argument("--check", action="store_true", help="fail when it is stale")
    parser.add_argument(
        "--results", type=Path, nargs="+", default=[], help="fail when these do not show all of it"
    )
    arguments = parser.parse_args()
    promises: dict[str, dict[str, str]] = tomllib.loads(SOURCE.read_text())
    tests = found_tests()
    known = {number for section in promises.values() for number in section}
    if unknown := sorted(set(tests) - known):
        where = ", ".join(f"{number} in {tests[number][0]}" for number in unknown)
        print(f"there is no requirement {where}", file=sys.stderr)
        return 1
    if arguments.results:
        missing = not_shown(tests, arguments.results)
        for number, why in missing.items():
            print(f"{number}: {why}")
        return 1 if missing else 0
    wanted = document(promises, tests)
    if not arguments.check:
        TARGET.write_text(wanted)
        return 0
    if TARGET.exists() and TARGET.read_text() == wanted:
        return 0
    print("docs/requirements.md is stale; run python scripts/generate_requirements.py", file=sys.stderr)
    return 1


def document(promises: dict[str, dict[str, str]], tests: dict[str, list[str]]) -> str:
    counts = {"all": sum(map(len, promises.values())), "shown": len(tests)}
    parts = [HEAD.format(**counts)]
    for title, section in promises.items():
        rows = [f"\n## {title}\n", "| | requirement | state | tests |", "|---|---|---|---|"]
        for number, words in section.items():
            names = tests.get(number, [])
            state = "shown" if names else "open"
            words = words.replace("|", "\\|")
            rows.append(f"| {number} | {words} | {state} | {' · '.join(f'`{name}`' for name in names)} |")
        parts.append("\n".join(rows) + "\n")
    return "".join(parts)


def not_shown(tests: dict[str, list[str]], results: list[Path]) -> dict[str, str]:
    """The promises that no test of this run showed, and why."""
    outcomes: dict[str, set[str]] = {}
    last: dict[str, str] = {}
    for line in "".join(path.read_text() for path in results).splitlines():
        result = json.loads(line)
        if "test" in result:  # one that failed and was run again counts by its last outcome
            last[result["test"]] = result["outcome"]
    for test, outcome in last.items():
        outcomes.setdefault(test.partition("[")[0].removeprefix("tests/"), set()).add(outcome)
    missing = {}
    for number, names in tests.items():
        found = {name: outcomes.get(name, {"not run"}) for name in names}
        if any("failed" in each for each in found.values()) or not any(
            "passed" in each for each in found.values()
        ):
            states = (f"{name} ({', '.join(sorted(each))})" for name, each in found.items())
            missing[number] = "; ".join(states)
    return missing


def found_tests() -> dict[str, list[str]]:
    """The tests of each number, by file and name."""
    tests: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        module = ast.parse(path.read_text())
        everywhere = [number for node in module.body if is_pytestmark(node) for number in numbers(node)]
        for node in module.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                own = [number for decorator in node.decorator_list for number in numbers(decorator)]
                name = f"{path.relative_to(ROOT / 'tests')}::{node.name}"
                for number in dict.fromkeys(everywhere + own):
                    tests.setdefault(number, []).append(name)
    return tests


def is_pytestmark(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and any(
        isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets
    )


def numbers(node: ast.AST) -> Iterator[str]:
    """What the marks below this node name."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.requirement":
            for argument in call.args:
                yield ast.literal_eval(argument)


if __name__ == "__main__":
    raise SystemExit(main())
