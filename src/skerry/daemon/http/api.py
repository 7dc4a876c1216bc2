"""The application: finds the operation for a request, hands it what the table promises, and answers failures.

One lookup in a tree of path segments, one call. Every failure leaves as a problem: ours with their own code,
all others as `internal`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from secrets import token_hex
from typing import Any
from urllib.parse import unquote

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from skerry.daemon.accounts import counted
from skerry.daemon.auth import acting, refusal
from skerry.daemon.http.answers import AT_ONCE, Stream, log, problem, unread
from skerry.daemon.http.operations import JSON, Call, Engine, Operation
from skerry.daemon.http.request_log import RequestLog
from skerry.daemon.http.requests import query, read_json
from skerry.daemon.peers import peer_of, take_share
from skerry.errors import (
    Busy,
    Denied,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    PlatformError,
    SkerryError,
    Unauthorized,
    UnsupportedMediaType,
    stopping,
)
from skerry.fairness import Line, Timed, lines
from skerry.manager.caller import Caller
from skerry.manager.capacity import SharedCapacity

PATH_TOLD = 200
BODY_USUAL = 256 << 10
BODIES_MAX = 256 << 20
"""Bytes of JSON that each request may bring, and hold until it is answered; and, beyond those, all together."""
REFUSAL_SECONDS = 0.0003
"""Loop time, about, to find out that a request is refused, and to say so."""
ANSWER_USUAL = AT_ONCE
ANSWERS_MAX = 64 << 20
"""Bytes that each answer may hold until it is read; and, beyond those, all together."""


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
        self._bodies = SharedCapacity(BODIES_MAX)
        self._answers = SharedCapacity(ANSWERS_MAX)
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
        request_id = token_hex(8)
        with RequestLog(self._engine.metrics) as request_log:
            if scope["type"] == "websocket":
                await self._websocket(scope, receive, send, request_id, request_log)
            else:
                await self._http(scope, receive, send, request_id, request_log)

    async def _http(
        self, scope: Scope, receive: Receive, send: Send, request_id: str, request_log: RequestLog
    ) -> None:
        try:
            operation, arguments = self._operation(scope)
            request_log.operation = operation
            if operation.websocket:
                raise InvalidRequest(
                    f"{scope['path']} is a WebSocket", hint="ask for an upgrade of the connection"
                )
            caller, line = await self._in_turn(scope, operation, request_id)
            request_log.caller = caller
        except SkerryError as error:
            request_log.answered(error.status)
            answer = problem(error)
            if isinstance(error, Busy):  # the tenant has too many connections: this one is not kept
                answer.headers["connection"] = "close"
            line = _stranger(scope)
            line.flow.spend(REFUSAL_SECONDS)
            await line.turn()
            await _identified(answer, request_id)(scope, receive, send)
            return
        accounts = self._engine.metrics.accounts
        account = accounts.of(caller.tenant) if operation.verb else accounts.nobody
        account.requests += 1
        receive, send = counted(receive, send, account)
        work = self._serve(scope, receive, send, request_id, request_log, operation, arguments, caller, line)
        await Timed(work, line.flow)

    async def _serve(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        request_id: str,
        request_log: RequestLog,
        operation: Operation,
        arguments: dict[str, Any],
        caller: Caller,
        line: Line,
    ) -> None:
        with (
            self._engine.authenticator.under_way(caller, scope),
            self._bodies.held(caller.tenant, BODY_USUAL) as more,
            self._answers.held(caller.tenant, ANSWER_USUAL) as hold,
        ):
            try:
                call = Call(self._engine, caller, scope, receive, hold, line.pause)
                answer = await self._answer(call, operation, arguments, more)
                extra = answer.weight - call.held if isinstance(answer, Stream) else 0
                # What has changed something is answered all the same: nobody shall do it again.
                if extra > 0 and not call.hold(extra) and operation.method == "GET":
                    raise unread()
            except SkerryError as error:
                answer = problem(error)
            except ClientDisconnect:
                answer = Response(status_code=400)
            except Exception as error:
                log.exception("request failed", operation=operation.name, request=request_id)
                answer = problem(_internal(error))
            request_log.answered(answer.status_code)
            if isinstance(answer, Stream):
                answer.charge(line)
            await _identified(answer, request_id)(scope, receive, send)

    async def _answer(
        self, call: Call, operation: Operation, arguments: dict[str, Any], more: Callable[[int], bool]
    ) -> Response:
        raw_query = call.scope["query_string"]
        if raw_query or operation.query:
            arguments |= operation.defaults
            arguments |= query(raw_query, operation.query)
        if operation.body is not None or operation.uploads:
            given = call.media_type()
            if operation.body is not None and given in ("", JSON):
                arguments["body"] = await read_json(call.receive, operation.body, more, call.pause)
            elif given and given not in operation.uploads:
                raise _unsupported(operation, given)
            elif operation.body is not None:
                arguments["body"] = None
        answer: Response = await operation.handler(call, **arguments)
        return answer

    async def _websocket(
        self, scope: Scope, receive: Receive, send: Send, request_id: str, request_log: RequestLog
    ) -> None:
        websocket = WebSocket(scope, receive, send)
        try:
            operation, arguments = self._operation({**scope, "method": "GET"})
            request_log.operation = operation
            if not operation.websocket:
                raise InvalidRequest(f"{scope['path']} is no WebSocket")
            caller, line = await self._in_turn(scope, operation, request_id)
            request_log.caller = caller
            account = self._engine.metrics.accounts.of(caller.tenant)
            account.requests += 1
            websocket = WebSocket(scope, *counted(receive, send, account))
            with self._engine.authenticator.under_way(caller, scope):
                call = Call(self._engine, caller, scope, receive)
                await Timed(operation.handler(call, websocket, **arguments), line.flow)
            request_log.answered(operation.status)
        except SkerryError as error:  # handlers raise none after they have accepted
            request_log.answered(error.status)
            await websocket.send_denial_response(_identified(problem(error), request_id))

    async def _in_turn(self, scope: Scope, operation: Operation, request_id: str) -> tuple[Caller, Line]:
        """The caller and its line, when it is its turn. Raises what `admit` does."""
        caller = await self.admit(scope, operation, request_id)
        line = lines().of(caller.tenant) if operation.verb else _stranger(scope)
        if await line.turn():  # meanwhile its token may have ended, or the daemon may be stopping
            caller = await self.admit(scope, operation, request_id)
        return caller, line

    async def admit(self, scope: Scope, operation: Operation, request_id: str) -> Caller:
        """The caller, from the headers alone: nothing of the body has been read.

        Raises Unauthorized, Denied, InvalidRequest, Busy, StoreUnavailable, DaemonUnavailable (it is stopping).
        """
        caller = await self._caller(scope, operation, request_id)
        self._check_verb(scope, operation, caller)
        return caller

    async def _caller(self, scope: Scope, operation: Operation, request_id: str) -> Caller:
        if not operation.verb:
            return Caller(verbs=frozenset(), peer=peer_of(scope).address, request_id=request_id)
        if self._engine.manager.closing:
            refused = stopping()
            refused.detail["begun"] = False
            raise refused
        try:
            caller = await self._engine.authenticator.caller(scope, request_id)
        except Unauthorized as error:
            stranger = Caller(verbs=frozenset(), peer=peer_of(scope).address, request_id=request_id)
            self._engine.manager.deny(stranger, operation.name, error, path=scope["path"][:PATH_TOLD])
            raise
        if caller.token and not take_share(scope, caller.tenant):
            raise Busy("too many connections of this tenant", hint="close some, or try again later")
        try:
            return acting(caller, scope)
        except Denied as error:
            self._engine.manager.deny(caller, operation.name, error, path=scope["path"][:PATH_TOLD])
            raise

    def _check_verb(self, scope: Scope, operation: Operation, caller: Caller) -> None:
        """Raises Denied."""
        for verb in operation.verbs:
            if verb in caller.verbs:
                continue
            denied = refusal(caller, verb)
            self._engine.manager.deny(caller, operation.name, denied, path=scope["path"][:PATH_TOLD])
            raise denied

    def _operation(self, scope: Scope) -> tuple[Operation, dict[str, Any]]:
        """Raises NotFound, MethodNotAllowed."""
        node, arguments = self._find(scope)
        operation = node.methods.get(scope["method"])
        if operation is None:
            raise MethodNotAllowed(
                f"{scope['method']} {scope['path']} is not possible",
                hint=f"use {', '.join(node.methods)}",
                detail={"allow": ", ".join(node.methods)},
            )
        return operation, arguments

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


def _stranger(scope: Scope) -> Line:
    """Where requests without a tenant wait."""
    return lines().of_stranger(peer_of(scope).host)


def _identified(answer: Response, request_id: str) -> Response:
    answer.raw_headers.append((b"x-request-id", request_id.encode()))
    return answer


def _nowhere(scope: Scope) -> NotFound:
    return NotFound(f"there is no {scope['path']}", hint="GET /docs lists what there is")


def _unsupported(operation: Operation, given: str) -> UnsupportedMediaType:
    known = ", ".join([JSON] * (operation.body is not None) + list(operation.uploads))
    return UnsupportedMediaType(f"the body is {given!r}", hint=f"send it as {known}")


def _internal(error: Exception) -> PlatformError:
    return PlatformError(f"internal error: {type(error).__name__}", hint="see the daemon's log")
