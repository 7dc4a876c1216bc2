"""Subjects, rounds and percentiles."""

from __future__ import annotations

import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median


@dataclass(frozen=True)
class Subject:
    """One thing to measure. `once` performs it and returns seconds by key."""

    once: Callable[[], Mapping[str, float]]


@dataclass(frozen=True)
class Summary:
    median: float
    p95: float
    p99: float
    samples: int


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def command(key: str, argv: Sequence[str], env: Mapping[str, str] | None = None) -> Subject:
    """Time until a host program exits. Raises CalledProcessError if it fails."""

    def once() -> dict[str, float]:
        return {key: timed(lambda: subprocess.run(argv, check=True, capture_output=True, env=env))}

    return Subject(once)


def first_output(key: str, argv: Sequence[str], env: Mapping[str, str] | None = None) -> Subject:
    """Time until a program's first output (`key`) and until its exit (`key` + "_end")."""

    def once() -> dict[str, float]:
        start = time.perf_counter()
        with subprocess.Popen(argv, stdout=subprocess.PIPE, env=env) as process:
            assert process.stdout is not None
            if not process.stdout.read(1):
                raise RuntimeError(f"no output from {argv}")
            first = time.perf_counter() - start
        return {key: first, f"{key}_end": time.perf_counter() - start}

    return Subject(once)


def take_turns(
    subjects: Sequence[Subject], rounds: int, progress: Callable[[int], None]
) -> dict[str, Summary]:
    """Measures all subjects in turn for `rounds` rounds, after one warm-up round."""
    samples: dict[str, list[float]] = defaultdict(list)
    for number in range(-1, rounds):
        for subject in subjects:
            for key, seconds in subject.once().items():
                if number >= 0:
                    samples[key].append(seconds)
        progress(number + 1)
    return {key: summarize(values) for key, values in samples.items()}


def summarize(values: Sequence[float]) -> Summary:
    """Percentiles by nearest rank: each is one of the values."""
    ordered = sorted(values)

    def at(part: float) -> float:
        return ordered[max(0, ceil(len(ordered) * part) - 1)]

    return Summary(median(ordered), at(0.95), at(0.99), len(ordered))
