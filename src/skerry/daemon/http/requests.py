"""What callers send: JSON bodies, query strings, raw bodies; within limits, and nothing that is not known."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar
from urllib.parse import unquote_to_bytes

from pydantic import BaseModel, ConfigDict, InstanceOf, ValidationError, WithJsonSchema
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from skerry.errors import Busy, InvalidRequest, LimitReached

if TYPE_CHECKING:
    from skerry.daemon.http.operations import Parameter

JSON_LIMIT = 16 << 20
UPLOAD_LIMIT = 1 << 30
BOOLEANS = {"0": False, "1": True, "false": False, "true": True}

Text = Annotated[InstanceOf[str], WithJsonSchema({"type": "string"})]
"""Any str: unlike for pydantic's own, lone surrogates are fine; they stand for bytes that are not UTF-8."""
Seconds = Annotated[
    float,
    WithJsonSchema({"type": "number", "exclusiveMinimum": 0, "maximum": 365 * 86400, "title": "Seconds"}),
]
Signal = Annotated[int, WithJsonSchema({"type": "integer", "minimum": 1, "maximum": 64})]
Length = Annotated[int, WithJsonSchema({"type": "integer", "minimum": 1, "maximum": 65535})]
Encoding = Literal["utf-8", "base64"]


class Body(BaseModel):
    """A JSON body. Unknown keys and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


AnyBody = TypeVar("AnyBody", bound=Body)


async def read_json(receive: Receive, model: type[AnyBody], more: Callable[[int], bool]) -> AnyBody:
    """`more` says whether there is room for so many bytes.

    Raises InvalidRequest, LimitReached, Busy, ClientDisconnect.
    """
    chunks = []
    async for chunk in read_raw(receive, JSON_LIMIT):
        if not more(len(chunk)):
            raise Busy("too many large requests are under way", hint="try again when some have been answered")
        chunks.append(chunk)
    return parse(model, b"".join(chunks))


def parse(model: type[AnyBody], text: bytes | str) -> AnyBody:
    """Raises InvalidRequest."""
    try:
        return model.model_validate(json.loads(text or b"{}"))
    except ValidationError as error:
        raise InvalidRequest(_explain(error)) from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error


def decode(text: str, encoding: Encoding, what: str) -> bytes:
    """Bytes that came as text. Raises InvalidRequest."""
    try:
        if encoding == "base64":
            return base64.b64decode(text, validate=True)
        return text.encode("utf-8", "surrogateescape")
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"{what} is not {encoding}") from error


async def read_raw(receive: Receive, limit: int) -> AsyncIterator[bytes]:
    """The body as it comes. Raises LimitReached, ClientDisconnect."""
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        size += len(chunk)
        if size > limit:
            raise LimitReached(f"the body is larger than {limit} bytes")
        if chunk:
            yield chunk


def query(raw: bytes, parameters: Iterable[Parameter]) -> dict[str, Any]:
    """What a query string gives, by name. Bytes that are not UTF-8 stay as surrogate escapes.

    Raises InvalidRequest.
    """
    known = {parameter.name: parameter for parameter in parameters}
    found: dict[str, Any] = {}
    for pair in raw.split(b"&") if raw else ():
        name, _, value = (
            unquote_to_bytes(part.replace(b"+", b" ")).decode("utf-8", "surrogateescape")
            for part in pair.partition(b"=")
        )
        if name not in known:
            raise InvalidRequest(
                f"unknown parameter {name!r}",
                hint=f"known: {', '.join(known)}" if known else "there are none",
            )
        if name in found:
            raise InvalidRequest(f"parameter {name!r} is given twice")
        found[name] = _value(known[name], value)
    for name, parameter in known.items():
        if parameter.required and name not in found:
            raise InvalidRequest(f"parameter {name!r} is missing")
    return found


def _value(parameter: Parameter, text: str) -> Any:
    if parameter.kind == "boolean":
        if text not in BOOLEANS:
            raise InvalidRequest(f"parameter {parameter.name!r} must be 0 or 1, not {text!r}")
        return BOOLEANS[text]
    if parameter.kind == "integer":
        number = int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else -1
        if not parameter.least <= number <= parameter.most:
            allowed = f"a whole number from {parameter.least} to {parameter.most}"
            raise InvalidRequest(f"parameter {parameter.name!r} must be {allowed}, not {text!r}")
        return number
    if parameter.required and not text:
        raise InvalidRequest(f"parameter {parameter.name!r} is empty")
    if parameter.choices and text not in parameter.choices:
        raise InvalidRequest(
            f"parameter {parameter.name!r} cannot be {text!r}", hint=f"known: {', '.join(parameter.choices)}"
        )
    return text


def _explain(error: ValidationError) -> str:
    first: Any = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown field {where!r}"
    return f"{where}: {first['msg']}" if where else str(first["msg"])
