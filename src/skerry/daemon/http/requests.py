"""What callers send: JSON bodies, query strings, raw bodies; within limits, and nothing that is not known."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, TypeVar
from urllib.parse import unquote_to_bytes

from fastapi import Request
from pydantic import BaseModel, ConfigDict, InstanceOf, ValidationError

from skerry.errors import InvalidRequest, LimitReached

JSON_LIMIT = 16 << 20
UPLOAD_LIMIT = 1 << 30

Text = InstanceOf[str]
"""Any str: unlike for pydantic's own, lone surrogates are fine; they stand for bytes that are not UTF-8."""


class Body(BaseModel):
    """A JSON body. Unknown keys and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


AnyBody = TypeVar("AnyBody", bound=Body)


async def read_json(request: Request, model: type[AnyBody]) -> AnyBody:
    """Raises InvalidRequest, LimitReached."""
    return parse(model, b"".join([chunk async for chunk in read_raw(request, JSON_LIMIT)]))


def parse(model: type[AnyBody], text: bytes | str) -> AnyBody:
    """Raises InvalidRequest."""
    try:
        return model.model_validate(json.loads(text or b"{}"))
    except ValidationError as error:
        raise InvalidRequest(_explain(error)) from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error


async def read_raw(request: Request, limit: int) -> AsyncIterator[bytes]:
    """The body as it comes. Raises LimitReached."""
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise LimitReached(f"the body is larger than {limit} bytes")
        if chunk:
            yield chunk


def query(request: Request, *known: str) -> dict[str, str]:
    """The query string, with bytes that are not UTF-8 kept as surrogate escapes. Raises InvalidRequest."""
    found: dict[str, str] = {}
    raw: bytes = request.scope["query_string"]
    for pair in raw.split(b"&") if raw else ():
        name, _, value = (
            unquote_to_bytes(part.replace(b"+", b" ")).decode("utf-8", "surrogateescape")
            for part in pair.partition(b"=")
        )
        if name not in known:
            raise InvalidRequest(f"unknown parameter {name!r}", hint=f"known: {', '.join(known)}")
        if name in found:
            raise InvalidRequest(f"parameter {name!r} is given twice")
        found[name] = value
    return found


def required(parameters: dict[str, str], name: str) -> str:
    """Raises InvalidRequest."""
    value = parameters.get(name, "")
    if not value:
        raise InvalidRequest(f"parameter {name!r} is missing")
    return value


def flag(parameters: dict[str, str], name: str, default: bool = False) -> bool:
    """Raises InvalidRequest."""
    value = parameters.get(name)
    if value is None:
        return default
    if value not in ("0", "1", "true", "false"):
        raise InvalidRequest(f"parameter {name!r} must be 0 or 1, not {value!r}")
    return value in ("1", "true")


def number(parameters: dict[str, str], name: str) -> int | None:
    """A whole number from 0, or None when it is not given. Raises InvalidRequest."""
    value = parameters.get(name)
    if value is None:
        return None
    if not value.isascii() or not value.isdecimal() or len(value) > 18:
        raise InvalidRequest(f"parameter {name!r} must be a whole number, not {value!r}")
    return int(value)


def _explain(error: ValidationError) -> str:
    first: Any = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown field {where!r}"
    return f"{where}: {first['msg']}" if where else str(first["msg"])
