"""Texts of errors are bounded, whatever a caller sent or a program wrote."""

from __future__ import annotations

import json

from skerry.errors import DETAIL_MAX, HINT_MAX, MESSAGE_MAX, InvalidRequest, from_dict


def test_every_text_of_an_error_is_bounded() -> None:
    long = "x" * 10_000_000
    error = InvalidRequest(
        f"begin {long} end", hint=long, detail={"text": long, "lines": ["first", *["line"] * 100_000, "last"]}
    )
    assert error.message.startswith("begin x")
    assert error.message.endswith("x end")
    assert (len(error.message), len(error.hint)) <= (MESSAGE_MAX, HINT_MAX)
    assert len(json.dumps(error.detail)) < DETAIL_MAX + 100
    assert len(str(error)) <= MESSAGE_MAX + HINT_MAX + 3


def test_last_lines_of_a_long_list_are_kept() -> None:
    lines = [f"line {number}" for number in range(100_000)]
    kept = InvalidRequest("no", detail={"output": lines, "step": "build"}).detail["output"]
    assert kept == lines[-len(kept) :]
    assert len(kept) > 100


def test_short_errors_are_kept_as_they_are() -> None:
    error = InvalidRequest(
        "no", hint="try", detail={"step": "a", "errno": 5, "lines": ["x"], "deep": {"a": [1]}}
    )
    assert from_dict(error.to_dict()).to_dict() == error.to_dict()
    assert error.detail == {"step": "a", "errno": 5, "lines": ["x"], "deep": {"a": [1]}}
