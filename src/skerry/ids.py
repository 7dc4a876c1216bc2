"""Ids of environments and executions."""

from __future__ import annotations

import secrets

LENGTH = 12
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_DIGITS = _LETTERS + "0123456789"
_COUNT = len(_LETTERS) * len(_DIGITS) ** (LENGTH - 1)


def new_id() -> str:
    """Twelve characters of [a-z0-9], the first a letter, so that it is a host name and never a number."""
    number = secrets.randbelow(_COUNT)
    number, first = divmod(number, len(_LETTERS))
    out = [_LETTERS[first]]
    for _ in range(LENGTH - 1):
        number, digit = divmod(number, len(_DIGITS))
        out.append(_DIGITS[digit])
    return "".join(out)
