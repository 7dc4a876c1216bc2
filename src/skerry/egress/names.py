"""Names of hosts, in one form: lower case, ASCII, without the dot at the end."""

from __future__ import annotations

import re

_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_ALL_DIGITS = re.compile(r"(0x[0-9a-f]*|[0-9]+)")
LONGEST = 253


def canonical(text: str) -> str | None:
    """The one form of a name; None for what is none.

    What some resolver would take for an address is no name: one whose last label is a number, also in hex.
    """
    try:
        name = text.lower() if text.isascii() else text.encode("idna").decode("ascii").lower()
    except UnicodeError:
        return None
    name = name.removesuffix(".")
    labels = name.split(".")
    if not name or len(name) > LONGEST or not all(map(_LABEL.fullmatch, labels)):
        return None
    return None if _ALL_DIGITS.fullmatch(labels[-1]) else name
