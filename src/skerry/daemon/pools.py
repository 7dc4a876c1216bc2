"""Which pools a daemon has: `pools.toml` in its home.

    [default]              # the name: for `skerry pool`
    minimum = 4            # so many are kept ready
    maximum = 50           # no more than so many are ready, being made, or in use
    age = 3600             # seconds after which one that nobody needed is replaced
    image = "dev"          # and whatever else a create takes, as environments will ask for it
    disk = "10g"

Without the file there is one pool, `default`, for environments of which nothing was said, in which nothing is kept
ready until somebody warms it up. Beside those there is a pool for each language whose interpreter can wait for its
program, under the language's name; for these the file says `minimum`, `maximum`, `age`, and `idle`: for so many
seconds after a use some are kept ready. `maximum = 0`: no pool.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from skerry.errors import InvalidRequest
from skerry.host import seccomp
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
        image=table.text("image", HOST) if language is None else language.image,
        policy=policy if language is None else Program(language.name, "").policy,
        minimum=table.count("minimum", 0, 0, maximum),
        maximum=maximum,
        language=language,
        after_use=0 if language is None else min(AFTER_USE, maximum),
        idle=table.count("idle", IDLE, 1, LONGEST),
        age=table.count("age", AGE, 1, LONGEST),
    )
