"""What a tool gives back to a model, and how long that may be."""

from __future__ import annotations

from dataclasses import dataclass

from skerry.models import Outcome

TYPE_CHECKING = False
if TYPE_CHECKING:
    from skerry.models import ExecutionResult

FIELD_MAX = 16_000
"""Characters of one text (a stream, the content of a file) that a model is shown."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The answer to a tool call. A call that could not be carried out is one, too: `is_error`, and words."""

    content: str
    is_error: bool = False
    images: tuple[tuple[str, str], ...] = ()
    """Pictures that belong to it: media type and base64."""


def bounded(text: str, limit: int = FIELD_MAX, whole: str = "") -> str:
    """`text`; of a longer one its head and tail, at most `limit` characters, and between them what was cut.

    `whole` is the path under which all of it can be read.
    """
    if len(text) <= limit:
        return text
    head, tail = text[: limit - limit // 2], text[len(text) - limit // 2 :]
    where = f"; all of it is in {whole}" if whole else ""
    return f"{head}\n[... {len(text) - limit} of {len(text)} characters cut{where} ...]\n{tail}"


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
