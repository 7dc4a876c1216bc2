"""What packages take of the disk while they are on their way."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from skerry.errors import Busy, DiskFull
from skerry.manager import packages as module
from skerry.manager.packages import Packages


def test_one_tenant_leaves_room_for_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment that is slow to take or to give what it should keeps an archive on the disk of all."""
    monkeypatch.setattr(module, "STAGED_MAX", 1000)
    nobody: Any = None
    packages = Packages(nobody, nobody, tmp_path, nobody)
    with packages._archive("greedy") as (file, more):
        more(300)
        with packages._archive("greedy") as (_, again):
            again(200)
            with pytest.raises(Busy):
                again(1)
            with packages._archive("modest") as (_, other):
                other(250)
        more(200)
        file.write(b"x")
    assert packages._staged.taken == 0
    with packages._archive("greedy") as (_, more):
        more(500)


def test_a_disk_that_is_full_is_told(tmp_path: Path) -> None:
    nobody: Any = None
    packages = Packages(nobody, nobody, tmp_path, nobody)
    with pytest.raises(DiskFull, match="No space left"), packages._archive("t"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert packages._staged.taken == 0
