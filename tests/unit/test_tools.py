"""Tools without a daemon: the table, the formats, the checks of arguments, the bounds."""

from __future__ import annotations

import json
import re
from typing import Any

import hypothesis
import jsonschema_rs
import pytest
from hypothesis import strategies as st

from skerry.cli import main
from skerry.errors import InvalidRequest
from skerry.tools import table
from skerry.tools.arguments import TEXT_MAX, check
from skerry.tools.results import FIELD_MAX, bounded, sent_length
from skerry.tools.schema import FORMATS, schemas

JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()))
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)
WORDS = ("command", "timeout_seconds", "path", "content", "language", "code", "files", "timeout")
ARGUMENTS = JUNK | st.dictionaries(st.sampled_from(WORDS), JUNK, max_size=3)


@pytest.mark.requirement("R43", "R46", "R47")
def test_the_meta_tools_are_those_of_the_document() -> None:
    fields = {tool.name: list(tool.parameters["properties"]) for tool in table.TOOLS}
    assert fields["environment.execute_command"] == ["command", "timeout_seconds"]
    assert fields["environment.write_file"] == ["path", "content"]
    assert fields["environment.read_file"] == ["path"]
    assert table.EXECUTE_COMMAND.parameters["properties"]["timeout_seconds"]["default"] == 60


@pytest.mark.parametrize("format", list(FORMATS))
def test_formats(format: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tools", "schema", "--format", format]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == schemas(format)
    for tool, shown in zip(table.TOOLS, printed, strict=True):
        inner = shown["function"] if format == "openai" else shown
        parameters = inner["input_schema" if format == "anthropic" else "parameters"]
        assert parameters == tool.parameters
        jsonschema_rs.validator_for(parameters)
        assert inner["name"] == (tool.name if format == "json" else tool.function_name)
        assert format == "json" or re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", inner["name"])
        assert table.find(inner["name"]) is tool


def test_a_format_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tools", "schema", "--format", "xml"]) == 2
    assert "one of openai, anthropic, json" in capsys.readouterr().err


@hypothesis.given(st.sampled_from(table.TOOLS), ARGUMENTS, st.booleans())
def test_arguments_that_pass_fit_the_schema(tool: table.Tool, arguments: Any, as_text: bool) -> None:
    if as_text:
        arguments = json.dumps(arguments, default=repr)
    words = ""
    try:
        passed = check(tool.parameters, arguments)
    except InvalidRequest as error:
        words = str(error)
    if words:
        assert len(words.encode()) < 1000
    else:
        assert jsonschema_rs.is_valid(tool.parameters, passed)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON: too deep"),
        ("1" * 10_000, "not JSON"),
        (" " * (6 * TEXT_MAX + 1), "longer than"),
        ("[]", "must be an object, not []"),
        ({}, "command is missing"),
        ({"command": None}, "command is missing"),
        ({"command": 5}, "command must be text, not 5"),
        ({"command": "x" * (TEXT_MAX + 1)}, "longer than"),
        ({"command": "a\ud800b"}, "half a character (a lone surrogate) at 1"),
        ({"command": "x", "cmd": 1}, "there is no argument 'cmd'; there are command, timeout_seconds"),
        ({"command": "x", "timeout_seconds": True}, "must be a number, not True"),
        ({"command": "x", "timeout_seconds": "60"}, "must be a number, not '60'"),
        ({"command": "x", "timeout_seconds": 0}, "must be more than 0 and at most 3600, not 0"),
        ({"command": "x", "timeout_seconds": float("nan")}, "not nan"),
        ({"command": "x", "timeout_seconds": float("inf")}, "not inf"),
        ({"command": "x", "timeout_seconds": 10**5000}, "not a huge int"),
    ],
)
def test_what_is_wrong_is_said(arguments: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(words)):
        check(table.EXECUTE_COMMAND.parameters, arguments)


def test_defaults_and_null() -> None:
    wanted = {"command": "x", "timeout_seconds": 60}
    assert check(table.EXECUTE_COMMAND.parameters, '{"command": "x", "timeout_seconds": null}') == wanted


@pytest.mark.parametrize("name", ["timeout", "cpu_limit", "mem_limit"])
def test_numbers_that_json_cannot_carry_are_refused(name: str) -> None:
    for number in (10**5000, -(10**5000), 1 << 60):
        with pytest.raises(InvalidRequest, match=f"{name} must be between"):
            check(table.EXECUTE_CODE.parameters, {"language": "python", "code": "", name: number})


@hypothesis.given(
    st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from('\0\x1b"\\\n'), max_size=300),
    st.integers(2, 100),
)
def test_texts_are_bounded_with_their_escapes(text: str, limit: int) -> None:
    shown = bounded(text, limit, "/tmp/whole")
    if sent_length(text) <= limit:
        assert shown == text
        return
    match = re.fullmatch(
        r"(.*)\n\[\.\.\. (\d+) of (\d+) characters cut; all of it is in /tmp/whole \.\.\.\]\n(.*)",
        shown,
        re.DOTALL,
    )
    assert match
    head, tail = match[1], match[4]
    assert text.startswith(head)
    assert text.endswith(tail)
    assert int(match[3]) == len(text) == len(head) + len(tail) + int(match[2])
    # No escape is cut in two, so up to five characters of each half are left free.
    assert limit - 12 < sent_length(head) + sent_length(tail) <= limit


def test_control_characters_do_not_multiply_a_result() -> None:
    for text in ("\0" * 50_000, "\x1b" * FIELD_MAX, '"' * FIELD_MAX, "\n" * 20_000):
        assert sent_length(bounded(text)) < FIELD_MAX + 200
