"""Tools for LangChain (`pip install 'skerry[langchain]'`).

    from skerry.tools.langchain import execute_python_code_in_sandbox, run_terminal_command_in_sandbox

    execute_python_code_in_sandbox.invoke({"code": "print('Hello, World!')"})
    run_terminal_command_in_sandbox.invoke({"command": "pip install requests && python -c 'import requests'"})

`sandbox_tools(memory="1g", allow=["python-packages"])` makes the two with other settings. The tools of an
`EnvironmentToolkit` share one environment, with its state.
"""

from __future__ import annotations

import asyncio
from typing import Any

from langchain_core.tools import BaseTool, BaseToolkit, StructuredTool, ToolException
from pydantic import ConfigDict, PrivateAttr

from skerry.client.aio.environment import AsyncEnvironment
from skerry.client.sync.environment import Environment
from skerry.tools import table
from skerry.tools.aio.dispatch import AsyncDispatcher
from skerry.tools.aio.sandbox import PYTHON_TIMEOUT, TERMINAL_TIMEOUT, AsyncSandbox
from skerry.tools.results import ToolResult
from skerry.tools.sync.dispatch import Dispatcher
from skerry.tools.sync.sandbox import Sandbox

__all__ = [
    "PYTHON_TIMEOUT",
    "TERMINAL_TIMEOUT",
    "EnvironmentToolkit",
    "execute_python_code_in_sandbox",
    "run_terminal_command_in_sandbox",
    "sandbox_tools",
]
Content = str | list[dict[str, str]]


def sandbox_tools(**settings: Any) -> list[BaseTool]:
    """`execute_python_code_in_sandbox` and `run_terminal_command_in_sandbox` with settings of `Sandbox`."""
    here, there = Sandbox(**settings), AsyncSandbox(**settings)

    def execute_python_code_in_sandbox(code: str) -> str:
        return here.run_python(code)

    async def execute_python_code(code: str) -> str:
        return await there.run_python(code)

    def run_terminal_command_in_sandbox(command: str) -> str:
        return here.run_command(command)

    async def run_terminal_command(command: str) -> str:
        return await there.run_command(command)

    return [
        StructuredTool.from_function(
            execute_python_code_in_sandbox, execute_python_code, description=_PYTHON_WORDS
        ),
        StructuredTool.from_function(
            run_terminal_command_in_sandbox, run_terminal_command, description=_TERMINAL_WORDS
        ),
    ]


_PYTHON_WORDS = (
    "Executes Python code in a fresh, isolated sandbox without a network and returns what it printed. Nothing persists"
    " between calls: print what you want to see. Example: print(sum(range(10)))"
)
_TERMINAL_WORDS = (
    "Runs a shell command in a fresh, isolated sandbox with internet access and returns its output. Nothing persists"
    " between calls: chain what belongs together. Example: pip install requests && python -c 'import requests'"
)
execute_python_code_in_sandbox, run_terminal_command_in_sandbox = sandbox_tools()


class EnvironmentToolkit(BaseToolkit):
    """The tools, bound to one environment, which is created and deleted by whoever made it.

        with skerry.Environment(memory="1g") as env:
            agent = create_agent(model, EnvironmentToolkit(environment=env).get_tools())

    With an AsyncEnvironment the tools can be awaited alone (`ainvoke`), and canceling a call kills what it runs; with
    an Environment that goes on until its time limit.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    environment: Environment | AsyncEnvironment

    def get_tools(self) -> list[BaseTool]:
        if isinstance(self.environment, AsyncEnvironment):
            dispatcher: Dispatcher | AsyncDispatcher = AsyncDispatcher(self.environment)
        else:
            dispatcher = Dispatcher(self.environment)
        return [_EnvironmentTool(tool, dispatcher) for tool in table.TOOLS]


class _EnvironmentTool(BaseTool):
    """A tool of the table. What fails becomes a message with the status `error`, never an exception.

    Copies, and what is made of a pickle, work in the same environment. A pickle holds the token of the daemon.
    """

    handle_tool_error: bool = True
    _dispatcher: Dispatcher | AsyncDispatcher = PrivateAttr()

    def __init__(self, tool: table.Tool, dispatcher: Dispatcher | AsyncDispatcher) -> None:
        super().__init__(name=tool.function_name, description=tool.description, args_schema=tool.parameters)
        self._dispatcher = dispatcher

    def _run(self, /, **arguments: Any) -> Content:
        if isinstance(self._dispatcher, AsyncDispatcher):
            raise ToolException("This tool belongs to an AsyncEnvironment: use ainvoke().")
        return _content(self._dispatcher.call(self.name, arguments))

    async def _arun(self, /, **arguments: Any) -> Content:
        if isinstance(self._dispatcher, AsyncDispatcher):
            return _content(await self._dispatcher.call(self.name, arguments))
        return await asyncio.to_thread(self._run, **arguments)


def _content(result: ToolResult) -> Content:
    """The text; with its pictures, if it has any, as content blocks."""
    content: Content = result.content
    if result.images:
        content = [{"type": "text", "text": result.content}]
        content += [{"type": "image", "base64": data, "mime_type": kind} for kind, data in result.images]
    if result.is_error:
        raise ToolException(content)
    return content
