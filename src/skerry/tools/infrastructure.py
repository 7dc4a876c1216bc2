"""The infrastructure that plugins get, and its service `sandbox_manager`, which runs code in sessions of a daemon.

    infrastructure = Infrastructure({"sandbox_manager": SandboxManager(HttpDoor())})
    await tool.init(PluginContext(infrastructure))

A door connects it to the daemon: `HttpDoor` (unix socket or URL) or `skerry.tools.grpc.GrpcDoor`.
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
from skerry.tools.aio.python import run_python
from skerry.tools.arguments import check, shown
from skerry.tools.python import SESSION, as_program, not_installed

RUNTIMES = {"python": "host"}
"""Image by runtime, with its version (`python:3.10`) or without (`python`)."""

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
"""How long the version of an image's interpreter is cached."""


class ToolExecutionResult(TypedDict):
    """Has `error` on failure, and `metadata` on success or if the failed code had printed something."""

    success: bool
    output: str | None
    error: NotRequired[str]
    metadata: NotRequired[dict[str, Any]]


class SandboxService(Protocol):
    """The interface of `SandboxManager` that plugins use."""

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
    """The argument of a plugin's `init`."""

    infrastructure: Infrastructure


@dataclass(frozen=True)
class AgentContext:
    """The session and trace that a tool call belongs to."""

    session_id: str
    trace_id: str = ""


class SandboxClient(Protocol):
    """The requests of `SandboxManager` to a daemon, by name of an environment. Every method raises SkerryError."""

    async def find(self, name: str) -> bool:
        """True if the environment is running; then its lease is renewed."""

    async def create(self, name: str, image: str, limits: Mapping[str, Any]) -> None: ...
    async def version(self, language: str, image: str) -> str:
        """The version in a new environment: code in a session could forge what its interpreter reports."""

    async def run(
        self, name: str, session: str, code: str, timeout: float, packages: list[str]
    ) -> ExecutionResult:
        """Install the packages, then run code in the session of this id; see `as_program`. Raises InstallFailed."""

    def close(self) -> None: ...


class DaemonDoor(Protocol):
    """Connects to one daemon."""

    def client(self, traceparent: str) -> SandboxClient: ...


class SandboxManager:
    """Runs code in one environment per session, created on first use with these limits.

    Requests cannot change limits or network. `timeout` is that of one call, without the installation of its packages.
    """

    def __init__(
        self,
        door: DaemonDoor,
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
        """By image: (expiry, version)."""

    async def runCode(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """`exitCode`, `stdout`, `stderr`, `durationMs`, `memoryUsage` in bytes, `traceId`, and the `runtime` that ran.

        The request has `sessionId`, `runtime`, `code`, and may have `traceId`, `packages` and `strict`, which refuses
        another version than the requested one. Code that fails and packages that cannot be installed are results.
        Raises SkerryError: InvalidRequest for the request, PlatformError and others for the infrastructure.
        """
        wanted = check(REQUEST, dict(request))
        client = self._door.client(traceparent(wanted["traceId"]))
        try:
            return await self._run(client, wanted)
        finally:
            client.close()

    async def _run(self, client: SandboxClient, wanted: dict[str, Any]) -> dict[str, Any]:
        language, _, version = wanted["runtime"].partition(":")
        image = self._runtimes.get(wanted["runtime"]) or self._runtimes.get(language)
        if image is None:
            known = ", ".join(self._runtimes)
            raise InvalidRequest(f"unknown runtime {shown(wanted['runtime'])}", hint=f"known: {known}")
        name = "session-" + hashlib.sha256(f"{image}\0{wanted['sessionId']}".encode()).hexdigest()[:24]
        ran = await self._version(client, language, image)
        if not await client.find(name):
            await client.create(name, image, self._limits)
        if wanted["strict"] and version and not f"{ran}.".startswith(f"{version}."):
            raise InvalidRequest(f"runtime {wanted['runtime']} is not available, but {language}:{ran} is")
        try:
            result = await client.run(name, SESSION, wanted["code"], self._timeout, wanted["packages"])
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

    async def _version(self, client: SandboxClient, language: str, image: str) -> str:
        until, known = self._versions.get(image, (0.0, "unknown"))
        if time.monotonic() < until:
            return known
        try:
            found = await client.version(language, image)
        except LimitReached:  # no new environment now: unrelated to this request
            return known
        ran = found if re.fullmatch(r"\d{1,3}(\.\d{1,3}){1,3}", found) else "unknown"
        self._versions[image] = time.monotonic() + VERSION_SECONDS, ran
        return ran


def traceparent(trace_id: str) -> str:
    """The W3C trace context of a trace id: 32 hex digits or a UUID as they are, other texts hashed."""
    if not trace_id:
        return ""
    digits = trace_id.replace("-", "").lower()
    if not re.fullmatch(r"(?!0{32})[0-9a-f]{32}", digits):
        digits = hashlib.sha256(trace_id.encode()).hexdigest()[:32]
    return f"00-{digits}-{digits[:15]}1-01"


class HttpDoor:
    """The local daemon, over its unix socket, or the one at `url`."""

    def __init__(self, *, url: str | None = None, token: str | None = None) -> None:
        self._url = url
        self._token = token

    def client(self, traceparent: str) -> SandboxClient:
        return _HttpClient(AsyncClient(url=self._url, token=self._token, traceparent=traceparent))


class _HttpClient:
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
        result = await run_python(await self._environment(name), code, packages, timeout, session)
        return as_program(result, result.raised.traceback if result.raised else "")

    async def _environment(self, name: str) -> AsyncEnvironment:
        if self._found is None:
            self._found = await AsyncEnvironment.get(name, self._client)
        return self._found

    def close(self) -> None:
        self._client.close()
