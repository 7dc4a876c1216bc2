"""`skerry code run` and `skerry languages`, as people call them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import Cli

PROGRAM = """\
import sys
print(open("data/x").read(), sys.stdin.read())
print("oops", file=sys.stderr)
sys.exit(7)
"""


def test_output_and_exit_code_are_passed_on(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "it.py").write_text(PROGRAM)
    (tmp_path / "x").write_bytes(b"\xc3\xa4")
    words = ("--file", f"data/x={tmp_path}/x", "-i", str(tmp_path / "it.py"))
    code, out, err = cli("code", "run", "-l", "python", *words, input=b"in")
    assert (code, out, err) == (7, b"\xc3\xa4 in\n", b"oops\n")


def test_the_program_from_stdin(cli: Cli) -> None:
    assert (
        cli.ok("code", "run", "--language=bash", "-", input=b"echo $((6 * 7)); read -t 0; echo $?") == "42\n0"
    )


def test_the_result_as_json(cli: Cli) -> None:
    result = json.loads(cli.ok("code", "run", "--json", "-l", "bash", "-", input=b"echo hi"))
    assert (result["stdout"], result["outcome"], result["language"]) == ("hi\n", "completed", "bash")
    assert result["version"]


def test_a_timeout_is_told(cli: Cli) -> None:
    program = b"echo so far; while :; do :; done"
    code, out, err = cli("code", "run", "-l", "bash", "--timeout", "3", "-", input=program)
    assert (code, out, err) == (124, b"so far\n", b"skerry: killed after 3 s\n")


def test_output_that_was_cut_is_told(cli: Cli) -> None:
    code, out, err = cli("code", "run", "-l", "bash", "-", input=b"head -c 2000000 /dev/zero")
    assert (code, len(out)) == (0, 1 << 20)
    assert err == b"skerry: output truncated to 1 MiB per stream\n"


def test_the_languages(cli: Cli) -> None:
    text = cli.ok("languages")
    assert text.splitlines()[0].split() == ["NAME", "VERSION", "IMAGE", "ALSO"]
    found = {each["name"]: each for each in json.loads(cli.ok("languages", "--json"))["languages"]}
    assert found["bash"]["available"]
    assert f"bash        {found['bash']['version']}" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("-",), "no language given"),
        (("-l", "cobol", "-"), "there is no language 'cobol'"),
        (("-l", "bash", "-i", "-"), "stdin cannot be both"),
        (("-l", "bash", "/no/such/file"), "/no/such/file: No such file"),
        (("-l", "bash", "--file", "../x=/dev/null", "-"), "outside of the program's directory"),
        (("-l", "bash", "--timeout", "301", "-"), "at most 300 seconds"),
        (("-l", "bash", "--mem-limit", "x", "-"), "--mem-limit takes MB"),
        (("-l", "python", "--package=-rx", "-"), "'-rx' is not a package that pip can be asked for"),
        (("-l", "bash"), "FILE is missing"),
    ],
)
def test_mistakes_are_explained(cli: Cli, words: tuple[str, ...], says: str) -> None:
    code, out, err = cli("code", "run", *words, input=b"")
    assert (code, out) == (2, b"")
    assert says in err.decode()
