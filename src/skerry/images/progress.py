"""Progress reports of image builds and imports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    step: str
    """The current phase, for people."""
    fraction: float | None = None
    """Fraction done, 0 to 1, never falling; None if unknown."""


Report = Callable[[Progress], None]


def silent(_: Progress) -> None:
    """Discards the report."""
