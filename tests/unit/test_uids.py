"""Claims of user id ranges."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from skerry.errors import LimitReached
from skerry.host import uids
from skerry.host.processes import start_time


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uids, "DIRECTORY", str(tmp_path / "uids"))


def test_ranges_never_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uids, "COUNT", 200)
    bases = [uids.claim() for _ in range(100)]
    assert len({(base - uids.FIRST) // uids.SIZE for base in bases}) == 100
    assert all((base - uids.FIRST) % uids.SIZE == 0 for base in bases)
    assert all(base + uids.SIZE < 1 << 32 for base in bases)


def test_when_all_are_taken_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uids, "COUNT", 1)
    uids.claim()
    with pytest.raises(LimitReached):
        uids.claim()


def test_a_released_range_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uids, "COUNT", 1)
    base = uids.claim()
    uids.release(base)
    assert not os.path.exists(uids.DIRECTORY)
    assert uids.claim() == base


def test_a_claim_dies_with_the_process_that_it_is_settled_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uids, "COUNT", 1)
    base = uids.claim()
    with subprocess.Popen(["sleep", "1000"]) as process:
        uids.settle(base, process.pid)
        with pytest.raises(LimitReached):
            uids.claim()
        process.kill()
    assert uids.claim() == base


def test_a_later_process_with_the_same_number_keeps_nothing_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uids, "COUNT", 1)
    base = uids.claim()
    path = f"{uids.DIRECTORY}/0"
    os.unlink(path)
    os.symlink(f"{os.getpid()} {start_time(os.getpid()) + 1}", path)
    assert uids.claim() == base


def test_releasing_what_was_never_claimed_is_fine() -> None:
    uids.release(uids.FIRST)


def test_claims_of_the_dead_are_swept_away() -> None:
    uids.sweep()
    kept, left = uids.claim(), uids.claim()
    with subprocess.Popen(["sleep", "1000"]) as process:
        uids.settle(left, process.pid)
        process.kill()
    uids.sweep()
    assert os.listdir(uids.DIRECTORY) == [str((kept - uids.FIRST) // uids.SIZE)]
    uids.release(kept)
    assert not os.path.exists(uids.DIRECTORY)
