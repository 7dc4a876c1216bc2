"""The languages that programs can be written in: languages.toml, and the operator's additions to it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, fields
from importlib.resources import files

from skerry.errors import LanguageNotFound, PlatformError
from skerry.tables import VARIABLE, Table, parse, read

FILE = "languages.toml"
_NAME = re.compile(r"[a-z][a-z0-9+#.-]{0,31}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_VERSION = re.compile(r"\d+(\.\d+)+")
VERSION_MAX = 64
INSTALLERS = ("pip", "npm")


@dataclass(frozen=True, slots=True)
class Cache:
    """Files compiled once for each image and version of a language, read by all its programs."""

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
        """True if this program cannot be read from a pipe."""
        beginning = source[:4096].decode("utf-8", "replace").splitlines()[:2]
        return bool(self.warm_unless) and any(re.search(self.warm_unless, line) for line in beginning)

    def variables(self, cpus: float) -> dict[str, str]:
        """Its environment variables, for a program with a limit of `cpus` cores."""
        cores = str(max(1, int(cpus)))
        return {name: value.replace("{cores}", cores) for name, value in self.env.items()}


class Languages:
    """The languages that Skerry ships, changed and extended by `languages.toml` in `home`."""

    def __init__(self, home: str) -> None:
        self._path = f"{home}/{FILE}"
        self._stamp: tuple[int, int] | None = None
        self._known: dict[str, Language] = {}
        self._names: dict[str, Language] = {}

    def list(self) -> list[Language]:
        """All languages. Raises PlatformError for an invalid languages.toml."""
        self._load()
        return list(self._known.values())

    def get(self, name: str) -> Language:
        """By name or alias. Raises LanguageNotFound, and PlatformError for an invalid languages.toml."""
        self._load()
        found = self._names.get(name)
        if found is None:
            raise LanguageNotFound(
                f"there is no language {name!r}",
                hint=f"known: {', '.join(self._known)}; {self._path} can define more",
            )
        return found

    def _load(self) -> None:
        """Read the operator's file if it has changed."""
        stamp = _stamp(self._path)
        if stamp == self._stamp and self._known:
            return
        shipped = parse(files(__package__).joinpath(FILE).read_text(), FILE, PlatformError)
        own = read(self._path, PlatformError) or Table({}, self._path, PlatformError)
        own.names(_NAME, "a language")
        values = {name: dict(table.values) for name, table in shipped.tables().items()}
        for name, table in own.tables().items():
            values[name] = {**values.get(name, {}), **table.values}
        merged = Table(values, self._path, PlatformError)
        known = {name: _language(table) for name, table in merged.tables().items()}
        names = dict(known)
        for language in known.values():
            for alias in language.aliases:
                if names.setdefault(alias, language) is not language:
                    raise PlatformError(
                        f"{self._path}: {names[alias].name} and {language.name} are both called {alias!r}"
                    )
        self._known, self._names, self._stamp = known, names, stamp


def version_in(text: str) -> str:
    """The version number in a version command's output, or its first line if it has none."""
    line = text.strip().partition("\n")[0]
    found = _VERSION.search(line)
    return (found[0] if found else line)[:VERSION_MAX]


def _stamp(path: str) -> tuple[int, int]:
    try:
        info = os.stat(path)
    except OSError:
        return 0, 0
    return info.st_mtime_ns, info.st_ino


def _language(table: Table) -> Language:
    """Raises PlatformError."""
    table.allow([each.name for each in fields(Language) if each.name != "name"])
    language = Language(
        name=table.name,
        file=table.text("file", pattern=_FILE_NAME),
        command=table.texts("command"),
        version=table.texts("version"),
        image=table.text("image", "host"),
        install=table.text("install"),
        aliases=table.texts("aliases", pattern=_NAME),
        env=table.variables("env"),
        cache=_cache(table.table("cache")) if "cache" in table.values else None,
        warm=table.truth("warm"),
        warm_unless=table.text("warm_unless"),
        packages=table.text("packages"),
    )
    for key in ("file", "command", "version"):
        if not getattr(language, key):
            raise table.wrong(f"{key} is missing")
    if language.packages not in ("", *INSTALLERS):
        raise table.wrong(f"packages must be one of {', '.join(INSTALLERS)}, not {language.packages!r}")
    try:
        re.compile(language.warm_unless)
    except re.error as error:
        raise table.wrong(f"warm_unless is not a regular expression: {error}") from error
    return language


def _cache(table: Table) -> Cache:
    """Raises PlatformError."""
    table.allow(("variable", "command", "clock"))
    for key in ("variable", "command"):
        if not table.values.get(key):
            raise table.wrong(f"{key} is missing")
    return Cache(
        table.text("variable", pattern=VARIABLE),
        table.texts("command"),
        table.text("clock", pattern=_FILE_NAME),
    )
