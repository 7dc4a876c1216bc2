"""Output in a form that fits into a model's context."""

from __future__ import annotations

LIMIT = 20_000
"""Characters."""


def bounded(text: str, limit: int = LIMIT, *, lost: int = 0) -> str:
    """At most about `limit` characters of it: the beginning and the end, and between them how much is missing.

    `lost` is how much of its end was cut away before; it counts as missing at the end.
    """
    if len(text) > limit:
        head, tail = text[: limit // 2], text[-(limit // 2) :]
        text = f"{head}\n[... {len(text) - len(head) - len(tail)} characters left out ...]\n{tail}"
    return f"{text}\n[... {lost} more bytes were cut ...]" if lost else text
