"""TOML files that operators write, read field by field. Every error names the file, the table and the key."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from skerry.errors import SkerryError

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Table:
    """One table of a TOML file. Every method raises `error` for a value of the wrong type.

    A key that is missing gives the default.
    """

    def __init__(
        self, values: Mapping[str, Any], path: str, error: type[SkerryError], name: str = ""
    ) -> None:
        self.values = values
        self.path = path
        self.name = name
        """With those of its parents, as TOML writes it; empty for the whole file."""
        self._error = error

    def wrong(self, problem: str, hint: str = "") -> SkerryError:
        where = f"{self.path}: [{self.name}]" if self.name else f"{self.path}:"
        return self._error(f"{where} {problem}", hint=hint)

    def allow(self, keys: Collection[str]) -> None:
        """Refuses keys other than these."""
        if unknown := sorted(set(self.values) - set(keys)):
            listed = ", ".join(map(repr, unknown))
            raise self.wrong(
                f"unknown key{'s' * (len(unknown) > 1)} {listed}", f"known: {', '.join(sorted(keys))}"
            )

    def text(self, key: str, default: str = "", pattern: re.Pattern[str] | None = None) -> str:
        value = self._checked(key, self.values.get(key, default), "a string")
        if pattern is not None and key in self.values and not pattern.fullmatch(value):
            raise self.wrong(f"{key} must match {pattern.pattern}, not {value!r}")
        return value

    def texts(
        self, key: str, default: tuple[str, ...] = (), pattern: re.Pattern[str] | None = None
    ) -> tuple[str, ...]:
        found = self.strings(key, self.values.get(key, default))
        for each in found:
            if pattern is not None and not pattern.fullmatch(each):
                raise self.wrong(f"{key}: {each!r} does not match {pattern.pattern}")
        return found

    def strings(self, what: str, value: object) -> tuple[str, ...]:
        """A value that is a list of strings."""
        if not isinstance(value, list | tuple):
            raise self.wrong(f"{what} must be a list of strings, not {value!r}")
        return tuple(self._checked(what, each, "a list of strings") for each in value)

    def truth(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(f"{key} must be true or false, not {value!r}")
        return value

    def count(self, key: str, default: int, low: int, high: int) -> int:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(f"{key} must be a whole number from {low} to {high}, not {value!r}")
        return value

    def variables(self, key: str) -> dict[str, str]:
        """A table of environment variables, whose names a shell can use."""
        self.table(key).names(VARIABLE, "an environment variable")
        return self.mapping(key)

    def mapping(self, key: str) -> dict[str, str]:
        """A table of strings."""
        table = self.table(key)
        return {name: table.text(name) for name in table.values}

    def table(self, key: str) -> Table:
        """The table below `key`, empty if it is missing."""
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            raise self.wrong(f"{key} must be a table, not {value!r}")
        return Table(value, self.path, self._error, f"{self.name}.{key}" if self.name else key)

    def tables(self) -> dict[str, Table]:
        """For a table that holds nothing but tables."""
        return {key: self.table(key) for key in self.values}

    def names(self, pattern: re.Pattern[str], what: str) -> None:
        """Refuses keys that do not match."""
        for key in self.values:
            if not pattern.fullmatch(key):
                raise self.wrong(f"{key!r} cannot be the name of {what}", f"it must match {pattern.pattern}")

    def _checked(self, key: str, value: object, kind: str) -> str:
        if not isinstance(value, str):
            raise self.wrong(f"{key} must be {kind}, not {value!r}")
        if "\0" in value:
            raise self.wrong(f"{key} contains a NUL byte")
        return value


def parse(text: str, path: str, error: type[SkerryError]) -> Table:
    """Raises `error` for what is not TOML."""
    try:
        return Table(tomllib.loads(text), path, error)
    except tomllib.TOMLDecodeError as reason:
        raise error(f"{path} is not valid TOML: {reason}") from reason


def read(path: str, error: type[SkerryError]) -> Table | None:
    """Returns None for a file that does not exist. Raises `error`."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as reason:
        said = reason.strerror if isinstance(reason, OSError) else reason
        raise error(f"cannot read {path}: {said}") from reason
    return parse(text, path, error)
