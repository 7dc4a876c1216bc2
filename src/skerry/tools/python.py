"""What those share who run Python code in a session for a model."""

from __future__ import annotations

import base64
import binascii
from dataclasses import replace

from skerry.errors import InstallFailed, PlatformError
from skerry.models import ExecutionResult, Outcome, SessionResult, Usage

SESSION = "python"
IMAGES_MAX = 4
_PICTURES = ("image/png", "image/jpeg", "image/gif", "image/webp")


def as_program(result: ExecutionResult, traceback: str = "") -> ExecutionResult:
    """The result as a program has it: with its exception on stderr, and why it was ended if it did not end by itself.

    Raises PlatformError when its end says nothing of the code.
    """
    if result.outcome == Outcome.INTERNAL:
        raise PlatformError(result.message or "the execution was lost")
    by_itself = result.outcome in (Outcome.COMPLETED, Outcome.FAILED) or not result.message
    more = (traceback if by_itself else f"{traceback}[{result.message}]\n").encode(errors="replace")
    return replace(
        result, stderr_bytes=result.stderr_bytes + more, stderr_size=result.stderr_size + len(more)
    )


def not_installed(failed: InstallFailed) -> ExecutionResult:
    """What the code comes to when its packages cannot be installed: it does not run, and stderr says why."""
    words = f"{failed}\n".encode(errors="replace")
    return ExecutionResult("", Outcome.FAILED, 1, b"", words, 0, len(words), 0.0, Usage())


def pictures(result: SessionResult) -> tuple[tuple[str, str], ...]:
    """The first few pictures that it has shown, as media type and base64; what is no base64 is none."""
    found = [(kind, data) for value in result.values for kind, data in value.data.items()]
    return tuple(picture for picture in found if picture[0] in _PICTURES and _is_base64(picture[1]))[
        :IMAGES_MAX
    ]


def _is_base64(text: str) -> bool:
    try:
        return bool(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError):
        return False
