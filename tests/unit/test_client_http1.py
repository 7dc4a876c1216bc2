"""The parser of HTTP responses, fed in every possible way."""

from __future__ import annotations

from itertools import pairwise
from urllib.parse import parse_qsl, unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.client.http1 import CHUNK_LINE_MAX, HEAD_MAX, Malformed, ResponseParser, chunk, quote, target
from skerry.errors import DaemonUnavailable


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in pairwise(edges)]


def parse(data: bytes, cuts: list[int], *, eof: bool = False) -> tuple[ResponseParser, bytes]:
    parser = ResponseParser("GET")
    body = b"".join(parser.feed(piece) for piece in pieces(data, cuts))
    if eof:
        body += parser.feed(b"")
    return parser, body


cuts = st.lists(st.integers(0, 1 << 20), max_size=30)


@given(body=st.binary(max_size=500), cuts=cuts)
def test_content_length(body: bytes, cuts: list[int]) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nX-Y:  z \r\n\r\n" % len(body)
    parser, got = parse(head + body + b"next", cuts)
    assert (parser.status, parser.headers["x-y"], got) == (200, "z", body)
    assert parser.done
    assert parser.keep_alive
    assert parser.rest == b"next"


@given(parts=st.lists(st.binary(min_size=1, max_size=200), max_size=6), cuts=cuts, trailer=st.booleans())
def test_chunked(parts: list[bytes], cuts: list[int], trailer: bool) -> None:
    data = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"".join(chunk(part) for part in parts)
    data += b"0;ext=1\r\n" + (b"x-trailer: 1\r\n" if trailer else b"") + b"\r\n"
    parser, got = parse(data + b"next", cuts)
    assert got == b"".join(parts)
    assert parser.done
    assert parser.rest == b"next"


@given(body=st.binary(max_size=100), cuts=cuts)
def test_until_the_connection_closes(body: bytes, cuts: list[int]) -> None:
    parser, got = parse(b"HTTP/1.1 200 OK\r\n\r\n" + body, cuts, eof=True)
    assert got == body
    assert parser.done
    assert not parser.keep_alive


@given(data=st.binary(max_size=300), cuts=cuts)
def test_garbage_is_refused_and_nothing_else_happens(data: bytes, cuts: list[int]) -> None:
    for head in (b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"):
        try:
            parser, _ = parse(head + data, cuts, eof=True)
        except (Malformed, DaemonUnavailable):
            continue
        assert 100 <= parser.status < 1000


def test_interim_responses_are_skipped() -> None:
    data = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nx: y\r\n\r\nHTTP/1.1 204 OK\r\n\r\n"
    parser, body = parse(data, [])
    assert (parser.status, parser.done, body) == (204, True, b"")


def test_an_upgrade_leaves_what_follows() -> None:
    parser, body = parse(b"HTTP/1.1 101 OK\r\nupgrade: websocket\r\n\r\n\x81\x00", [])
    assert (parser.status, parser.done, body, parser.rest) == (101, True, b"", b"\x81\x00")


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 2x0 OK\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n folded: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0x5\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nabc",
        b"HTTP/1.1 200 OK\r\nx: y\r\n" + b"a: b\r\n" * HEAD_MAX,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"0" * CHUNK_LINE_MAX,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n" + b"x" * (HEAD_MAX + 1),
    ],
)
def test_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        parse(data, [])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n",
    ],
)
def test_an_end_in_the_middle(data: bytes) -> None:
    with pytest.raises(DaemonUnavailable, match="middle"):
        parse(data, [], eof=True)


@given(st.text(), st.binary())
def test_quoting_round_trips(text: str, raw: bytes) -> None:
    assert quote(text).isascii()
    assert unquote_to_bytes(quote(text)) == text.encode()
    assert unquote_to_bytes(quote(raw.decode("utf-8", "surrogateescape"))) == raw


def test_target() -> None:
    query: dict[str, str | int | bool | None] = {
        "path": "a b&c=d/é",
        "offset": 3,
        "recursive": True,
        "all": False,
        "length": None,
    }
    got = target("/x", query)
    assert dict(parse_qsl(got.partition("?")[2])) == {
        "path": "a b&c=d/é",
        "offset": "3",
        "recursive": "1",
        "all": "0",
    }
    assert target("/x", {"a": None}) == "/x"
