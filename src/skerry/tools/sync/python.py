# Generated from aio/python.py by scripts/generate_sync.py. Change that file, not this one.
"""The tool `python:execute` in a session of one environment: what one call defines, the next finds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skerry.tools.python import FIND_PACKAGES, INSTALL, SESSION, as_program, pictures
from skerry.tools.results import FIELD_MAX, bounded
from skerry.tools.sync.environment import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.client.sync.environment import Environment
    from skerry.models import ExecutionResult

    Images = tuple[tuple[str, str], ...]

TIMEOUT_SECONDS = 60
INSTALL_SECONDS = 300


class Python:
    """Packages are installed with whatever network the environment has. `limit` is as that of `environment.*`.

    Raises what is not the code's fault: PlatformError, EnvironmentNotFound, EnvironmentEnded, Denied, LimitReached, and
    InvalidRequest where there is no Python.
    """

    def __init__(self, environment: Environment, limit: int | None = None) -> None:
        self._environment = environment
        self._limit = limit

    def execute(self, code: str, requirements: Sequence[str] = ()) -> tuple[dict[str, Any], Images]:
        """The result as the plugin gives it, with the `value` of the last expression; and pictures, of figures say."""
        if requirements:
            done = self._environment.run([*INSTALL, *requirements], timeout=INSTALL_SECONDS)
            if not done.ok:
                return self._failed(as_program(done)), ()
        session = self._environment.session("python", id=SESSION)
        if (session.info()).state == "crashed":
            session.restart()
        if requirements:
            session.run(FIND_PACKAGES, timeout=TIMEOUT_SECONDS)
        result = session.run(code, timeout=TIMEOUT_SECONDS)
        images = pictures(result)
        ended = as_program(result, result.raised.traceback if result.raised else "")
        if result.exit_code != 0:
            return self._failed(ended), images
        metadata = {
            "executionTime": round(result.duration_seconds * 1000, 3),
            "memoryUsage": result.usage.memory_peak_bytes,
            "value": result.value and bounded(result.value, self._limit or FIELD_MAX),
        }
        output = shown(self._environment, result, "stdout", self._limit)
        return {"success": True, "output": output, "metadata": metadata}, images

    def _failed(self, result: ExecutionResult) -> dict[str, Any]:
        output = shown(self._environment, result, "stderr", self._limit)
        return {"success": False, "output": output, "error": "Execution failed with non-zero exit code"}
