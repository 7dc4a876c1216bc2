"""What an environment may do and how much of it: isolation, limits, profile. Plain data, no I/O.

Names, defaults, bounds and choices come from `skerry.parameters`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import Any

from skerry.errors import InvalidRequest
from skerry.parameters import CREATE, ParameterSpec

ISOLATIONS = CREATE["isolation"].choices
"""Weakest first. A backend may give more than what was asked for, never less."""
WORKSPACES = CREATE["workspace"].choices
NETWORKS = CREATE["network"].choices
_LIMITS = {name: row for name, row in CREATE.items() if "limits" in row.where}
_CHOICES = tuple((name, CREATE[name].choices) for name in ("network", "workspace"))

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_UNITS = {"": 1, "b": 1, "k": KIB, "m": MIB, "g": GIB, "t": GIB << 10}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([bkmgt]?)(?:i?b)?", re.IGNORECASE)


def parse_size(value: str | int, what: str = "size") -> int:
    """Bytes from `536870912`, `"512m"`, `"1.5g"`, `"64KiB"`: units are powers of 1024, as in Docker.

    Raises InvalidRequest for anything else, zero and negatives included.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise InvalidRequest(f"{what} must be a number of bytes or a string like '512m', not {value!r}")
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        if match is None:
            raise InvalidRequest(
                f"{what} {value!r} is not a size",
                hint="write a number with an optional unit: 536870912, 512m, 2g, 64KiB",
            )
        number = float(match[1]) * _UNITS[match[2].lower()]
        value = int(number) if math.isfinite(number) else 1 << 63
    if not 0 < value < 1 << 60:
        raise InvalidRequest(f"{what} must be between 1 byte and 1 EiB, not {value}")
    return value


def format_size(value: int) -> str:
    """`512.0 MiB` and the like, for people."""
    number = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError("unreachable")


def seconds(value: Any, what: str, high: float = 365 * 86400.0) -> float:
    """A positive, finite number of seconds, at most `high`. Raises InvalidRequest."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequest(f"{what} must be a number of seconds, not {value!r}")
    if not 0 < value <= high:
        raise InvalidRequest(f"{what} must be more than 0 and at most {high:g} seconds, not {value:g}")
    return float(value)


def check(row: ParameterSpec, value: Any) -> Any:
    """The value of a size, number or count, within the bounds of its row. Raises InvalidRequest."""
    if row.kind == "size":
        size = parse_size(value, row.name)
        if size < row.low:
            raise InvalidRequest(f"{row.name} must be at least {row.low // MIB}m", hint=row.hint)
        return size
    if row.kind == "count":
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidRequest(f"{row.name} must be a whole number, not {value!r}")
        if not row.low <= value <= row.high:
            raise InvalidRequest(f"{row.name} must be between {row.low} and {row.high}, not {value}")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not row.low <= value <= row.high:
        raise InvalidRequest(f"{row.name} must be between {row.low} and {row.high} {row.unit}, not {value!r}")
    return float(value)


def preferences(isolation: str) -> tuple[str, ...]:
    """The isolations of a text like `microvm,gvisor`, in order of preference. Raises InvalidRequest."""
    wanted = tuple(part.strip() for part in isolation.split(","))
    for part in wanted:
        if part not in ISOLATIONS:
            raise InvalidRequest(f"unknown isolation {part!r}", hint=f"known: {', '.join(ISOLATIONS)}")
    return wanted


def at_least(isolation: str, least: str) -> str:
    """The preferences that are `least` or stronger; `least` alone if none is."""
    strong = [part for part in preferences(isolation) if ISOLATIONS.index(part) >= ISOLATIONS.index(least)]
    return ",".join(strong) or least


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one environment may use. All of them always hold; what cannot be enforced is reported."""

    cpus: float = CREATE["cpus"].default
    """Cores; 0.5 is 500 millicores."""
    memory: int = CREATE["memory"].default
    """Bytes, without swap, for everything inside: processes, page cache, tmpfs."""
    pids: int = CREATE["pids"].default
    fds: int = CREATE["fds"].default
    """Open files of each process."""
    disk: int = CREATE["disk"].default
    """Bytes of `/workspace`."""
    inodes: int = CREATE["inodes"].default
    """Files and directories of `/workspace`."""
    connections: int = CREATE["connections"].default
    """Out of the environment, at once."""
    traffic: int = CREATE["traffic"].default
    """Bytes that are sent and received over its network, as long as it lives."""

    @property
    def millicores(self) -> int:
        return round(self.cpus * 1000)

    def to_dict(self) -> dict[str, Any]:
        # Not asdict(): its deep copies take longer than all else that is done for a create.
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> Limits:
        """Limits from a caller's values; None means the default. Raises InvalidRequest."""
        return cls().changed(raw)

    def changed(self, raw: dict[str, Any]) -> Limits:
        """These, but for a caller's values; None leaves one as it is. Raises InvalidRequest."""
        unknown = sorted(raw.keys() - _LIMITS.keys())
        if unknown:
            raise InvalidRequest(
                f"unknown limit: {', '.join(unknown)}", hint=f"known: {', '.join(sorted(_LIMITS))}"
            )
        given = {name: check(_LIMITS[name], value) for name, value in raw.items() if value is not None}
        return replace(self, **given)


@dataclass(frozen=True, slots=True)
class Policy:
    """What is allowed. The defaults are the safe ones; anything weaker is asked for by name."""

    isolation: str = CREATE["isolation"].default
    """At least this much; several, separated by commas, in order of preference."""
    profile: str = CREATE["profile"].default
    """The system call profile: `default`, `strict`, `debug` or `filters`."""
    network: str = CREATE["network"].default
    """`none`: loopback alone; `allowlist`: what `allow` names; `public`: every public address. Never internal ones."""
    allow: tuple[str, ...] = ()
    """Rules of an allowlist: names, ranges of addresses, presets; see `skerry.egress.rules`."""
    workspace: str = CREATE["workspace"].default
    """`disk`, `memory`, or `auto`: disk where its limits can be enforced, else memory."""
    limits: Limits = field(default_factory=Limits)

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__} | {"limits": self.limits.to_dict()}

    def __post_init__(self) -> None:
        preferences(self.isolation)
        for name, known in _CHOICES:
            if (value := getattr(self, name)) not in known:
                raise InvalidRequest(f"unknown {name} {value!r}", hint=f"known: {', '.join(known)}")
