"""The same tests once more, in a pytest of their own: as another user, or on a machine that lacks something.

Each test of it is an item of this run, with its own verdict. The other pytest runs the tests of one file, when the
first of them is asked for: files are given to several processes, each of which would run all.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests import support

ROOT = Path(__file__).parents[2]
SECONDS = 600
FOLDER, SUFFIXES = "tests/conformance/", ("rootless", "without-bash")
"""Which tests do, and what their names end with."""
INSIDE = "SKERRY_TESTS_ELSEWHERE"
"""Set in the environment of the other pytest, which shall not go elsewhere again."""
BASHES = ("/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash")
"""Where the guest looks for one."""


class Elsewhere:
    """One other pytest; `command` makes its command line from a folder of its own and pytest's arguments."""

    def __init__(
        self, suffix: str, command: Callable[[Path, Sequence[str]], tuple[list[str], dict[str, str]]]
    ) -> None:
        self.suffix = suffix
        self.chosen: list[str] = []
        """Ids of the tests that are wanted."""
        self._results: dict[str, tuple[dict[tuple[str, str], ElementTree.Element], str]] = {}
        """Of each file that ran."""
        self._command = command

    def judge(self, nodeid: str) -> None:
        """Skip or fail as that test did."""
        path, _, name = nodeid.partition("::")
        if path not in self._results:
            self._results[path] = self._run([test for test in self.chosen if test.startswith(f"{path}::")])
        results, words = self._results[path]
        case = results.get((path.removesuffix(".py").replace("/", "."), name))
        if case is None:
            pytest.fail(f"it did not run:\n{words}", pytrace=False)
        for outcome in case:
            said = f"{outcome.get('message')}\n{outcome.text or ''}"
            if outcome.tag == "skipped":
                pytest.skip(outcome.get("message", ""))
            elif outcome.tag in ("failure", "error"):
                pytest.fail(said, pytrace=False)

    def _run(self, tests: Sequence[str]) -> tuple[dict[tuple[str, str], ElementTree.Element], str]:
        with tempfile.TemporaryDirectory(prefix="skerry-test-", dir="/tmp") as name:
            folder = Path(name)
            folder.chmod(0o755)
            repository = folder / "repository"
            shutil.copytree(
                ROOT / "tests", repository / "tests", ignore=shutil.ignore_patterns("__pycache__")
            )
            shutil.copy(ROOT / "pyproject.toml", repository)
            (folder / "out").mkdir()
            (folder / "out").chmod(0o777)
            report = folder / "out" / "report.xml"
            arguments = ["-m", "pytest", "-p", "no:cacheprovider", "-q", f"--junitxml={report}", *tests]
            command, environ = self._command(folder, arguments)
            environ[INSIDE] = self.suffix
            with open(folder / "out" / "words", "w+", errors="replace") as words_file:
                status = subprocess.run(
                    command, cwd=repository, env=environ, stdin=subprocess.DEVNULL, timeout=SECONDS,
                    stdout=words_file, stderr=subprocess.STDOUT,
                ).returncode  # fmt: skip
                words_file.seek(0)
                words = f"{words_file.read()}\n(exit status {status})"
            if not report.exists():
                return {}, words
            cases = ElementTree.parse(report).getroot().iter("testcase")
            return {(case.get("classname", ""), case.get("name", "")): case for case in cases}, words


class Item(pytest.Item):
    """A test that runs elsewhere."""

    def __init__(self, *, place: Elsewhere, original: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.place = place
        self.original = original

    def runtest(self) -> None:
        self.place.judge(self.original)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name

    @classmethod
    def of(cls, item: pytest.Function, place: Elsewhere) -> Item:
        name = f"{item.name.removesuffix(']')}-{place.suffix}]"
        assert item.parent is not None
        made: Item = cls.from_parent(item.parent, name=name, place=place, original=item.nodeid)
        made.add_marker(pytest.mark.timeout(SECONDS + 10))
        return made


def selectable(nodeid: str) -> str:
    """The name by which pytest takes a test, or the one that it is made of: what runs elsewhere has none of its own."""
    for suffix in SUFFIXES:
        if nodeid.startswith(FOLDER) and nodeid.endswith(f"-{suffix}]"):
            return nodeid.removesuffix(f"-{suffix}]") + "]"
    return nodeid


def as_nobody(folder: Path, arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    support.require("setpriv", "util-linux")
    python, packages = support.python_for_nobody(folder)
    home = folder / "home"
    home.mkdir()
    os.chown(home, support.NOBODY, support.NOBODY)
    nobody = support.Nobody(home, python, packages)
    return nobody.argv([python, *arguments]), nobody.env | {k: v for k, v in os.environ.items() if k == "CI"}


def without_bash(folder: Path, arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """On a machine where every bash is a file that nobody can execute."""
    support.require("unshare", "util-linux")
    empty = folder / "empty"
    empty.touch(0o644)
    found = {os.path.realpath(path) for path in BASHES if os.path.exists(path)}
    script = "".join(f"mount --bind {empty} {path} && " for path in sorted(found)) + 'exec "$@"'
    return ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, *arguments], dict(os.environ)
