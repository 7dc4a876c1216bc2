"""Write docs/cli.md from what the parsers of the CLI know.

python scripts/generate_cli_docs.py            write it
python scripts/generate_cli_docs.py --check    fail when it is not what would be written
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from skerry import cli  # noqa: E402
from skerry.cli.parser import Argument, Parser  # noqa: E402

TARGET = ROOT / "docs" / "cli.md"


def option(argument: Argument) -> str:
    """One option as a line of a list."""
    value = f" {argument.takes}" if argument.takes else ""
    return "- " + ", ".join(f"`{name}{value}`" for name in argument.names) + f": {argument.help}"


def section(name: str) -> str:
    verb = cli.load(name)
    parser = Parser(name, verb)
    parts = [f"## {name}", verb.text, f"```\n{verb.usage}\n```"]
    lines = [f"- `{argument.takes}`: {argument.help}" for argument in parser.positional]
    lines += [option(argument) for argument in parser.options]
    if lines:
        parts.append("\n".join(lines))
    parts.append(f"Example: `{verb.example}`")
    return "\n\n".join(parts)


def document() -> str:
    _, codes, _ = inspect.cleandoc(cli.__doc__ or "").split("\n\n", 2)
    verbs = [name for name, (_, words) in cli.VERBS.items() if words]
    head = [
        "# The command line",
        "<!-- Written by scripts/generate_cli_docs.py. -->",
        f"`{cli.USAGE}`",
        codes,
    ]
    return "\n\n".join([*head, *(section(name) for name in verbs)]) + "\n"


def main() -> int:
    wanted = document()
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(wanted)
        return 0
    if TARGET.exists() and TARGET.read_text() == wanted:
        return 0
    print("docs/cli.md is stale; run python scripts/generate_cli_docs.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
