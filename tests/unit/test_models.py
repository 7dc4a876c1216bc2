"""What goes over the wire."""

from __future__ import annotations

from skerry.models import decode_bytes, encode_bytes


def test_what_is_mostly_control_characters_is_no_text() -> None:
    for data in (bytes(4096), b"\x01\x02\x7f" * 1000):
        text, encoding = encode_bytes(data)
        assert encoding == "base64"
        assert decode_bytes(text, encoding) == data
    for data in (b"\0", b"tab\tand\x1b[31mcolour\x1b[0m\r\n" * 100, "ünïcode".encode() * 1000):
        assert encode_bytes(data) == (data.decode(), "utf-8")
