"""The tool `python:execute` in a session of one environment: what one call defines, the next finds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skerry.errors import InstallFailed
from skerry.tools.aio.environment import shown
from skerry.tools.python import SESSION, as_program, not_installed, pictures
from skerry.tools.results import FIELD_MAX, bounded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.client.aio.environment import AsyncEnvironment
    from skerry.models import ExecutionResult

    Images = tuple[tuple[str, str], ...]

TIMEOUT_SECONDS = 60


class AsyncPython:
    """Packages are installed by the daemon, whatever network there is inside. `limit` is as that of `environment.*`.

    Raises what is not the code's fault: PlatformError, EnvironmentNotFound, EnvironmentEnded, Denied, LimitReached, and
    InvalidRequest where there is no Python.
    """

    def __init__(self, environment: AsyncEnvironment, limit: int | None = None) -> None:
        self._environment = environment
        self._limit = limit

    async def execute(self, code: str, requirements: Sequence[str] = ()) -> tuple[dict[str, Any], Images]:
        """The result as the plugin gives it, with the `value` of the last expression; and pictures, of figures say.

        The stream that is not `output` is in `metadata`, if anything was written to it.
        """
        try:
            session = await self._environment.session("python", id=SESSION, packages=requirements)
        except InstallFailed as failed:
            return await self._failed(not_installed(failed), {}), ()
        if (await session.info()).state == "crashed":
            await session.restart()
        result = await session.run(code, timeout=TIMEOUT_SECONDS)
        images, left_out = pictures(result)
        told = {"picturesLeftOut": left_out} if left_out else {}
        ended = as_program(result, result.raised.traceback if result.raised else "")
        if result.exit_code != 0:
            return await self._failed(ended, told), images
        metadata = {
            "executionTime": round(result.duration_seconds * 1000, 3),
            "memoryUsage": result.usage.memory_peak_bytes,
            "value": result.value and bounded(result.value, self._limit or FIELD_MAX),
            **told,
        }
        if ended.stderr_bytes:
            metadata["stderr"] = await shown(self._environment, ended, "stderr", self._limit)
        output = await shown(self._environment, result, "stdout", self._limit)
        return {"success": True, "output": output, "metadata": metadata}, images

    async def _failed(self, result: ExecutionResult, metadata: dict[str, Any]) -> dict[str, Any]:
        output = await shown(self._environment, result, "stderr", self._limit)
        answer = {"success": False, "output": output, "error": "Execution failed with non-zero exit code"}
        if result.stdout_bytes:
            metadata = {"stdout": await shown(self._environment, result, "stdout", self._limit), **metadata}
        return {**answer, "metadata": metadata} if metadata else answer
