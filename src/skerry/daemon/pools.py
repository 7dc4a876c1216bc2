"""The pools of a daemon, from `pools.toml` in its home.

    [default]              # the name, for `skerry pool`
    minimum = 4            # environments kept ready
    maximum = 50           # limit of those ready, being made, or in use
    age = 3600             # seconds after which an unused environment is replaced
    image = "dev"          # and other fields of a create, as environments will ask for them
    disk = "10g"

Without the file there is one pool, `default`, for environments without any options; it keeps none ready until it is
warmed up. Each language with a pre-started interpreter has a pool of its name; for these the file sets `minimum`,
`maximum`, `age`, and `idle`: seconds for which some are kept ready after a use. `maximum = 0` turns a pool off.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from skerry.errors import InvalidRequest
from skerry.host import seccomp
from skerry.images.references import Reference, is_reference
from skerry.images.store import HOST
from skerry.languages import Language
from skerry.manager.code.program import Program
from skerry.manager.pools.pool import AGE, IDLE, PoolSettings
from skerry.policy import Limits, Policy
from skerry.settings import Home
from skerry.tables import Table, read

FILE = "pools.toml"
MOST = 10_000
LONGEST = 7 * 24 * 3600
AFTER_USE = 2
"""Interpreters kept started for a recently used language."""
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_LIMITS = ("memory", "cpus", "pids", "fds", "disk", "inodes")
_POLICY = ("isolation", "profile", "workspace")


def load(home: Home, languages: Iterable[Language]) -> list[PoolSettings]:
    """Raises InvalidRequest for an invalid pools.toml."""
    warm = {language.name: language for language in languages if language.warm}
    path = f"{home.path}/{FILE}"
    document = read(path, InvalidRequest) or Table({"default": {}}, path, InvalidRequest)
    document.names(_NAME, "a pool")
    given = [_settings(table, warm.pop(name, None)) for name, table in document.tables().items()]
    added = [_settings(Table({}, path, InvalidRequest, name), language) for name, language in warm.items()]
    return given + added


def _image(table: Table) -> str:
    name = table.text("image", HOST)
    try:
        return Reference.parse(name).name if is_reference(name) else name
    except InvalidRequest as error:
        raise table.wrong(error.message, error.hint) from error


def _settings(table: Table, language: Language | None) -> PoolSettings:
    own = ("idle",) if language is not None else ("image", *_POLICY, *_LIMITS)
    table.allow(("minimum", "maximum", "age", *own))
    maximum = table.count("maximum", MOST, 0, MOST)
    chosen: dict[str, Any] = {key: table.text(key) for key in _POLICY if key in table.values}
    try:
        limits = Limits.parse({key: table.values[key] for key in _LIMITS if key in table.values})
        policy = Policy(**chosen, limits=limits)
        seccomp.compile_profile(policy.profile)
    except InvalidRequest as error:
        raise table.wrong(error.message, error.hint) from error
    return PoolSettings(
        name=table.name,
        image=_image(table) if language is None else language.image,
        policy=policy if language is None else Program(language.name, "").policy,
        minimum=table.count("minimum", 0, 0, maximum),
        maximum=maximum,
        language=language,
        after_use=0 if language is None else min(AFTER_USE, maximum),
        idle=table.count("idle", IDLE, 1, LONGEST),
        age=table.count("age", AGE, 1, LONGEST),
    )
