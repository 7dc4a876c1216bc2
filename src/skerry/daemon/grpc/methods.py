"""Which operation each RPC is: the RPC `CreateEnvironment` is the operation `create_environment`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from starlette.types import Scope

from skerry.daemon.grpc.messages import to_json
from skerry.daemon.http.operations import JSON, Operation
from skerry.errors import InvalidRequest
from skerry.v1 import (
    audit_pb2,
    code_pb2,
    daemon_pb2,
    environments_pb2,
    executions_pb2,
    files_pb2,
    images_pb2,
    network_pb2,
    pools_pb2,
    sessions_pb2,
    tenants_pb2,
)

SERVICES: tuple[ServiceDescriptor, ...] = tuple(
    service
    for module in (
        *(environments_pb2, executions_pb2, code_pb2, sessions_pb2, files_pb2, network_pb2, images_pb2),
        pools_pb2,
        *(tenants_pb2, audit_pb2, daemon_pb2),
    )
    for service in module.DESCRIPTOR.services_by_name.values()
)
DATA = "data"
"""The field with a piece of a body that is bytes: of an upload, or of a download."""


@dataclass(frozen=True, slots=True)
class Method:
    name: str
    operation: Operation
    request: type[Message]
    answer: type[Message]
    takes_many: bool
    gives_many: bool

    @property
    def downloads(self) -> bool:
        return list(self.answer.DESCRIPTOR.fields_by_name) == [DATA]


def operation_name(rpc: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", rpc).lower()


def methods(service: ServiceDescriptor, operations: Iterable[Operation]) -> list[Method]:
    known = {operation.name: operation for operation in operations}
    return [
        Method(
            name=method.name,
            operation=known[operation_name(method.name)],
            request=GetMessageClass(method.input_type),
            answer=GetMessageClass(method.output_type),
            takes_many=method.client_streaming,
            gives_many=method.server_streaming,
        )
        for method in service.methods
    ]


def request(method: Method, message: Message) -> tuple[Scope, bytes]:
    """The request over HTTP that says the same: what stands in its scope, and its body (of a WebSocket, the first
    message). Raises InvalidRequest.
    """
    operation = method.operation
    values = to_json(message)
    path = "/".join(_segment(part, values) for part in operation.path.split("/"))
    query = [
        f"{parameter.name}={_quote(_text(values.pop(parameter.name)))}"
        for parameter in operation.query
        if parameter.name in values
    ]
    headers: list[tuple[bytes, bytes]] = []
    for parameter in operation.headers:
        name = parameter.name.lower()
        if value := values.pop(name.replace("-", "_"), ""):
            headers.append((name.encode(), value.encode()))
    if method.downloads:
        headers.append((b"accept", operation.media[-1].encode()))
    body = b""
    if operation.uploads and method.takes_many:
        headers.append((b"content-type", operation.uploads[0].encode()))
    elif operation.body is not None or operation.websocket:
        headers.append((b"content-type", JSON.encode()))
        body = json.dumps(values).encode()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "2",
        "method": operation.method,
        "scheme": "https",
        "path": unquote(path),
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": "&".join(query).encode(),
        "headers": headers,
    }
    return scope, body


def _segment(part: str, values: dict[str, Any]) -> str:
    if not part.startswith("{"):
        return part
    value = values.pop(part[1:-1], "")
    if not value:
        raise InvalidRequest(f"{part[1:-1]} is missing")
    return _quote(value)


def _quote(text: str) -> str:
    return quote(text.encode("utf-8", "surrogateescape"), safe="")


def _text(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)
