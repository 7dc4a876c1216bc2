"""The gRPC server: the same application as over HTTP, on a port of its own.

Health is there for everybody, and answers without reading the request; all else, reflection too, needs a token, which
is checked before a message is read. What C-core buffers before that is bounded by the options of the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from secrets import token_hex
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2
from starlette.types import ASGIApp

from skerry.daemon.doors import crowd
from skerry.daemon.grpc.calls import Admit, Calls, head, parsed
from skerry.daemon.grpc.methods import SERVICES, methods
from skerry.daemon.grpc.problems import refuse
from skerry.daemon.http.operations import Operation
from skerry.errors import InvalidRequest, SkerryError, TooSlow

MESSAGE_MAX = 4 << 20
"""Bytes of one message from a client: what clients of gRPC take by default, too."""
WINDOW = 64 << 10
"""Bytes of a stream that C-core takes from the network before anybody reads its messages. While a message is read,
it takes the whole message."""
METADATA_MAX = 16 << 10
CALLS_MAX = 4000
CALLS_OF_ONE_CONNECTION = 256
CALLS_WAITING = 512
"""Calls that C-core holds until the event loop gets to them; beyond those it refuses some."""
REFLECTION_SECONDS = 10.0
GRACE_SECONDS = 5.0

OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_MAX),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_concurrent_streams", CALLS_OF_ONE_CONNECTION),
    ("grpc.server.max_pending_requests", CALLS_WAITING),
    ("grpc.http2.lookahead_bytes", WINDOW),
    # The probe would raise the window to megabytes, for every stream of the connection.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.max_metadata_size", METADATA_MAX // 2),
    ("grpc.absolute_max_metadata_size", METADATA_MAX),
    # None but identity: 16 KB of gzip can be 16 MB of message.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # A second daemon on the same port must fail, and not get every other connection.
    ("grpc.so_reuseport", 0),
    # A peer that is dead is noticed; one that asks whether we are alive all the time is sent away.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 3),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),
)


class Health:
    """Tells load balancers what `/readyz` tells, whatever service they ask for, without reading which one it is:
    anybody may ask, and a message that is read is buffered first. Has no Watch: they poll.
    """

    def __init__(self, ready: Callable[[], Awaitable[object]]) -> None:
        self._ready = ready

    def handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        answer = health_pb2.HealthCheckResponse.SerializeToString
        return {"Check": grpc.stream_unary_rpc_method_handler(self.check, response_serializer=answer)}

    async def check(
        self, _asked: AsyncIterator[bytes], _context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        try:
            await self._ready()
        except SkerryError:
            return health_pb2.HealthCheckResponse(status="NOT_SERVING")
        return health_pb2.HealthCheckResponse(status="SERVING")


class Reflection:
    """Tells callers with a token what services there are."""

    def __init__(self, names: Iterable[str], admit: Admit, like: Operation) -> None:
        """Who may ask for the operation `like` may ask for this."""
        self._servicer: Any = reflection.aio.ReflectionServicer(names)
        self._admit = admit
        self._like = like

    def handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        answer = reflection_pb2.ServerReflectionResponse.SerializeToString
        info = self._info
        return {
            "ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(info, response_serializer=answer)
        }

    async def _info(
        self, asked: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        try:
            await self._admit(head(self._like, context), self._like, token_hex(8))
            requests = parsed(reflection_pb2.ServerReflectionRequest, asked)
            async with asyncio.timeout(REFLECTION_SECONDS):
                async for answer in self._servicer.ServerReflectionInfo(requests, context):
                    yield answer
        except TimeoutError:
            failure: SkerryError = TooSlow(f"a call takes {REFLECTION_SECONDS:g} s at most")
        except SkerryError as error:
            failure = error.with_traceback(None)
        else:
            return
        refuse(context, failure)


class GrpcServer:
    """Takes its addresses (`HOST:PORT`) at once, and serves from `start()` on. Must be made where the event loop runs.

    `addresses` afterwards are those that it has, with the ports that were chosen for 0. `tls` are the files (PEM) of
    the certificate and of its key. Raises InvalidRequest.
    """

    def __init__(
        self,
        app: ASGIApp,
        admit: Admit,
        operations: Iterable[Operation],
        ready: Callable[[], Awaitable[object]],
        addresses: Iterable[str],
        tls: tuple[str, str] | None,
    ) -> None:
        self._calls = Calls(app, admit)
        options = (*OPTIONS, ("grpc.max_allowed_incoming_connections", crowd()))
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=CALLS_MAX)
        operations = tuple(operations)
        for service in SERVICES:
            handlers = {method.name: self._calls.handler(method) for method in methods(service, operations)}
            self._add(service.full_name, handlers)
        health = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        names = (*(service.full_name for service in SERVICES), health, reflection.SERVICE_NAME)
        self._add(health, Health(ready).handlers())
        version = next(operation for operation in operations if operation.name == "version")
        self._add(reflection.SERVICE_NAME, Reflection(names, admit, version).handlers())
        credentials = None
        if tls is not None:
            certificate, key = (Path(path).read_bytes() for path in tls)
            credentials = grpc.ssl_server_credentials([(key, certificate)])
        self.addresses = [self._bind(address, credentials) for address in addresses]

    def _add(self, service: str, handlers: dict[str, grpc.RpcMethodHandler[Any, Any]]) -> None:
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))

    def _bind(self, address: str, credentials: grpc.ServerCredentials | None) -> str:
        try:
            if credentials is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise InvalidRequest(f"cannot serve gRPC on {address}: {error}") from error
        return f"{address.rpartition(':')[0]}:{port}"

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        """Ends all calls, after a moment for those that are about to end, and waits for what they left."""
        await self._server.stop(GRACE_SECONDS)
        if self._calls.under_way:
            await asyncio.wait(self._calls.under_way, timeout=GRACE_SECONDS)
