"""The pages for people: their links lead somewhere, their commands exist, and what was promised to be in them is."""

from __future__ import annotations

import re
import shlex
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


@pytest.mark.requirement("R114")
def test_the_page_on_security_has_what_was_promised() -> None:
    titles = re.findall(r"^## (.*)$", (ROOT / "SECURITY.md").read_text(), re.MULTILINE)
    assert {"Layers", "Threat model", "Practices", "Incident response"} <= set(titles)
