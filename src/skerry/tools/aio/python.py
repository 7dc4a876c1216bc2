"""The tool `python:execute` in a session of one environment, which keeps its state between calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skerry.errors import InstallFailed
from skerry.tools.aio.environment import shown
from skerry.tools.python import SESSION, as_program, not_installed, pictures
from skerry.tools.results import FIELD_MAX, bounded
from skerry.tools.table import FAILED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.client.aio.environment import AsyncEnvironment
    from skerry.models import ExecutionResult, SessionResult

    Images = tuple[tuple[str, str], ...]

TIMEOUT_SECONDS = 60


async def run_python(
    environment: AsyncEnvironment,
    code: str,
    packages: Sequence[str],
    timeout: float,
    session_id: str = SESSION,
) -> SessionResult:
    """Run code in the session of this id, which is opened or restarted as needed. Raises InstallFailed."""
    session = await environment.session("python", id=session_id, packages=packages)
    if (await session.info()).state == "crashed":
        await session.restart()
    return await session.run(code, timeout=timeout)


class AsyncPython:
    """The tool, bound to one environment. The daemon installs packages, whatever the environment's network is.

    `limit` is that of `AsyncEnvironmentTools`. Raises PlatformError, EnvironmentNotFound, EnvironmentEnded, Denied,
    LimitReached, and InvalidRequest if the image has no Python.
    """

    def __init__(self, environment: AsyncEnvironment, limit: int | None = None) -> None:
        self._environment = environment
        self._limit = limit

    async def execute(self, code: str, requirements: Sequence[str] = ()) -> tuple[dict[str, Any], Images]:
        """The result in the form of the plugin, with the `value` of the last expression; and pictures, e.g. figures.

        The stream that is not `output` is in `metadata`, unless it is empty.
        """
        try:
            result = await run_python(self._environment, code, requirements, TIMEOUT_SECONDS)
        except InstallFailed as failed:
            return await self._failed(not_installed(failed), {}), ()
        ended = as_program(result, result.raised.traceback if result.raised else "")
        images, left_out = pictures(result)
        omitted = {"picturesLeftOut": left_out} if left_out else {}
        if result.exit_code != 0:
            return await self._failed(ended, omitted), images
        metadata = {
            "executionTime": round(result.duration_seconds * 1000, 3),
            "memoryUsage": result.usage.memory_peak_bytes,
            "value": result.value and bounded(result.value, self._limit or FIELD_MAX),
            **omitted,
        }
        if ended.stderr_bytes:
            metadata["stderr"] = await shown(self._environment, ended, "stderr", self._limit)
        output = await shown(self._environment, result, "stdout", self._limit)
        return {"success": True, "output": output, "metadata": metadata}, images

    async def _failed(self, result: ExecutionResult, metadata: dict[str, Any]) -> dict[str, Any]:
        output = await shown(self._environment, result, "stderr", self._limit)
        answer = {"success": False, "output": output, "error": FAILED}
        if result.stdout_bytes:
            metadata = {"stdout": await shown(self._environment, result, "stdout", self._limit), **metadata}
        return {**answer, "metadata": metadata} if metadata else answer
