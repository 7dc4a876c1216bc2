"""Names of hosts, in one form: lower case, ASCII, without the dot at the end."""

from __future__ import annotations

import re

_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMBER = re.compile(r"(0x[0-9a-f]*|[0-9]+)")
LONGEST = 253


def canonical(text: str) -> str | None:
    """The one form of a name as it is sent over a network; None for what is none.

    What some resolver would take for an address is no name: one whose last label is a number, also in hex. Neither is
    what has other letters than those of ASCII: which name they stand for depends on who reads them.
    """
    name = text.lower().removesuffix(".")
    labels = name.split(".")
    if not text.isascii() or not name or len(name) > LONGEST or not all(map(_LABEL.fullmatch, labels)):
        return None
    return None if _NUMBER.fullmatch(labels[-1]) else name


def from_person(text: str) -> str | None:
    """The one form of a name as people write it, in any alphabet; None for what is none, or could be two."""
    if text.isascii():
        return canonical(text)
    try:
        encoded = text.encode("idna")
        # Letters that the two versions of IDNA see differently come back as others.
        same = encoded.decode("idna") == text.lower()
    except UnicodeError:
        return None
    return canonical(encoded.decode("ascii")) if same else None
