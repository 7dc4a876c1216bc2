"""The meta-tools `environment.*`, bound to one environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skerry.errors import (
    FileConflict,
    FileDenied,
    FileMissing,
    InvalidRequest,
    LimitReached,
    PlatformError,
    SkerryError,
)
from skerry.models import Outcome
from skerry.tools.results import bounded, fits
from skerry.tools.table import TIMEOUT_SECONDS

if TYPE_CHECKING:
    from skerry.client.aio.environment import AsyncEnvironment
    from skerry.models import ExecutionResult

READ_MAX = 16 << 20
OUTPUT_FOLDER = "/tmp/skerry-output"  # noqa: S108 (inside the environment)
_FILE_FAULTS = (InvalidRequest, FileMissing, FileConflict, FileDenied, LimitReached)


class AsyncEnvironmentTools:
    """What a planner does in its environment: run commands, write files, read files.

    With `limit`, no text in a result has many more characters than that as JSON: head and tail are kept, and what
    was cut can be read from a file inside. A command that fails, and a file that is not there, are results. What is
    nobody's fault inside raises: PlatformError, EnvironmentNotFound, EnvironmentEnded, Denied.
    """

    def __init__(self, environment: AsyncEnvironment, limit: int | None = None) -> None:
        self._environment = environment
        self._limit = limit

    async def execute_command(self, command: str, timeout_seconds: float = TIMEOUT_SECONDS) -> dict[str, Any]:
        """`error`, `stdout`, `stderr`, `exit_code`; and `message`, where the command did not end by itself.

        Working directory, variables and functions stay for the next command. Raises InvalidRequest.
        """
        result = await self._environment.execute(command, timeout=timeout_seconds)
        if result.outcome == Outcome.INTERNAL:
            raise PlatformError(result.message or "the command was lost")
        answer: dict[str, Any] = {
            "error": result.exit_code != 0,
            "stdout": await shown(self._environment, result, "stdout", self._limit),
            "stderr": await shown(self._environment, result, "stderr", self._limit),
            "exit_code": result.exit_code,
        }
        if result.outcome not in (Outcome.COMPLETED, Outcome.FAILED, Outcome.SIGNALED):
            answer["message"] = result.message or str(result.outcome)
        return answer

    async def write_file(self, path: str, content: str) -> dict[str, Any]:
        """`error` and `message`."""
        try:
            await self._environment.files.write(path, content)
        except _FILE_FAULTS as fault:
            return {"error": True, "message": str(fault)}
        return {"error": False, "message": "File saved successfully."}

    async def read_file(self, path: str) -> dict[str, Any]:
        """`error` and `content`: the file's, or what is wrong."""
        try:
            data = await self._environment.files.read_bytes(path, length=READ_MAX + 1)
            if len(data) > READ_MAX:
                raise LimitReached(
                    f"{path} is larger than {READ_MAX} bytes", hint="read parts of it with a command"
                )
            content = data.decode()
        except _FILE_FAULTS as fault:
            return {"error": True, "content": str(fault)}
        except UnicodeDecodeError:
            return {"error": True, "content": f"{path} is not text in UTF-8 (look at it with a command)"}
        if self._limit is not None:
            content = bounded(content, self._limit, path)
        return {"error": False, "content": content}


async def shown(
    environment: AsyncEnvironment, result: ExecutionResult, stream: str, limit: int | None
) -> str:
    """The text of `stdout` or `stderr`, as long as it may be; all that there is of a longer one goes into a file."""
    data, size, text = (getattr(result, f"{stream}{part}") for part in ("_bytes", "_size", ""))
    if limit is None or fits(text, limit):
        return str(text)
    path = f"{OUTPUT_FOLDER}/{result.execution_id}.{stream}"
    try:
        await environment.files.write(path, data)
    except SkerryError:  # a full disk, say: the command has been run all the same, and that is what counts
        path = ""
    words = bounded(text, limit, path)
    if size > len(data):
        words += f"\n[... only the first {len(data)} of {size} bytes were kept; let it write to a file ...]"
    return words
