"""Output of the CLI itself: data to stdout, messages to stderr, control characters escaped."""

from __future__ import annotations

import codecs
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, TextIO

    from skerry.errors import SkerryError


def clean(text: object) -> str:
    """One line of text with control characters, bidi marks and invalid bytes escaped."""
    return "".join([c if c.isprintable() else _escaped(c) for c in str(text)])


def clean_text(text: str) -> str:
    """Like `clean`, for several lines."""
    return "".join([c if c.isprintable() or c in "\n\t" else _escaped(c) for c in text.replace("\r\n", "\n")])


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def say(text: str) -> None:
    """Print a message to stderr."""
    print(clean_text(text), file=sys.stderr, flush=True)


def show_error(error: SkerryError, as_json: bool) -> None:
    if as_json:
        import json

        print(json.dumps({"error": error.to_dict()}), file=sys.stderr)
        return
    say(f"skerry: {error.message}")
    if error.hint:
        say(f"hint: {error.hint}")


def show_json(value: Any, file: TextIO | None = None) -> None:
    import json

    print(json.dumps(value, indent=2), file=file)


def show_table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> None:
    """Print aligned columns."""
    cells = [head, *(tuple(clean(value) for value in row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    for row in cells:
        print("  ".join(value.ljust(width) for value, width in zip(row, widths, strict=True)).rstrip())


class Sink:
    """Writes one output stream: raw bytes, or escaped text on a terminal."""

    def __init__(self, fd: int) -> None:
        self._file = (sys.stdout if fd == 1 else sys.stderr).buffer
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode if os.isatty(fd) else None

    def write(self, data: bytes) -> None:
        self._file.write(data if self._decode is None else clean_text(self._decode(data)).encode())
        self._file.flush()


def ago(seconds: float) -> str:
    """A duration as one number with its unit."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if abs(seconds) >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
