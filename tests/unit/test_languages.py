"""Languages as data: those that come along, and what an operator says of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from skerry.errors import LanguageNotFound, PlatformError
from skerry.languages import FILE, Cache, Languages, version_in


@pytest.mark.requirement("F2")
@pytest.mark.parametrize(
    ("name", "file", "begins"),
    [
        pytest.param("python", "main.py", ("python3", "main.py"), marks=pytest.mark.requirement("R60")),
        pytest.param("nodejs", "main.js", ("node", "main.js"), marks=pytest.mark.requirement("R61")),
        pytest.param("go", "main.go", ("go", "run", "main.go"), marks=pytest.mark.requirement("R62")),
        pytest.param("bash", "main.sh", ("bash", "main.sh"), marks=pytest.mark.requirement("R63")),
        ("ruby", "main.rb", ("ruby", "main.rb")),
        ("php", "main.php", ("php", "main.php")),
        ("rust", "main.rs", ("sh", "-c")),
        ("typescript", "main.ts", ("node",)),
    ],
)
def test_what_comes_along(tmp_path: Path, name: str, file: str, begins: tuple[str, ...]) -> None:
    language = Languages(str(tmp_path)).get(name)
    assert (language.name, language.file, language.image) == (name, file, "host")
    assert language.command[: len(begins)] == begins
    assert language.install


def test_an_alias_is_the_same_language(tmp_path: Path) -> None:
    languages = Languages(str(tmp_path))
    assert languages.get("js") is languages.get("nodejs")
    assert languages.get("golang").name == "go"


def test_a_language_that_nobody_knows(tmp_path: Path) -> None:
    with pytest.raises(LanguageNotFound, match="'cobol'") as caught:
        Languages(str(tmp_path)).get("cobol")
    assert "python, nodejs, go, bash" in caught.value.hint


def test_an_operator_changes_and_adds_languages_at_any_time(tmp_path: Path) -> None:
    languages = Languages(str(tmp_path))
    before = languages.get("python")
    (tmp_path / FILE).write_text(
        '[python]\nimage = "dev"\n'
        '[lua]\nfile = "main.lua"\ncommand = ["lua", "main.lua"]\nversion = ["lua", "-v"]\naliases = ["moon"]\n'
        '[lua.cache]\nvariable = "LUA_CACHE"\ncommand = ["true"]\n'
    )
    python, lua = languages.get("python"), languages.get("moon")
    assert (python.image, python.command, python.env) == ("dev", before.command, before.env)
    assert (lua.name, lua.image, lua.cache) == ("lua", "host", Cache("LUA_CACHE", ("true",)))
    assert [language.name for language in languages.list()][-1] == "lua"
    os.unlink(tmp_path / FILE)
    assert languages.get("python") == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[python", "is not valid TOML"),
        ("python = 1", "python must be a table, not 1"),
        ('[python]\nfil = "x"', "[python] unknown key 'fil'"),
        ('[python]\nfile = "a/b"', "[python] file must match"),
        ('[python]\nfile = ".."', "file must match"),
        ('[python]\ncommand = "python"', "[python] command must be a list of strings"),
        ("[python]\ncommand = []", "[python] command is missing"),
        ('[python]\ncommand = ["a\\u0000b"]', "command contains a NUL byte"),
        ("[python]\nimage = 1", "image must be a string, not 1"),
        ("[python]\nenv = { A = 1 }", "[python.env] A must be a string"),
        ('[python]\nenv = { "A=B" = "1" }', "'A=B' cannot be the name of an environment variable"),
        ('[python]\naliases = ["go"]', "go and python are both called 'go'"),
        ('[python]\naliases = ["A B"]', "aliases: 'A B' does not match"),
        ('["Bad Name"]\nfile = "x"', "'Bad Name' cannot be the name of a language"),
        ('[new]\nfile = "x"', "[new] command is missing"),
        ('[go]\ncache = { variable = "X" }', "[go.cache] command is missing"),
        ('[go]\ncache = { variable = "X", command = [] }', "[go.cache] command is missing"),
        ('[go]\ncache = { variable = "X", command = ["x"], clock = "../x" }', "[go.cache] clock must match"),
        ('[go]\ncache = { variable = "X", command = ["x"], more = 1 }', "[go.cache] unknown key 'more'"),
    ],
)
def test_mistakes_of_an_operator_are_explained(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / FILE).write_text(text)
    languages = Languages(str(tmp_path))
    for ask in (languages.list, lambda: languages.get("python")):
        with pytest.raises(PlatformError) as caught:
            ask()
        assert words in caught.value.message
        assert str(tmp_path / FILE) in caught.value.message


def test_how_many_cores_a_program_may_use_is_for_it_to_know(tmp_path: Path) -> None:
    go = Languages(str(tmp_path)).get("go")
    found = [go.variables(cpus)["GOMAXPROCS"] for cpus in (0.1, 1.0, 1.9, 4.0)]
    assert found == ["1", "1", "1", "4"]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("Python 3.11.2\n", "3.11.2"),
        ("v20.20.2\n", "20.20.2"),
        ("go version go1.19.8 linux/amd64\n", "1.19.8"),
        ("GNU bash, version 5.2.15(1)-release (x86_64-pc-linux-gnu)\nCopyright 2022.1\n", "5.2.15"),
        ("ruby 3.1.2p20 (2022-04-12 revision 4491bb740a) [x86_64-linux-gnu]\n", "3.1.2"),
        ("something\nelse 1.2", "something"),
        ("", ""),
        ("x" * 100, "x" * 64),
    ],
)
def test_the_version_in_what_a_program_says(text: str, version: str) -> None:
    assert version_in(text) == version
