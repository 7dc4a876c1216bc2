"""What models call, in a real environment."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

import skerry
from skerry.tools import table
from skerry.tools.aio.dispatch import AsyncDispatcher
from skerry.tools.results import FIELD_MAX, ToolResult, sent_length
from skerry.tools.sync.dispatch import Dispatcher
from skerry.tools.sync.environment import READ_MAX, EnvironmentTools
from tests import support
from tests.integration.daemon import started
from tests.integration.test_mcp import PNG
from tests.unit.test_tools import ARGUMENTS, JUNK


@pytest.fixture(scope="module")
def client() -> Iterator[skerry.Client]:
    with support.temporary_home() as home, skerry.Client(str(home)) as client:
        yield client


@pytest.fixture
def env(client: skerry.Client) -> Iterator[skerry.Environment]:
    with skerry.Environment(memory="256m", disk="64m", client=client) as env:
        yield env


@pytest.fixture
def tools(env: skerry.Environment) -> EnvironmentTools:
    return EnvironmentTools(env)


@pytest.mark.requirement("R43", "R44")
def test_a_command_gives_exactly_four_fields(tools: EnvironmentTools) -> None:
    assert tools.execute_command("echo out; echo err >&2; exit 3") == {
        "error": True,
        "stdout": "out\n",
        "stderr": "err\n",
        "exit_code": 3,
    }
    assert tools.execute_command("echo '{\"error\": true}'", timeout_seconds=60) == {
        "error": False,
        "stdout": '{"error": true}\n',
        "stderr": "",
        "exit_code": 0,
    }


@pytest.mark.requirement("R45")
def test_directory_and_state_stay(tools: EnvironmentTools) -> None:
    tools.execute_command("mkdir -p a/b && cd a/b && export WORD=kept && f() { echo function; }")
    assert tools.execute_command("pwd; echo $WORD; f")["stdout"] == "/workspace/a/b\nkept\nfunction\n"


@pytest.mark.requirement("R46", "R47")
def test_files(tools: EnvironmentTools) -> None:
    saved = {"error": False, "message": "File saved successfully."}
    assert tools.write_file("src/main.py", "print('ä')\n") == saved
    assert tools.write_file("src/main.py", "print('ö')\n") == saved
    assert tools.execute_command("cd src && python3 main.py")["stdout"] == "ö\n"
    # Files are named from the workspace, wherever the shell is.
    assert tools.read_file("src/main.py") == {"error": False, "content": "print('ö')\n"}


def test_files_that_cannot_be(tools: EnvironmentTools, env: skerry.Environment) -> None:
    env.files.write("binary", b"\xff\xfe")
    env.files.write("nul", "a\0b")
    assert tools.read_file("nul") == {"error": False, "content": "a\0b"}
    for path, words in (
        ("missing", "missing"),
        ("../../etc/passwd", "outside"),
        ("binary", "not text in UTF-8"),
        (".", "directory"),
        ("a\0b", "NUL"),
        ("a" * 5000, "5000 bytes long"),
        ("a" * 1_000_000, "too long"),
    ):
        answer = tools.read_file(path)
        assert (list(answer), answer["error"]) == (["error", "content"], True)
        assert words in answer["content"], answer
    tools.execute_command(f"truncate -s {READ_MAX + 1} large")
    assert "larger than" in tools.read_file("large")["content"]
    answer = tools.write_file("/etc/passwd", "x")
    assert (list(answer), answer["error"]) == (["error", "message"], True)
    assert tools.execute_command("yes | head -c 80m > full")["exit_code"] != 0
    assert tools.write_file("more", "x" * 100_000)["error"]


def test_a_command_that_does_not_end_by_itself_says_so_beside_its_output(tools: EnvironmentTools) -> None:
    answer = tools.execute_command("echo begun; sleep 600", timeout_seconds=2.5)
    message = answer.pop("message")
    assert answer == {"error": True, "stdout": "begun\n", "stderr": "", "exit_code": 124}
    assert "2.5" in message


def test_long_output_keeps_head_and_tail_and_is_whole_in_a_file(
    client: skerry.Client, env: skerry.Environment
) -> None:
    dispatcher = Dispatcher(env, limit=1000)
    result = dispatcher.call("environment.execute_command", {"command": "seq 20000; seq 30000 >&2"})
    answer = json.loads(result.content)
    for stream, last in (("stdout", 20000), ("stderr", 30000)):
        whole = "".join(f"{number}\n" for number in range(1, last + 1))
        head, words, tail = re.split(r"\n\[\.\.\. (.*) \.\.\.\]\n", answer[stream])
        assert whole.startswith(head)
        assert whole.endswith(tail)
        assert sent_length(head) == sent_length(tail) == 500
        assert f"{len(whole) - len(head) - len(tail)} of {len(whole)} characters cut" in words
        path = answer[stream].split("all of it is in ")[1].split(" ")[0]
        assert env.files.read(path) == whole
        read = json.loads(dispatcher.call("environment_read_file", {"path": path}).content)
        assert read["content"] == answer[stream]


def test_output_beyond_what_the_daemon_keeps_is_named(env: skerry.Environment) -> None:
    answer = EnvironmentTools(env, 1000).execute_command("yes | head -c 3000000")
    assert answer["stdout"].endswith(
        "[... only the first 1048576 of 3000000 bytes were kept; let it write to a file ...]"
    )
    full = EnvironmentTools(env, 1000).execute_command(
        "cat /dev/zero > /tmp/full 2>&-; yes | head -c 30000; rm /tmp/full"
    )
    assert "10 characters cut" not in full["stdout"]
    assert " of 30000 characters cut" in full["stdout"]


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("environment.execute_command", {"command": "cat zeros; cat zeros >&2"}),
        ("environment.read_file", {"path": "zeros"}),
        ("python:execute", {"code": "print(open('/workspace/zeros').read() * 2)"}),
        ("python:execute", {"code": "print('\\0' * 50000); raise SystemExit('\\0' * 50000)"}),
        (
            "execute_code",
            {"language": "bash", "code": "head -c 50000 /dev/zero; head -c 50000 /dev/zero >&2"},
        ),
    ],
)
def test_a_result_is_bounded_as_it_is_sent(
    env: skerry.Environment, tool: str, arguments: dict[str, str]
) -> None:
    """50,000 control characters, of which each takes six in JSON."""
    env.files.write("zeros", bytes(50_000))
    result = Dispatcher(env).call(tool, arguments)
    assert "characters cut" in result.content
    assert (
        sent_length(result.content) < 4 * FIELD_MAX
    )  # backslashes once more, in a message of the model's API
    if tool != "execute_code":
        assert len(result.content) < 2 * FIELD_MAX + 1000
        assert result.structured == json.loads(result.content)


@pytest.mark.requirement("R58")
def test_a_program_runs_beside_the_environment(env: skerry.Environment) -> None:
    dispatcher = Dispatcher(env)
    env.files.write("here", "x")
    code = "import os; print(os.path.exists('/workspace/here'), open('data').read())"
    arguments = {"language": "python", "code": code, "files": {"data": "given"}}
    assert dispatcher.call("execute_code", arguments) == ToolResult("STDOUT:\nFalse given\nExit code: 0")
    for wrong, words in (
        (
            {"language": "cobol", "code": ""},
            "Unsupported language: cobol. Supported: python, nodejs, go, bash",
        ),
        ({"language": "python", "code": "", "files": {"../x": ""}}, "Invalid parameters: "),
        (
            {"language": "python", "code": "", "files": {"x": [1]}},
            "Invalid parameters: files['x'] must be text",
        ),
    ):
        result = dispatcher.call("execute_code", wrong)
        assert result.is_error
        assert result.content.startswith(words)


@pytest.mark.requirement("R9", "R13", "R14")
def test_python_keeps_its_state(env: skerry.Environment) -> None:
    dispatcher = Dispatcher(env, limit=1000)

    def execute(code: str, **more: Any) -> dict[str, Any]:
        result = dispatcher.call("python_execute", {"code": code, **more})
        answer: dict[str, Any] = json.loads(result.content)
        assert answer["success"] is not result.is_error
        return answer

    first = execute("x = 6\nprint('seen')\nx * 7")
    assert (first["success"], first["output"], first["metadata"]["value"]) == (True, "seen\n", "42")
    assert execute("print(x, open('/workspace/file', 'w').write('abc'))")["output"] == "6 3\n"
    assert env.files.read("file") == "abc"
    failed = execute("1 / 0")
    assert failed["error"] == "Execution failed with non-zero exit code"
    assert failed["output"].endswith("ZeroDivisionError: division by zero\n")
    assert "characters cut" in execute("print('x' * 5000)")["output"]
    assert len(execute("'x' * 5000")["metadata"]["value"]) < 1200
    ended = execute("import os; print('said'); os._exit(3)")
    assert (ended["success"], ended["metadata"]["stdout"]) == (False, "said\n")
    assert "the interpreter ended with exit code 3" in ended["output"]
    assert "NameError" in execute("x")["output"]
    refused = execute("1", requirements=["--pre"])
    assert "'--pre' is not a package that pip can be asked for" in refused["output"]


@pytest.mark.requirement("R13", "R14")
def test_python_tells_everything_that_was_written(env: skerry.Environment) -> None:
    dispatcher = Dispatcher(env)

    def execute(code: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(dispatcher.call("python:execute", {"code": code}).content)
        return found

    failed = execute("print('printed before')\n1 / 0")
    assert list(failed) == ["success", "output", "error", "metadata"]
    assert "ZeroDivisionError" in failed["output"]
    assert failed["metadata"] == {"stdout": "printed before\n"}
    assert list(execute("1 / 0")) == ["success", "output", "error"]
    warned = execute("import warnings\nwarnings.warn('careful')\nprint('done')")
    assert (warned["success"], warned["output"]) == (True, "done\n")
    assert "UserWarning: careful" in warned["metadata"]["stderr"]
    assert "stderr" not in execute("print('done')")["metadata"]
    left = execute("import os; print('last words'); os._exit(0)")
    assert (left["success"], left["output"]) == (True, "last words\n")
    assert "the interpreter ended with exit code 0" in left["metadata"]["stderr"]


def test_pictures_beyond_the_limit_are_counted(env: skerry.Environment) -> None:
    code = f"class P:\n    def _repr_png_(self): return {PNG!r}\nfor _ in range(6): display(P())"
    result = Dispatcher(env).call("python:execute", {"code": code})
    assert len(result.images) == 4, result
    assert json.loads(result.content)["metadata"]["picturesLeftOut"] == 2


def test_pictures(env: skerry.Environment) -> None:
    shows = "class Picture:\n    def _repr_png_(self): return {}\nPicture()"
    dispatcher = Dispatcher(env)
    result = dispatcher.call("python:execute", {"code": shows.format(repr(PNG))})
    ((kind, data),) = result.images
    assert (kind, base64.b64decode(data)) == ("image/png", PNG)


def test_a_lost_environment_is_no_output(client: skerry.Client) -> None:
    env = skerry.Environment(client=client).create()
    dispatcher = Dispatcher(env)
    env.delete()
    for tool, arguments in (
        ("environment.execute_command", {"command": "true"}),
        ("environment.read_file", {"path": "x"}),
        ("environment.write_file", {"path": "x", "content": ""}),
    ):
        result = dispatcher.call(tool, arguments)
        assert result.is_error
        assert result.content.startswith("Error: "), result
        with pytest.raises(ValueError, match="Expecting value"):
            json.loads(result.content)


def test_a_daemon_that_is_gone_is_no_output(home: Path) -> None:
    with started(home) as daemon:
        env = skerry.Environment(client=skerry.Client(url=f"unix://{daemon.socket}")).create()
        daemon.kill()
        result = Dispatcher(env).call("environment.execute_command", {"command": "true"})
        assert result.is_error
        assert result.content.startswith("Sandbox error: ")
    with started(home):
        env.delete()


@hypothesis.settings(max_examples=150, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(
    JUNK | st.sampled_from([name for tool in table.TOOLS for name in (tool.name, tool.function_name)]),
    ARGUMENTS,
    st.booleans(),
)
def test_whatever_a_model_sends_there_is_an_answer(
    env: skerry.Environment, name: Any, arguments: Any, as_text: bool
) -> None:
    if isinstance(arguments, dict) and isinstance(arguments.get("timeout_seconds"), int | float):
        hypothesis.assume(not arguments["timeout_seconds"] > 1)
    if as_text:
        arguments = json.dumps(arguments, default=repr)
    result = Dispatcher(env).call(name, arguments)
    assert result.content
    assert len(result.content) < 8 * FIELD_MAX
    result.content.encode()


def test_the_dispatcher_for_programs_with_a_loop(home: Path) -> None:
    async def main() -> None:
        async with skerry.AsyncEnvironment() as env:
            dispatcher = AsyncDispatcher(env)
            one, two = await asyncio.gather(
                dispatcher.call("environment.execute_command", '{"command": "echo one"}'),
                dispatcher.call("environment.execute_command", '{"command": "echo two"}'),
            )
            assert [json.loads(result.content)["stdout"] for result in (one, two)] == ["one\n", "two\n"]

    asyncio.run(main())
