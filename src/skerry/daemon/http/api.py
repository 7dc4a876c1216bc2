"""The application: finds the operation for a request, hands it what the table promises, and answers failures.

One lookup in a tree of path segments, one call. Every failure leaves as a problem: ours with their own code,
all others as `internal`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from skerry.daemon.http.answers import log, problem
from skerry.daemon.http.operations import JSON, Call, Engine, Operation
from skerry.daemon.http.requests import query, read_json
from skerry.errors import (
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    PlatformError,
    SkerryError,
    UnsupportedMediaType,
)


class _Node:
    """One place in the tree of paths: what is below it by name, or whatever the name, and what is here."""

    __slots__ = ("any", "methods", "named", "parameters")

    def __init__(self) -> None:
        self.named: dict[str, _Node] = {}
        self.any: _Node | None = None
        self.methods: dict[str, Operation] = {}
        self.parameters: tuple[str, ...] = ()


class Api:
    """The ASGI application that serves a table of operations."""

    def __init__(self, engine: Engine, operations: Iterable[Operation]) -> None:
        self._engine = engine
        self._root = _Node()
        for operation in operations:
            self._add(operation)

    def _add(self, operation: Operation) -> None:
        node = self._root
        names: list[str] = []
        for segment in operation.path.split("/")[1:]:
            if segment.startswith("{"):
                names.append(segment[1:-1])
                node.any = node.any or _Node()
                node = node.any
            else:
                node = node.named.setdefault(segment, _Node())
        node.parameters = tuple(names)
        node.methods[operation.method] = operation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
            return
        try:
            answer = await self._answer(scope, receive)
        except SkerryError as error:
            answer = problem(error)
        except ClientDisconnect:
            answer = Response(status_code=400)
        except Exception as error:
            log.exception("request failed", method=scope["method"], path=scope["path"])
            answer = problem(_internal(error))
        await answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive) -> Response:
        node, arguments = self._find(scope)
        operation = node.methods.get(scope["method"])
        if operation is None:
            allowed = ", ".join(node.methods)
            refusal = MethodNotAllowed(
                f"{scope['method']} {scope['path']} is not possible", hint=f"use {allowed}"
            )
            return problem(refusal, {"allow": allowed})
        if operation.websocket:
            raise InvalidRequest(
                f"{scope['path']} is a WebSocket", hint="ask for an upgrade of the connection"
            )
        call = Call(self._engine, scope, receive)
        if scope["query_string"] or operation.query:
            arguments |= operation.defaults
            arguments |= query(scope["query_string"], operation.query)
        if operation.body is not None or operation.uploads:
            given = call.media_type()
            if operation.body is not None and given in ("", JSON):
                arguments["body"] = await read_json(receive, operation.body)
            elif given and given not in operation.uploads:
                raise _unsupported(operation, given)
            elif operation.body is not None:
                arguments["body"] = None
        answer: Response = await operation.handler(call, **arguments)
        return answer

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        websocket = WebSocket(scope, receive, send)
        try:
            node, arguments = self._find(scope)
            operation = node.methods.get("GET")
            if operation is None or not operation.websocket:
                raise InvalidRequest(f"{scope['path']} is no WebSocket")
        except SkerryError as error:
            await websocket.send_denial_response(problem(error))
            return
        await operation.handler(self._engine, websocket, **arguments)

    def _find(self, scope: Scope) -> tuple[_Node, dict[str, Any]]:
        """Raises NotFound."""
        node = self._root
        values: list[str] = []
        for segment in scope["raw_path"].decode("latin-1").split("/")[1:]:
            below = node.named.get(segment)
            if below is None:
                below = node.any
                if below is None or not segment:
                    raise _nowhere(scope)
                values.append(unquote(segment, errors="surrogateescape"))
            node = below
        if not node.methods:
            raise _nowhere(scope)
        return node, dict(zip(node.parameters, values, strict=True))


def _nowhere(scope: Scope) -> NotFound:
    return NotFound(f"there is no {scope['path']}", hint="GET /docs lists what there is")


def _unsupported(operation: Operation, given: str) -> UnsupportedMediaType:
    known = ", ".join([JSON] * (operation.body is not None) + list(operation.uploads))
    return UnsupportedMediaType(f"the body is {given!r}", hint=f"send it as {known}")


def _internal(error: Exception) -> PlatformError:
    return PlatformError(f"internal error: {type(error).__name__}", hint="see the daemon's log")
