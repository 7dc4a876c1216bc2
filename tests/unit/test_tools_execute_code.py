"""The tool `execute_code` without a daemon: its contract, what it refuses, and its texts."""

from __future__ import annotations

import copy
import json
from typing import Any, cast

import pytest

from skerry.client.sync.client import Client
from skerry.errors import DaemonUnavailable, InvalidRequest, LanguageNotFound, SkerryError
from skerry.models import CodeResult, Outcome, Usage
from skerry.tools.results import ToolResult
from skerry.tools.sync.execute_code import ExecuteCode


class StubClient:
    """Answers every program with the same result, or fails."""

    def __init__(self, result: CodeResult | SkerryError) -> None:
        self.result = result
        self.asked: list[dict[str, Any]] = []
        self.closed = 0

    def execute_code(self, language: str, code: str, **options: Any) -> CodeResult:
        self.asked.append({"language": language, "code": code, **options})
        if isinstance(self.result, SkerryError):
            raise self.result
        return self.result

    def close(self) -> None:
        self.closed += 1


def result(stdout: str = "", stderr: str = "", code: int = 0, **more: Any) -> CodeResult:
    values: dict[str, Any] = {
        "execution_id": "x",
        "outcome": Outcome.FAILED if code else Outcome.COMPLETED,
        "exit_code": code,
        "stdout_bytes": stdout.encode(),
        "stderr_bytes": stderr.encode(),
        "stdout_size": len(stdout.encode()),
        "stderr_size": len(stderr.encode()),
        "duration_seconds": 0.1,
        "usage": Usage(),
        **more,
    }
    return CodeResult(**values)


def tool(answer: CodeResult | SkerryError | None = None, **options: Any) -> tuple[ExecuteCode, StubClient]:
    stub = StubClient(answer or result())
    return ExecuteCode(client=cast(Client, stub), **options), stub


HELLO = {"language": "python", "code": "print('hello')"}


@pytest.mark.requirement("R58")
def test_name_description_schema_execute() -> None:
    made, _ = tool(result("hello\n"))
    assert made.name == "execute_code"
    assert "Python, Node.js, Go, or Bash" in made.description
    assert made.execute(HELLO) == ToolResult("STDOUT:\nhello\nExit code: 0")


@pytest.mark.requirement("R59")
def test_the_schema_is_that_of_the_document() -> None:
    found = copy.deepcopy(tool()[0].schema)
    assert found.pop("additionalProperties") is False
    assert found["properties"]["files"].pop("additionalProperties") == {"type": "string"}
    assert found == {
        "type": "object",
        "properties": {
            "language": {
                "type": "string",
                "enum": ["python", "nodejs", "go", "bash"],
                "description": "Programming language to execute",
            },
            "code": {"type": "string", "description": "The code to execute"},
            "stdin": {"type": "string", "description": "Optional standard input"},
            "files": {"type": "object", "description": "Optional additional files (filename -> content)"},
            "timeout": {"type": "integer", "description": "Timeout in seconds (default: 30, max: 300)"},
            "cpu_limit": {"type": "integer", "description": "CPU limit in millicores (default: 1000)"},
            "mem_limit": {"type": "integer", "description": "Memory limit in MB (default: 512)"},
        },
        "required": ["language", "code"],
    }


@pytest.mark.requirement("R71")
@pytest.mark.parametrize(
    ("answer", "text", "is_error"),
    [
        (result("out", "err\n", 3), "STDOUT:\nout\nSTDERR:\nerr\nExit code: 3", True),
        (result(), "Exit code: 0", False),
        (result("a\n\n"), "STDOUT:\na\n\nExit code: 0", False),
        (
            result("so far", code=124, outcome=Outcome.TIMED_OUT, message="killed after 1 s"),
            "Execution timed out\nSTDOUT:\nso far\nExit code: 124",
            True,
        ),
        (
            result(code=137, outcome=Outcome.OOM_KILLED, message="killed: its memory is used up"),
            "Killed: its memory is used up\nExit code: 137",
            True,
        ),
        (result(code=139, outcome=Outcome.SIGNALED), "Exit code: 139", True),
        (
            result(code=125, outcome=Outcome.INTERNAL, message="the environment went away"),
            "Execution failed: the environment went away",
            True,
        ),
    ],
)
def test_results_as_text(answer: CodeResult, text: str, is_error: bool) -> None:
    assert tool(answer)[0].execute(HELLO) == ToolResult(text, is_error)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("{", "Invalid parameters: the arguments are not JSON: "),
        ("[" * 100_000, "Invalid parameters: the arguments are not JSON: too deep"),
        ("[]", "Invalid parameters: the arguments must be an object, not []"),
        ("null", "Invalid parameters: language is missing"),
        (b"\xff", "Invalid parameters: the arguments are not JSON: "),
        ({}, "Invalid parameters: language is missing"),
        ({"language": "python"}, "Invalid parameters: code is missing"),
        ({**HELLO, "code": 1}, "Invalid parameters: code must be text, not 1"),
        ({**HELLO, "timeout": "10"}, "Invalid parameters: timeout must be a whole number, not '10'"),
        ({**HELLO, "timeout": True}, "Invalid parameters: timeout must be a whole number, not True"),
        ({**HELLO, "files": []}, "Invalid parameters: files must be an object, not []"),
        ({**HELLO, "files": {"a": 1}}, "Invalid parameters: files['a'] must be text, not 1"),
        ({**HELLO, "shell": "x"}, "Invalid parameters: there is no argument 'shell'; there are language, "),
        (
            {"language": "cobol", "code": ""},
            "Unsupported language: cobol. Supported: python, nodejs, go, bash",
        ),
        ({"language": "ruby", "code": ""}, "Unsupported language: ruby. Supported: python, nodejs, go, bash"),
    ],
)
def test_bad_calls_are_results(given: Any, text: str) -> None:
    made, stub = tool()
    answer = made.execute(given)
    assert answer.is_error
    assert answer.content.startswith(text)
    assert stub.asked == []


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (InvalidRequest("mem_limit must be more"), "Invalid parameters: mem_limit must be more"),
        (DaemonUnavailable("nobody there", hint="start it"), "Execution failed: nobody there (start it)"),
        (LanguageNotFound("it has no go"), "Execution failed: it has no go"),
    ],
)
def test_failures_are_results(error: SkerryError, text: str) -> None:
    assert tool(error)[0].execute(HELLO) == ToolResult(text, is_error=True)


@pytest.mark.requirement("R64")
def test_options_and_their_defaults() -> None:
    made, stub = tool()
    made.execute(HELLO)
    made.execute(json.dumps({**HELLO, "timeout": 0, "stdin": None}))
    plain = {**HELLO, "timeout": 30, "network": "none", "isolation": None}
    assert stub.asked == [plain, plain]
    made, stub = tool(backend="gvisor", default_timeout=60, network_enabled=True)
    made.execute(HELLO)
    made.execute(
        {**HELLO, "timeout": 900, "cpu_limit": 500, "mem_limit": 256, "stdin": "x", "files": {"a": "b"}}
    )
    first = {**HELLO, "timeout": 60, "network": "public", "isolation": "gvisor"}
    others = {"timeout": 300, "cpu_limit": 500, "mem_limit": 256, "stdin": "x", "files": {"a": "b"}}
    assert stub.asked == [first, {**first, **others}]


@pytest.mark.requirement("R73")
def test_closing_is_fine_any_number_of_times() -> None:
    made, stub = tool()
    with made:
        pass
    made.close()
    assert stub.closed == 0, "the client is the caller's"
    answer = made.execute(HELLO)
    assert (answer.content, answer.is_error) == ("Execution failed: the tool is closed", True)
    assert stub.asked == []
    with ExecuteCode() as own:
        own.close()


def test_a_client_knows_where_it_goes() -> None:
    with pytest.raises(InvalidRequest):
        ExecuteCode(client=cast(Client, StubClient(result())), url="http://127.0.0.1:1")


def test_long_output_keeps_its_beginning_and_its_end() -> None:
    long = "a" * 600 + "b" * 600
    made, _ = tool(result(long, long), limit=100)
    cut = "a" * 50 + "\n[... 1100 of 1200 characters cut ...]\n" + "b" * 50
    assert made.execute(HELLO).content == f"STDOUT:\n{cut}\nSTDERR:\n{cut}\nExit code: 0"


def test_what_the_daemon_has_cut_is_told_as_well() -> None:
    made, _ = tool(result("abc", stdout_size=1003))
    assert made.execute(HELLO).content == "STDOUT:\nabc\n[... 1000 more bytes were cut ...]\nExit code: 0"
