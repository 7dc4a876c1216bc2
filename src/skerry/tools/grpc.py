"""Connects `sandbox_manager` to a remote daemon over gRPC (`pip install 'skerry[grpc]'`)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from skerry.errors import (
    Conflict,
    DaemonUnavailable,
    EnvironmentEnded,
    NotFound,
    PlatformError,
    SkerryError,
    from_dict,
)
from skerry.models import ExecutionResult, Outcome, Usage
from skerry.tools.infrastructure import SandboxClient
from skerry.tools.python import as_program
from skerry.v1 import code_pb2, environments_pb2, executions_pb2, sessions_pb2
from skerry.v1.code_pb2_grpc import CodeStub
from skerry.v1.environments_pb2_grpc import EnvironmentsStub
from skerry.v1.problem_pb2 import Problem
from skerry.v1.sessions_pb2_grpc import SessionsStub


class GrpcDoor:
    """The daemon behind `channel`, which the caller closes; `token` is the access token."""

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        self._channel = channel
        self._token = token

    def client(self, traceparent: str) -> SandboxClient:
        metadata = [("authorization", f"Bearer {self._token}")]
        if traceparent:
            metadata.append(("traceparent", traceparent))
        return _GrpcClient(self._channel, tuple(metadata))


class _GrpcClient:
    def __init__(self, channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...]) -> None:
        self._metadata = metadata
        self._environments: Any = EnvironmentsStub(channel)
        self._sessions: Any = SessionsStub(channel)
        self._code: Any = CodeStub(channel)

    async def find(self, name: str) -> bool:
        try:
            await self._call(
                self._environments.Heartbeat, environments_pb2.HeartbeatRequest(environment_id=name)
            )
        except (NotFound, EnvironmentEnded):
            return False
        return True

    async def create(self, name: str, image: str, limits: Mapping[str, Any]) -> None:
        request = environments_pb2.CreateEnvironmentRequest(name=name, image=image, **limits)
        try:
            await self._call(self._environments.CreateEnvironment, request)
        except Conflict:
            if not await self.find(name):  # else another call was faster
                raise

    async def version(self, language: str, image: str) -> str:
        request = code_pb2.ExecuteCodeRequest(language=language, code="pass", image=image)
        version: str = (await self._call(self._code.ExecuteCode, request)).version
        return version

    async def run(
        self, name: str, session: str, code: str, timeout: float, packages: list[str]
    ) -> ExecutionResult:
        where: dict[str, Any] = {"environment_id": name, "session_id": session}
        request = sessions_pb2.OpenSessionRequest(language="python", packages=packages, **where)
        found = await self._call(self._sessions.OpenSession, request)
        if found.state == sessions_pb2.SESSION_STATE_CRASHED:
            await self._call(self._sessions.RestartSession, sessions_pb2.RestartSessionRequest(**where))
        call = sessions_pb2.RunCodeRequest(code=code, timeout=timeout, **where)
        answer = await self._call(self._sessions.RunCode, call)
        return as_program(_result(answer), answer.raised.traceback)

    async def _call(self, rpc: Any, request: Any) -> Any:
        async with _errors():
            return await rpc(request, metadata=self._metadata)

    def close(self) -> None:
        """Does nothing: the caller of GrpcDoor closes the channel."""


def _result(message: Any) -> ExecutionResult:
    usage = {field.name: value for field, value in message.usage.ListFields()}
    outcome = executions_pb2.Outcome.Name(message.outcome).removeprefix("OUTCOME_").lower()
    return ExecutionResult(
        execution_id=message.execution_id,
        outcome=Outcome(outcome),
        exit_code=message.exit_code,
        stdout_bytes=message.stdout,
        stderr_bytes=message.stderr,
        stdout_size=message.stdout_size,
        stderr_size=message.stderr_size,
        duration_seconds=message.duration_seconds,
        usage=Usage.from_dict(usage),
        message=message.message,
    )


@asynccontextmanager
async def _errors() -> AsyncIterator[None]:
    """Raise the SkerryError of the daemon instead of a gRPC error."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise _problem(error) from None


def _problem(error: grpc.aio.AioRpcError) -> SkerryError:
    for key, value in error.trailing_metadata() or ():
        if key == "skerry-problem-bin" and isinstance(value, bytes):
            told = Problem.FromString(value)
            return from_dict({"code": told.code, "message": told.message, "hint": told.hint})
    words = error.details() or error.code().name
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        return DaemonUnavailable(words)
    return PlatformError(words)
