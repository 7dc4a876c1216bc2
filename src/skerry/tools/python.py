"""Shared by the tools that run Python code in a session: results as those of programs, and pictures."""

from __future__ import annotations

import base64
import binascii
from dataclasses import replace

from skerry.errors import InstallFailed, PlatformError
from skerry.models import ExecutionResult, Outcome, SessionResult, Usage

SESSION = "python"
IMAGES_MAX = 4
IMAGE_SIZE_MAX = 5 << 20
"""Characters of base64 of one picture; the APIs of models refuse larger ones."""
_PICTURES = ("image/png", "image/jpeg", "image/gif", "image/webp")


def as_program(result: ExecutionResult, traceback: str = "") -> ExecutionResult:
    """The result in the form of a program's: exception and end of the interpreter are on stderr.

    Raises PlatformError if the platform, not the code, ended it.
    """
    if result.outcome == Outcome.INTERNAL:
        raise PlatformError(result.message or "the execution was lost")
    more = (f"{traceback}[{result.message}]\n" if result.message else traceback).encode(errors="replace")
    return replace(
        result, stderr_bytes=result.stderr_bytes + more, stderr_size=result.stderr_size + len(more)
    )


def not_installed(failed: InstallFailed) -> ExecutionResult:
    """The result of code whose packages cannot be installed: exit code 1, the reason on stderr."""
    words = f"{failed}\n".encode(errors="replace")
    return ExecutionResult("", Outcome.FAILED, 1, b"", words, 0, len(words), 0.0, Usage())


def pictures(result: SessionResult) -> tuple[tuple[tuple[str, str], ...], int]:
    """The first pictures that the call displayed, as media type and base64, and the number left out.

    Left out are those beyond IMAGES_MAX and IMAGE_SIZE_MAX, and what is not base64.
    """
    shown = [
        (kind, data) for value in result.values for kind, data in value.data.items() if kind in _PICTURES
    ]
    fit = [(kind, data) for kind, data in shown if len(data) <= IMAGE_SIZE_MAX and _is_base64(data)]
    found = tuple(fit[:IMAGES_MAX])
    return found, len(shown) - len(found)


def _is_base64(text: str) -> bool:
    try:
        return bool(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError):
        return False
