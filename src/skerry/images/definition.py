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
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skerry.errors import ImageNotFound, InvalidRequest

_BUILT_IN = Path(__file__).parent / "definitions"
_KEYS = {"description", "base", "suite", "packages", "commands", "env"}
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+")
_SUITE = re.compile(r"[a-z0-9][a-z0-9.-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


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
    """The definitions there are, by name; a user's own hides a built-in one of the same name."""
    folders = (_BUILT_IN, folder or user_folder())
    return {path.stem: path for place in folders for path in sorted(place.glob("*.toml"))}


def find(name: str, folder: Path | None = None) -> Definition:
    """The definition of that name. Raises ImageNotFound, and InvalidRequest for a file that is wrong."""
    known = available(folder)
    if name not in known:
        raise ImageNotFound(
            f"there is no definition of an image {name!r}",
            hint=f"known: {', '.join(sorted(known))}; your own go to {folder or user_folder()}/{name}.toml",
        )
    return load(known[name])


def load(path: Path) -> Definition:
    """The definition in a file. Raises InvalidRequest."""
    try:
        raw = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"cannot read {path}: {error}") from error
    try:
        return _parse(path.stem, raw)
    except ValueError as error:
        raise InvalidRequest(f"{path}: {error}") from error


def _parse(name: str, raw: dict[str, Any]) -> Definition:
    unknown = sorted(set(raw) - _KEYS)
    _require(not unknown, f"unknown keys: {', '.join(unknown)}")
    _require(raw.get("base") == "debian", 'base must be "debian"')
    packages = _strings(raw.get("packages", []), "packages")
    for package in packages:
        _require(_PACKAGE.fullmatch(package) is not None, f"{package!r} is not the name of a package")
    suite = raw.get("suite", "bookworm")
    _require(isinstance(suite, str) and _SUITE.fullmatch(suite) is not None, "suite must be a release's name")
    commands = raw.get("commands", [])
    _require(isinstance(commands, list), "commands must be a list of lists of strings")
    argvs = tuple(_strings(command, "each of commands") for command in commands)
    _require(all(argvs), "a command is empty")
    env = raw.get("env", {})
    _require(isinstance(env, dict), "env must be a table of strings")
    for variable, value in env.items():
        _require(_VARIABLE.fullmatch(variable) is not None, f"{variable!r} is not a name for a variable")
        _require(isinstance(value, str) and "\0" not in value, f"env.{variable} must be a string")
    description = raw.get("description", "")
    _require(isinstance(description, str), "description must be a string")
    return Definition(name, description, suite, packages, argvs, env)


def _strings(value: Any, what: str) -> tuple[str, ...]:
    good = isinstance(value, list) and all(isinstance(item, str) and "\0" not in item for item in value)
    _require(good, f"{what} must be a list of strings")
    return tuple(value)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
