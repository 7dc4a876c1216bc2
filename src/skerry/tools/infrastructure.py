"""What plugins find around them, and the service `sandbox_manager`, which runs code in sessions of a daemon.

    infrastructure = Infrastructure({"sandbox_manager": SandboxManager(HttpDoor())})
    await tool.init(PluginContext(infrastructure))

The daemon is reached through a door: `HttpDoor` (the unix socket of this machine, or a URL) or
`skerry.tools.grpc.GrpcDoor`.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NotRequired, Protocol, TypedDict

from skerry.client.aio.client import AsyncClient
from skerry.client.aio.environment import AsyncEnvironment
from skerry.errors import Conflict, EnvironmentEnded, InstallFailed, InvalidRequest, LimitReached, NotFound
from skerry.models import ExecutionResult
from skerry.tools.arguments import check, shown
from skerry.tools.python import SESSION, as_program, not_installed

RUNTIMES = {"python": "host"}
"""The image for a runtime, by its name as it is asked for (`python:3.10`) or without its version (`python`)."""

REQUEST: dict[str, Any] = {
    "type": "object",
    "properties": {
        "sessionId": {"type": "string"},
        "traceId": {"type": "string", "default": ""},
        "runtime": {"type": "string"},
        "code": {"type": "string"},
        "packages": {"type": "array", "items": {"type": "string"}, "default": []},
        "strict": {"type": "boolean", "default": False},
    },
    "required": ["sessionId", "runtime", "code"],
}
VERSION_SECONDS = 600.0
"""How long the version of an image's interpreter is remembered."""


class ToolExecutionResult(TypedDict):
    """`error` when it did not succeed, `metadata` when it did, or when it failed after it had printed something."""

    success: bool
    output: str | None
    error: NotRequired[str]
    metadata: NotRequired[dict[str, Any]]


class SandboxService(Protocol):
    """What a plugin knows of `SandboxManager`."""

    async def runCode(self, request: Mapping[str, Any]) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Infrastructure:
    """The services that plugins may use, by name."""

    services: Mapping[str, Any]

    def get_service(self, name: str) -> Any:
        """The service of this name, or None."""
        return self.services.get(name)


@dataclass(frozen=True)
class PluginContext:
    """What a plugin is given at its start."""

    infrastructure: Infrastructure


@dataclass(frozen=True)
class AgentContext:
    """For whom a tool is called."""

    session_id: str
    trace_id: str = ""


class Calls(Protocol):
    """What is asked of a daemon. An environment is told by its name. Every method raises SkerryError."""

    async def find(self, name: str) -> bool:
        """Whether it lives; if so, it is kept for longer."""

    async def create(self, name: str, image: str, limits: Mapping[str, Any]) -> None: ...
    async def version(self, language: str, image: str) -> str:
        """The version in a fresh environment: code of a session can forge whatever its own interpreter says."""

    async def run(
        self, name: str, session: str, code: str, timeout: float, packages: list[str]
    ) -> ExecutionResult:
        """In the session of this id, which is made, or made anew after a crash, when it is needed; see `as_program`.

        Packages are installed before. Raises InstallFailed.
        """

    def close(self) -> None: ...


class Door(Protocol):
    """A way to a daemon."""

    def calls(self, traceparent: str) -> Calls: ...


class SandboxManager:
    """Runs code, in one environment for each session, made when it is first needed, with these limits.

    A request has no say in limits or network; the daemon installs packages elsewhere. `timeout` is for one call, its
    installation apart.
    """

    def __init__(
        self,
        door: Door,
        *,
        runtimes: Mapping[str, str] = RUNTIMES,
        memory: int = 512 << 20,
        cpus: float = 1.0,
        timeout: float = 60.0,
    ) -> None:
        self._door = door
        self._runtimes = runtimes
        self._limits = {"memory": memory, "cpus": cpus}
        self._timeout = timeout
        self._versions: dict[str, tuple[float, str]] = {}
        """By image, with the time until which it holds."""

    async def runCode(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """`exitCode`, `stdout`, `stderr`, `durationMs`, `memoryUsage` in bytes, `traceId`, and the `runtime` that ran.

        The request has `sessionId`, `runtime`, `code`, and may have `traceId`, `packages` and `strict`: another version
        than that asked for is then refused instead of used. Code that fails, and packages that cannot be installed, are
        results. Raises SkerryError: InvalidRequest for the request, PlatformError and others for the infrastructure.
        """
        wanted = check(REQUEST, dict(request))
        calls = self._door.calls(traceparent(wanted["traceId"]))
        try:
            return await self._ran(calls, wanted)
        finally:
            calls.close()

    async def _ran(self, calls: Calls, wanted: dict[str, Any]) -> dict[str, Any]:
        language, _, version = wanted["runtime"].partition(":")
        image = self._runtimes.get(wanted["runtime"]) or self._runtimes.get(language)
        if image is None:
            known = ", ".join(self._runtimes)
            raise InvalidRequest(
                f"there is no runtime {shown(wanted['runtime'])}", hint=f"there are: {known}"
            )
        name = "session-" + hashlib.sha256(f"{image}\0{wanted['sessionId']}".encode()).hexdigest()[:24]
        ran = await self._version(calls, language, image)
        if not await calls.find(name):
            await calls.create(name, image, self._limits)
        if wanted["strict"] and version and not f"{ran}.".startswith(f"{version}."):
            raise InvalidRequest(f"{wanted['runtime']} is not there; there is {language}:{ran}")
        try:
            result = await calls.run(name, SESSION, wanted["code"], self._timeout, wanted["packages"])
        except InstallFailed as failed:
            result = not_installed(failed)
        return {
            "exitCode": result.exit_code,
            "stdout": result.stdout,
            "stderr": result.stderr,
            "durationMs": round(result.duration_seconds * 1000, 3),
            "memoryUsage": result.usage.memory_peak_bytes,
            "traceId": wanted["traceId"],
            "runtime": f"{language}:{ran}",
        }

    async def _version(self, calls: Calls, language: str, image: str) -> str:
        until, known = self._versions.get(image, (0.0, "unknown"))
        if time.monotonic() < until:
            return known
        try:
            told = await calls.version(language, image)
        except LimitReached:  # no room for one more environment, which says nothing of the code
            return known
        ran = told if re.fullmatch(r"\d{1,3}(\.\d{1,3}){1,3}", told) else "unknown"
        self._versions[image] = time.monotonic() + VERSION_SECONDS, ran
        return ran


def traceparent(trace_id: str) -> str:
    """The W3C trace context for a trace id: of 32 hex digits (or a UUID) that id, of other texts one made of them."""
    if not trace_id:
        return ""
    digits = trace_id.replace("-", "").lower()
    if not re.fullmatch(r"(?!0{32})[0-9a-f]{32}", digits):
        digits = hashlib.sha256(trace_id.encode()).hexdigest()[:32]
    return f"00-{digits}-{digits[:15]}1-01"


class HttpDoor:
    """HTTP: to the daemon of this machine, by its unix socket, or to the one at `url`."""

    def __init__(self, *, url: str | None = None, token: str | None = None) -> None:
        self._url = url
        self._token = token

    def calls(self, traceparent: str) -> Calls:
        return _HttpCalls(AsyncClient(url=self._url, token=self._token, traceparent=traceparent))


class _HttpCalls:
    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._found: AsyncEnvironment | None = None

    async def find(self, name: str) -> bool:
        try:
            await (await self._environment(name)).heartbeat()
        except (NotFound, EnvironmentEnded):
            self._found = None
            return False
        return True

    async def create(self, name: str, image: str, limits: Mapping[str, Any]) -> None:
        try:
            await AsyncEnvironment(image, name=name, client=self._client, **limits).create()
        except Conflict:
            await self._environment(name)  # another call was faster

    async def version(self, language: str, image: str) -> str:
        return (await self._client.execute_code(language, "pass", image=image)).version

    async def run(
        self, name: str, session: str, code: str, timeout: float, packages: list[str]
    ) -> ExecutionResult:
        one = await (await self._environment(name)).session("python", id=session, packages=packages)
        if (await one.info()).state == "crashed":
            await one.restart()
        result = await one.run(code, timeout=timeout)
        return as_program(result, result.raised.traceback if result.raised else "")

    async def _environment(self, name: str) -> AsyncEnvironment:
        if self._found is None:
            self._found = await AsyncEnvironment.get(name, self._client)
        return self._found

    def close(self) -> None:
        self._client.close()
