"""The tool `python:execute` in a session of one environment: what one call defines, the next finds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skerry.tools.aio.environment import shown
from skerry.tools.python import FIND_PACKAGES, INSTALL, SESSION, as_program, pictures
from skerry.tools.results import FIELD_MAX, bounded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.client.aio.environment import AsyncEnvironment
    from skerry.models import ExecutionResult

    Images = tuple[tuple[str, str], ...]

TIMEOUT_SECONDS = 60
INSTALL_SECONDS = 300


class AsyncPython:
    """Packages are installed with whatever network the environment has. `limit` is as that of `environment.*`.

    Raises what is not the code's fault: PlatformError, EnvironmentNotFound, EnvironmentEnded, Denied, LimitReached, and
    InvalidRequest where there is no Python.
    """

    def __init__(self, environment: AsyncEnvironment, limit: int | None = None) -> None:
        self._environment = environment
        self._limit = limit

    async def execute(self, code: str, requirements: Sequence[str] = ()) -> tuple[dict[str, Any], Images]:
        """The result as the plugin gives it, with the `value` of the last expression; and pictures, of figures say."""
        if requirements:
            done = await self._environment.run([*INSTALL, *requirements], timeout=INSTALL_SECONDS)
            if not done.ok:
                return await self._failed(as_program(done)), ()
        session = await self._environment.session("python", id=SESSION)
        if (await session.info()).state == "crashed":
            await session.restart()
        if requirements:
            await session.run(FIND_PACKAGES, timeout=TIMEOUT_SECONDS)
        result = await session.run(code, timeout=TIMEOUT_SECONDS)
        images = pictures(result)
        ended = as_program(result, result.raised.traceback if result.raised else "")
        if result.exit_code != 0:
            return await self._failed(ended), images
        metadata = {
            "executionTime": round(result.duration_seconds * 1000, 3),
            "memoryUsage": result.usage.memory_peak_bytes,
            "value": result.value and bounded(result.value, self._limit or FIELD_MAX),
        }
        output = await shown(self._environment, result, "stdout", self._limit)
        return {"success": True, "output": output, "metadata": metadata}, images

    async def _failed(self, result: ExecutionResult) -> dict[str, Any]:
        output = await shown(self._environment, result, "stderr", self._limit)
        return {"success": False, "output": output, "error": "Execution failed with non-zero exit code"}
