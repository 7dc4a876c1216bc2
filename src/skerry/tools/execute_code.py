"""The tool `execute_code`: a program in one of four languages, run once, with its output as text for a model.

    from skerry.tools.execute_code import ExecuteCode

    with ExecuteCode() as tool:
        print(tool.execute({"language": "python", "code": "print(6 * 7)"}).content)

Whatever the arguments are, and whatever goes wrong, the answer is a ToolResult: a model can read it and do better.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skerry.client.sync.client import Client
from skerry.errors import InvalidRequest, SkerryError
from skerry.models import CodeResult, Outcome
from skerry.tools.text import LIMIT, bounded

if TYPE_CHECKING:
    from typing import Self

LANGUAGES = ("python", "nodejs", "go", "bash")
TIMEOUT_MAX = 300
"""Seconds; a model that asks for more gets this."""
_KINDS: dict[str, tuple[type, str]] = {
    "language": (str, "a string"),
    "code": (str, "a string"),
    "stdin": (str, "a string"),
    "files": (dict, "an object of strings"),
    "timeout": (int, "an integer"),
    "cpu_limit": (int, "an integer"),
    "mem_limit": (int, "an integer"),
}


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the model is given."""

    content: str
    is_error: bool = False


class ExecuteCode:
    """The daemon is that of `client`, or the one that `Client(url=url, token=token)` finds.

    `backend` is the isolation that programs get at least (`namespace`, `gvisor`, `microvm`); `default_timeout` is in
    seconds, for calls that give none; `network_enabled` lets programs reach public addresses. Of each stream, at most
    about `output_limit` characters are given to the model.
    """

    name = "execute_code"
    description = (
        "Execute code in a secure sandbox with resource limits. Supports Python, Node.js, Go, and Bash. Each run is "
        "isolated and starts fresh; only the standard library is available, files are read-only, /tmp is writable."
    )

    def __init__(
        self,
        *,
        backend: str | None = None,
        default_timeout: float = 30,
        network_enabled: bool = False,
        output_limit: int = LIMIT,
        client: Client | None = None,
        url: str | None = None,
        token: str | None = None,
    ) -> None:
        if client is not None and (url or token):
            raise InvalidRequest("a client knows its url and token already")
        self._backend = backend
        self._default_timeout = default_timeout
        self._network = "public" if network_enabled else "none"
        self._output_limit = output_limit
        self._client = client or Client(url=url, token=token)
        self._owns_client = client is None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; once or several times."""
        self._closed = True
        if self._owns_client:
            self._client.close()

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON Schema of the arguments."""
        texts = {
            "code": "The code to execute",
            "stdin": "Optional standard input",
            "files": "Optional additional files (filename -> content)",
            "timeout": "Timeout in seconds (default: 30, max: 300)",
            "cpu_limit": "CPU limit in millicores (default: 1000)",
            "mem_limit": "Memory limit in MB (default: 512)",
        }
        kinds = {str: "string", dict: "object", int: "integer"}
        language = {
            "type": "string",
            "enum": list(LANGUAGES),
            "description": "Programming language to execute",
        }
        others = {name: {"type": kinds[_KINDS[name][0]], "description": text} for name, text in texts.items()}
        return {
            "type": "object",
            "properties": {"language": language, **others},
            "required": ["language", "code"],
        }

    def execute(self, params: Mapping[str, Any] | str | bytes) -> ToolResult:
        """Run a program. The arguments are those of the schema, as an object or as its JSON."""
        try:
            given = _checked(params)
        except ValueError as error:
            return ToolResult(f"Invalid parameters: {error}", is_error=True)
        if given["language"] not in LANGUAGES:
            supported = ", ".join(LANGUAGES)
            return ToolResult(
                f"Unsupported language: {given['language']}. Supported: {supported}", is_error=True
            )
        given["timeout"] = min(given.get("timeout", self._default_timeout), TIMEOUT_MAX)
        if self._closed:
            return ToolResult("Execution failed: the tool is closed", is_error=True)
        try:
            result = self._client.execute_code(**given, network=self._network, isolation=self._backend)
        except InvalidRequest as error:
            return ToolResult(f"Invalid parameters: {error}", is_error=True)
        except SkerryError as error:
            return ToolResult(f"Execution failed: {error}", is_error=True)
        if result.outcome is Outcome.INTERNAL:
            return ToolResult(f"Execution failed: {result.message}", is_error=True)
        return ToolResult(self._text(result), is_error=not result.ok)

    def _text(self, result: CodeResult) -> str:
        lines = []
        if result.outcome is Outcome.TIMED_OUT:
            lines.append("Execution timed out")
        elif result.message:
            lines.append(result.message.capitalize())
        streams = (
            ("STDOUT", result.stdout, result.stdout_size - len(result.stdout_bytes)),
            ("STDERR", result.stderr, result.stderr_size - len(result.stderr_bytes)),
        )
        for name, text, lost in streams:
            if text:
                lines += [f"{name}:", bounded(text, self._output_limit, lost=lost).removesuffix("\n")]
        return "\n".join([*lines, f"Exit code: {result.exit_code}"])


def _checked(params: Mapping[str, Any] | str | bytes) -> dict[str, Any]:
    """What was given, without what is null or 0, which stand for the default. Raises ValueError, with the reason."""
    if isinstance(params, str | bytes):
        try:
            params = json.loads(params)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON: {error}") from error
    if not isinstance(params, Mapping):
        raise ValueError("an object is expected")
    given = {name: value for name, value in params.items() if value is not None}
    for name, value in given.items():
        if name not in _KINDS:
            raise ValueError(f"unknown parameter {name!r}; known: {', '.join(_KINDS)}")
        kind, words = _KINDS[name]
        right = isinstance(value, kind) and not isinstance(value, bool)
        if name == "files" and right:
            right = all(isinstance(text, str) for pair in value.items() for text in pair)
        if not right:
            raise ValueError(f"{name} must be {words}")
    for name in ("language", "code"):
        if name not in given:
            raise ValueError(f"{name} is required")
    return {name: value for name, value in given.items() if value != 0}
