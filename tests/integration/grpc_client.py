"""A client of gRPC that remembers what it called."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from typing import Any

import grpc

from skerry.v1.audit_pb2_grpc import AuditStub
from skerry.v1.code_pb2_grpc import CodeStub
from skerry.v1.daemon_pb2_grpc import DaemonStub
from skerry.v1.environments_pb2_grpc import EnvironmentsStub
from skerry.v1.executions_pb2_grpc import ExecutionsStub
from skerry.v1.files_pb2_grpc import FilesStub
from skerry.v1.images_pb2_grpc import ImagesStub
from skerry.v1.network_pb2_grpc import NetworkStub
from skerry.v1.pools_pb2_grpc import PoolsStub
from skerry.v1.sessions_pb2_grpc import SessionsStub
from skerry.v1.tenants_pb2_grpc import TenantsStub

STUBS: tuple[Any, ...] = (
    *(EnvironmentsStub, ExecutionsStub, CodeStub, SessionsStub, FilesStub, NetworkStub, ImagesStub),
    *(PoolsStub, TenantsStub, AuditStub, DaemonStub),
)


class Client:
    """Every RPC of every service is an attribute."""

    def __init__(self, channel: grpc.aio.Channel, token: str = "") -> None:
        self.called: set[str] = set()
        self.channel = channel
        self.metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._stubs = [stub(channel) for stub in STUBS]

    def __getattr__(self, name: str) -> Any:
        (rpc,) = (getattr(stub, name) for stub in self._stubs if hasattr(stub, name))
        self.called.add(name)
        return functools.partial(rpc, metadata=self.metadata)


async def messages(call: Any) -> AsyncIterator[Any]:
    """What is left of a call that was read from with `read()`."""
    while (message := await call.read()) is not grpc.aio.EOF:
        yield message
