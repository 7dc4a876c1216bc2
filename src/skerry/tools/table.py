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
    writes: bool = True
    """Whether it can change anything."""

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
)
READ_FILE = Tool(
    "environment.read_file",
    "Reads the entire content of a file from the workspace. Use this to inspect code, view logs, or get the output of a"
    " script that writes to a file. Returns {'error': bool, 'content': str}.",
    _object(
        ["path"],
        path={"type": "string", "description": "The relative path of the file to read."},
    ),
    writes=False,
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
)
"""Also a plugin: see `skerry.tools.plugin`."""

TOOLS = (EXECUTE_COMMAND, WRITE_FILE, READ_FILE, EXECUTE_CODE, PYTHON_EXECUTE)


def find(name: object) -> Tool | None:
    """The tool of this name, in either spelling."""
    return next((tool for tool in TOOLS if name in (tool.name, tool.function_name)), None)
