"""Claims of user id ranges."""

from __future__ import annotations

import asyncio
import fcntl
import os
import stat
import subprocess
from pathlib import Path

import pytest

from skerry.errors import LimitReached, PlatformError
from skerry.host import uids
from skerry.host.processes import start_time


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uids, "DIRECTORY", str(tmp_path / "uids"))


def claim() -> int:
    return asyncio.run(uids.claim())


def claims() -> list[str]:
    return os.listdir(uids.DIRECTORY)


def test_ranges_never_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uids, "COUNT", 200)
    bases = [claim() for _ in range(100)]
    assert len({(base - uids.FIRST) // uids.SIZE for base in bases}) == 100
    assert all((base - uids.FIRST) % uids.SIZE == 0 for base in bases)
    assert all(base + uids.SIZE < 1 << 32 for base in bases)


def test_the_creator_of_a_namespace_is_mapped_into_none() -> None:
    bases = [uids.FIRST + number * uids.SIZE for number in range(uids.COUNT)]
    owners = {uids.owner(base) for base in bases}
    assert len(owners) == len(bases)
    assert min(owners) > 65536
    assert max(owners) < uids.FIRST


def test_when_all_are_taken_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uids, "COUNT", 1)
    claim()
    with pytest.raises(LimitReached):
        claim()


def test_a_released_range_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uids, "COUNT", 1)
    base = claim()
    uids.release(base)
    assert claims() == []
    assert claim() == base


def test_a_claim_dies_with_the_process_that_it_is_settled_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uids, "COUNT", 1)
    base = claim()
    with subprocess.Popen(["sleep", "1000"]) as process:
        uids.settle(base, process.pid)
        with pytest.raises(LimitReached):
            claim()
        process.kill()
    assert claim() == base


def test_a_later_process_with_the_same_number_keeps_nothing_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uids, "COUNT", 1)
    base = claim()
    path = f"{uids.DIRECTORY}/0"
    os.unlink(path)
    os.symlink(f"{os.getpid()} {start_time(os.getpid()) + 1}", path)
    assert claim() == base


def test_releasing_what_was_never_claimed_is_fine() -> None:
    uids.release(uids.FIRST)


def test_claims_of_the_dead_are_swept_away() -> None:
    uids.sweep()
    kept, left = claim(), claim()
    with subprocess.Popen(["sleep", "1000"]) as process:
        uids.settle(left, process.pid)
        process.kill()
    uids.sweep()
    assert claims() == [str((kept - uids.FIRST) // uids.SIZE)]
    uids.release(kept)
    assert claims() == []


def test_half_written_claims_of_the_dead_are_swept_away() -> None:
    uids.release(claim())
    with subprocess.Popen(["sleep", "1000"]) as process:
        os.symlink("1 1", f"{uids.DIRECTORY}/5.{process.pid}")
        uids.sweep()
        assert claims() == [f"5.{process.pid}"]
        process.kill()
    uids.sweep()
    assert claims() == []


def test_lock_is_on_a_file_that_no_other_user_can_open() -> None:
    uids.release(claim())
    assert stat.S_IMODE(os.stat(uids.DIRECTORY).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(f"{uids.DIRECTORY}.lock").st_mode) == 0o600


def test_lock_on_the_parent_directory_keeps_nobody_from_claiming() -> None:
    """Any user can open /run, and so lock it."""
    parent = os.open(os.path.dirname(uids.DIRECTORY), os.O_RDONLY)
    try:
        fcntl.flock(parent, fcntl.LOCK_EX)
        base = claim()
        uids.settle(base, os.getpid())
        uids.release(base)
        uids.sweep()
    finally:
        os.close(parent)


def test_held_lock_stalls_nobody_and_fails_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """While another daemon holds it the loop runs on; settle, release and sweep need no lock."""
    monkeypatch.setattr(uids, "LOCK_SECONDS", 0.2)
    base = claim()
    held = os.open(f"{uids.DIRECTORY}.lock", os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)

    async def waiting() -> int:
        turns = 0
        claiming = asyncio.create_task(uids.claim())
        while not claiming.done():
            turns += 1
            await asyncio.sleep(0)
        with pytest.raises(PlatformError, match="another daemon"):
            claiming.result()
        return turns

    try:
        assert asyncio.run(waiting()) > 20
        uids.settle(base, os.getpid())
        uids.sweep()
        uids.release(base)
    finally:
        os.close(held)
    assert claims() == []
