"""The gRPC server: the same application as over HTTP, on a port of its own.

Health and reflection are there for everybody; all else needs a token, which the application asks for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from starlette.types import ASGIApp

from skerry.daemon.grpc.calls import Calls
from skerry.daemon.grpc.methods import SERVICES, methods
from skerry.daemon.http.operations import Operation
from skerry.errors import InvalidRequest, SkerryError

MESSAGE_MAX = 16 << 20
"""Bytes of one message from a client, as of one JSON body."""
CALLS_MAX = 4000
CALLS_OF_ONE_CONNECTION = 1000
GRACE_SECONDS = 5.0

OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_MAX),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_concurrent_streams", CALLS_OF_ONE_CONNECTION),
    # A second daemon on the same port must fail, and not get every other connection.
    ("grpc.so_reuseport", 0),
    # A peer that is dead is noticed; one that asks whether we are alive all the time is sent away.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 3),
    ("grpc.server_handshake_timeout_ms", 10_000),
)


class Health(health_pb2_grpc.HealthServicer):
    """Tells load balancers what `/readyz` tells, whatever service they ask for. Has no Watch: they poll."""

    def __init__(self, ready: Callable[[], Awaitable[object]]) -> None:
        self._ready = ready

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in ("", *(service.full_name for service in SERVICES)):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.service}")
        try:
            await self._ready()
        except SkerryError:
            return health_pb2.HealthCheckResponse(status="NOT_SERVING")
        return health_pb2.HealthCheckResponse(status="SERVING")


class GrpcServer:
    """Takes its addresses (`HOST:PORT`) at once, and serves from `start()` on. Must be made where the event loop runs.

    `tls` are the files (PEM) of the certificate and of its key. Raises InvalidRequest.
    """

    def __init__(
        self,
        app: ASGIApp,
        operations: Iterable[Operation],
        ready: Callable[[], Awaitable[object]],
        addresses: Iterable[str],
        tls: tuple[str, str] | None,
    ) -> None:
        self._calls = Calls(app)
        self._server = grpc.aio.server(options=OPTIONS, maximum_concurrent_rpcs=CALLS_MAX)
        operations = tuple(operations)
        for service in SERVICES:
            handlers = {method.name: self._calls.handler(method) for method in methods(service, operations)}
            self._server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(service.full_name, handlers),)
            )
        health_pb2_grpc.add_HealthServicer_to_server(Health(ready), self._server)
        health = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        names = (*(service.full_name for service in SERVICES), health, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        credentials = None
        if tls is not None:
            certificate, key = (Path(path).read_bytes() for path in tls)
            credentials = grpc.ssl_server_credentials([(key, certificate)])
        for address in addresses:
            self._bind(address, credentials)

    def _bind(self, address: str, credentials: grpc.ServerCredentials | None) -> None:
        try:
            if credentials is None:
                self._server.add_insecure_port(address)
            else:
                self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise InvalidRequest(f"cannot serve gRPC on {address}: {error}") from error

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        """Ends all calls, after a moment for those that are about to end, and waits for what they left."""
        await self._server.stop(GRACE_SECONDS)
        if self._calls.under_way:
            await asyncio.wait(self._calls.under_way, timeout=GRACE_SECONDS)
