"""The two contracts, held against each other: what REST has gRPC has too, under the same names, and nothing more."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, cast

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.struct_pb2 import Struct

from skerry.daemon.grpc.messages import TWIN, words
from skerry.daemon.grpc.methods import DATA, SERVICES, Method, methods
from skerry.daemon.http import attach, openapi, table
from skerry.daemon.http.operations import EVENTS, Parameter
from skerry.errors import BY_CODE
from skerry.v1.environments_pb2 import Usage

HTTP_ONLY = {"openapi", "docs", "metrics"}
ALIASES = {"timeout_seconds"}
ANYTHING = {Struct.DESCRIPTOR.full_name, Usage.DESCRIPTOR.full_name}
"""What an object without properties may be: the audit keeps a usage as it was."""
FIELDS = FieldDescriptor
KINDS = {
    "string": {FIELDS.TYPE_STRING, FIELDS.TYPE_BYTES, FIELDS.TYPE_ENUM},
    "integer": {FIELDS.TYPE_INT32, FIELDS.TYPE_INT64},
    "number": {FIELDS.TYPE_DOUBLE},
    "boolean": {FIELDS.TYPE_BOOL},
    "object": {FIELDS.TYPE_MESSAGE},
}
DOCUMENT = openapi.document(table.OPERATIONS)
METHODS = [method for service in SERVICES for method in methods(service, table.OPERATIONS)]
each = pytest.mark.parametrize("method", METHODS, ids=[method.name for method in METHODS])


def variants(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a value can be, without references."""
    if "$ref" in schema:
        yield from variants(DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    elif "anyOf" in schema:
        for variant in schema["anyOf"]:
            yield from variants(variant)
    elif "oneOf" in schema:
        for variant in schema["oneOf"]:
            yield from variants(variant)
    else:
        yield schema


class Comparison:
    """Remembers which fields of which message stand for something in REST."""

    def __init__(self) -> None:
        self.known: dict[str, set[str]] = defaultdict(set)
        self.messages: dict[str, Descriptor] = {}

    def message(self, descriptor: Descriptor, schema: dict[str, Any]) -> None:
        self.messages[descriptor.full_name] = descriptor
        for variant in variants(schema):
            for name, below in variant.get("properties", {}).items():
                if name in ALIASES or name == "encoding" or name.endswith("_encoding"):
                    continue
                assert name in descriptor.fields_by_name, f"{descriptor.full_name} has no {name}"
                self.field(descriptor.fields_by_name[name], below)

    def field(self, field: FieldDescriptor, schema: dict[str, Any]) -> None:
        assert field.containing_type is not None
        self.messages[field.containing_type.full_name] = field.containing_type
        self.known[field.containing_type.full_name].add(field.name)
        found = list(variants(schema))
        real = [variant for variant in found if variant.get("type") != "null"]
        if len(real) < len(found) and not field.is_repeated:
            assert field.has_presence, f"{field.full_name} may be null"
        for variant in real:
            self.value(field, variant)

    def value(self, field: FieldDescriptor, schema: dict[str, Any]) -> None:
        allowed = schema.get("enum") or [schema["const"]] if "const" in schema or "enum" in schema else []
        kind = schema.get("type") or ("string" if isinstance(allowed[0], str) else "boolean")
        if kind == "array":
            assert field.is_repeated, field.full_name
            for variant in variants(schema["items"]):
                self.value(field, variant)
            return
        kinds = set.union(*(KINDS[one] for one in (kind if isinstance(kind, list) else [kind])))
        assert field.type in kinds, f"{field.full_name} is no {kind}"
        if field.type == FIELDS.TYPE_ENUM and allowed:
            assert field.enum_type is not None
            assert set(allowed) - {""} <= set(words(field.enum_type).values()), field.full_name
        if "properties" in schema:
            assert field.message_type is not None
            self.message(field.message_type, schema)
        elif kind == "object":
            assert field.message_type is not None
            is_map = field.message_type.GetOptions().map_entry
            assert is_map or field.message_type.full_name in ANYTHING

    def unknown(self) -> set[str]:
        return {
            f"{name}.{field}"
            for name, descriptor in self.messages.items()
            for field in set(descriptor.fields_by_name)
            - self.known[name]
            - {f"{text}{TWIN}" for text in self.known[name]}
        }


def parameter_schema(parameter: Parameter) -> dict[str, Any]:
    choices = {"enum": list(parameter.choices)} if parameter.choices else {}
    return {"type": parameter.kind, **choices}


def compare_request(comparison: Comparison, method: Method) -> None:
    operation = method.operation
    descriptor = cast(Descriptor, method.request.DESCRIPTOR)
    comparison.messages[descriptor.full_name] = descriptor
    if operation.websocket:
        comparison.known[descriptor.full_name] |= {
            "opening",
            "stdin",
            "close_stdin",
            *attach.Control.model_fields,
        }
        descriptor = cast(Descriptor, descriptor.fields_by_name["opening"].message_type)
        comparison.message(descriptor, attach.Opening.model_json_schema())
    for part in operation.path.split("/"):
        if part.startswith("{"):
            comparison.field(descriptor.fields_by_name[part[1:-1]], {"type": "string"})
    for parameter in operation.query:
        field = descriptor.fields_by_name[parameter.name]
        comparison.field(field, parameter_schema(parameter))
        # Without presence, what is not given cannot be told from the zero of its type.
        assert field.has_presence or not parameter.default or parameter.kind != "boolean", field.full_name
    for parameter in operation.headers:
        if parameter.name != "Accept":
            name = parameter.name.lower().replace("-", "_")
            comparison.field(descriptor.fields_by_name[name], parameter_schema(parameter))
    if operation.uploads:
        comparison.field(descriptor.fields_by_name[DATA], {"type": "string"})
    elif operation.body is not None:
        name = operation.body.__name__
        comparison.message(descriptor, {"$ref": f"#/components/schemas/{name}"})


def compare_answer(comparison: Comparison, method: Method) -> None:
    operation = method.operation
    descriptor = cast(Descriptor, method.answer.DESCRIPTOR)
    if operation.websocket or descriptor.full_name == Empty.DESCRIPTOR.full_name:
        return
    comparison.messages[descriptor.full_name] = descriptor
    if method.downloads:
        comparison.known[descriptor.full_name].add(DATA)
        return
    described = DOCUMENT["paths"][operation.path][operation.method.lower()]
    content = described["responses"][str(operation.status)]["content"][operation.media[0]]
    schema = content.get("x-item-schema") or content["schema"]
    found = [variant for variant in variants(schema) if variant["title"] != "Failed"]
    for variant in found:
        if operation.media[0] == EVENTS:
            comparison.known[descriptor.full_name].add("id")
            comparison.field(descriptor.fields_by_name[variant["title"].lower()], variant)
        else:
            comparison.message(descriptor, variant)


@each
def test_an_rpc_takes_and_gives_what_its_operation_does(method: Method) -> None:
    comparison = Comparison()
    compare_request(comparison, method)
    compare_answer(comparison, method)


def test_no_message_has_anything_that_rest_has_not() -> None:
    comparison = Comparison()
    for method in METHODS:
        compare_request(comparison, method)
        compare_answer(comparison, method)
    assert comparison.unknown() == set()


def test_every_operation_is_an_rpc_of_the_service_that_has_its_tag() -> None:
    found = {
        (service.name, method.operation.name)
        for service in SERVICES
        for method in methods(service, table.OPERATIONS)
    }
    wanted = {
        (operation.tag.capitalize(), operation.name)
        for operation in table.OPERATIONS
        if operation.name not in HTTP_ONLY
    }
    assert found == wanted


def test_every_error_has_a_status() -> None:
    for error in BY_CODE.values():
        assert grpc.StatusCode[error.grpc] not in (grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN)


def test_grpc_costs_nothing_until_somebody_asks_for_it() -> None:
    program = "import sys, skerry.daemon.app; print('grpc' in sys.modules, 'google.protobuf' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
