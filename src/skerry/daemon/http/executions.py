"""Routes of executions: run and wait, start in the background, look at, feed, signal, kill, read the log."""

from __future__ import annotations

import base64
import binascii
from collections.abc import AsyncGenerator
from typing import Literal

from fastapi import APIRouter, Request, Response
from starlette.routing import Route

from skerry.daemon.http.answers import Stream, Watch, line, reply
from skerry.daemon.http.requests import UPLOAD_LIMIT, Body, Text, flag, query, read_json, read_raw
from skerry.errors import InvalidRequest
from skerry.manager.commands import OUTPUT_LIMIT, Command
from skerry.manager.environments import EnvironmentManager
from skerry.manager.output import STREAM_NAMES, Log
from skerry.models import Outcome, encode_bytes


class Execute(Body):
    command: Text | None = None
    argv: list[Text] | None = None
    shell: Text = "main"
    timeout: float | None = None
    output_limit: int | None = None
    stdin: Text | None = None
    stdin_encoding: Literal["utf-8", "base64"] = "utf-8"
    cwd: Text | None = None
    env: dict[Text, Text] | None = None
    user: Text | None = None

    def to_command(self) -> Command:
        return Command(
            argv=self.argv,
            text=self.command,
            shell=self.shell if self.argv is None else "",
            timeout=self.timeout,
            output_limit=OUTPUT_LIMIT if self.output_limit is None else self.output_limit,
            stdin=self.stdin is not None,
            cwd=self.cwd,
            env=self.env or {},
            user=self.user or "appuser",
        )

    def input(self) -> bytes | None:
        if self.stdin is None:
            return None
        try:
            if self.stdin_encoding == "base64":
                return base64.b64decode(self.stdin, validate=True)
            return self.stdin.encode("utf-8", "surrogateescape")
        except (binascii.Error, ValueError) as error:
            raise InvalidRequest(f"stdin is not {self.stdin_encoding}") from error


class Terminal(Body):
    rows: int
    cols: int


class Start(Body):
    command: Text | None = None
    argv: list[Text] | None = None
    pty: Terminal | None = None
    stdin: bool = False
    timeout: float | None = None
    cwd: Text | None = None
    env: dict[Text, Text] | None = None
    user: Text | None = None

    def to_command(self) -> Command:
        return Command(
            argv=self.argv,
            text=self.command,
            pty=(self.pty.rows, self.pty.cols) if self.pty is not None else None,
            stdin=self.stdin,
            timeout=self.timeout,
            cwd=self.cwd,
            env=self.env or {},
            user=self.user or "appuser",
        )


class Signal(Body):
    signal: int


def execute_route(manager: EnvironmentManager) -> Route:
    """The one route whose speed is felt: a plain one, without what FastAPI does around the others."""

    async def execute(request: Request) -> Response:
        body = await read_json(request, Execute)
        command, stdin = body.to_command(), body.input()
        _, executions = manager.running(request.path_params["ref"])
        execution = executions.prepare(command)
        with Watch(request.receive, lambda: execution.stop(Outcome.CANCELED, "the client went away")):
            result = await execution.run(stdin)
        return reply(result.to_dict())

    return Route("/environments/{ref}/execute", execute, methods=["POST"])


def routes(manager: EnvironmentManager) -> APIRouter:
    router = APIRouter(prefix="/environments/{ref}")

    @router.post("/executions")
    async def start(ref: str, request: Request) -> Response:
        command = (await read_json(request, Start)).to_command()
        _, executions = manager.running(ref)
        execution = await executions.start(command)
        executions.follow(execution)
        return reply(execution.info.to_dict(), 201)

    @router.get("/executions")
    async def list_executions(ref: str) -> Response:
        _, executions = manager.running(ref)
        return reply({"executions": [execution.info.to_dict() for execution in executions.list()]})

    @router.get("/executions/{execution_id}")
    async def inspect(ref: str, execution_id: str) -> Response:
        execution = manager.running(ref)[1].find(execution_id)
        found = execution.info.to_dict()
        if execution.result is not None:
            found["result"] = execution.result.to_dict()
        return reply(found)

    @router.post("/executions/{execution_id}/signal")
    async def signal(ref: str, execution_id: str, request: Request) -> Response:
        body = await read_json(request, Signal)
        manager.running(ref)[1].find(execution_id).signal(body.signal)
        return reply({})

    @router.post("/executions/{execution_id}/stdin")
    async def stdin(ref: str, execution_id: str, request: Request) -> Response:
        eof = flag(query(request, "eof"), "eof")
        execution = manager.running(ref)[1].find(execution_id)
        async for chunk in read_raw(request, UPLOAD_LIMIT):
            await execution.write(chunk)
        if eof:
            await execution.close_stdin()
        return reply({})

    @router.delete("/executions/{execution_id}")
    async def kill(ref: str, execution_id: str) -> Response:
        execution = manager.running(ref)[1].find(execution_id)
        execution.stop(Outcome.CANCELED, "killed on request")
        await execution.over()
        return reply({})

    @router.get("/logs")
    async def logs(ref: str, request: Request) -> Response:
        parameters = query(request, "follow", "execution")
        lines = _log_lines(
            manager.running(ref)[1].log, flag(parameters, "follow"), parameters.get("execution", "")
        )
        return Stream(lines, "application/x-ndjson")

    return router


async def _log_lines(log: Log, follow: bool, only: str) -> AsyncGenerator[bytes, None]:
    tap = log.read(follow=follow)
    try:
        async for entry in tap:
            if only and entry.execution_id not in (only, ""):
                continue
            data, encoding = encode_bytes(entry.data)
            yield line(
                {
                    "t": entry.at,
                    "execution_id": entry.execution_id,
                    "stream": STREAM_NAMES[entry.stream],
                    "data": data,
                    "encoding": encoding,
                }
            )
    finally:
        log.leave(tap)
