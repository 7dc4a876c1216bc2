"""Random histories against a real daemon that is killed and stopped all the time; see tests/soak/histories.py."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.soak import histories
from tests.soak.durations import SECONDS

SHORT = 6.0
"""Seconds of load, to try a change with; `make test` has histories without kills, in tests/integration."""


def check(home: Path, kind: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.randrange(1 << 30)
    print(f"{kind}: seed {seed}, {seconds:.0f} s", flush=True)
    with histories.store(kind) as url:
        monkeypatch.setenv("SKERRY_DATABASE", url)
        world = histories.run(home, seed, seconds)
    print(world.stats, flush=True)
    again = f"python -m tests.soak.histories --seed {seed} --seconds {seconds:.0f} --store {kind}"
    assert not world.broken, f"{again}\n{histories.report(world)}"


@pytest.mark.soak
def test_a_short_history_breaks_no_promise(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(home, "sqlite", SHORT, monkeypatch)


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 300)
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_long_history_breaks_no_promise(home: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of the time each, so that all soaks end together."""
    check(home, kind, SECONDS / 3, monkeypatch)
