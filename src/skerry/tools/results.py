"""What a tool gives back to a model, and how long that may be."""

from __future__ import annotations

import json
from dataclasses import dataclass

from skerry.models import Outcome

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from skerry.models import ExecutionResult

FIELD_MAX = 16_000
"""Characters of one text (a stream, the content of a file) that a model is sent, counted with their JSON escapes."""
_TWO_CHARACTERS = '"\\\n\r\t\b\f'
"""Characters whose JSON escape has two characters; that of other control characters has six."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The answer to a tool call. A call that could not be carried out is one, too: `is_error`, and words."""

    content: str
    is_error: bool = False
    images: tuple[tuple[str, str], ...] = ()
    """Pictures that belong to it: media type and base64."""
    structured: dict[str, Any] | None = None
    """What `content` is the JSON of, where it is JSON."""


def sent_length(text: str) -> int:
    """Characters of `text` inside a JSON string, escapes included."""
    return len(json.dumps(text, ensure_ascii=False)) - 2


def fits(text: str, limit: int) -> bool:
    """Whether `text` is sent whole."""
    return len(text) <= limit and sent_length(text) <= limit


def bounded(text: str, limit: int = FIELD_MAX, whole: str = "") -> str:
    """`text`; of a longer one its head and tail, with a note of how many characters were cut between them.

    Head and tail together have at most `limit` characters as sent, that is with JSON escapes: control characters
    take six each. `whole` is the path under which all of it can be read.
    """
    if fits(text, limit):
        return text
    head = _fitting(text, limit - limit // 2)
    tail = min(_fitting(reversed(text), limit // 2), len(text) - head)
    where = f"; all of it is in {whole}" if whole else ""
    words = f"\n[... {len(text) - head - tail} of {len(text)} characters cut{where} ...]\n"
    return text[:head] + words + text[len(text) - tail :]


def _fitting(characters: Iterable[str], room: int) -> int:
    """The number of leading characters that fit into `room` characters of JSON."""
    count = 0
    for character in characters:
        room -= 2 if character in _TWO_CHARACTERS else 6 if character < " " else 1
        if room < 0:
            break
        count += 1
    return count


def sections(result: ExecutionResult, timeout: float) -> str:
    """An execution as text: what it wrote under headings, and how it ended where that is worth a word."""
    parts = []
    if result.outcome == Outcome.TIMED_OUT:
        parts.append(f"Execution timed out after {timeout:g} seconds. The process was terminated.")
    for heading, text in (("STDOUT", result.stdout), ("STDERR", result.stderr)):
        if text:
            parts.append(f"--- {heading} ---\n{bounded(text).removesuffix(chr(10))}")
    if result.outcome not in (Outcome.COMPLETED, Outcome.TIMED_OUT):
        why = "" if result.outcome == Outcome.FAILED or not result.message else f"\n{result.message}"
        parts.append(f"--- EXIT CODE: {result.exit_code} ---{why}")
    return "\n".join(parts) or "Execution completed successfully with no output."


def plain(text: str) -> str:
    """Text that every encoder takes: half characters become question marks."""
    return text.encode(errors="replace").decode()
