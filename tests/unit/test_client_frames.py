"""WebSocket frames, fed in every possible way."""

from __future__ import annotations

import os
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.client.frames import (
    BINARY,
    CLOSE,
    CONTINUATION,
    MESSAGE_MAX,
    PING,
    TEXT,
    FrameParser,
    frame,
    message,
)
from skerry.client.http1 import Malformed
from tests.unit.scripted_server import server_frame

payloads = st.binary(max_size=300)


def parse(data: bytes, step: int) -> list[tuple[int, bytes]]:
    parser, got = FrameParser(), []
    for at in range(0, len(data), step):
        parser.feed(data[at : at + step])
        while (one := parser.next()) is not None:
            got.append(one)
    return got


def unmask(data: bytes) -> tuple[int, bytes]:
    size, at = data[1] & 0x7F, 2
    if size >= 126:
        at = 4 if size == 126 else 10
        size = int.from_bytes(data[2:at], "big")
    mask, body = data[at : at + 4], data[at + 4 :]
    assert len(body) == size
    return data[0], bytes(byte ^ mask[i % 4] for i, byte in enumerate(body))


@given(st.lists(st.tuples(st.sampled_from([TEXT, BINARY]), payloads), max_size=5), st.integers(1, 5000))
def test_messages(messages: list[tuple[int, bytes]], step: int) -> None:
    assert parse(b"".join(server_frame(*one) for one in messages), step) == messages


@pytest.mark.parametrize("size", [0, 1, 125, 126, 127, 65535, 65536, 100_000])
def test_sizes_at_the_edges(size: int) -> None:
    payload = os.urandom(size)
    assert parse(server_frame(BINARY, payload), 4096) == [(BINARY, payload)]
    assert unmask(message(payload)) == (0x80 | BINARY, payload)


@given(st.lists(payloads, min_size=1, max_size=5), st.integers(1, 5000))
def test_fragments_with_a_ping_between(parts: list[bytes], step: int) -> None:
    data = server_frame(BINARY, parts[0], final=len(parts) == 1)
    for i, part in enumerate(parts[1:], 2):
        data += server_frame(PING, b"?") + server_frame(CONTINUATION, part, final=i == len(parts))
    got = parse(data, step)
    assert got == [(PING, b"?")] * (len(parts) - 1) + [(BINARY, b"".join(parts))]


@given(st.binary(max_size=100), st.integers(1, 20))
def test_garbage_is_refused_and_nothing_else_happens(data: bytes, step: int) -> None:
    with suppress(Malformed):
        parse(data, step)


@pytest.mark.parametrize(
    "data",
    [
        b"\xc1\x00",
        b"\x83\x00",
        b"\x81\x80\x00\x00\x00\x00",
        b"\x89\x7e\x00\x7e" + b"x" * 126,
        b"\x09\x00",
        b"\x80\x00",
        server_frame(TEXT, b"a", final=False) + server_frame(TEXT, b"b"),
        b"\x82\x7f" + (MESSAGE_MAX + 1).to_bytes(8, "big"),
        b"\x82\x7f" + b"\xff" * 8,
        server_frame(BINARY, bytes(MESSAGE_MAX), final=False) + server_frame(CONTINUATION, b"x"),
    ],
)
def test_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        parse(data, len(data))


@given(payloads)
def test_what_we_send_is_masked_and_whole(payload: bytes) -> None:
    assert unmask(frame(CLOSE if len(payload) < 126 else BINARY, payload))[1] == payload
    assert unmask(message(payload)) == (0x80 | BINARY, payload)
    assert unmask(message("é")) == (0x80 | TEXT, "é".encode())


def test_the_mask_changes() -> None:
    assert len({frame(BINARY, b"same") for _ in range(8)}) > 1
