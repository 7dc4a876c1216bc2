"""The digest tells trees apart by what they are, not by how or when they were made."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from skerry.images.digest import tree_digest


def make(top: Path, order: int = 1) -> Path:
    top.mkdir()
    for name in ["a", "b", "c"][::order]:
        (top / name).mkdir(mode=0o755)
        (top / name / "file").write_text(name)
    (top / "link").symlink_to("a/file")
    os.link(top / "a/file", top / "hard")
    return top


def test_the_same_tree_has_the_same_digest(tmp_path: Path) -> None:
    one, two = make(tmp_path / "one"), make(tmp_path / "two", -1)
    os.utime(two / "a/file", (1, 1))
    assert tree_digest(one) == tree_digest(two)


def test_a_hard_link_is_the_file_it_looks_like(tmp_path: Path) -> None:
    one, two = make(tmp_path / "one"), make(tmp_path / "two")
    (two / "hard").unlink()
    (two / "hard").write_text("a")
    assert tree_digest(one)[0] == tree_digest(two)[0]
    assert tree_digest(one)[1] < tree_digest(two)[1]


def _swap(top: Path) -> None:
    (top / "link").unlink()
    (top / "link").write_text("a/file")


def _redirect(top: Path) -> None:
    (top / "link").unlink()
    (top / "link").symlink_to("b/file")


def _move(top: Path) -> None:
    (top / "b/file").rename(top / "b-file")


CHANGES: list[Callable[[Path], object]] = [
    lambda top: (top / "a").rename(top / "d"),
    lambda top: (top / "a/file").write_text("x"),
    lambda top: (top / "a/file").chmod(0o600),
    lambda top: (top / "a").chmod(0o700),
    lambda top: (top / "new").mkdir(),
    lambda top: (top / "b/file").unlink(),
    _redirect,
    _swap,
    _move,
]


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_counts(tmp_path: Path, change: Callable[[Path], object]) -> None:
    one, two = make(tmp_path / "one"), make(tmp_path / "two")
    change(two)
    assert tree_digest(one)[0] != tree_digest(two)[0]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("owner", [(1, 0), (0, 1)])
def test_owners_count(tmp_path: Path, owner: tuple[int, int]) -> None:
    one, two = make(tmp_path / "one"), make(tmp_path / "two")
    os.chown(two / "b/file", *owner)
    assert tree_digest(one)[0] != tree_digest(two)[0]


def test_structure_cannot_be_imitated_by_names(tmp_path: Path) -> None:
    """A directory in another and one beside it differ only in where the other ends."""
    for top, place in ((tmp_path / "one", "d/e"), (tmp_path / "two", "e")):
        (top / "d").mkdir(parents=True)
        (top / place).mkdir()
    assert tree_digest(tmp_path / "one")[0] != tree_digest(tmp_path / "two")[0]


def test_names_that_are_not_text(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff\n")).symlink_to(os.fsdecode(b"\xfe"))
    tree_digest(tmp_path)
