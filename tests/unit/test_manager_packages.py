"""What packages take of the disk while they are on their way."""

from __future__ import annotations

import asyncio
import errno
import io
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from skerry.errors import Busy, DiskFull, QuotaExceeded
from skerry.manager.code import packages as module
from skerry.manager.code.packages import Packages


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


class Records:
    """Of a tenant that may keep so many bytes."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.noted: dict[str, int] = {}

    async def kept(self, sizes: dict[str, int], kind: str, *, within: str | None = None) -> None:
        assert kind == "packages"
        if within is not None and sizes[within] > self.room:
            raise QuotaExceeded("disk")
        self.noted = dict(sizes)

    async def crowded(self, tenants: Sequence[str]) -> list[str]:
        return [each for each in tenants if self.noted.get(each, 0) > self.room]


class Manager:
    def __init__(self, records: Records) -> None:
        self.records = records


def test_packages_of_a_tenant_stay_within_its_quota_of_disk(tmp_path: Path) -> None:
    nobody: Any = None
    records = Records(room=100_000)
    manager: Any = Manager(records)
    packages = Packages(manager, nobody, tmp_path, nobody)

    def install(tenant: str, key: str, size: int) -> None:
        with tempfile.TemporaryFile() as archive:
            with tarfile.open(fileobj=archive, mode="w") as tar:
                entry = tarfile.TarInfo("file")
                entry.size = size
                tar.addfile(entry, io.BytesIO(bytes(size)))
            made = packages._layers.make(tenant, key, archive)
        try:
            asyncio.run(packages._keep(made))
        finally:
            packages._layers.clean()

    install("acme", "first", 60_000)
    install("other", "theirs", 60_000)
    install("acme", "second", 60_000)  # in the place of the first
    assert packages._layers.find("first") is None
    assert packages._layers.find("theirs") is not None
    second = packages._layers.find("second")
    assert second is not None
    with packages._layers.holding(second), pytest.raises(QuotaExceeded):
        install("acme", "third", 60_000)
    assert len(list(tmp_path.iterdir())) == 2
    assert set(records.noted) == {"acme", "other"}
    records.room = 0  # workspaces need it
    asyncio.run(packages.tend())
    assert list(tmp_path.iterdir()) == []
    assert records.noted == {}
