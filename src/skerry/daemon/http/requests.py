"""What callers send: JSON bodies, query strings, raw bodies; within limits, and nothing that is not known."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar
from urllib.parse import unquote_to_bytes

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    InstanceOf,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from skerry.daemon.http.bodies import PIECE, SMALL, JsonBody, LongText, load
from skerry.errors import Busy, InvalidRequest, LimitReached

if TYPE_CHECKING:
    from skerry.daemon.http.operations import Parameter

JSON_LIMIT = 16 << 20
UPLOAD_LIMIT = 1 << 30
BOOLEANS = {"0": False, "1": True, "false": False, "true": True}

Text = Annotated[InstanceOf[str], WithJsonSchema({"type": "string"})]
"""Any str: unlike for pydantic's own, lone surrogates are fine; they stand for bytes that are not UTF-8."""


Content = Annotated[InstanceOf[str] | InstanceOf[LongText], WithJsonSchema({"type": "string"})]
"""A text that may be long, for the fields in `contents`."""


def _texts(value: Any) -> Any:
    """Stop at the first item that is no text: pydantic would describe every one."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        if not isinstance(item, str):
            where = {"name": str(name)[:100], "kind": type(item).__name__}
            raise PydanticCustomError("text", "{name} must be text, not {kind}", where)
    return value


Texts = Annotated[list[Text], BeforeValidator(_texts)]
TextsByName = Annotated[dict[Text, Text], BeforeValidator(_texts)]
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
    contents: ClassVar[Collection[str]] = ()
    """The fields that may hold long texts."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, raw: Any) -> Any:
        """Stop at the first field that there is not: pydantic would describe every one. Raises InvalidRequest."""
        if isinstance(raw, dict) and not raw.keys() <= cls.model_fields.keys():
            unknown = next(name for name in raw if name not in cls.model_fields)
            raise InvalidRequest(
                f"unknown field {unknown[:100]!r}", hint=f"known: {', '.join(cls.model_fields)}"
            )
        return raw


AnyBody = TypeVar("AnyBody", bound=Body)


async def read_json(
    receive: Receive, model: type[AnyBody], more: Callable[[int], bool], pause: Callable[[], Awaitable[None]]
) -> AnyBody:
    """A JSON body. `more(size)` says whether there is room for that many bytes. A large body is parsed with pauses.

    Raises InvalidRequest, LimitReached, Busy, ClientDisconnect.
    """
    small = bytearray()
    large: JsonBody | None = None
    async for chunk in read_raw(receive, JSON_LIMIT):
        if not more(len(chunk)):
            raise Busy("too many large requests are under way", hint="try again when some have been answered")
        if large is None:
            small += chunk
            if len(small) <= SMALL:
                continue
            large, chunk = JsonBody(model.contents), bytes(small)
        for at in range(0, len(chunk), PIECE):
            _explained(large.feed, chunk[at : at + PIECE])
            await pause()
    if large is None:
        return parse(model, small)
    found = _explained(large.finish)
    await pause()
    return _validated(model, found)


def parse(model: type[AnyBody], text: bytes | bytearray | str) -> AnyBody:
    """Raises InvalidRequest, LimitReached."""
    if len(text) <= SMALL:
        return _validated(model, _explained(load, text))
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    body = JsonBody(())
    for at in range(0, len(data), PIECE):
        _explained(body.feed, data[at : at + PIECE])
    return _validated(model, _explained(body.finish))


def _explained(step: Callable[..., Any], *arguments: Any) -> Any:
    """Raises InvalidRequest for what is not JSON."""
    try:
        return step(*arguments)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {str(error)[:200]}") from error


def _validated(model: type[AnyBody], found: Any) -> AnyBody:
    """Raises InvalidRequest."""
    try:
        return model.model_validate(found)
    except ValidationError as error:
        raise InvalidRequest(_explain(error)) from error


async def decode(text: str | LongText, encoding: Encoding, what: str) -> bytes | bytearray:
    """Bytes that came as text. A long one is used up, in several turns of the event loop. Raises InvalidRequest."""
    if isinstance(text, str):
        return _decoded(text, encoding, what)
    found = bytearray()
    rest = ""
    pieces, text.pieces = text.pieces, []
    pieces.reverse()
    while pieces:
        piece = rest + pieces.pop()
        end = len(piece) // 4 * 4 if encoding == "base64" and pieces else len(piece)
        piece, rest = piece[:end], piece[end:]
        if encoding == "base64" and pieces and piece.endswith("="):
            raise InvalidRequest(f"{what} is not {encoding}")
        found += _decoded(piece, encoding, what)
        await asyncio.sleep(0)
    return found


def _decoded(text: str, encoding: Encoding, what: str) -> bytes:
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
