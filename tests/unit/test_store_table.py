"""Statements, cursors and URLs of the store."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.errors import InvalidRequest
from skerry.store import Store
from skerry.store.table import Where, canonical, from_cursor, page_size, to_cursor


def test_conditions_leave_out_what_was_not_asked_for() -> None:
    where = Where().equal(tenant="t", name=None).one_of("state", None)
    assert str(where) == "WHERE tenant = :tenant"
    assert where.parameters == {"tenant": "t"}
    assert str(Where()) == ""


def test_one_of_nothing_is_nothing() -> None:
    assert str(Where().one_of("state", [])) == "WHERE 1 = 0"
    two = Where().one_of("state", ["running", "ended"])
    assert str(two) == "WHERE state IN (:state_0, :state_1)"
    assert two.parameters == {"state_0": "running", "state_1": "ended"}


@given(st.floats(allow_nan=False), st.from_regex(r"[a-z][a-z0-9]{11}", fullmatch=True))
def test_a_cursor_comes_back_exactly(at: float, last: str) -> None:
    assert from_cursor(to_cursor(at, last)) == (at, last)


@given(st.text())
def test_any_other_text_is_no_cursor_or_a_harmless_one(text: str) -> None:
    try:
        at, last = from_cursor(text)
    except InvalidRequest:
        return
    assert isinstance(at, float)
    assert isinstance(last, str)


@pytest.mark.parametrize("limit", [0, -1, 1001])
def test_pages_have_a_size(limit: int) -> None:
    with pytest.raises(InvalidRequest, match="limit"):
        page_size(limit)


def test_canonical_text_does_not_depend_on_order() -> None:
    assert canonical({"b": 1, "a": "ä\udcff\0"}) == '{"a":"\\u00e4\\udcff\\u0000","b":1}'
    with pytest.raises(ValueError, match="JSON"):
        canonical(float("nan"))


@pytest.mark.parametrize(
    "url",
    [
        "",
        "sqlite:relative.db",
        "sqlite://host/x.db",
        "mysql://u:hunter2@h/d",
        "/x.db",
        "postgresql://u:hunter2@[/d",
    ],
)
def test_a_url_that_is_none_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        asyncio.run(Store.open(url))
    assert "hunter2" not in str(caught.value)
