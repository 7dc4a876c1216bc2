"""DNS messages: what is taken for a question, and the answers."""

from __future__ import annotations

import struct
from ipaddress import IPv4Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.egress import dns


def question(
    name: bytes, kind: int = 1, *, flags: int = 0x100, counts: str = "1000", end: bytes = b""
) -> bytes:
    labels = b"".join(bytes((len(label),)) + label for label in name.split(b".") if label)
    head = struct.pack(">HHHHHH", 7, flags, *map(int, counts))
    return head + labels + b"\0" + struct.pack(">HH", kind, 1) + end


EDNS = struct.pack(">BHHIH", 0, dns.OPT, 512, 0, 0)


def test_a_question_and_its_answer() -> None:
    asked = dns.parse(question(b"Example.COM", counts="1001", end=EDNS))
    assert asked is not None
    assert (asked.name, asked.kind, asked.extended) == ("Example.COM", 1, True)
    answer = dns.answer(asked, dns.NO_ERROR, IPv4Address("198.18.0.2"))
    assert answer[:12] == struct.pack(">HHHHHH", 7, 0x8180, 1, 1, 0, 1)
    assert b"\x07Example\x03COM\0" in answer, "the letters come back as they were asked, for those who check"
    assert IPv4Address("198.18.0.2").packed in answer


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"\0" * 11,
        question(b"a.example", flags=0x8100),  # an answer
        question(b"a.example", flags=0x2900),  # an update
        question(b"a.example", counts="2000"),
        question(b"a.example", counts="0000"),
        question(b"a.example", counts="1100"),
        question(b"a.example", counts="1002"),
        question(b"a.example")[:-1],
        question(b"a.example")[:15],
        question(b"")[:12] + b"\xc0\x0c\0\x01\0\x01",  # the name is a pointer, to itself
        question(b"a.example")[:-2] + b"\0\x03",  # CHAOS
        question(b"\xe9.example"),
        question(b"")[:12] + b"\x03a.b\x07example\0\0\x01\0\x01",
        question(b".".join([b"a" * 63] * 5)),
        question(b".".join([b"a"] * 200)),
    ],
)
def test_what_is_no_question(packet: bytes) -> None:
    assert dns.parse(packet) is None
    answer = dns.broken(packet)
    if len(packet) < 12 or packet[2] & 0x80:
        assert answer is None
    else:
        assert answer is not None
        assert answer[3] & 0xF == (dns.NOT_IMPLEMENTED if packet[2] & 0x78 else dns.FORMAT_ERROR)


def test_an_answer_is_never_too_long() -> None:
    longest = b".".join([b"a" * 63] * 3 + [b"a" * 61])
    asked = dns.parse(question(longest, counts="1001", end=EDNS))
    assert asked is not None
    assert len(dns.answer(asked, dns.NO_ERROR, IPv4Address("198.18.0.2"), "x" * 1000)) <= 512


@given(st.binary(max_size=600))
def test_whatever_comes(packet: bytes) -> None:
    asked = dns.parse(packet)
    if asked is None:
        dns.broken(packet)
    else:
        assert dns.parse(dns.answer(asked, dns.NO_ERROR)) is None, "an answer is no question"
