"""The arguments of a model's tool call, which can be anything at all, against the schema of the tool."""

from __future__ import annotations

import json
import reprlib
from typing import Any

from skerry.errors import InvalidRequest
from skerry.tools.results import plain

TEXT_MAX = 4 << 20
"""Characters of all texts in one call together."""
SHOWN_MAX = 200
NUMBER_MAX = 1 << 53
"""The largest number that every JSON reader takes exactly."""

_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "string": ((str,), "text"),
    "number": ((int, float), "a number"),
    "integer": ((int,), "a whole number"),
    "boolean": ((bool,), "true or false"),
    "array": ((list, tuple), "a list"),
    "object": ((dict,), "an object"),
}


def check(parameters: dict[str, Any], arguments: object) -> dict[str, Any]:
    """The arguments, with the defaults of those that are not given. Text is read as JSON, null counts as not given.

    Raises InvalidRequest, which says in words for the model what is wrong, and is short whatever was sent.
    """
    if isinstance(arguments, str | bytes):
        arguments = _parsed(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"the arguments must be an object, not {shown(arguments)}")
    properties: dict[str, Any] = parameters["properties"]
    given = {name: value for name, value in arguments.items() if value is not None}
    if unknown := [shown(name) for name in given if name not in properties]:
        raise InvalidRequest(f"there is no argument {unknown[0]}; there are {', '.join(properties)}")
    for name in parameters.get("required", ()):
        if name not in given:
            raise InvalidRequest(f"{name} is missing")
    left = TEXT_MAX
    for name, value in given.items():
        left -= _check_value(name, properties[name], value)
        if left < 0:
            raise InvalidRequest(f"the arguments are longer than {TEXT_MAX} characters")
    defaults = {name: schema["default"] for name, schema in properties.items() if "default" in schema}
    return {**defaults, **given}


def _parsed(text: str | bytes) -> object:
    # Escapes make up to six characters of one; the exact limit is that on the parsed texts.
    if len(text) > 6 * TEXT_MAX:
        raise InvalidRequest(f"the arguments are longer than {TEXT_MAX} characters")
    try:
        return json.loads(text) if text.strip() else None
    except (ValueError, RecursionError) as error:
        reason = "too deep" if isinstance(error, RecursionError) else shown(str(error))
        raise InvalidRequest(f"the arguments are not JSON: {reason}") from None


def _check_value(name: str, schema: dict[str, Any], value: Any) -> int:
    """Returns how much text is in it."""
    types, word = _TYPES[schema["type"]]
    if (type(value) is bool and bool not in types) or not issubclass(type(value), types):
        raise InvalidRequest(f"{name} must be {word}, not {shown(value)}")
    if "enum" in schema and value not in schema["enum"]:
        raise InvalidRequest(f"{name} must be one of {', '.join(schema['enum'])}, not {shown(value)}")
    match schema["type"]:
        case "string":
            return _check_text(name, value)
        case "number" | "integer":
            return _check_number(name, schema, value)
        case "object":
            items = schema["additionalProperties"]
            inner = (_check_value(f"{name}[{shown(key)}]", items, item) for key, item in value.items())
            return sum(_check_text(name, key) for key in value) + sum(inner)
        case "array":
            return sum(_check_value(f"{name}[{at}]", schema["items"], item) for at, item in enumerate(value))
    return 0


def _check_text(name: str, value: object) -> int:
    if not isinstance(value, str):
        raise InvalidRequest(f"a name in {name} must be text, not {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{name} has half a character (a lone surrogate) at {error.start}") from None
    return len(value)


def _check_number(name: str, schema: dict[str, Any], value: float) -> int:
    low, least, most = (schema.get(key) for key in ("exclusiveMinimum", "minimum", "maximum"))
    if most is None and abs(value) > NUMBER_MAX:
        raise InvalidRequest(f"{name} must be between -{NUMBER_MAX} and {NUMBER_MAX}, not {shown(value)}")
    if (
        value != value
        or (low is not None and value <= low)
        or (least is not None and value < least)
        or (most is not None and value > most)
    ):
        bounds = [f"more than {low}"] if low is not None else []
        bounds += [f"at least {least}"] if least is not None else []
        bounds += [f"at most {most}"] if most is not None else []
        raise InvalidRequest(f"{name} must be {' and '.join(bounds) or 'a number'}, not {shown(value)}")
    return 0


def shown(value: object) -> str:
    """A few words of a value, whatever it is."""
    try:
        text = _SHORT.repr(value)
    except ValueError:  # a number of more digits than Python writes
        text = f"a huge {type(value).__name__}"
    return plain(text if len(text) <= SHOWN_MAX else text[:SHOWN_MAX] + "...")


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_SHORT.maxlevel = 2
_SHORT.maxdict = _SHORT.maxlist = 3
