"""Programs that others wrote: 300 of the Go project's own tests do inside what they do outside.

Each comes with what it must print, which for most is nothing: it ends badly when something is not as it should be.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import skerry
from tests import support
from tests.integration.daemon import started

COUNT = 300
AT_ONCE = 2
_ELSEWHERE = re.compile(r'^//\s?(go:build|\+build)|"os/exec"', re.MULTILINE)
"""Of programs for some systems alone, and of those that need the compiler's own tree."""


def programs() -> list[tuple[str, Path]]:
    """The smallest ones that are a single file."""
    found = []
    for path in sorted(Path("/usr/share").glob("go-*/test/**/*.go")):
        code = path.read_text(encoding="utf-8", errors="surrogateescape")
        if code.startswith("// run\n") and ".dir/" not in str(path) and not _ELSEWHERE.search(code):
            found.append((code, path))
    return sorted(found, key=lambda program: len(program[0]))[:COUNT]


async def differs(client: skerry.AsyncClient, code: str, path: Path) -> str:
    """How it ended, if that is not as it should."""
    golden = path.with_suffix(".out")
    wanted = golden.read_text() if golden.exists() else ""
    result = await client.execute_code("go", code, timeout=120)
    written = (result.stdout + result.stderr).splitlines()
    # The expected output has both streams in one: which line of which came first is lost here.
    if result.ok and sorted(written) == sorted(wanted.splitlines()):
        return ""
    return f"{path}: {result.outcome} {result.exit_code} {written[:5]}"


async def all_differences(home: Path) -> list[str]:
    todo: Iterator[tuple[str, Path]] = iter(programs())
    found = []

    async def work(client: skerry.AsyncClient) -> None:
        for code, path in todo:
            # Some of them race on purpose, against time or the garbage collector: twice is no chance.
            if await differs(client, code, path) and (words := await differs(client, code, path)):
                found.append(words)

    async with skerry.AsyncClient(str(home)) as client:
        await asyncio.gather(*(work(client) for _ in range(AT_ONCE)))
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.requirement("R62", "R71")
def test_programs_of_others_do_inside_what_they_do_outside() -> None:
    if not Path("/usr/bin/go").exists() or len(programs()) < COUNT:
        support.missing("Go and its tests are not installed (apt-get install golang-go)")
    with support.temporary_home() as home, started(home):
        assert asyncio.run(all_differences(home)) == []
