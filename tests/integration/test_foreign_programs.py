"""Programs that others wrote do inside what they do outside: the same output, the same exit code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import skerry
from skerry.languages import Language, Languages
from tests import support
from tests.integration.daemon import Daemon, started
from tests.integration.foreign import SUITES, Foreign, Suite

AT_ONCE = 2
SECONDS = 60.0
FEW = [replace(suite, count=5) for suite in SUITES]
WARM = ("python", "nodejs", "ruby", "php")
"""Those whose interpreters wait in pools."""
_CHANGES = re.compile(r"0x[0-9a-f]+|\d+\.\d+(e-?\d+)?|(?<=\(node:)\d+")
"""Addresses, times and process ids."""
Ended = tuple[int | None, str, str]


@pytest.fixture(scope="module")
def cold() -> Iterator[Daemon]:
    with support.temporary_home() as home:
        (home / "pools.toml").write_text("".join(f"[{language}]\nmaximum = 0\n" for language in WARM))
        with started(home) as daemon:
            yield daemon


@pytest.fixture(scope="module")
def warm() -> Iterator[Daemon]:
    with support.temporary_home() as home, started(home) as daemon:
        yield daemon


@contextlib.contextmanager
def laid_out(program: Foreign, language: Language) -> Iterator[tuple[Path, Path]]:
    """A folder with nothing but the program, and one that the user nobody can write to."""
    with tempfile.TemporaryDirectory(prefix="skerry-outside-") as root:
        os.chmod(root, 0o755)
        workspace, tmp = Path(root, "workspace"), Path(root, "tmp")
        tmp.mkdir()
        shutil.chown(tmp, support.NOBODY)
        for name, text in {**program.files, language.file: program.code}.items():
            (workspace / name).parent.mkdir(parents=True, exist_ok=True)
            (workspace / name).write_text(text)
        yield workspace, tmp


async def outside(program: Foreign, language: Language, path: str) -> Ended:
    """What it does as nobody, on the machine itself."""
    with laid_out(program, language) as (workspace, tmp):
        process = await asyncio.create_subprocess_exec(
            *("setpriv", f"--reuid={support.NOBODY}", f"--regid={support.NOBODY}", "--clear-groups"),
            *language.command,
            cwd=workspace,
            env={
                "PATH": path,
                "HOME": f"{tmp}",
                "TMPDIR": f"{tmp}",
                "LANG": "C.UTF-8",
                **language.variables(1),
            },
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(SECONDS):
                output = await process.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = (
            text.decode(errors="replace").replace(f"{workspace}", "/workspace").replace(f"{tmp}", "/tmp")
            for text in output
        )
        return process.returncode, _CHANGES.sub("", stdout), _CHANGES.sub("", stderr)


async def inside(client: skerry.AsyncClient, program: Foreign) -> Ended:
    found = await client.execute_code(program.language, program.code, files=program.files)
    return found.exit_code, _CHANGES.sub("", found.stdout), _CHANGES.sub("", found.stderr)


async def differences(suite: Suite, daemons: list[Daemon]) -> list[str]:
    """What did not end as it did outside."""
    todo = iter(suite.programs())
    language = Languages("").get(suite.language)
    found = []

    async def work(clients: list[skerry.AsyncClient], path: str) -> None:
        for program in todo:
            for _ in range(2):  # some of them race on purpose: twice is no chance
                wanted = await outside(program, language, path)
                ended = [await inside(client, program) for client in clients]
                if all(each == wanted for each in ended):
                    break
            else:
                found.append(f"{program.name}: {wanted} outside, {ended} inside")

    async with skerry.AsyncClient(str(daemons[0].home)) as first:
        clients = [first]
        path = (await first.execute_code("bash", "printf %s $PATH")).stdout
        async with skerry.AsyncClient(str(daemons[-1].home)) as last:
            if len(daemons) > 1:
                clients.append(last)
            await asyncio.gather(*(work(clients, path) for _ in range(AT_ONCE)))
    return found


@pytest.mark.timeout(300)
@pytest.mark.requirement("R60", "R61", "R62", "R63", "R71", "F2")
@pytest.mark.parametrize(
    "suite",
    [*FEW, *(pytest.param(suite, marks=pytest.mark.soak) for suite in SUITES)],
    ids=lambda suite: f"{suite.count} in {suite.language}",
)
def test_programs_of_others_do_inside_what_they_do_outside(suite: Suite, cold: Daemon, warm: Daemon) -> None:
    """Cold, and from a pool."""
    if len(suite.programs()) < suite.count:
        support.missing(
            f"the tests of {suite.language} are not here (scripts/setup_test_deps.sh fetches them)"
        )
    support.require(f"/usr/bin/{Languages('').get(suite.language).command[0]}")
    if suite.language not in WARM:
        assert asyncio.run(differences(suite, [cold])) == []
        return
    warm.call("POST", f"/pools/{suite.language}/warmup", {"count": 4})
    assert asyncio.run(differences(suite, [cold, warm])) == []
    [stats] = [each for each in warm.call("GET", "/pools")["pools"] if each["pool"] == suite.language]
    assert stats["hits"] >= 4
    warm.call("POST", f"/pools/{suite.language}/shrink", {"count": 0})


def test_there_are_300_and_more() -> None:
    assert sum(suite.count for suite in SUITES) >= 300
