"""The OpenAPI document, made from the table of operations and the types that it names."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from itertools import pairwise
from typing import Any, get_args

from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode
from typing_extensions import get_original_bases, get_type_hints

from skerry._version import VERSION
from skerry.daemon.http.operations import EVENTS, JSON, NDJSON, Operation, Parameter
from skerry.daemon.http.schemas import Problem
from skerry.errors import (
    Busy,
    Denied,
    InvalidRequest,
    LimitReached,
    PlatformError,
    SkerryError,
    StoreUnavailable,
    Unauthorized,
    UnsupportedMediaType,
)

PROBLEM = "application/problem+json"
RETRY_AFTER = {"description": "Seconds after which to try again.", "schema": {"type": "integer"}}
REFERENCE = "#/components/schemas/"
TAGS = {
    "environments": "Isolated places to run code in.",
    "executions": "Programs that run in an environment.",
    "code": "Programs that run once, in an environment of their own.",
    "sessions": "Interpreters that keep their state from one call to the next.",
    "files": "Files of an environment, as its own user sees them.",
    "network": "What an environment may reach.",
    "images": "What environments are made from.",
    "pools": "Environments that are ready before anybody asks.",
    "tenants": "Who may use this daemon, and how much of it.",
    "audit": "What was done, by whom.",
    "daemon": "The daemon itself.",
    "documentation": "What you are reading.",
}
IN_PATH = {
    "environment_id": ("An id, the beginning of one (three characters or more), or a name.", "k3v9x1m2p7qa"),
    "execution_id": ("As it was given when the execution started.", "b8t2c6w4y0hn"),
    "pool": ("Its name; `GET /pools` lists them.", "default"),
    "session_id": ("As it was chosen, or given, when the session was opened.", "analysis"),
    "token_id": ("As it was given when the token was made; no secret.", "t4n8q2r6w1zc"),
    "tenant": ("The name of a tenant.", "acme"),
    "image": ("A name, or the beginning of a digest.", "host"),
}
INTRODUCTION = """\
The daemon listens on the unix socket `daemon.sock` in its home (`$SKERRY_HOME`; for root `/var/lib/skerry`), where its
own user needs no token, belongs to the tenant `default` and may do everything. Everywhere else a request needs
`Authorization: Bearer` with a token that allows the operation's verb; the environments of other tenants are not found.
Who has the verb `admin` can act for another tenant with the header `Skerry-Tenant`.

Every answer has an `X-Request-Id`, which is also in the log and in the audit. A W3C `traceparent` is written down
with it, and given to programs that are started without a shell as `TRACEPARENT`.

Bodies are JSON unless something else is said, and unknown fields and parameters are refused. Errors are
`application/problem+json` (RFC 9457) with a stable `code`, a `message` and often a `hint`. Code that fails inside an
environment is a result, never an error.

Three times have three names: `lifetime` ends an environment for good, `idle` ends it when it is not used, `timeout`
ends one execution."""


def document(operations: Sequence[Operation]) -> dict[str, Any]:
    """OpenAPI 3.1, as a tree that can be written as JSON."""
    schemas, components = _schemas(operations)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Skerry",
            "version": VERSION,
            "summary": "Isolated environments for agents.",
            "description": INTRODUCTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def errors(operation: Operation) -> list[type[SkerryError]]:
    """All that an operation can fail with: its own, and what every one of its kind can."""
    found = [*operation.errors, Denied, PlatformError]
    if operation.verb:
        found += [Unauthorized, InvalidRequest, StoreUnavailable]
    if "{" in operation.path or operation.query or operation.headers or operation.body or operation.websocket:
        found.append(InvalidRequest)
    if operation.body is not None or operation.uploads:
        found += [InvalidRequest, LimitReached, Busy, UnsupportedMediaType]
    return sorted(set(found), key=lambda error: (error.status, error.code))


def _operation(operation: Operation, schemas: dict[Any, Any]) -> dict[str, Any]:
    names = [segment[1:-1] for segment in operation.path.split("/") if segment.startswith("{")]
    described: dict[str, Any] = {
        "operationId": operation.name,
        "tags": [operation.tag],
        "summary": operation.summary,
        "description": operation.text,
        "parameters": [
            *(_in_path(name) for name in names),
            *(_parameter(parameter, "query") for parameter in operation.query),
            # OpenAPI has another place for what is accepted: the media types of the answer.
            *(_parameter(p, "header") for p in operation.headers if p.name != "Accept"),
        ],
        "responses": dict(sorted(_responses(operation, schemas).items())),
    }
    if operation.verb:
        described["security"] = [{"token": []}, {}]
        described["x-verb"] = operation.verb
    if operation.body is not None or operation.uploads:
        described["requestBody"] = _request_body(operation, schemas)
    return {key: value for key, value in described.items() if value}


def _in_path(name: str) -> dict[str, Any]:
    text, example = IN_PATH[name]
    schema = {"type": "string", "minLength": 1}
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": text,
        "schema": schema,
        "example": example,
    }


def _parameter(parameter: Parameter, where: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": parameter.kind}
    if parameter.kind == "integer":
        schema |= {"minimum": parameter.least, "maximum": parameter.most}
    if parameter.required:
        schema["minLength"] = 1
    if parameter.choices:
        schema["enum"] = list(parameter.choices)
    if parameter.default not in (None, ""):
        schema["default"] = parameter.default
    found: dict[str, Any] = {
        "name": parameter.name,
        "in": where,
        "description": parameter.text,
        "schema": schema,
    }
    if parameter.required:
        found["required"] = True
    if parameter.example is not None:
        found["example"] = parameter.example
    return found


def _request_body(operation: Operation, schemas: dict[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    required = bool(operation.uploads)
    if operation.body is not None:
        schema = schemas[operation.body, "validation"]
        content[JSON] = {"schema": schema, "example": operation.body_example}
        required = any(field.is_required() for field in operation.body.model_fields.values())
    for media in operation.uploads:
        content[media] = {"schema": {"type": "string", "format": "binary"}}
    return {"required": required, "content": content}


def _responses(operation: Operation, schemas: dict[Any, Any]) -> dict[str, Any]:
    success: dict[str, Any] = {"description": "Switching to a WebSocket." if operation.websocket else "Done."}
    if not operation.websocket:
        success["content"] = {media: _answer(operation, media, schemas) for media in operation.media}
    found = {str(operation.status): success}
    found |= {str(status): {"description": text} for status, text in operation.also.items()}
    by_status: dict[int, list[type[SkerryError]]] = {}
    for error in errors(operation):
        by_status.setdefault(error.status, []).append(error)
    for status, group in by_status.items():
        codes = [error.code for error in group]
        schema = {**schemas[Problem, "serialization"], "properties": {"code": {"enum": codes}}}
        found[str(status)] = {
            "description": " or ".join(f"`{code}`" for code in codes),
            "content": {PROBLEM: {"schema": schema}},
        }
        if any(error.retryable for error in group):
            found[str(status)]["headers"] = {"Retry-After": RETRY_AFTER}
    return found


def _answer(operation: Operation, media: str, schemas: dict[Any, Any]) -> dict[str, Any]:
    example = operation.answer_example
    if media == JSON:
        content: dict[str, Any] = {"schema": schemas[operation.answer, "serialization"]}
    elif media in (NDJSON, EVENTS):
        # OpenAPI 3.1 has schemas of whole bodies only; that of each item of a stream stands beside.
        content = {"x-item-schema": schemas[operation.answer, "serialization"]}
        text = json.dumps(example)
        example = f"{text}\n" if media == NDJSON else f"id: 5f0c2a91-6\nevent: output\ndata: {text}\n\n"
    else:
        content = {"schema": {"type": "string", "format": "binary"}}
        example = None
    return content if example is None else {**content, "example": example}


def _schemas(operations: Iterable[Operation]) -> tuple[dict[Any, Any], dict[str, Any]]:
    """The schema of every type that the table names, by type and direction; and what they refer to."""
    wanted: dict[tuple[Any, JsonSchemaMode], None] = {(Problem, "serialization"): None}
    for operation in operations:
        if operation.body is not None:
            wanted[operation.body, "validation"] = None
        if operation.answer is not None:
            wanted[operation.answer, "serialization"] = None
    adapters = [(key, key[1], TypeAdapter(key[0])) for key in wanted]
    found, rest = TypeAdapter.json_schemas(adapters, ref_template=REFERENCE + "{model}")
    schemas = {key[0]: schema for key, schema in found.items()}
    components: dict[str, Any] = rest["$defs"]
    for kind in {kind for root, _ in wanted for kind in _types(root)}:
        if (schema := components.get(kind.__name__)) is not None:
            _describe(kind, schema)
    return schemas, dict(sorted(components.items()))


def _types(root: Any) -> Iterator[type]:
    """The classes with fields that a type is made of."""
    for part in get_args(root):
        yield from _types(part)
    if isinstance(root, type) and hasattr(root, "__annotations__") and not get_args(root):
        yield root
        with suppress(TypeError, NameError):
            for part in get_type_hints(root).values():
                if part is not root:
                    yield from _types(part)


def _describe(kind: type, schema: dict[str, Any]) -> None:
    """Add what the source says about each field; of a dataclass, all fields are always there."""
    properties = schema.get("properties", {})
    for name, text in _attribute_docs(kind).items():
        if name in properties:
            properties[name]["description"] = text
    for described in properties.values():
        described.pop("title", None)
    if is_dataclass(kind):
        schema["required"] = list(properties)
        for described in properties.values():
            described.pop("default", None)
        schema.pop("description", None)
        if kind.__doc__ and not kind.__doc__.startswith(f"{kind.__name__}("):
            schema["description"] = inspect.cleandoc(kind.__doc__)


def _attribute_docs(kind: Any) -> dict[str, str]:
    """The strings that follow the fields of a class, and of those it inherits from, in its source."""
    if not isinstance(kind, type) or kind.__module__.partition(".")[0] != "skerry":
        return {}
    found: dict[str, str] = {}
    for base in get_original_bases(kind):
        found |= _attribute_docs(base)
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except OSError:
        return found
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    return found | {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
