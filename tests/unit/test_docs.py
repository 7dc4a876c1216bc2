"""The pages for people: their links lead somewhere, their commands exist, and what was promised to be in them is."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from skerry import cli
from skerry.cli.parser import Parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
@pytest.mark.requirement("R115")
def test_commands_exist(page: Path) -> None:
    """As they stand in the text: `skerry net show ENV`, with `|` and `...` for what can be there."""
    for command in re.findall(r"`skerry ([a-z][^`\n]*)`", page.read_text()):
        words = shlex.split(command.split("|")[0], comments=True)
        if words[0] == "cli" or any(mark in command for mark in ("[", "…")):
            continue
        try:
            name, rest = cli._find(words)
        except SystemExit:
            continue  # a group of verbs
        parser = Parser(name, cli.load(name))
        known = {option for argument in parser.options for option in argument.names} | {"-h", "--help", "--"}
        for word in rest:
            if len(word) > 1 and word.startswith("-") and not parser.has_command:
                assert word.partition("=")[0] in known, command


def test_glossary_has_each_word_once_in_order() -> None:
    words_table, _, _ = (ROOT / "docs/glossary.md").read_text().partition("\n## ")
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", words_table, re.MULTILINE)
    words = [row.lower() for row in rows if row != "word"]
    assert words == sorted(set(words))
    assert len(words) > 50


def test_every_name_of_the_walkthrough_exists() -> None:
    page = (ROOT / "docs" / "walkthrough.md").read_text()
    named = re.findall(r"`([a-z0-9_/]+\.(?:py|c))(?:::([A-Za-z_.]+))?`", page)
    assert len(named) > 30
    assert [f"{file}::{name}" for file, name in named if not _defines(file, name)] == []


def _defines(file: str, name: str) -> bool:
    """Whether a source file defines a function, or a class and perhaps its method; True for no name if it exists."""
    path = ROOT / file if file.startswith("native/") else ROOT / "src" / "skerry" / file
    if not path.is_file() or not name:
        return path.is_file()
    if path.suffix == ".c":
        return bool(re.search(rf"^[a-z][^;{{]*\b{name}\([^;]*\n{{", path.read_text(), re.MULTILINE))
    body: list[ast.stmt] = ast.parse(path.read_text()).body
    for part in name.split("."):
        found = [
            node
            for node in body
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == part
        ]
        if not found:
            return False
        body = found[0].body
    return True


def test_glossary_gives_a_reason_for_each_class_name_used_twice() -> None:
    sources = ROOT / "src" / "skerry"
    names: Counter[str] = Counter()
    for file in sources.rglob("*.py"):
        if file.relative_to(sources).parts[0] != "v1":
            names.update(
                node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)
            )
    reasons = (ROOT / "docs" / "glossary.md").read_text().partition("## Class names used more than once")[2]
    listed = set(re.findall(r"`(\w+)`", reasons))
    assert [
        name for name, count in names.items() if count > 1 and name[0] != "_" and name not in listed
    ] == []


@pytest.mark.requirement("R89")
def test_the_two_kinds_of_tests_have_a_door_each() -> None:
    for target, ends in (("test-unit", "-m pytest tests/unit"), ("test", "-m tests")):
        told = subprocess.run(
            ["make", "--dry-run", "--no-print-directory", target],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert told.stdout.splitlines()[-1].endswith(ends)
