"""What one RPC does: it becomes a request to the application, and the answer becomes its messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any
from urllib.parse import unquote

import grpc
from google.protobuf.message import Message
from grpc.aio import ServicerContext
from starlette.types import ASGIApp
from starlette.types import Message as Event

from skerry.daemon.grpc import dialogue
from skerry.daemon.grpc.exchange import Exchange
from skerry.daemon.grpc.messages import parse, to_message
from skerry.daemon.grpc.methods import DATA, Method, request
from skerry.daemon.grpc.problems import problem, refuse
from skerry.daemon.http.attach import LOST
from skerry.daemon.http.operations import EVENTS, NDJSON
from skerry.daemon.peers import CUT, PEER, Peer
from skerry.errors import InvalidRequest, PlatformError, SkerryError, TooSlow, Unauthorized, from_dict

FIRST_SECONDS = 10.0
"""Within this time a call sends its first message: until then nothing is known of who it is."""
PASSED_ON = ("authorization", "skerry-tenant", "traceparent")
GIVEN_BACK = b"x-request-id"

Context = ServicerContext[Any, Any]
Handler = Callable[[Any, Context], Coroutine[Any, Any, Message | None]]


class Calls:
    """The RPCs of one application. `under_way` are the requests whose work has not ended yet."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.under_way: set[asyncio.Task[None]] = set()

    def handler(self, method: Method) -> grpc.RpcMethodHandler[Any, Any]:
        # On the wire one message is a stream of one. Only for a stream gRPC lets us decide how long we wait.
        make = (
            grpc.stream_stream_rpc_method_handler
            if method.gives_many
            else grpc.stream_unary_rpc_method_handler
        )
        # Requests are parsed here: gRPC would log each one that is broken, at length, for everybody who sends some.
        found: grpc.RpcMethodHandler[Any, Any] = make(
            self._behaviour(method), response_serializer=method.answer.SerializeToString
        )
        return found

    def _behaviour(self, method: Method) -> Handler:
        async def behave(asked: Any, context: Context) -> Message | None:
            cut = False
            task = asyncio.current_task()
            assert task is not None

            def end() -> None:
                nonlocal cut
                cut = True
                task.cancel()

            try:
                try:
                    return await self._serve(method, asked, context, end)
                except SkerryError as error:
                    failure = error
                except asyncio.CancelledError:
                    if not cut:
                        raise
                    task.uncancel()
                    failure = Unauthorized("the token was revoked")
                await refuse(context, failure)
            except grpc.aio.InternalError:
                return None  # nothing can be sent: the client has gone, and the call is over

        return behave

    async def _serve(
        self, method: Method, asked: Any, context: Context, cut: Callable[[], None]
    ) -> Message | None:
        rest = parsed(method.request, asked)
        first = await first_of(rest)
        state = {PEER: Peer(_address(context.peer()), trusted=False), CUT: cut}
        if method.operation.websocket:
            scope, incoming = dialogue.opening(method, first, rest)
        else:
            scope, body = request(method, first)
            incoming = _upload(first, rest, context) if method.takes_many else _whole(body)
        scope["headers"] += [
            (name.encode(), value.encode() if isinstance(value, str) else value)
            for name, value in context.invocation_metadata() or ()
            if name in PASSED_ON
        ]
        scope["state"] = state
        exchange = Exchange(self._app, scope, incoming)
        state[LOST] = exchange.gone
        self.under_way.add(exchange.task)
        exchange.task.add_done_callback(self.under_way.discard)
        try:
            if method.operation.websocket:
                await dialogue.answer(exchange, context.write)
                return None
            return await _answer(method, exchange, context)
        finally:
            exchange.leave()


async def _answer(method: Method, exchange: Exchange, context: Context) -> Message | None:
    """The only message of the answer; what is a stream is written as it comes. Raises SkerryError."""
    start = await exchange.next()
    if start is None:
        raise PlatformError("there is no answer", hint="see the daemon's log")
    for name, value in start["headers"]:
        if name == GIVEN_BACK:
            context.set_trailing_metadata(((name.decode(), value.decode()),))
    if start["status"] >= 400:
        raise problem(await _text(exchange))
    if not method.gives_many:
        return to_message(method.answer, json.loads(await _text(exchange)))
    media = method.operation.media[0]
    if method.downloads:
        async for chunk in _chunks(exchange):
            await context.write(method.answer(**{DATA: chunk}))
    elif media == NDJSON:
        async for line in _records(exchange, b"\n"):
            found = json.loads(line)
            if isinstance(found.get("error"), dict):
                raise from_dict(found["error"])
            await context.write(to_message(method.answer, found))
    elif media == EVENTS:
        async for block in _records(exchange, b"\n\n"):
            if event := _event(block):
                await context.write(to_message(method.answer, event))
    return None


async def parsed(kind: type[Message], asked: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    """Raises InvalidRequest, which in the middle of an upload is the application's answer."""
    async for data in asked:
        yield parse(kind, data)


async def first_of(asked: AsyncIterator[Any]) -> Any:
    """Raises InvalidRequest, TooSlow."""
    try:
        async with asyncio.timeout(FIRST_SECONDS):
            return await anext(asked)
    except StopAsyncIteration:
        raise InvalidRequest("no message came") from None
    except TimeoutError:
        raise TooSlow(f"no message came within {FIRST_SECONDS:g} s") from None


async def _whole(body: bytes) -> AsyncIterator[Event]:
    yield {"type": "http.request", "body": body}


async def _upload(first: Any, rest: AsyncIterator[Any], context: Context) -> AsyncIterator[Event]:
    """The bytes of all messages."""
    yield {"type": "http.request", "body": first.data, "more_body": True}
    async for message in rest:
        yield {"type": "http.request", "body": message.data, "more_body": True}
    # A call that was canceled looks here as if the client had sent everything: nobody may take the part for the whole.
    # This can be sent only on a call that is alive.
    try:
        await context.send_initial_metadata(())
    except grpc.aio.BaseError:
        return
    yield {"type": "http.request", "body": b""}


async def _chunks(exchange: Exchange) -> AsyncIterator[bytes]:
    """The body of the answer. Raises PlatformError when it breaks off."""
    more = True
    while more:
        event = await exchange.next()
        if event is None:
            raise PlatformError("the answer broke off", hint="see the daemon's log")
        more = event.get("more_body", False)
        if body := event.get("body"):
            yield body


async def _text(exchange: Exchange) -> bytes:
    return b"".join([chunk async for chunk in _chunks(exchange)])


async def _records(exchange: Exchange, end: bytes) -> AsyncIterator[bytes]:
    """The body of the answer in the pieces that `end` ends."""
    rest = b""
    async for chunk in _chunks(exchange):
        *records, rest = (rest + chunk).split(end)
        for record in records:
            yield record


def _event(block: bytes) -> dict[str, Any]:
    """A server-sent event: its id, and its data by the name of its kind. A comment is nothing."""
    fields = dict(line.split(b": ", 1) for line in block.split(b"\n") if not line.startswith(b":"))
    if not fields:
        return {}
    return {"id": fields.get(b"id", b"").decode(), fields[b"event"].decode(): json.loads(fields[b"data"])}


def _address(peer: str) -> str:
    """`192.0.2.7:50312` from gRPC's `ipv4:192.0.2.7:50312`."""
    return unquote(peer.partition(":")[2])
