"""The WebSocket that joins a client to an execution: output, input, signals, the size of its terminal."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Annotated, Any

from pydantic import Field
from starlette.websockets import WebSocket, WebSocketDisconnect

from skerry.daemon.http.executions import Start
from skerry.daemon.http.operations import IN_ENVIRONMENT, Call, Operation
from skerry.daemon.http.requests import Body, Text, parse
from skerry.errors import InvalidRequest, SkerryError
from skerry.manager.caller import Caller
from skerry.manager.executions.execution import Execution
from skerry.manager.executions.registry import Executions
from skerry.models import ExecutionResult, Outcome

LOST = "skerry.lost"
"""Where the server puts a future, into the connection's state, that is done when the connection is lost."""


class Opening(Start):
    execution_id: Text | None = None


class Control(Body):
    resize: Annotated[list[int], Field(min_length=2, max_length=2)] | None = None
    signal: int | None = None
    kill: bool = False


async def attach(call: Call, websocket: WebSocket, environment_id: str) -> None:
    executions = await call.executions(environment_id)
    await websocket.accept()
    with contextlib.suppress(WebSocketDisconnect):
        try:
            opening = parse(Opening, await _receive_text(websocket))
            await _serve(call.caller, websocket, executions, opening)
        except SkerryError as error:
            await _say(websocket, {"event": "error", "error": error.to_dict()})
            await websocket.close(1011)


async def _serve(caller: Caller, websocket: WebSocket, executions: Executions, opening: Opening) -> None:
    owned = opening.execution_id is None
    if opening.execution_id is None:
        execution = await executions.start(caller, opening.to_command())
    else:
        execution = executions.find(opening.execution_id)
    tap = execution.tap()
    if owned:
        executions.follow(execution)
    lost: asyncio.Future[None] = websocket.scope["state"][LOST]
    lost.add_done_callback(lambda _: tap.close())
    inbound = asyncio.create_task(_inbound(caller, websocket, executions, execution))
    try:
        await _say(websocket, {"event": "started", "execution": execution.info.to_dict()})
        async for entry in tap:
            await websocket.send_bytes(bytes((entry.stream,)) + entry.data)
        if not lost.done():
            await execution.over()
            result = execution.result
            await _say(
                websocket, {"event": "ended", "result": summary(result) if result is not None else None}
            )
            await websocket.close(1000)
    finally:
        inbound.cancel()
        execution.untap(tap)
        if owned and execution.result is None:
            execution.stop(Outcome.CANCELED, "the client went away")


async def _inbound(
    caller: Caller, websocket: WebSocket, executions: Executions, execution: Execution
) -> None:
    """What the client sends. Stdin that the program does not take holds up all that comes after it."""
    with contextlib.suppress(WebSocketDisconnect):
        while True:
            message = await websocket.receive()
            if message["type"] == "websocket.disconnect":
                return
            try:
                if (data := message.get("bytes")) is not None:
                    await _stdin(execution, data)
                else:
                    await _control(caller, executions, execution, message["text"])
            except SkerryError as error:
                # It may have ended meanwhile, which the other direction tells; a bad message is worth a word.
                if isinstance(error, InvalidRequest):
                    await _say(websocket, {"event": "error", "error": error.to_dict()})


async def _stdin(execution: Execution, data: bytes) -> None:
    if data[:1] != b"\0":
        raise InvalidRequest("binary messages begin with a 0 byte, for stdin")
    if len(data) == 1:
        await execution.close_stdin()
    else:
        await execution.write(data[1:])


async def _control(caller: Caller, executions: Executions, execution: Execution, text: str) -> None:
    control = parse(Control, text)
    detail = {"execution_id": execution.id}
    if control.resize is not None:
        execution.resize(*control.resize)
    if control.signal is not None:
        async with executions.runtime.act(caller, "execution.signal", {**detail, "signal": control.signal}):
            execution.signal(control.signal)
    if control.kill:
        async with executions.runtime.act(caller, "execution.kill", detail):
            execution.stop(Outcome.CANCELED, "killed on request")


async def _receive_text(websocket: WebSocket) -> str:
    message = await websocket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message["code"])
    text = message.get("text")
    if not isinstance(text, str):
        raise InvalidRequest("the first message must be text: what to start, or what to attach to")
    return text


def summary(result: ExecutionResult) -> dict[str, Any]:
    """A result without the output, for those who have read it."""
    found = result.to_dict()
    for name in ("stdout", "stderr", "stdout_encoding", "stderr_encoding"):
        del found[name]
    return found


async def _say(websocket: WebSocket, body: dict[str, Any]) -> None:
    await websocket.send_text(json.dumps(body))


OPERATIONS = (
    Operation(
        name="attach",
        method="GET",
        path="/environments/{environment_id}/attach",
        tag="executions",
        verb="execute",
        summary="Start a program, or join one, on a WebSocket",
        text='The first message is text: what `start_execution` takes, or `{"execution_id": ...}` of one that runs. '
        'The daemon answers `{"event": "started", "execution": ...}`, then binary messages: a byte for the '
        'stream (1 stdout, 2 stderr) and the output; at the end `{"event": "ended", "result": ...}`. The '
        "client sends binary messages for stdin: a 0 byte and the data, without data for its end; and text: "
        '`{"resize": [rows, cols]}`, `{"signal": n}`, `{"kill": true}`. A program that was started here is '
        "killed when the connection breaks. Output that is not read stops the program.",
        handler=attach,
        status=101,
        websocket=True,
        errors=IN_ENVIRONMENT,
    ),
)
