"""What was installed, on the disk: whole or not at all, ours, bounded, and never taken from who uses it."""

from __future__ import annotations

import io
import json
import os
import stat
import tarfile
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from skerry.errors import InvalidRequest, SkerryError
from skerry.host.trees import remove_tree
from skerry.manager.code import layers
from skerry.manager.code.layers import Layers, StoredLayer

KIB = 1024


def tar(**files: bytes | tarfile.TarInfo) -> BinaryIO:
    file = tempfile.TemporaryFile()  # noqa: SIM115
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, content in files.items():
            if isinstance(content, tarfile.TarInfo):
                archive.addfile(content)
                continue
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file


def entry(name: str, type: bytes, **more: Any) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type = type
    for key, value in more.items():
        setattr(member, key, value)
    return member


def made(store: Layers, key: str, archive: BinaryIO | None = None) -> StoredLayer:
    with archive or tar(file=os.urandom(64 * KIB)) as content:
        kept = store.make("acme", key, content)
    store.add(kept)
    store.clean()
    return kept


def names(store: Layers) -> list[str]:
    return sorted(path.name.partition("-")[0] for path in store.directory.iterdir())


def test_what_was_made_is_found_by_the_next_daemon(tmp_path: Path) -> None:
    store = Layers(tmp_path / "packages")
    kept = made(store, "a", tar(file=b"content"))
    again = Layers(tmp_path / "packages").find("a")
    assert again is not None
    assert (again.place, again.size, again.made) == (kept.place, kept.size, kept.made)
    assert (again.tree / "file").read_bytes() == b"content"
    assert store.find("b") is None


def test_what_was_left_half_made_or_half_removed_is_swept(tmp_path: Path) -> None:
    made(Layers(tmp_path), "a")
    going = made(Layers(tmp_path), "b").place
    going.rename(tmp_path / f".staging-{going.name}")
    (tmp_path / ".staging-half" / "tree").mkdir(parents=True)
    (tmp_path / "c-1").mkdir()
    (tmp_path / "d-1").mkdir()
    (tmp_path / "d-1" / "about.json").write_text("[]")
    (tmp_path / "file").write_text("")
    assert names(Layers(tmp_path)) == ["a"]


def test_a_dishonest_archive_leaves_nothing(tmp_path: Path) -> None:
    store = Layers(tmp_path)
    with io.BytesIO(b"x" * 2048) as junk, pytest.raises(SkerryError):
        store.make("acme", "a", junk)
    with tar(x=entry("../outside", tarfile.DIRTYPE)) as archive, pytest.raises(InvalidRequest):
        store.make("acme", "a", archive)
    assert names(store) == []


def test_it_all_belongs_to_us_and_nothing_is_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("as it was")
    outside.chmod(0o600)
    ids = {"uid": 12345, "gid": 12345}
    store = Layers(tmp_path / "packages")
    kept = made(
        store,
        "a",
        tar(
            setuid=entry("setuid", tarfile.REGTYPE, mode=0o6755, **ids),
            hidden=entry("hidden", tarfile.REGTYPE, mode=0o000, **ids),
            folder=entry("folder", tarfile.DIRTYPE, mode=0o2777, **ids),
            link=entry("folder/link", tarfile.SYMTYPE, linkname=str(outside), **ids),
            twice=entry("twice", tarfile.LNKTYPE, linkname="setuid"),
            fifo=entry("fifo", tarfile.FIFOTYPE),
            device=entry("device", tarfile.CHRTYPE, devmajor=1, devminor=3),
        ),
    )
    found = {path.name: path.lstat() for path in kept.tree.rglob("*")}
    assert {name: oct(stat.S_IMODE(status.st_mode)) for name, status in found.items()} == {
        "setuid": "0o755",
        "twice": "0o755",
        "hidden": "0o644",
        "folder": "0o755",
        "link": "0o777",
    }
    assert {(status.st_uid, status.st_gid) for status in found.values()} == {(os.geteuid(), os.getegid())}
    assert (outside.read_text(), stat.S_IMODE(outside.stat().st_mode)) == ("as it was", 0o600)


def test_what_was_not_used_for_longest_goes_first_but_never_what_is_held(tmp_path: Path) -> None:
    store = Layers(tmp_path, most=150 * KIB)
    first, second = made(store, "a"), made(store, "b")
    first.used, second.used = 1.0, 2.0
    with store.holding(first):
        first.used = 1.0
        made(store, "c")
        assert names(store) == ["a", "c"]
        made(store, "d")
        assert names(store) == ["a", "d"]
    assert store.find("a") is first
    first.used = 1.0
    made(store, "e")
    assert names(store) == ["d", "e"]
    assert store.find("a") is None


def test_one_that_is_larger_than_all_may_be_stays_for_who_asked_for_it(tmp_path: Path) -> None:
    store = Layers(tmp_path, most=KIB)
    assert store.find("a") is None
    assert made(store, "a") is store.find("a")
    made(store, "b")
    assert names(store) == ["b"]


def test_an_old_one_is_resolved_anew_and_stays_for_who_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Layers(tmp_path)
    old = made(store, "a", tar(file=b"old"))
    monkeypatch.setattr(layers, "AGE_MAX", -1.0)
    assert store.find("a") is None
    with store.holding(old):
        monkeypatch.undo()
        new = made(store, "a", tar(file=b"new"))
        assert (old.tree / "file").read_bytes() == b"old"
    store.clean()
    assert (names(store), store.find("a")) == (["a"], new)
    assert [json.loads((path / "about.json").read_text())["made"] for path in tmp_path.iterdir()] == [
        new.made
    ]


def test_one_that_somebody_has_removed_is_not_found(tmp_path: Path) -> None:
    store = Layers(tmp_path)
    remove_tree(made(store, "a").place)
    assert store.find("a") is None
    made(store, "a")
    assert len(names(store)) == 1


def test_its_archive_is_the_same_tree(tmp_path: Path) -> None:
    store = Layers(tmp_path / "packages")
    deep = "/".join("d" * 300)
    long = "n" * 200
    kept = made(
        store,
        "a",
        tar(
            **{long: b"long", "a" * 90 + "/b": b"below"},
            deep=entry(deep, tarfile.DIRTYPE, mode=0o755),
            link=entry("link", tarfile.SYMTYPE, linkname="/etc/shadow"),
            twice=entry("twice", tarfile.LNKTYPE, linkname=long),
        ),
    )
    with tempfile.TemporaryFile() as file:
        store.archive(kept, file)
        with tarfile.open(fileobj=file) as archive:
            members = {member.name: member for member in archive}
            assert members["link"].linkname == "/etc/shadow"
            kinds = {members[name].type for name in ("twice", long)}
            assert kinds == {
                tarfile.LNKTYPE,
                tarfile.REGTYPE,
            }  # or a large file with many names would become many
            content = archive.extractfile(long)
            assert content is not None
            assert content.read() == b"long"
            assert deep in members
