"""How the long work on images tells how far it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    step: str
    """What is being done, in words."""
    fraction: float | None = None
    """Of the whole work, 0 to 1, never falling; None: cannot be told."""


Report = Callable[[Progress], None]


def silent(_: Progress) -> None:
    """A report that nobody reads."""
