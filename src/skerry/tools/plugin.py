"""The plugin `python:execute`: passes requests to the service `sandbox_manager`."""

from __future__ import annotations

from typing import Any

from skerry.errors import InvalidRequest
from skerry.tools.arguments import check
from skerry.tools.infrastructure import AgentContext, PluginContext, SandboxService, ToolExecutionResult
from skerry.tools.results import bounded
from skerry.tools.table import FAILED, PYTHON_EXECUTE


class PythonInterpreterTool:
    """Call `init(context)` once, then `execute(agent_context, args)` for every call of the model."""

    id = "python-interpreter"
    name = PYTHON_EXECUTE.name
    description = PYTHON_EXECUTE.description
    parameters = PYTHON_EXECUTE.parameters

    def __init__(self) -> None:
        self._sandbox: SandboxService | None = None

    async def init(self, context: PluginContext) -> None:
        """Raises RuntimeError if the service is not available."""
        self._sandbox = context.infrastructure.get_service("sandbox_manager")
        if self._sandbox is None:
            raise RuntimeError("Sandbox Infrastructure not available. Cannot initialize Python Tool.")

    async def execute(self, agent_context: AgentContext, args: Any) -> ToolExecutionResult:
        """Never raises. The stream that is not `output` is in `metadata`, unless it is empty."""
        try:
            given = check(self.parameters, args)
        except InvalidRequest as error:
            return {"success": False, "output": None, "error": f"Invalid parameters: {error}"}
        request = {
            "sessionId": agent_context.session_id,
            "traceId": agent_context.trace_id,
            "runtime": "python:3.10",
            "code": given["code"],
            "packages": given.get("requirements") or [],
        }
        try:
            if self._sandbox is None:
                raise RuntimeError("the tool was not initialized")
            return _outcome(await self._sandbox.runCode(request))
        except Exception as error:
            return {"success": False, "output": None, "error": f"Sandbox Error: {bounded(str(error))}"}


def _outcome(result: dict[str, Any]) -> ToolExecutionResult:
    stdout, stderr = bounded(result["stdout"]), bounded(result["stderr"])
    if result["exitCode"] != 0:
        failed: ToolExecutionResult = {"success": False, "output": stderr, "error": FAILED}
        return {**failed, "metadata": {"stdout": stdout}} if stdout else failed
    metadata = {"executionTime": result["durationMs"], "memoryUsage": result["memoryUsage"]}
    if stderr:
        metadata["stderr"] = stderr
    return {"success": True, "output": stdout, "metadata": metadata}
