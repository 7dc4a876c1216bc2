"""Operations of executions: run and wait, start in the background, look at, feed, signal, kill, read the log."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Annotated, Any

from pydantic import WithJsonSchema
from starlette.responses import Response

from skerry.daemon.http import schemas
from skerry.daemon.http.answers import AT_ONCE, Octets, Stream, Watch, line, reply
from skerry.daemon.http.environments import USAGE_EXAMPLE
from skerry.daemon.http.operations import (
    IN_ENVIRONMENT,
    IN_EXECUTION,
    NDJSON,
    OCTETS,
    Call,
    Operation,
    Parameter,
)
from skerry.daemon.http.requests import (
    UPLOAD_LIMIT,
    Body,
    Content,
    Encoding,
    Length,
    Seconds,
    Signal,
    Text,
    Texts,
    TextsByName,
    decode,
)
from skerry.errors import Busy, InvalidRequest
from skerry.manager.executions.commands import OUTPUT_LIMIT, OUTPUT_LIMIT_MAX, Command
from skerry.manager.executions.output import STREAM_NAMES, Log
from skerry.models import ExecutionResult, Outcome, encode_bytes, encoding_of

OUTPUT_LIMITS = {"type": "integer", "minimum": 0, "maximum": OUTPUT_LIMIT_MAX}


class Execute(Body):
    contents = ("stdin",)
    command: Text | None = None
    """Text for a shell that remembers: working directory, variables, functions."""
    argv: Texts | None = None
    """A program and its arguments, without a shell; instead of `command`."""
    shell: Text = "main"
    """Which shell runs the command; each name is a shell of its own."""
    timeout: Seconds | None = None
    """After this many seconds it is killed, with everything it started."""
    timeout_seconds: Seconds | None = None
    """Another name for `timeout`."""
    output_limit: Annotated[int, WithJsonSchema(OUTPUT_LIMITS)] | None = None
    """Bytes of each stream; what is beyond is cut and flagged."""
    stdin: Content | None = None
    stdin_encoding: Encoding = "utf-8"
    cwd: Text | None = None
    """Relative to the workspace."""
    env: TextsByName | None = None
    secrets: TextsByName | None = None
    """Variables of which only the names are ever written down. Other code in the environment can read them."""
    user: Text | None = None
    """`appuser` or `root`, which is root of the environment alone."""
    profile: Text | None = None
    """The execution profile, which restricts this program further than its environment: `strict`, say."""

    def to_command(self) -> Command:
        if self.timeout is not None and self.timeout_seconds is not None:
            raise InvalidRequest("timeout and timeout_seconds are the same: give one")
        return Command(
            argv=self.argv,
            text=self.command,
            shell=self.shell if self.argv is None else "",
            timeout=self.timeout if self.timeout is not None else self.timeout_seconds,
            output_limit=OUTPUT_LIMIT if self.output_limit is None else self.output_limit,
            stdin=self.stdin is not None,
            cwd=self.cwd,
            env=self.env or {},
            secrets=self.secrets or {},
            user=self.user or "appuser",
            profile=self.profile or "",
        )

    async def input(self) -> bytes | bytearray | None:
        return None if self.stdin is None else await decode(self.stdin, self.stdin_encoding, "stdin")


class Terminal(Body):
    rows: Length
    cols: Length


class Start(Body):
    command: Text | None = None
    """Text for `sh -c`."""
    argv: Texts | None = None
    """A program and its arguments, instead of `command`."""
    pty: Terminal | None = None
    """With a terminal of this size; everything it writes is then `stdout`."""
    stdin: bool = False
    """Whether it shall have a standard input."""
    timeout: Seconds | None = None
    """After this many seconds it is killed, with everything it started."""
    cwd: Text | None = None
    """Relative to the workspace."""
    env: TextsByName | None = None
    secrets: TextsByName | None = None
    """Variables of which only the names are ever written down. Other code in the environment can read them."""
    user: Text | None = None
    """`appuser` or `root`, which is root of the environment alone."""
    profile: Text | None = None
    """The execution profile, which restricts this program further than its environment: `strict`, say."""

    def to_command(self) -> Command:
        return Command(
            argv=self.argv,
            text=self.command,
            pty=(self.pty.rows, self.pty.cols) if self.pty is not None else None,
            stdin=self.stdin,
            timeout=self.timeout,
            cwd=self.cwd,
            env=self.env or {},
            secrets=self.secrets or {},
            user=self.user or "appuser",
            profile=self.profile or "",
        )


class Kill(Body):
    signal: Signal
    """Its number: 2 is SIGINT, 15 is SIGTERM."""


CUT_TO = AT_ONCE // 4


async def result_reply(call: Call, result: ExecutionResult, **more: Any) -> Response:
    """The answer with a result. Its output is cut, and flagged, if too many large answers are unread."""
    size = len(result.stdout_bytes) + len(result.stderr_bytes)
    if size <= AT_ONCE:
        return reply({**result.to_dict(), **more})
    if not call.hold(size):
        cut = result.stdout_bytes[:CUT_TO], result.stderr_bytes[:CUT_TO]
        words = f"{result.message}; " if result.message else ""
        words += "the output is cut: too many large answers are unread"
        return reply(
            {**replace(result, stdout_bytes=cut[0], stderr_bytes=cut[1], message=words).to_dict(), **more}
        )
    body = replace(result, stdout_bytes=b"", stderr_bytes=b"").to_dict()
    for name, data in (("stdout", result.stdout_bytes), ("stderr", result.stderr_bytes)):
        body[name] = Octets(data, encoding_of(data))
        await call.pause()
        body |= {
            f"{name}_encoding": body[name].encoding,
            f"{name}_truncated": getattr(result, f"{name}_truncated"),
        }
    return reply({**body, **more})


async def execute(call: Call, environment_id: str, body: Execute) -> Response:
    command, stdin = body.to_command(), await body.input()
    executions = await call.executions(environment_id)
    execution = executions.prepare(call.caller, command)
    with Watch(call.receive, lambda: execution.stop(Outcome.CANCELED, "the client went away")):
        result = await execution.run(stdin)
    return await result_reply(call, result)


async def start(call: Call, environment_id: str, body: Start) -> Response:
    command = body.to_command()
    executions = await call.executions(environment_id)
    execution = await executions.start(call.caller, command)
    executions.follow(execution)
    return reply(execution.info.to_dict(), 201)


async def list_executions(call: Call, environment_id: str) -> Response:
    executions = await call.executions(environment_id)
    return reply({"executions": [execution.info.to_dict() for execution in executions.list()]})


async def inspect(call: Call, environment_id: str, execution_id: str) -> Response:
    execution = (await call.executions(environment_id)).find(execution_id)
    result = execution.result
    return reply({**execution.info.to_dict(), "result": None if result is None else result.to_dict()})


async def signal(call: Call, environment_id: str, execution_id: str, body: Kill) -> Response:
    executions = await call.executions(environment_id)
    execution = executions.find(execution_id)
    detail = {"execution_id": execution.id, "signal": body.signal}
    async with executions.runtime.act(call.caller, "execution.signal", detail):
        execution.signal(body.signal)
    return reply({})


async def stdin(call: Call, environment_id: str, execution_id: str, eof: bool) -> Response:
    execution = (await call.executions(environment_id)).find(execution_id)
    async for chunk in call.chunks(UPLOAD_LIMIT):
        await execution.write(chunk)
    if eof:
        await execution.close_stdin()
    return reply({})


async def kill(call: Call, environment_id: str, execution_id: str) -> Response:
    executions = await call.executions(environment_id)
    execution = executions.find(execution_id)
    async with executions.runtime.act(call.caller, "execution.kill", {"execution_id": execution.id}):
        execution.stop(Outcome.CANCELED, "killed on request")
        await execution.over()
    return reply({})


async def logs(call: Call, environment_id: str, follow: bool, execution: str) -> Response:
    log = (await call.executions(environment_id)).runtime.log
    return Stream(_log_lines(log, follow, execution), NDJSON)


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


EXAMPLE = {
    "execution_id": "b8t2c6w4y0hn",
    "environment_id": "k3v9x1m2p7qa",
    "command": "python3 server.py",
    "state": "running",
    "started_at": 1767225601.5,
    "pid": 12,
    "pty": False,
    "outcome": "",
    "exit_code": None,
    "profile": "",
}
RESULT_EXAMPLE = {
    "error": False,
    "stdout": "hello\n",
    "stderr": "",
    "exit_code": 0,
    "execution_id": "b8t2c6w4y0hn",
    "outcome": "completed",
    "stdout_encoding": "utf-8",
    "stderr_encoding": "utf-8",
    "stdout_size": 6,
    "stderr_size": 0,
    "stdout_truncated": False,
    "stderr_truncated": False,
    "duration_seconds": 0.0012,
    "usage": USAGE_EXAMPLE,
    "message": "",
    "profile": "",
}

OPERATIONS = (
    Operation(
        name="execute",
        method="POST",
        path="/environments/{environment_id}/execute",
        tag="executions",
        verb="execute",
        summary="Run a command and wait for its result",
        text="A command that fails, hangs or is killed is a result (200), never an error. Commands of one shell "
        "wait for each other. If the connection breaks, the command is killed.",
        handler=execute,
        body=Execute,
        body_example={"command": "cd src && make test", "timeout": 60},
        answer=schemas.Result,
        answer_example=RESULT_EXAMPLE,
        errors=(*IN_ENVIRONMENT, Busy),
    ),
    Operation(
        name="start_execution",
        method="POST",
        path="/environments/{environment_id}/executions",
        tag="executions",
        verb="execute",
        summary="Start a program in the background",
        text="Its recent output is kept. Read it as it comes with `events`, or with `attach`, which can also write.",
        handler=start,
        body=Start,
        body_example={"command": "python3 server.py", "stdin": True},
        status=201,
        answer=schemas.Execution,
        answer_example=EXAMPLE,
        errors=(*IN_ENVIRONMENT, Busy),
    ),
    Operation(
        name="list_executions",
        method="GET",
        path="/environments/{environment_id}/executions",
        tag="executions",
        verb="read",
        summary="List executions: running ones, and recent background ones",
        handler=list_executions,
        answer=schemas.Executions,
        answer_example={"executions": [EXAMPLE]},
        errors=IN_ENVIRONMENT,
    ),
    Operation(
        name="get_execution",
        method="GET",
        path="/environments/{environment_id}/executions/{execution_id}",
        tag="executions",
        verb="read",
        summary="Inspect an execution",
        handler=inspect,
        answer=schemas.ExecutionDetails,
        answer_example={**EXAMPLE, "result": None},
        errors=IN_EXECUTION,
    ),
    Operation(
        name="signal_execution",
        method="POST",
        path="/environments/{environment_id}/executions/{execution_id}/signal",
        tag="executions",
        verb="execute",
        summary="Send a signal to an execution",
        handler=signal,
        body=Kill,
        body_example={"signal": 15},
        answer=schemas.Nothing,
        answer_example={},
        errors=IN_EXECUTION,
    ),
    Operation(
        name="write_stdin",
        method="POST",
        path="/environments/{environment_id}/executions/{execution_id}/stdin",
        tag="executions",
        verb="execute",
        summary="Write to the standard input of an execution",
        text="Answers when the program has read everything.",
        handler=stdin,
        query=(Parameter("eof", "boolean", "Close it afterwards.", default=False, example=True),),
        uploads=(OCTETS,),
        body_example="yes\n",
        answer=schemas.Nothing,
        answer_example={},
        errors=IN_EXECUTION,
    ),
    Operation(
        name="kill_execution",
        method="DELETE",
        path="/environments/{environment_id}/executions/{execution_id}",
        tag="executions",
        verb="execute",
        summary="Kill an execution with all its processes",
        text="Answers when all its processes are gone. Killing an ended execution succeeds.",
        handler=kill,
        answer=schemas.Nothing,
        answer_example={},
        errors=IN_EXECUTION,
    ),
    Operation(
        name="read_logs",
        method="GET",
        path="/environments/{environment_id}/logs",
        tag="executions",
        verb="read",
        summary="Read the recent output of all executions",
        text="One JSON object a line. A slow reader misses output, and is told how much.",
        handler=logs,
        query=(
            Parameter(
                "follow", "boolean", "Go on with what comes, until the environment ends.", default=False
            ),
            Parameter("execution", "string", "Only of this execution.", default=""),
        ),
        answer=schemas.LogLine,
        media=(NDJSON,),
        answer_example={
            "t": 1767225601.75,
            "execution_id": "b8t2c6w4y0hn",
            "stream": "stdout",
            "data": "hello\n",
            "encoding": "utf-8",
        },
        errors=IN_ENVIRONMENT,
    ),
)
