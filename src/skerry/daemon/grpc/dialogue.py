"""The RPC `Attach`: its messages as those of the WebSocket, and back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.types import Message as Event
from starlette.types import Scope

from skerry.daemon.grpc.exchange import Exchange
from skerry.daemon.grpc.messages import to_message
from skerry.daemon.grpc.methods import Method, request
from skerry.daemon.grpc.problems import problem
from skerry.errors import InvalidRequest, PlatformError, from_dict
from skerry.manager.executions.output import STREAM_NAMES
from skerry.v1.executions_pb2 import AttachRequest, AttachResponse, Dropped


def opening(
    method: Method, first: AttachRequest, rest: AsyncIterator[AttachRequest]
) -> tuple[Scope, AsyncIterator[Event]]:
    """What stands in the scope of the WebSocket, and what comes in on it. Raises InvalidRequest."""
    if first.WhichOneof("request") != "opening":
        raise InvalidRequest("the first message must be the opening: what to start, or what to join")
    scope, body = request(method, first.opening)
    scope.update(type="websocket", subprotocols=[], extensions={"websocket.http.response": {}})
    return scope, _incoming(body.decode(), rest)


async def answer(exchange: Exchange, write: Callable[[AttachResponse], Awaitable[None]]) -> None:
    """Passes everything on until the WebSocket is closed. Raises SkerryError."""
    while event := await exchange.next():
        match event["type"]:
            case "websocket.send" if event.get("bytes") is not None:
                await write(_output(event["bytes"]))
            case "websocket.send":
                await write(_news(json.loads(event["text"])))
            case "websocket.http.response.start":
                refusal = await exchange.next()
                raise problem(refusal["body"] if refusal else b"")
            case "websocket.close":
                return
    raise PlatformError("the connection broke off", hint="see the daemon's log")


async def _incoming(first: str, rest: AsyncIterator[AttachRequest]) -> AsyncIterator[Event]:
    yield {"type": "websocket.connect"}
    yield {"type": "websocket.receive", "text": first}
    async for message in _or_nothing(rest):
        kind = message.WhichOneof("request") or "nothing"
        if kind == "close_stdin":
            yield {"type": "websocket.receive", "bytes": b"\0"}
        elif kind != "stdin":
            yield {"type": "websocket.receive", "text": json.dumps({kind: _control(kind, message)})}
        elif message.stdin:  # without data it would be the end of stdin
            yield {"type": "websocket.receive", "bytes": b"\0" + message.stdin}


async def _or_nothing(rest: AsyncIterator[AttachRequest]) -> AsyncIterator[AttachRequest]:
    """What is broken becomes a message that says nothing, which the application refuses."""
    try:
        async for message in rest:
            yield message
    except InvalidRequest:
        yield AttachRequest()


def _control(kind: str, message: AttachRequest) -> Any:
    if kind == "resize":
        return [message.resize.rows, message.resize.cols]
    return message.signal if kind == "signal" else True


def _output(data: bytes) -> AttachResponse:
    stream = STREAM_NAMES[data[0]]
    if stream == "dropped":
        return AttachResponse(dropped=Dropped(message=data[1:].decode()))
    return AttachResponse(stdout=data[1:]) if stream == "stdout" else AttachResponse(stderr=data[1:])


def _news(found: dict[str, Any]) -> AttachResponse:
    """Raises the error that it tells of."""
    if found["event"] == "error":
        raise from_dict(found["error"])
    if found["event"] == "started":
        return to_message(AttachResponse, {"started": found["execution"]})
    return to_message(AttachResponse, {"ended": found})
