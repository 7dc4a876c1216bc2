"""The tools, as data: names, what models are told of them, and the JSON Schema of their arguments.

Schemas for model APIs, the dispatcher, LangChain and MCP all derive from this one table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TIMEOUT_SECONDS = 60
TIMEOUT_MAX = 3600


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool. In `parameters`, an object schema, nothing constrains but what `skerry.tools.arguments` knows."""

    name: str
    description: str
    parameters: dict[str, Any]
    title: str
    result: dict[str, Any] | None = None
    """The JSON Schema of its result; None for text."""
    writes: bool = True
    """Whether it can change anything."""
    destroys: bool = True
    """Whether it can change or remove what was there before."""
    repeatable: bool = False
    """Whether a second call with the same arguments changes nothing more."""
    runs_code: bool = True
    """Whether it runs code, which can reach whatever the environment can."""

    @property
    def function_name(self) -> str:
        """The name where only letters, digits and underscores are allowed, as in the APIs of models."""
        return self.name.replace(".", "_").replace(":", "_")


def _object(required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _result(required: list[str], **types: str) -> dict[str, Any]:
    properties = {name: {"type": kind} for name, kind in types.items()}
    return {"type": "object", "properties": properties, "required": required}


EXECUTE_COMMAND = Tool(
    "environment.execute_command",
    "Executes any shell command within the secure, stateful environment. This is the primary tool for all actions like"
    " listing files, running scripts, using git, etc. Maintains a persistent working directory and state for the"
    " lifetime of the environment. Returns {'error': bool, 'stdout': str, 'stderr': str, 'exit_code': int}; error is"
    " true if the exit code is not 0.",
    _object(
        ["command"],
        command={"type": "string", "description": "The full shell command to execute."},
        timeout_seconds={
            "type": "number",
            "description": "After this many seconds the command is killed, with everything that it started.",
            "exclusiveMinimum": 0,
            "maximum": TIMEOUT_MAX,
            "default": TIMEOUT_SECONDS,
        },
    ),
    title="Execute a command",
    result=_result(
        ["error", "stdout", "stderr", "exit_code"],
        error="boolean",
        stdout="string",
        stderr="string",
        exit_code="integer",
        message="string",
    ),
)
WRITE_FILE = Tool(
    "environment.write_file",
    "Creates or overwrites a file with the provided content. Useful for creating Python scripts, shell scripts, or"
    " configuration files that will be executed later. Returns {'error': bool, 'message': str}.",
    _object(
        ["path", "content"],
        path={
            "type": "string",
            "description": "The relative path within the workspace (e.g., 'src/main.py').",
        },
        content={"type": "string", "description": "The full content of the file."},
    ),
    title="Write a file",
    result=_result(["error", "message"], error="boolean", message="string"),
    repeatable=True,
    runs_code=False,
)
READ_FILE = Tool(
    "environment.read_file",
    "Reads the entire content of a file from the workspace. Use this to inspect code, view logs, or get the output of a"
    " script that writes to a file. Returns {'error': bool, 'content': str}.",
    _object(
        ["path"],
        path={"type": "string", "description": "The relative path of the file to read."},
    ),
    title="Read a file",
    result=_result(["error", "content"], error="boolean", content="string"),
    writes=False,
    destroys=False,
    repeatable=True,
    runs_code=False,
)

EXECUTE_CODE = Tool(
    "execute_code",
    "Executes a program in a secure, isolated sandbox: Python, Node.js, Go, or Bash. Every run starts fresh, and"
    " nothing stays for the next. Only the standard library is available; the program and its files can only be read,"
    " /tmp can be written.",
    _object(
        ["language", "code"],
        language={
            "type": "string",
            "enum": ["python", "nodejs", "go", "bash"],
            "description": "Programming language to execute",
        },
        code={"type": "string", "description": "The code to execute"},
        stdin={"type": "string", "description": "Optional standard input"},
        files={
            "type": "object",
            "additionalProperties": {"type": "string"},
            "description": "Optional additional files (filename -> content)",
        },
        timeout={"type": "integer", "description": "Timeout in seconds (default: 30, max: 300)"},
        cpu_limit={"type": "integer", "description": "CPU limit in millicores (default: 1000)"},
        mem_limit={"type": "integer", "description": "Memory limit in MB (default: 512)"},
    ),
    title="Run a program once",
    destroys=False,
)
"""Needs no environment: see `skerry.tools.aio.execute_code`."""

PYTHON_EXECUTE = Tool(
    "python:execute",
    "Executes Python code in a secure sandbox.",
    {
        "type": "object",
        "properties": {
            "code": {"type": "string", "description": "The Python code to execute"},
            "requirements": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["code"],
    },
    title="Execute Python code",
    result=_result(
        ["success", "output"], success="boolean", output="string", error="string", metadata="object"
    ),
)
"""Also a plugin: see `skerry.tools.plugin`."""
FAILED = "Execution failed with non-zero exit code"
"""The `error` of python:execute when the code failed."""

TOOLS = (EXECUTE_COMMAND, WRITE_FILE, READ_FILE, EXECUTE_CODE, PYTHON_EXECUTE)


def find(name: object) -> Tool | None:
    """The tool of this name, in either spelling."""
    return next((tool for tool in TOOLS if name in (tool.name, tool.function_name)), None)
