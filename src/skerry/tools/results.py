"""What a tool gives back to a model, and how long that may be."""

from __future__ import annotations

from dataclasses import dataclass

FIELD_MAX = 16_000
"""Characters of one text (a stream, the content of a file) that a model is shown."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The answer to a tool call. A call that could not be carried out is one, too: `is_error`, and words."""

    content: str
    is_error: bool = False


def bounded(text: str, limit: int = FIELD_MAX, whole: str = "") -> str:
    """`text`; of a longer one its head and tail, at most `limit` characters, and between them what was cut.

    `whole` is the path under which all of it can be read.
    """
    if len(text) <= limit:
        return text
    head, tail = text[: limit - limit // 2], text[len(text) - limit // 2 :]
    where = f"; all of it is in {whole}" if whole else ""
    return f"{head}\n[... {len(text) - limit} of {len(text)} characters cut{where} ...]\n{tail}"


def plain(text: str) -> str:
    """Text that every encoder takes: half characters become question marks."""
    return text.encode(errors="replace").decode()
