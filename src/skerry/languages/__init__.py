"""The languages that programs can be written in: data, see languages.toml, which an operator extends."""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from skerry.errors import LanguageNotFound, PlatformError

FILE = "languages.toml"
_NAME = re.compile(r"[a-z][a-z0-9+#.-]{0,31}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VERSION = re.compile(r"\d+(\.\d+)+")
VERSION_MAX = 64
INSTALLERS = ("pip", "npm")


@dataclass(frozen=True, slots=True)
class Cache:
    """What is made once for each image and version of a language, for all programs to read."""

    variable: str
    command: tuple[str, ...]
    clock: str = ""


@dataclass(frozen=True, slots=True)
class Language:
    name: str
    file: str
    command: tuple[str, ...]
    version: tuple[str, ...]
    image: str = "host"
    install: str = ""
    aliases: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict, hash=False)
    cache: Cache | None = None
    warm: bool = False
    warm_unless: str = ""
    packages: str = ""

    def needs_file(self, source: bytes) -> bool:
        """Whether a program cannot be read from a pipe."""
        beginning = source[:4096].decode("utf-8", "replace").splitlines()[:2]
        return bool(self.warm_unless) and any(re.search(self.warm_unless, line) for line in beginning)

    def variables(self, cpus: float) -> dict[str, str]:
        """Its variables, for a program that may use so many cores."""
        cores = str(max(1, int(cpus)))
        return {name: value.replace("{cores}", cores) for name, value in self.env.items()}


class Languages:
    """Those that come with Skerry, and what `languages.toml` in `home` says of them."""

    def __init__(self, home: str) -> None:
        self._path = f"{home}/{FILE}"
        self._stamp: tuple[int, int] | None = None
        self._known: dict[str, Language] = {}
        self._names: dict[str, Language] = {}

    def list(self) -> list[Language]:
        """All of them. Raises PlatformError when the operator's file is wrong."""
        self._load()
        return list(self._known.values())

    def get(self, name: str) -> Language:
        """By name or alias. Raises LanguageNotFound, PlatformError when the operator's file is wrong."""
        self._load()
        found = self._names.get(name)
        if found is None:
            raise LanguageNotFound(
                f"there is no language {name!r}",
                hint=f"known: {', '.join(self._known)}; {self._path} can define more",
            )
        return found

    def _load(self) -> None:
        """Read the operator's file, if it has changed."""
        stamp = _stamp(self._path)
        if stamp == self._stamp and self._known:
            return
        tables = _tables(files(__package__).joinpath(FILE).read_text(), FILE)
        try:
            with open(self._path, encoding="utf-8") as file:
                own = _tables(file.read(), self._path)
        except FileNotFoundError:
            own = {}
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise PlatformError(f"cannot read {self._path}: {reason}") from error
        for name, table in own.items():
            tables[name] = {**tables.get(name, {}), **table}
        known = {name: _language(name, table, self._path) for name, table in tables.items()}
        names = dict(known)
        for language in known.values():
            for alias in language.aliases:
                if names.setdefault(alias, language) is not language:
                    raise PlatformError(
                        f"{self._path}: {alias!r} is a name of both {names[alias].name} and {language.name}"
                    )
        self._known, self._names, self._stamp = known, names, stamp


def version_in(text: str) -> str:
    """The number in what a version command printed, or its first line if there is none."""
    line = text.strip().partition("\n")[0]
    found = _VERSION.search(line)
    return (found[0] if found else line)[:VERSION_MAX]


def _stamp(path: str) -> tuple[int, int]:
    try:
        info = os.stat(path)
    except OSError:
        return 0, 0
    return info.st_mtime_ns, info.st_ino


def _tables(text: str, path: str) -> dict[str, dict[str, Any]]:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlatformError(f"{path} is not TOML: {error}") from error
    for name, table in document.items():
        if not isinstance(table, dict):
            raise PlatformError(f"{path}: {name} is not a table", hint="each language is a [table]")
    return document


_KINDS = {
    "file": "a text",
    "image": "a text",
    "install": "a text",
    "command": "a list of texts",
    "version": "a list of texts",
    "aliases": "a list of texts",
    "env": "a table of texts",
    "cache": "a table with variable, command and perhaps clock",
    "warm": "true or false",
    "warm_unless": "a text",
    "packages": "a text",
}


def _language(name: str, table: dict[str, Any], path: str) -> Language:
    """Raises PlatformError, which says what is wrong with it."""

    def wrong(what: str, hint: str = "") -> PlatformError:
        return PlatformError(f"{path}: [{name}] {what}", hint=hint)

    def check(key: str, value: Any, kind: str) -> None:
        texts = value if isinstance(value, list) else [value] if isinstance(value, str) else []
        right = {
            "a text": isinstance(value, str),
            "a list of texts": isinstance(value, list) and all(isinstance(text, str) for text in value),
            "true or false": isinstance(value, bool),
            "a table of texts": isinstance(value, dict)
            and all(isinstance(text, str) for text in value.values()),
        }
        if not right.get(kind, isinstance(value, dict)):
            raise wrong(f"{key} is not {kind}")
        if any("\0" in text for text in texts):
            raise wrong(f"{key} holds a NUL")

    if not _NAME.fullmatch(name):
        raise PlatformError(f"{path}: {name!r} cannot be the name of a language")
    if unknown := sorted(set(table) - set(_KINDS)):
        raise wrong(f"has an unknown {unknown[0]!r}", f"known: {', '.join(_KINDS)}")
    for key, value in table.items():
        check(key, value, _KINDS[key])
    for key in ("file", "command", "version"):
        if not table.get(key):
            raise wrong(f"has no {key}")
    if not _FILE_NAME.fullmatch(table["file"]):
        raise wrong(f"file is not a plain name: {table['file']!r}")
    for variable in table.get("env", {}):
        if not _VARIABLE.fullmatch(variable):
            raise wrong(f"has a variable with the name {variable!r}")
    for alias in table.get("aliases", []):
        if not _NAME.fullmatch(alias):
            raise wrong(f"cannot be called {alias!r}")
    try:
        re.compile(table.get("warm_unless", ""))
    except re.error as error:
        raise wrong(f"warm_unless is not a pattern: {error}") from error
    if table.get("packages", "") not in ("", *INSTALLERS):
        raise wrong(f"packages is none of {', '.join(INSTALLERS)}")
    cache = None
    if "cache" in table:
        said = {"clock": "", **table["cache"]}
        if set(said) != {"variable", "command", "clock"} or not _VARIABLE.fullmatch(str(said["variable"])):
            raise wrong(f"cache is not {_KINDS['cache']}")
        check("cache.command", said["command"], "a list of texts")
        check("cache.clock", said["clock"], "a text")
        if not said["command"] or (said["clock"] and not _FILE_NAME.fullmatch(said["clock"])):
            raise wrong(f"cache is not {_KINDS['cache']}")
        cache = Cache(said["variable"], tuple(said["command"]), said["clock"])
    return Language(
        name=name,
        file=table["file"],
        command=tuple(table["command"]),
        version=tuple(table["version"]),
        image=table.get("image", "host"),
        install=table.get("install", ""),
        aliases=tuple(table.get("aliases", [])),
        env=table.get("env", {}),
        cache=cache,
        warm=table.get("warm", False),
        warm_unless=table.get("warm_unless", ""),
        packages=table.get("packages", ""),
    )
