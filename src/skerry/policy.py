"""What an environment may do and how much of it: isolation, limits, profile. Plain data, no I/O."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields, replace
from typing import Any

from skerry.errors import InvalidRequest

ISOLATIONS = ("namespace", "gvisor", "microvm")
"""Weakest first. A backend that gives more than what was asked for is acceptable, never less."""

WORKSPACES = ("auto", "disk", "memory")
NETWORKS = ("none", "allowlist", "public")

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


def _whole(value: Any, what: str, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{what} must be a whole number, not {value!r}")
    if not low <= value <= high:
        raise InvalidRequest(f"{what} must be between {low} and {high}, not {value}")
    return value


def seconds(value: Any, what: str, high: float = 365 * 86400.0) -> float:
    """A positive, finite number of seconds, at most `high`. Raises InvalidRequest."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequest(f"{what} must be a number of seconds, not {value!r}")
    if not 0 < value <= high:
        raise InvalidRequest(f"{what} must be more than 0 and at most {high:g} seconds, not {value:g}")
    return float(value)


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one environment may use. All of them always hold; what cannot be enforced is reported."""

    cpus: float = 1.0
    """Cores; 0.5 is 500 millicores."""
    memory: int = 512 * MIB
    """Bytes, without swap, for everything inside: processes, page cache, tmpfs."""
    pids: int = 256
    fds: int = 1024
    """Open files of each process."""
    disk: int = 2 * GIB
    """Bytes of `/workspace`."""
    inodes: int = 131072
    """Files and directories of `/workspace`."""
    connections: int = 1024
    """Out of the environment, at once."""
    traffic: int = 100 * GIB
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
        names = {f.name for f in fields(self)}
        unknown = sorted(set(raw) - names)
        if unknown:
            raise InvalidRequest(
                f"unknown limit: {', '.join(unknown)}", hint=f"known: {', '.join(sorted(names))}"
            )
        given = {name: value for name, value in raw.items() if value is not None}
        out: dict[str, Any] = {}
        if "cpus" in given:
            cpus = given["cpus"]
            if isinstance(cpus, bool) or not isinstance(cpus, int | float) or not 0.01 <= cpus <= 1024:
                raise InvalidRequest(f"cpus must be between 0.01 and 1024 cores, not {cpus!r}")
            out["cpus"] = float(cpus)
        if "memory" in given:
            out["memory"] = parse_size(given["memory"], "memory")
            if out["memory"] < 16 * MIB:
                raise InvalidRequest(
                    "memory must be at least 16m", hint="a Python interpreter needs about 16 MiB"
                )
        if "disk" in given:
            out["disk"] = parse_size(given["disk"], "disk")
            if out["disk"] < MIB:
                raise InvalidRequest("disk must be at least 1m")
        if "pids" in given:
            out["pids"] = _whole(given["pids"], "pids", 8, 1 << 22)
        if "fds" in given:
            out["fds"] = _whole(given["fds"], "fds", 16, 1 << 20)
        if "inodes" in given:
            out["inodes"] = _whole(given["inodes"], "inodes", 16, 1 << 26)
        if "connections" in given:
            out["connections"] = _whole(given["connections"], "connections", 1, 1 << 16)
        if "traffic" in given:
            out["traffic"] = parse_size(given["traffic"], "traffic")
        return replace(self, **out)


@dataclass(frozen=True, slots=True)
class Policy:
    """What is allowed. The defaults are the safe ones; anything weaker is asked for by name."""

    isolation: str = "namespace"
    profile: str = "default"
    """The system call profile: `default`, `strict`, `debug` or `filters`."""
    network: str = "none"
    """`none`: loopback alone; `allowlist`: what `allow` names; `public`: every public address. Never internal ones."""
    allow: tuple[str, ...] = ()
    """Rules of an allowlist: names, ranges of addresses, presets; see `skerry.egress.rules`."""
    workspace: str = "auto"
    """`disk`, `memory`, or `auto`: disk where its limits can be enforced, else memory."""
    limits: Limits = field(default_factory=Limits)

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__} | {"limits": self.limits.to_dict()}

    def __post_init__(self) -> None:
        for what, value, known in (
            ("isolation", self.isolation, ISOLATIONS),
            ("network", self.network, NETWORKS),
            ("workspace", self.workspace, WORKSPACES),
        ):
            if value not in known:
                raise InvalidRequest(f"unknown {what} {value!r}", hint=f"known: {', '.join(known)}")
