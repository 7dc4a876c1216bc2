"""The numbers that SPECIFICATION.md promises, and goals beyond them. A unit test compares the two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.measure import Summary

MIB = 1 << 20

BASELINES = {
    "docker_run": "`docker run`",
    "docker_exec": "`docker exec`",
    "python": "a bare `python3 -c pass`",
    "bare_print": "a bare `python3 -c`",
    "bare_go": "a bare `go run` with a warm cache",
}


@dataclass(frozen=True)
class Verdict:
    """One promise or goal, whether this run kept it, and what was measured."""

    what: str
    value: str
    kept: bool
    measured: str


@dataclass(frozen=True)
class Speed:
    """The median time of `subject` is at most that of `baseline`, divided by `factor`."""

    what: str
    subject: str
    baseline: str
    factor: float

    @property
    def value(self) -> str:
        baseline = BASELINES[self.baseline]
        if self.factor > 1:
            return f"{self.factor:g}× faster than {baseline}"
        return f"sooner than {baseline}" if self.factor == 1 else f"within {1 / self.factor:g}× of {baseline}"

    def check(self, times: Mapping[str, Summary]) -> Verdict:
        """A number that was not measured counts as missed."""
        if self.baseline not in times or self.subject not in times:
            return Verdict(self.what, self.value, False, "not measured")
        ratio = times[self.baseline].median / times[self.subject].median
        measured = f"{ratio:.1f}× faster" if ratio >= 1 else f"{1 / ratio:.1f}× slower"
        return Verdict(self.what, self.value, ratio >= self.factor, measured)


PROMISED_SPEEDS = (
    Speed("fresh environment to first output, no pool", "fresh", "docker_run", 18),
    Speed("`env.run` in a live environment", "run", "docker_exec", 22),
    Speed("`env.execute` (stateful shell) in a live environment", "execute", "docker_exec", 22),
    Speed("fresh environment to first output, from a pool", "pooled_fresh", "docker_run", 45),
    Speed("a Python program that runs once, from its pool", "code_python", "bare_print", 1),
    Speed("a call in a live Python session (`session.run`), of ten in a row", "session", "python", 6),
    Speed("`skerry run -- true` with the daemon up", "cli", "python", 1 / 8),
    Speed("a Go program that runs once", "code_go", "bare_go", 1 / 3),
)
GOAL_SPEEDS = (
    Speed("fresh environment to first output, no pool", "fresh", "docker_run", 25),
    Speed("fresh environment to first output, from a pool", "pooled_fresh", "docker_run", 60),
    Speed("a call in a live Python session (`session.run`), of ten in a row", "session", "python", 10),
)


def promises(results: Mapping[str, Any], times: Mapping[str, Summary]) -> list[Verdict]:
    """Verdicts on what SPECIFICATION.md promises, in its order."""
    idle, many = results.get("idle_bytes"), results.get("many") or {}
    alive = many.get("alive", 0)
    return [
        *(speed.check(times) for speed in PROMISED_SPEEDS),
        Verdict(
            "memory charged to the cgroup of an idle environment",
            "under 1 MiB",
            idle is not None and idle < MIB,
            "not measured" if idle is None else f"{idle / 1024:.0f} KiB",
        ),
        Verdict("environments alive at once on a 24 GiB machine", "500", alive >= 500, f"{alive}"),
    ]


def goals(results: Mapping[str, Any], times: Mapping[str, Summary]) -> list[Verdict]:
    """Verdicts on goals beyond the promises. Missing one is no failure."""
    rate = (results.get("code") or {}).get("per_second", 0.0)
    return [
        *(speed.check(times) for speed in GOAL_SPEEDS),
        Verdict("Python programs a second, each in a fresh environment", "150", rate >= 150, f"{rate:.0f}"),
    ]
