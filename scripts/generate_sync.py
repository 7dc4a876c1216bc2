"""Derive the synchronous client, and the tools on top of it, from the asynchronous ones.

    python scripts/generate_sync.py            write src/skerry/client/sync/ and src/skerry/tools/sync/
    python scripts/generate_sync.py --check    fail when what is there is not what would be written

Works on tokens: `async` and `await` go, names are mapped by the table below, and comments and strings follow.
The two `stream.py` are written by hand: they are the difference between the two worlds.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

SKERRY = Path(__file__).resolve().parent.parent / "src" / "skerry"
MODULES = {
    "client": ("websocket", "transport", "client", "environment", "files", "network", "process", "session"),
    "tools": ("environment", "dispatch", "sandbox", "execute_code", "python"),
}
HEADER = "# Generated from aio/{name} by scripts/generate_sync.py. Change that file, not this one.\n"
NAMES = {
    "aio": "sync",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "StopAsyncIteration": "StopIteration",
}
WORDS = {"task": "thread", "tasks": "threads", "asynchronous": "synchronous"}


def rename(name: str) -> str:
    return NAMES.get(name) or re.sub(r"^(_?)Async(?=[A-Z])", r"\1", name)


def rename_text(text: str) -> str:
    text = re.sub(r"\b(?:async|await) ", "", text)
    return re.sub(r"\w+", lambda word: WORDS.get(word[0], rename(word[0])), text)


def convert(source: str) -> str:
    """The synchronous form of an asynchronous module."""
    lines = source.splitlines(keepends=True)
    edits: list[tuple[tuple[int, int], tuple[int, int], str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind, text, start, end, line = token
        if kind == tokenize.NAME and text in ("async", "await"):
            after = end[1] + 1 if line[end[1] : end[1] + 1] == " " else end[1]
            edits.append((start, (end[0], after), ""))
        elif kind == tokenize.NAME and rename(text) != text:
            edits.append((start, end, rename(text)))
        elif kind in (tokenize.STRING, tokenize.COMMENT) and rename_text(text) != text:
            edits.append((start, end, rename_text(text)))
    for (row, column), (end_row, end_column), text in reversed(edits):
        first, last = lines[row - 1], lines[end_row - 1]
        lines[row - 1 : end_row] = [first[:column] + text + last[end_column:]]
    return "".join(lines)


def tidy(source: str, target: Path) -> str:
    """Formatted, and with sorted imports: dropped words leave room on the lines."""
    sort = ["check", "--select=I", "--fix", "--quiet", "--config=lint.isort.known-first-party=['skerry']"]
    for command in (sort, ["format"]):
        source = subprocess.run(
            [sys.executable, "-m", "ruff", *command, f"--stdin-filename={target}", "-"],
            input=source,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    return source


def main() -> int:
    check = "--check" in sys.argv[1:]
    stale = []
    for folder, modules in MODULES.items():
        for module in modules:
            name = f"{module}.py"
            source, target = (SKERRY / folder / world / name for world in ("aio", "sync"))
            wanted = tidy(HEADER.format(name=name) + convert(source.read_text()), target)
            if target.exists() and target.read_text() == wanted:
                continue
            stale.append(f"{folder}/{name}")
            if not check:
                target.write_text(wanted)
    if check and stale:
        print(f"stale: {', '.join(stale)}; run python scripts/generate_sync.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
