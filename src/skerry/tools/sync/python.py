# Generated from aio/python.py by scripts/generate_sync.py. Change that file, not this one.
"""The tool `python:execute` in a session of one environment, which keeps its state between calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skerry.errors import InstallFailed
from skerry.tools.python import SESSION, as_program, not_installed, pictures
from skerry.tools.results import FIELD_MAX, bounded
from skerry.tools.sync.environment import shown
from skerry.tools.table import FAILED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.client.sync.environment import Environment
    from skerry.models import ExecutionResult, SessionResult

    Images = tuple[tuple[str, str], ...]

TIMEOUT_SECONDS = 60


def run_python(
    environment: Environment,
    code: str,
    packages: Sequence[str],
    timeout: float,
    session_id: str = SESSION,
) -> SessionResult:
    """Run code in the session of this id, which is opened or restarted as needed. Raises InstallFailed."""
    session = environment.session("python", id=session_id, packages=packages)
    if (session.info()).state == "crashed":
        session.restart()
    return session.run(code, timeout=timeout)


class Python:
    """The tool, bound to one environment. The daemon installs packages, whatever the environment's network is.

    `limit` is that of `EnvironmentTools`. Raises PlatformError, EnvironmentNotFound, EnvironmentEnded, Denied,
    LimitReached, and InvalidRequest if the image has no Python.
    """

    def __init__(self, environment: Environment, limit: int | None = None) -> None:
        self._environment = environment
        self._limit = limit

    def execute(self, code: str, requirements: Sequence[str] = ()) -> tuple[dict[str, Any], Images]:
        """The result in the form of the plugin, with the `value` of the last expression; and pictures, e.g. figures.

        The stream that is not `output` is in `metadata`, unless it is empty.
        """
        try:
            result = run_python(self._environment, code, requirements, TIMEOUT_SECONDS)
        except InstallFailed as failed:
            return self._failed(not_installed(failed), {}), ()
        ended = as_program(result, result.raised.traceback if result.raised else "")
        images, left_out = pictures(result)
        omitted = {"picturesLeftOut": left_out} if left_out else {}
        if result.exit_code != 0:
            return self._failed(ended, omitted), images
        metadata = {
            "executionTime": round(result.duration_seconds * 1000, 3),
            "memoryUsage": result.usage.memory_peak_bytes,
            "value": result.value and bounded(result.value, self._limit or FIELD_MAX),
            **omitted,
        }
        if ended.stderr_bytes:
            metadata["stderr"] = shown(self._environment, ended, "stderr", self._limit)
        output = shown(self._environment, result, "stdout", self._limit)
        return {"success": True, "output": output, "metadata": metadata}, images

    def _failed(self, result: ExecutionResult, metadata: dict[str, Any]) -> dict[str, Any]:
        output = shown(self._environment, result, "stderr", self._limit)
        answer = {"success": False, "output": output, "error": FAILED}
        if result.stdout_bytes:
            metadata = {"stdout": shown(self._environment, result, "stdout", self._limit), **metadata}
        return {**answer, "metadata": metadata} if metadata else answer
