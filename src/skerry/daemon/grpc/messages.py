"""Messages of gRPC from the JSON of the API, and back. Fields have the same names in both; what differs:

- `bytes` are text in JSON, with an encoding beside it (`stdout_encoding`, or plain `encoding`);
- `path_bytes`, the twin of `path`, has the bytes of a name that is not UTF-8, which JSON keeps as surrogate escapes;
- a value of an enum is a word: `STATE_RUNNING` is `running`, unspecified is "" or null.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.struct_pb2 import Struct

from skerry.errors import InvalidRequest, LimitReached
from skerry.models import decode_bytes

AnyMessage = TypeVar("AnyMessage", bound=Message)
Convert = Callable[[Any], Any]
TWIN = "_bytes"
SMALL = 64 << 10
"""Bytes below which a message cannot hold too many fields."""
FIELDS_MAX = 20_000
"""Fields of a larger message, those of nested messages included. Only content is large."""


def parse(kind: type[AnyMessage], data: bytes) -> AnyMessage:
    """Raises InvalidRequest, LimitReached."""
    if len(data) > SMALL and _fields(cast(Descriptor, kind.DESCRIPTOR), memoryview(data), FIELDS_MAX) < 0:
        raise LimitReached(f"a {kind.DESCRIPTOR.name} has more than {FIELDS_MAX} fields", hint="send fewer")
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise InvalidRequest(f"this is no {kind.DESCRIPTOR.name}") from error


def _fields(descriptor: Descriptor, data: memoryview, left: int) -> int:
    """What is left of `left` after all fields of a message on the wire were counted; negative if there are more.

    Skips over content, so that its cost is bounded by `left`. What is malformed ends it: the parser will say so.
    """
    at, end = 0, len(data)
    nested = _nested(descriptor)
    while at < end and left >= 0:
        left -= 1
        key, at = _varint(data, at, end)
        kind = key & 7
        if kind == 0:
            _, at = _varint(data, at, end)
        elif kind == 1:
            at += 8
        elif kind == 5:
            at += 4
        elif kind == 2:
            size, at = _varint(data, at, end)
            if (number := key >> 3) in nested:
                left = _fields(nested[number], data[at : at + size], left)
            at += size
        elif kind not in (3, 4):  # groups: their fields are counted with ours
            return left
    return left


def _varint(data: memoryview, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128 or shift > 63:
            break
    return value, at


@cache
def _nested(descriptor: Descriptor) -> dict[int, Descriptor]:
    """The messages below this one, by the number of their field."""
    return {field.number: field.message_type for field in descriptor.fields if field.message_type is not None}


def to_json(message: Message) -> dict[str, Any]:
    """What was given, and nothing else. Raises InvalidRequest for a number that an enum does not have."""
    found: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_BYTES:
            if name := _text_of(field):
                found[name] = value.decode("utf-8", "surrogateescape")
            else:
                found[field.name] = base64.b64encode(value).decode()
                found[f"{field.name}_encoding"] = "base64"
        elif _is_map(field):
            found[field.name] = dict(value)
        elif field.is_repeated:
            found[field.name] = list(value)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            found[field.name] = to_json(value)
        elif field.type == FieldDescriptor.TYPE_ENUM:
            if value not in words(field.enum_type):
                raise InvalidRequest(f"{field.name} cannot be {value}")
            found[field.name] = words(field.enum_type)[value]
        else:
            found[field.name] = value
    return found


def to_message(kind: type[AnyMessage], found: dict[str, Any]) -> AnyMessage:
    """The message of this kind that says the same. What it has no field for is left out."""
    return kind(**_arguments(cast(Descriptor, kind.DESCRIPTOR), found))


@cache
def words(enum: EnumDescriptor) -> dict[int, str]:
    """The word for each number."""
    prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", enum.name).upper() + "_"
    return {value.number: value.name.removeprefix(prefix).lower() for value in enum.values}


def clean(text: str) -> str:
    """Text that is UTF-8 everywhere, for people."""
    return text.encode("utf-8", "replace").decode() if not text.isascii() else text


def _arguments(descriptor: Descriptor, found: dict[str, Any]) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for name, convert, kind in _shape(descriptor):
        value = found.get(name)
        if value is None:
            continue
        if kind == FieldDescriptor.TYPE_BYTES:
            arguments[name] = decode_bytes(value, found.get(f"{name}_encoding") or found["encoding"])
        else:
            arguments[name] = convert(value)
            twin = f"{name}{TWIN}"
            if arguments[name] != value and twin in descriptor.fields_by_name:
                arguments[twin] = value.encode("utf-8", "surrogateescape")
    return arguments


@cache
def _shape(descriptor: Descriptor) -> tuple[tuple[str, Convert, int], ...]:
    """Name, conversion and type of every field that JSON has; of a repeated one each item is converted."""
    return tuple(
        (field.name, _conversion(field), 0 if field.is_repeated else field.type)
        for field in descriptor.fields
        if _text_of(field) is None
    )


def _conversion(field: FieldDescriptor) -> Convert:
    if _is_map(field):
        return lambda value: {clean(key): clean(text) for key, text in value.items()}
    one = _conversion_of_one(field)
    return (lambda value: [one(item) for item in value]) if field.is_repeated else one


def _conversion_of_one(field: FieldDescriptor) -> Convert:
    if field.type == FieldDescriptor.TYPE_STRING:
        return clean
    if field.type == FieldDescriptor.TYPE_ENUM:
        numbers = {word: number for number, word in words(field.enum_type).items()}
        return lambda word: numbers.get(word, 0)
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        below = cast(Descriptor, field.message_type)
        if below.full_name == Struct.DESCRIPTOR.full_name:
            return lambda value: json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
        return lambda value: _arguments(below, value)
    return lambda value: value


def _text_of(field: FieldDescriptor) -> str | None:
    """The field whose twin this one is."""
    name = field.name.removesuffix(TWIN)
    siblings = cast(Descriptor, field.containing_type).fields_by_name
    return (
        name if name != field.name and field.type == FieldDescriptor.TYPE_BYTES and name in siblings else None
    )


def _is_map(field: FieldDescriptor) -> bool:
    below = field.message_type
    return below is not None and below.GetOptions().map_entry
