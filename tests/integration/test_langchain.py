"""The LangChain tools in a real agent loop, whose model follows a script, and one by one."""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import logging
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import BaseTool
from pydantic import Field

import skerry
from skerry.egress.presets import preset
from skerry.settings import Home
from skerry.tools import langchain
from skerry.tools.langchain import (
    EnvironmentToolkit,
    execute_python_code_in_sandbox,
    run_terminal_command_in_sandbox,
    sandbox_tools,
)
from tests import support
from tests.integration.daemon import Daemon, started
from tests.integration.internet import in_a_network_of_its_own, internet
from tests.integration.mirrors import with_python_packages
from tests.integration.test_mcp import PNG


class Script(BaseChatModel):
    """A model whose every answer was written before."""

    answers: list[AIMessage]
    told: list[list[str]] = Field(default_factory=list)

    @property
    def _llm_type(self) -> str:
        return "script"

    def bind_tools(self, tools: Any, **options: Any) -> Any:
        self.told.append([tool.name for tool in tools])
        return self

    def _generate(self, messages: list[BaseMessage], *args: Any, **options: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=self.answers.pop(0))])


def asks(name: str, **arguments: Any) -> AIMessage:
    call = {"name": name, "args": arguments, "id": f"call-{name}", "type": "tool_call"}
    return AIMessage(content="", tool_calls=[call])


@pytest.fixture(scope="module")
def daemon_home() -> Iterator[Path]:
    with support.temporary_home() as home:
        yield home


@pytest.fixture
def client(daemon_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[skerry.Client]:
    monkeypatch.setenv("SKERRY_HOME", str(daemon_home))
    with skerry.Client() as client:
        yield client
        assert client.environments() == []


def python(code: str) -> str:
    text: str = execute_python_code_in_sandbox.invoke({"code": code})
    return text


def terminal(command: str) -> str:
    text: str = run_terminal_command_in_sandbox.invoke({"command": command})
    return text


def last(client: skerry.Client) -> skerry.EnvironmentInfo:
    """The environment that ended last."""
    return max(client.environments(ended=True), key=lambda info: info.created_at)


@pytest.mark.requirement("R92", "R93", "R94")
def test_an_agent_uses_both_tools(client: skerry.Client) -> None:
    tools = [execute_python_code_in_sandbox, run_terminal_command_in_sandbox]
    model = Script(
        answers=[
            asks("execute_python_code_in_sandbox", code="x = 10\ny = 20\nprint(f'Sum: {x + y}')"),
            asks("run_terminal_command_in_sandbox", command="echo one && echo two"),
            asks("execute_python_code_in_sandbox", program="x"),
            AIMessage(content="done"),
        ]
    )
    answer = create_agent(model, tools).invoke({"messages": [HumanMessage("add")]})
    told = [message for message in answer["messages"] if isinstance(message, ToolMessage)]
    assert [message.content for message in told[:2]] == [
        "--- STDOUT ---\nSum: 30",
        "--- STDOUT ---\none\ntwo",
    ]
    assert told[2].status == "error"
    assert "code" in str(told[2].content)
    assert answer["messages"][-1].content == "done"
    assert model.told[0] == ["execute_python_code_in_sandbox", "run_terminal_command_in_sandbox"]


@pytest.mark.requirement("R43", "R45", "R94")
def test_an_agent_works_in_one_environment(client: skerry.Client) -> None:
    with skerry.Environment(client=client) as env:
        tools = EnvironmentToolkit(environment=env).get_tools()
        model = Script(
            answers=[
                asks("environment_write_file", path="src/main.py", content="print(6 * 7)"),
                asks("environment_execute_command", command="cd src"),
                asks("environment_execute_command", command="python3 main.py; exit 3"),
                asks("environment_read_file", path=["no"], self=1, config=2, run_manager=3),
                AIMessage(content="done"),
            ]
        )
        agent = create_agent(model, tools)
        answer = asyncio.run(agent.ainvoke({"messages": [HumanMessage("run it")]}))
    told = [message for message in answer["messages"] if isinstance(message, ToolMessage)]
    assert json.loads(str(told[0].content)) == {"error": False, "message": "File saved successfully."}
    result = {"error": True, "stdout": "42\n", "stderr": "", "exit_code": 3}
    assert json.loads(str(told[2].content)) == result
    assert [message.status for message in told] == ["success", "success", "error", "error"]
    assert str(told[3].content).startswith("Invalid parameters: ")


def test_a_toolkit_of_an_environment_that_is_awaited(client: skerry.Client) -> None:
    async def main() -> None:
        async with skerry.AsyncEnvironment() as env:
            tools = {tool.name: tool for tool in EnvironmentToolkit(environment=env).get_tools()}
            tool = tools["environment_execute_command"]
            assert "use ainvoke()" in tool.invoke({"command": "true"})
            seen = client.verify_audit()["seq"]
            running = asyncio.ensure_future(tool.ainvoke({"command": "sleep 601 # main.py"}))
            await asyncio.to_thread(wait_for_environment, client, seen)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            # Commands of one shell queue up: this one runs when the other is gone.
            found = json.loads(await tool.ainvoke({"command": "pgrep -f 'sleep 60[1]' || echo gone"}))
            assert found["stdout"] == "gone\n"

    asyncio.run(main())


def test_a_figure_reaches_the_model(client: skerry.Client) -> None:
    shows = f"class P:\n    def _repr_png_(self): return {PNG!r}\nprint('drawn')\ndisplay(P())\n"
    picture = {"type": "image", "base64": base64.b64encode(PNG).decode(), "mime_type": "image/png"}
    with skerry.Environment(client=client) as env:
        tools = {tool.name: tool for tool in EnvironmentToolkit(environment=env).get_tools()}
        for code, status in ((shows, "success"), (shows + "1 / 0", "error")):
            call = {"name": "python_execute", "args": {"code": code}, "id": "1", "type": "tool_call"}
            message = tools["python_execute"].invoke(call)
            text, block = message.content
            assert (message.status, block) == (status, picture)
            assert "drawn" in text["text"]


def test_a_tool_of_a_toolkit_can_be_copied(client: skerry.Client) -> None:
    ways: list[Callable[[BaseTool], BaseTool]] = [
        copy.copy,
        copy.deepcopy,
        lambda tool: tool.model_copy(),
        lambda tool: tool.model_copy(deep=True),
        lambda tool: pickle.loads(pickle.dumps(tool)),
    ]
    with skerry.Environment(client=client) as env:
        tool = EnvironmentToolkit(environment=env).get_tools()[0]
        tool.invoke({"command": "x=kept"})
        for way in ways:
            assert json.loads(way(tool).invoke({"command": "echo $x"}))["stdout"] == "kept\n"


def test_an_awaited_tool_can_be_copied(client: skerry.Client) -> None:
    async def main() -> None:
        async with skerry.AsyncEnvironment() as env:
            tool = EnvironmentToolkit(environment=env).get_tools()[0]
            await tool.ainvoke({"command": "x=kept"})
            for other in (copy.deepcopy(tool), pickle.loads(pickle.dumps(tool))):
                assert json.loads(await other.ainvoke({"command": "echo $x"}))["stdout"] == "kept\n"

    asyncio.run(main())


@pytest.mark.requirement("R106", "R112")
def test_texts(client: skerry.Client) -> None:
    assert python("print('Hello, World!')") == "--- STDOUT ---\nHello, World!"
    assert python("pass") == "Execution completed successfully with no output."
    assert python("") == "Execution completed successfully with no output."
    assert terminal("true") == "Execution completed successfully with no output."
    assert terminal("echo out; echo err >&2; exit 3") == (
        "--- STDOUT ---\nout\n--- STDERR ---\nerr\n--- EXIT CODE: 3 ---"
    )
    failed = python("print(undefined_variable)")
    assert failed.startswith("--- STDERR ---\nTraceback")
    assert "line 1" in failed
    assert "NameError: name 'undefined_variable' is not defined" in failed
    assert failed.endswith("--- EXIT CODE: 1 ---")
    assert "characters cut" in python("print('x' * 100_000)")
    assert python("print(input())").endswith("EOFError: EOF when reading a line\n--- EXIT CODE: 1 ---")


@pytest.mark.requirement("R97", "R98", "R106")
def test_timeouts(client: skerry.Client) -> None:
    assert (langchain.PYTHON_TIMEOUT, langchain.TERMINAL_TIMEOUT) == (30, 120)
    run_python, run_terminal = sandbox_tools(python_timeout=1, terminal_timeout=2.5)
    assert run_python.invoke({"code": "while True: pass"}) == (
        "Execution timed out after 1 seconds. The process was terminated."
    )
    assert run_terminal.invoke({"command": "echo begun; sleep 600"}) == (
        "Execution timed out after 2.5 seconds. The process was terminated.\n--- STDOUT ---\nbegun"
    )


@pytest.mark.root
@pytest.mark.requirement("R95", "R96")
def test_terminal_reaches_public_addresses_and_python_nothing() -> None:
    address, name = "93.184.216.34", "example.test"
    code = f"import urllib.request as u; print(u.urlopen('http://{name}/', timeout=10).read().decode())"
    settings: tuple[dict[str, Any], ...] = ({"network": "none"}, {"allow": ["api.example.com"]})

    def body() -> None:
        with support.temporary_home() as home, internet([address]) as outside, started(home) as daemon:
            outside.names = {name: address}
            url = f"unix://{daemon.socket}"
            run_python, run_terminal = sandbox_tools(url=url)
            command = {"command": f'python3 -c "{code}"'}
            assert run_terminal.invoke(command) == "--- STDOUT ---\nhello\n"
            assert outside.arrived == [(address, 80)]
            assert "URLError" in run_python.invoke({"code": code})
            for more in settings:
                assert "Error" in sandbox_tools(url=url, **more)[1].invoke(command)
            assert outside.arrived == [(address, 80)]
            with skerry.Client(str(home)) as client:
                ended = sorted(client.environments(ended=True), key=lambda info: info.created_at)
            assert [info.network for info in ended] == ["public", "none", "none", "allowlist"]

    in_a_network_of_its_own(body)


@pytest.mark.requirement("R99")
def test_limits(client: skerry.Client) -> None:
    for tool, arguments in ((python, "pass"), (terminal, "true")):
        tool(arguments)
        limits = last(client).limits
        assert (limits["memory"], limits["cpus"]) == (512 << 20, 0.5)
    assert "killed: the environment's memory is used up" in python("x = 'x' * (600 << 20)")
    larger, _ = sandbox_tools(memory="1g", cpus=1)
    assert larger.invoke({"code": "x = 'x' * (600 << 20); print(len(x))"}) == "--- STDOUT ---\n629145600"
    assert last(client).limits["cpus"] == 1


@pytest.mark.requirement("R100", "R101", "R113")
def test_every_run_is_fresh_and_unprivileged(client: skerry.Client) -> None:
    terminal("echo kept > /workspace/file; echo kept > /tmp/file")
    assert terminal("ls /workspace/file /tmp/file").endswith("--- EXIT CODE: 2 ---")
    assert (
        python("import os; print(os.getuid(), os.path.exists('/tmp/file'))") == "--- STDOUT ---\n1000 False"
    )
    assert "PermissionError" in python("import os; os.setuid(0)")


@pytest.mark.requirement("R103", "R111")
def test_errors_of_the_platform_are_answers_that_say_what_to_do(
    client: skerry.Client, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(**settings: Any) -> str:
        text: str = sandbox_tools(**settings)[0].invoke({"code": "print(1)"})
        return text

    before = len(client.environments(ended=True))
    missing = answer(image="missing")
    assert missing.startswith("Sandbox error: there is no image 'missing'")
    assert "skerry image build" in missing
    assert "skerry image build dev" in answer(image="dev")
    assert answer(url="unix:///nowhere/daemon.sock").startswith("Sandbox error: cannot reach unix:///nowhere")
    assert answer(memory="much").startswith("Sandbox error: memory 'much' is not a size")
    assert sum(record.levelno == logging.ERROR for record in caplog.records) == 4
    assert len(client.environments(ended=True)) == before, "none of them made one"
    assert python("print('Sandbox error: no')") == "--- STDOUT ---\nSandbox error: no"


@pytest.mark.requirement("R102", "R105", "R117")
def test_each_run_logs_its_start_its_end_and_its_removal(
    client: skerry.Client, caplog: pytest.LogCaptureFixture
) -> None:
    """Documented were containers that start in 1 to 2 s, and are removed in less than 1."""
    caplog.set_level(logging.INFO, "skerry.tools")
    taken: dict[str, list[float]] = {"created": [], "removed": []}
    for _ in range(5):
        caplog.clear()
        assert python("print(1)") == "--- STDOUT ---\n1"
        info = last(client)
        made, ran, removed = [record.getMessage() for record in caplog.records]
        assert ran == f"sandbox {info.environment_id}: completed, exit code 0"
        for message, word in ((made, "created"), (removed, "removed")):
            found = re.fullmatch(rf"sandbox {info.environment_id}: {word} in (\d+\.\d) ms", message)
            assert found, message
            taken[word].append(float(found[1]))
        assert (info.state, info.ended_reason) == ("ended", "deleted")
    assert 0 < min(taken["created"]) < 1000
    assert 0 < min(taken["removed"]) < 1000


@contextmanager
def under_way(tool: BaseTool, arguments: dict[str, str], answers: list[str]) -> Iterator[None]:
    thread = threading.Thread(target=lambda: answers.append(tool.invoke(arguments)))
    thread.start()
    yield
    thread.join()


@pytest.mark.requirement("R104")
def test_a_removal_that_fails_is_a_warning(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    answers: list[str] = []
    with started(home) as daemon:
        tool, _ = sandbox_tools(url=f"unix://{daemon.socket}")
        with under_way(tool, {"code": "while True: pass"}, answers):
            with skerry.Client(url=f"unix://{daemon.socket}") as client:
                environment = wait_for_environment(client)
            daemon.kill()
    assert answers[0].startswith("Sandbox error: ")
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any(f"sandbox {environment}: failed to remove it" in text for text in warnings), warnings
    with started(home), skerry.Client(str(home)) as client:
        [info] = client.environments()
        assert (info.environment_id, info.lifetime) == (environment, langchain.PYTHON_TIMEOUT + 60)
        skerry.Environment.get(environment, client).delete()


def wait_for_environment(client: skerry.Client, after: int = 0) -> str:
    """The environment in which main.py is started first after this row of the audit."""
    for row in client.audit(after=after, follow=True):
        if row["action"] == "execution" and "main.py" in json.dumps(row):
            found: str = row["environment_id"]
            return found
    raise AssertionError("the audit ended")


@pytest.mark.requirement("R98", "R104")
def test_giving_up_removes_it(client: skerry.Client) -> None:
    seen = client.verify_audit()["seq"]

    async def main() -> None:
        call = {"code": "while True: pass"}
        running = asyncio.ensure_future(execute_python_code_in_sandbox.ainvoke(call))
        await asyncio.to_thread(wait_for_environment, client, seen)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.requirement("R107")
def test_pip_install_and_import_with_the_default_network(tmp_path: Path) -> None:
    def install(daemon: Daemon) -> None:
        _, tool = sandbox_tools(url=f"unix://{daemon.socket}")
        index = preset("python-packages", Home(str(daemon.home))).variables["PIP_INDEX_URL"]
        host = urlsplit(index).hostname
        # This machine's registry may have a certificate that only this machine knows.
        setup = f"export PIP_INDEX_URL={index} PIP_TRUSTED_HOST={host}"
        command = "pip install -q requests && python -c 'import requests; print(requests.__name__)'"
        assert "--- STDOUT ---\nrequests" in tool.invoke({"command": f"{setup} && {command}"})
        with skerry.Client(str(daemon.home)) as client:
            assert last(client).network == "public"

    with_python_packages(tmp_path, install)
