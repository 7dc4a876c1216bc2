"""What one RPC does: it becomes a request to the application, and the answer becomes its messages."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from secrets import token_hex
from typing import Any
from urllib.parse import unquote

import grpc
from google.protobuf.message import Message
from grpc.aio import ServicerContext
from starlette.types import ASGIApp, Scope
from starlette.types import Message as Event

from skerry.daemon.grpc import dialogue
from skerry.daemon.grpc.exchange import Exchange
from skerry.daemon.grpc.messages import parse, to_message
from skerry.daemon.grpc.methods import DATA, Method, request
from skerry.daemon.grpc.problems import problem, refuse
from skerry.daemon.http.attach import LOST
from skerry.daemon.http.operations import EVENTS, NDJSON, Operation
from skerry.daemon.peers import CUT, GONE, PEER, Peer
from skerry.errors import Busy, InvalidRequest, PlatformError, SkerryError, TooSlow, Unauthorized, from_dict
from skerry.manager.caller import Caller
from skerry.manager.capacity import SharedCapacity

FIRST_SECONDS = 10.0
"""Within this time a call sends its first message."""
READS_AT_ONCE = 8
"""First messages of one tenant that are read at once: C-core buffers each up to its full length."""
STREAMS_MAX = 128
"""Calls that send many messages, of all tenants together: a message of each can be buffered at any time."""
PASSED_ON = ("authorization", "skerry-tenant", "traceparent")
GIVEN_BACK = b"x-request-id"

Context = ServicerContext[Any, Any]
Admit = Callable[[Scope, Operation, str], Awaitable[Caller]]
"""Finds the caller in the headers of a scope. Raises SkerryError."""
Handler = Callable[[Any, Context], Coroutine[Any, Any, Message | None]]


class Calls:
    """The RPCs of one application. `under_way` are the requests whose work has not ended yet.

    The caller is admitted from the metadata before any message is read; a method without a verb, which everybody
    may call, is answered without reading its message at all. A stranger therefore never gets a message buffered
    beyond the window of its stream.
    """

    def __init__(self, app: ASGIApp, admit: Admit) -> None:
        self._app = app
        self._admit = admit
        self._reads = _Turns(READS_AT_ONCE)
        self._streams = SharedCapacity(STREAMS_MAX)
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
                    # The traceback refers to this frame, which would refer to the error: a cycle that keeps the
                    # message until the next full garbage collection.
                    failure = error.with_traceback(None)
                except asyncio.CancelledError:
                    if not cut:
                        raise
                    task.uncancel()
                    failure = Unauthorized("the token was revoked")
                refuse(context, failure)
                return None
            except grpc.aio.InternalError:
                return None  # nothing can be sent: the client has gone, and the call is over

        return behave

    async def _serve(
        self, method: Method, asked: Any, context: Context, cut: Callable[[], None]
    ) -> Message | None:
        request_id = token_hex(8)
        context.set_trailing_metadata(((GIVEN_BACK.decode(), request_id),))
        asking = head(method.operation, context)
        asking["state"][CUT] = cut
        caller = await self._admit(asking, method.operation, request_id)
        with self._stream(caller, method):
            if method.operation.verb:
                rest = parsed(method.request, asked)
                async with self._reads.turn(caller.tenant):
                    first = await first_of(rest)
            else:
                rest, first = _none(), method.request()
            return await self._exchange(method, first, rest, context, asking)

    @contextlib.contextmanager
    def _stream(self, caller: Caller, method: Method) -> Iterator[None]:
        """Raises Busy."""
        if not method.takes_many:
            yield
            return
        if not self._streams.take(caller.tenant, 1):
            raise Busy(f"tenant {caller.tenant!r} has too many uploads and attachments", hint="end some")
        try:
            yield
        finally:
            self._streams.give_back(caller.tenant, 1)

    async def _exchange(
        self, method: Method, first: Any, rest: AsyncIterator[Any], context: Context, asking: Scope
    ) -> Message | None:
        if method.operation.websocket:
            scope, incoming = dialogue.opening(method, first, rest)
        else:
            scope, body = request(method, first)
            incoming = _upload(first, rest, context) if method.takes_many else _whole(body)
        scope["headers"] += asking["headers"]
        state = scope["state"] = asking["state"]
        exchange = Exchange(self._app, scope, incoming)
        state[LOST] = exchange.gone
        state[GONE] = exchange.gone.done
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


class _Turns:
    """At most `most` at once of each tenant; the others wait, in order."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tenants: dict[str, tuple[asyncio.Semaphore, list[None]]] = {}

    @contextlib.asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        semaphore, users = self._tenants.setdefault(tenant, (asyncio.Semaphore(self._most), []))
        users.append(None)
        try:
            async with semaphore:
                yield
        finally:
            users.pop()
            if not users:
                del self._tenants[tenant]


def head(operation: Operation, context: Context) -> Scope:
    """What is known of a call before its message is read: who asks for what."""
    return {
        "type": "http",
        "method": operation.method,
        "path": operation.path,
        "headers": [
            (name.encode(), value.encode() if isinstance(value, str) else value)
            for name, value in context.invocation_metadata() or ()
            if name in PASSED_ON
        ],
        "state": {PEER: Peer(_address(context.peer()), trusted=False)},
    }


async def _none() -> AsyncIterator[Any]:
    return
    yield


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
