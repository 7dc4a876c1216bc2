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
import tomllib
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

FILE = "pools.toml"
MOST = 10_000
LONGEST = 7 * 24 * 3600
AFTER_USE = 2
"""Programs of a language that was used are kept waiting for."""
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_LIMITS = ("memory", "cpus", "pids", "fds", "disk", "inodes")
_POLICY = ("isolation", "profile", "workspace")


def load(home: Home, languages: Iterable[Language]) -> list[PoolSettings]:
    """Raises InvalidRequest, which says what is wrong with the file."""
    warm = {language.name: language for language in languages if language.warm}
    path = f"{home.path}/{FILE}"
    try:
        with open(path, "rb") as file:
            tables = tomllib.load(file)
    except FileNotFoundError:
        tables = {"default": {}}
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path}: {error}") from error
    try:
        given = [_settings(name, table, warm.pop(name, None)) for name, table in tables.items()]
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}: {error.message}", hint=error.hint) from error
    return given + [_settings(name, {}, language) for name, language in warm.items()]


def _settings(name: str, table: Any, language: Language | None) -> PoolSettings:
    if not isinstance(table, dict):
        raise InvalidRequest(f"{name} stands alone", hint="each pool is a table: [default]")
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{name!r} is not a name for a pool", hint="up to 32 of a-z 0-9 _ -, a letter or digit first"
        )
    own = ("idle",) if language is not None else ("image", *_POLICY, *_LIMITS)
    known = ("minimum", "maximum", "age", *own)
    unknown = sorted(set(table) - set(known))
    if unknown:
        raise InvalidRequest(f"[{name}] {unknown[0]} is unknown", hint=f"known: {', '.join(known)}")
    for each in ("image", *_POLICY):
        if not isinstance(table.get(each, ""), str):
            raise InvalidRequest(f"[{name}] {each} must be a text")
    maximum = _count(name, "maximum", table.get("maximum", MOST), 0, MOST)
    policy = Policy(
        **{each: table[each] for each in _POLICY if each in table},
        limits=Limits.parse({each: table[each] for each in _LIMITS if each in table}),
    )
    seccomp.compile_profile(policy.profile)
    return PoolSettings(
        name=name,
        image=table.get("image", HOST) if language is None else language.image,
        policy=policy if language is None else Program(language.name, "").policy,
        minimum=_count(name, "minimum", table.get("minimum", 0), 0, maximum),
        maximum=maximum,
        language=language,
        after_use=0 if language is None else min(AFTER_USE, maximum),
        idle=_count(name, "idle", table.get("idle", IDLE), 1, LONGEST),
        age=_count(name, "age", table.get("age", AGE), 1, LONGEST),
    )


def _count(name: str, what: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(f"[{name}] {what} must be a whole number from {low} to {high}, not {value!r}")
    return value
