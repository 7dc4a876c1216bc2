"""Text for the stateful shell."""

from __future__ import annotations

import shlex
from collections.abc import Mapping


def with_context(command: str, cwd: str | None, exports: Mapping[str, str]) -> str:
    """The command with what it shall find: exports and directory stay, as if the caller had written them."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in exports.items()]
    if cwd is not None:
        lines.append(f"cd -- {shlex.quote(cwd)} || return 1 2>/dev/null || exit 1")
    return "\n".join([*lines, command])
