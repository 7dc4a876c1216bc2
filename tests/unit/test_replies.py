"""What comes from the interpreter of a session is hostile: bounded, and understood or refused."""

from __future__ import annotations

import ast
import contextlib
import json
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.guest.frames import ProtocolError
from skerry.guest.replies import CALL_MAX, HEAD_MAX, PIECE_MAX, REPLIES_MAX, Parser

REPLIES = [
    ({"token": "a", "size": 3}, b"\n{}"),
    ({"end": None}, b""),
    ({"size": 0}, b""),
    ({"size": 5}, b"12345"),
]
WIRE = b"".join(json.dumps(head).encode() + b"\n" + data for head, data in REPLIES)


@given(st.lists(st.integers(1, 20), max_size=60))
def test_replies_arrive_in_any_pieces(cuts: list[int]) -> None:
    parser, rest = Parser(), WIRE
    found: list[object] = []
    for cut in cuts:
        found += parser.feed(rest[:cut])
        rest = rest[cut:]
    found += parser.feed(rest)
    assert found == REPLIES


@pytest.mark.parametrize(
    "line",
    [
        b"nonsense",
        b"",
        b"5",
        b"[]",
        b'{"size": -1}',
        b'{"size": true}',
        b'{"size": 1.5}',
        b'{"size": %d}' % (PIECE_MAX + 1),
        b'{"size": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b"\xff",
        b'"' + b"a" * HEAD_MAX + b'"',
    ],
)
def test_what_makes_no_sense_is_refused(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(Parser().feed(line + b"\n"))


@given(st.binary(max_size=300))
def test_nothing_else_is_raised(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        list(Parser().feed(data))


def test_a_line_without_an_end_is_refused() -> None:
    parser = Parser()
    assert list(parser.feed(b"a" * HEAD_MAX)) == []
    with pytest.raises(ProtocolError):
        list(parser.feed(b"a"))


def test_a_call_has_so_many_replies_and_no_more() -> None:
    parser, one = Parser(), json.dumps({"size": 100_000}).encode() + b"\n" + bytes(100_000)
    for _ in range(CALL_MAX // len(one)):
        assert len(list(parser.feed(one))) == 1
    with pytest.raises(ProtocolError):
        list(parser.feed(one))
    parser = Parser()
    for _ in range(2 * CALL_MAX // len(one)):
        parser.renew()
        assert len(list(parser.feed(one))) == 1


def test_small_ones_are_counted_too() -> None:
    """To understand each takes the daemon's time: millions of them would hold up everybody."""
    parser = Parser()
    with pytest.raises(ProtocolError):
        list(parser.feed(b"{}\n" * (REPLIES_MAX + 1)))
    parser = Parser()
    for _ in range(3):
        parser.renew()
        assert len(list(parser.feed(b"{}\n" * REPLIES_MAX))) == REPLIES_MAX


def test_the_runner_is_for_older_pythons_as_well() -> None:
    source = files("skerry.runners").joinpath("python.py").read_text()
    ast.parse(source, feature_version=(3, 8))
