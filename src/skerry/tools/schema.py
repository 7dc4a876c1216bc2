"""The tools in the formats in which models are told of them."""

from __future__ import annotations

from typing import Any

from skerry.errors import InvalidRequest
from skerry.tools.table import TOOLS, Tool


def _openai(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.function_name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _anthropic(tool: Tool) -> dict[str, Any]:
    return {"name": tool.function_name, "description": tool.description, "input_schema": tool.parameters}


def _json(tool: Tool) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": tool.parameters}


FORMATS = {"openai": _openai, "anthropic": _anthropic, "json": _json}


def schemas(format: str = "json") -> list[dict[str, Any]]:
    """All tools: as the `tools` of a request to a model (`openai`, `anthropic`), or plainly (`json`).

    Raises InvalidRequest for another format.
    """
    if format not in FORMATS:
        raise InvalidRequest(f"there is no format {format!r}", hint=f"one of {', '.join(FORMATS)}")
    return [FORMATS[format](tool) for tool in TOOLS]
