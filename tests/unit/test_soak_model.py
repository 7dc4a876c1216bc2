"""The model that the random histories are checked against."""

from __future__ import annotations

from tests.soak.model import MISSING, PENDING_SECONDS, Model

A, B = ("write", "f", "a"), ("write", "f", "b")
READ = ("read", "f")


def test_an_answered_write_is_read() -> None:
    model = Model()
    assert not model.answered(READ, MISSING, 0)
    assert not model.answered(A, "ok", 0)
    assert not model.answered(READ, "a", 0)
    assert "expected one of ['a']" in model.answered(READ, MISSING, 0)


def test_an_unanswered_write_is_there_or_not_and_then_stays() -> None:
    model = Model()
    model.answered(A, "ok", 0)
    model.unanswered(B, 0)
    assert not model.answered(READ, "a", 1)
    assert not model.answered(READ, "b", 2)
    assert model.answered(READ, "a", 3)


def test_an_unanswered_write_does_not_come_late() -> None:
    model = Model()
    model.answered(A, "ok", 0)
    model.unanswered(B, 0)
    assert not model.answered(READ, "a", PENDING_SECONDS + 1)
    assert model.pending == 0
    assert model.answered(READ, "b", PENDING_SECONDS + 2)


def test_a_cut_off_file_is_neither() -> None:
    model = Model()
    model.answered(("write", "f", "aaa"), "ok", 0)
    model.unanswered(("write", "f", "bbb"), 0)
    assert model.answered(READ, "b", 0)


def test_a_counter_counts_each_call_once() -> None:
    model = Model()
    assert not model.answered(("count",), "1", 0)
    model.unanswered(("count",), 0)
    assert not model.answered(("count",), "3", 0)
    assert model.answered(("count",), "3", 0)
    model = Model()
    model.answered(("count",), "1", 0)
    assert model.answered(("count",), "1", 0)


def test_two_writes_at_once_have_some_order() -> None:
    for last in "ab":
        model = Model()
        assert not model.answered_together((A, "ok"), (B, "ok"), 0)
        assert not model.answered(READ, last, 0)
    model = Model()
    rename, delete = ("rename", "f", "g"), ("delete", "f")
    model.answered(A, "ok", 0)
    assert model.answered_together((rename, "ok"), (delete, "ok"), 0)
