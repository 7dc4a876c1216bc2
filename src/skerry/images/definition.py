"""Definitions of images that can be built, as TOML files: some come with Skerry, users add their own.

    description = "..."
    base = "debian"              # the only base there is
    suite = "bookworm"           # the default
    packages = ["git", "jq"]
    commands = [["true"]]        # each an argv, run as root in the new root filesystem after the packages
    [env]                        # of everything that runs in the image
    LANG = "C.UTF-8"

The file's name without `.toml` is the image's name.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from skerry.errors import ImageNotFound, InvalidRequest
from skerry.tables import Table, read

_BUILT_IN = Path(__file__).parent / "definitions"
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+")
_SUITE = re.compile(r"[a-z0-9][a-z0-9.-]*")


@dataclass(frozen=True, slots=True)
class Definition:
    name: str
    description: str
    suite: str
    packages: tuple[str, ...]
    commands: tuple[tuple[str, ...], ...]
    env: dict[str, str]


def user_folder() -> Path:
    """Where a user's own definitions are looked for."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return Path(base) / "skerry" / "images"


def available(folder: Path | None = None) -> dict[str, Path]:
    """Paths of all definitions, by name; a user's own replaces a built-in one of the same name."""
    folders = (_BUILT_IN, folder or user_folder())
    return {path.stem: path for place in folders for path in sorted(place.glob("*.toml"))}


def find(name: str, folder: Path | None = None) -> Definition:
    """The definition of that name. Raises ImageNotFound, and InvalidRequest for an invalid file."""
    known = available(folder)
    if name not in known:
        raise ImageNotFound(
            f"there is no definition of an image {name!r}",
            hint=f"known: {', '.join(sorted(known))}; your own go to {folder or user_folder()}/{name}.toml",
        )
    return load(known[name])


def load(path: Path) -> Definition:
    """The definition in a file. Raises InvalidRequest."""
    table = read(str(path), InvalidRequest)
    if table is None:
        raise InvalidRequest(f"cannot read {path}: it was removed meanwhile")
    table.allow(("description", "base", "suite", "packages", "commands", "env"))
    if table.values.get("base") != "debian":
        raise table.wrong('base must be "debian"')
    return Definition(
        path.stem,
        table.text("description"),
        table.text("suite", "bookworm", _SUITE),
        table.texts("packages", pattern=_PACKAGE),
        _commands(table),
        table.variables("env"),
    )


def _commands(table: Table) -> tuple[tuple[str, ...], ...]:
    commands = table.values.get("commands", [])
    if not isinstance(commands, list):
        raise table.wrong(f"commands must be a list of lists of strings, not {commands!r}")
    found = []
    for number, command in enumerate(commands, 1):
        found.append(table.strings(f"commands, number {number},", command))
        if not found[-1]:
            raise table.wrong(f"commands, number {number}, is empty")
    return tuple(found)
