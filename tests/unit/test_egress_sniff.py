"""What connections say about themselves: what is let through to the one host, and what is not."""

from __future__ import annotations

import ssl
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.egress.sniff import HEAD_MAX, Refused, Screen

NAME = "example.com"
GET = b"GET / HTTP/1.1\r\nHost: example.com\r\n\r\n"
EVIL = b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n"


def passed(data: bytes, port: int = 80) -> bytes:
    """What comes through, and it is the same whether it comes at once or in pieces. Raises Refused."""
    at_once = Screen(NAME, port)
    slowly = Screen(NAME, port)
    bytewise, failure = b"", None
    try:
        step = 1 if len(data) < 5000 else 997
        for at in range(0, len(data), step):
            bytewise += slowly.feed(data[at : at + step])
    except Refused as refused:
        failure = refused
    try:
        out = at_once.feed(data)
    except Refused:
        assert failure is not None
        raise
    assert failure is None
    assert bytewise == out
    return out


def hello(name: str | None, *, context: ssl.SSLContext | None = None) -> bytes:
    """The first words of a real client."""
    context = context or ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname=name).do_handshake()
    return outgoing.read()


def greeting(*extensions: tuple[int, bytes]) -> bytes:
    """First words with these extensions, in one record."""
    listed = b"".join(struct.pack(">HH", kind, len(value)) + value for kind, value in extensions)
    body = (
        b"\x03\x03"
        + bytes(32)
        + b"\0"
        + b"\0\x02\x13\x01"
        + b"\x01\0"
        + struct.pack(">H", len(listed))
        + listed
    )
    message = b"\x01" + len(body).to_bytes(3, "big") + body
    return b"\x16\x03\x01" + struct.pack(">H", len(message)) + message


def named(*names: bytes, kind: int = 0) -> bytes:
    listed = b"".join(struct.pack(">BH", kind, len(name)) + name for name in names)
    return struct.pack(">H", len(listed)) + listed


def records(data: bytes, size: int) -> bytes:
    """The same greeting in records of at most this size."""
    body = data[5:]
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"\x16\x03\x01" + struct.pack(">H", len(piece)) + piece for piece in pieces)


GREASE = (0x1A1A, b"")
ECH = (0xFE0D, bytes(100))


@pytest.mark.parametrize("port", [443, 80, 8443, 22])
@pytest.mark.parametrize(
    "words",
    [
        hello("example.com"),
        hello("Example.COM"),
        records(hello("example.com"), 100),
        records(hello("example.com"), 1),
        greeting(GREASE, (0, named(b"example.com")), GREASE, ECH),
        greeting((0, named(b"example.com."))),
        hello("example.com") + b"\x17\x03\x03\0\x01x",
    ],
)
def test_tls_for_the_host(words: bytes, port: int) -> None:
    assert passed(words, port) == words


@pytest.mark.parametrize("port", [443, 8443])
@pytest.mark.parametrize(
    "words",
    [
        hello("evil.example"),
        records(hello("evil.example"), 50),
        hello(None),
        hello("93.184.216.34"),
        greeting(),
        greeting((0, named())),
        greeting((0, named(b""))),
        greeting((0, named(b"evil.example"))),
        greeting((0, named(b"example.com", b"evil.example"))),
        greeting((0, named(b"example.com")), (0, named(b"evil.example"))),
        greeting((0, named(b"example.com", kind=1))),
        greeting((0, named(b"example.com\0.evil.example"))),
        greeting((0, named(b"ex\xaample.com"))),
        greeting((0, named(b"example.com") + b"x")),
        greeting(ECH, (0, named(b"outer.example"))),
        b"\x16\x03\x01\0\0",
        b"\x16\x02\x01\0\x05\x01\0\0\x01\0",
        b"\x16\x03\x01\0\x04\x02\0\0\0",
        b"\x16\x03\x01\0\x04\x01\xff\xff\xff",
        b"\x16\x03\x01\x00\x05\x01\0\0\x01\0",
        hello("example.com")[:40] + b"\xff" * (len(hello("example.com")) - 40),
        greeting((0, named(b"example.com")))[:48] + b"\xff\xff" + greeting((0, named(b"example.com")))[50:],
    ],
)
def test_tls_for_another(words: bytes, port: int) -> None:
    with pytest.raises(Refused) as refused:
        passed(words, port)
    assert refused.value.protocol == "tls"


def test_no_extensions_at_all() -> None:
    body = b"\x03\x03" + bytes(32) + b"\0" + b"\0\x02\x13\x01" + b"\x01\0"
    with pytest.raises(Refused, match="names no host"):
        passed(
            b"\x16\x03\x01" + struct.pack(">H", len(body) + 4) + b"\x01" + len(body).to_bytes(3, "big") + body
        )


def request(*lines: bytes, body: bytes = b"") -> bytes:
    return b"\r\n".join((*lines, b"", b"")) + body


HOST = b"Host: example.com"
POST = b"POST / HTTP/1.1"


@pytest.mark.parametrize(
    "words",
    [
        GET,
        GET * 3,
        request(b"GET /x?y=http://evil.example/ HTTP/1.0", HOST),
        request(b"OPTIONS * HTTP/1.1", b"host:EXAMPLE.com.:80\t"),
        request(b"GET http://example.com/ HTTP/1.1", HOST),
        request(b"GET HTTP://Example.com:80?x HTTP/1.1", HOST),
        request(POST, HOST, b"Content-Length: 5", body=b"hello") + GET,
        request(POST, HOST, b"Content-Length: 0") + GET,
        request(POST, HOST, b"Content-Length: 37", body=EVIL[:37]) + GET,
        request(POST, HOST, b"Transfer-Encoding: Chunked", body=b"5\r\nhello\r\n0\r\n\r\n") + GET,
        request(POST, HOST, b"Transfer-Encoding: chunked", body=b"A;x=y\r\n0123456789\r\n0\r\nX: y\r\n\r\n")
        + GET,
        request(b"GET / HTTP/1.1", HOST, b"Upgrade: h2c", b"Connection: Upgrade") + GET,
        request(POST, HOST, b"Upgrade: websocket", b"Content-Length: 2", body=b"hi") + GET,
        GET + request(b"GET / HTTP/1.1", HOST, b"Upgrade: websocket") + GET,
        request(b"GET / HTTP/1.1", HOST, b"X-\xe9: no")[:16] + HOST + b"\r\nX: \xe9\t\r\n\r\n",
    ],
)
def test_http_for_the_host(words: bytes) -> None:
    assert passed(words) == words


def test_empty_lines_before_a_request_are_left_out() -> None:
    assert passed(b"\r\n\n\r\n" + GET + b"\r\n" + GET) == GET + GET


@pytest.mark.parametrize("port", [80, 8080])
@pytest.mark.parametrize(
    "words",
    [
        EVIL,
        b"\r\n" + EVIL,
        GET + EVIL,
        request(b"GET / HTTP/1.1"),
        request(b"GET / HTTP/1.1", HOST, HOST),
        request(b"GET / HTTP/1.1", HOST, b"host: evil.example"),
        request(b"GET / HTTP/1.1", b"Host: example.com:81"),
        request(b"GET / HTTP/1.1", b"Host: example.com:"),
        request(b"GET / HTTP/1.1", b"Host: example.com, evil.example"),
        request(b"GET / HTTP/1.1", b"Host: evil.example@example.com"),
        request(b"GET / HTTP/1.1", b"Host: example.com/evil.example"),
        request(b"GET / HTTP/1.1", b"Host: ex\xaample.com"),
        request(b"GET / HTTP/1.1", b"Host : example.com"),
        request(b"GET / HTTP/1.1", b"Host:"),
        request(b"GET / HTTP/1.1", HOST, b" evil.example"),
        request(b"GET / HTTP/1.1", b"X: y", b"\tz", HOST),
        request(b"GET / HTTP/1.1", HOST, b"nothing"),
        request(b"GET / HTTP/1.1", HOST, b": nothing"),
        request(b"GET / HTTP/1.1", HOST, b"X\x0b: y"),
        request(b"GET / HTTP/1.1", HOST, b"X: \0"),
        request(b"GET / HTTP/1.1", HOST, b"X: a\rHost: evil.example"),
        b"GET / HTTP/1.1\nHost: example.com\n\n",
        b"GET / HTTP/1.1\r\nX: y\nHost: evil.example\r\nHost: example.com\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: example.com\r\n\nGET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        request(b"GET http://evil.example/ HTTP/1.1", HOST),
        request(b"GET http://example.com@evil.example/ HTTP/1.1", HOST),
        request(b"GET http://example.com\\@evil.example/ HTTP/1.1", HOST),
        request(b"GET https://example.com/ HTTP/1.1", HOST),
        request(b"GET evil.example/ HTTP/1.1", HOST),
        request(b"GET http:/evil.example/ HTTP/1.1", HOST),
        request(b"CONNECT example.com:80 HTTP/1.1", HOST),
        request(b"connect example.com:80 HTTP/1.1", HOST),
        request(b"GET  / HTTP/1.1", HOST),
        request(b"GET /\tx HTTP/1.1", HOST),
        request(b"GET / x HTTP/1.1", HOST),
        request(b"GET / http/1.1", HOST),
        request(b"GET / HTTP/1.2", HOST),
        request(b"GET / HTTP/1.1 ", HOST),
        request(b"GET / HTTP/0.9", HOST),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        request(POST, HOST, b"Content-Length: 4", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
        request(POST, HOST, b"Content-Length: 4", b"Content-Length: 4", body=b"0123"),
        request(POST, HOST, b"Content-Length: 4, 4", body=b"0123"),
        request(POST, HOST, b"Content-Length: +4", body=b"0123"),
        request(POST, HOST, b"Content-Length: 0x4", body=b"0123"),
        request(POST, HOST, b"Content-Length: -1"),
        request(POST, HOST, b"Content-Length:"),
        request(POST, HOST, b"Transfer-Encoding: gzip, chunked"),
        request(POST, HOST, b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"),
        request(POST, HOST, b"Transfer-Encoding: \x0bchunked"),
        request(b"POST / HTTP/1.0", HOST, b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
        request(POST, HOST, b"Transfer-Encoding: chunked", body=b"5\nhello\r\n0\r\n\r\n"),
        request(POST, HOST, b"Transfer-Encoding: chunked", body=b"5\r\nhelloXX0\r\n\r\n"),
        request(POST, HOST, b"Transfer-Encoding: chunked", body=b"-5\r\nhello\r\n"),
        request(POST, HOST, b"Transfer-Encoding: chunked", body=b"0x5\r\nhello\r\n"),
        request(POST, HOST, b"Transfer-Encoding: chunked", body=b"f" * 16 + b"\r\n"),
        request(POST, HOST, b"Transfer-Encoding: chunked", body=b"5;" + b"x" * 2000),
        request(POST, HOST, b"Transfer-Encoding: chunked", body=b"0\r\nX: a\nb\r\n\r\n"),
        request(POST, HOST, b"Transfer-Encoding: chunked", body=b"0\r\n\r\n") + EVIL,
        request(POST, HOST, b"Content-Length: 5", body=b"hello") + EVIL,
        request(b"GET / HTTP/1.1", HOST, b"Upgrade: h2c") + b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        request(b"GET / HTTP/1.1", HOST, b"X: " + b"y" * HEAD_MAX),
        b"GET /" + b"y" * (HEAD_MAX + 10),
        b"\r\n" * HEAD_MAX,
        request(b"A" * 33 + b" / HTTP/1.1", b"Host: evil.example"),
        request(b"A" * 300 + b" / HTTP/1.1", b"Host: evil.example"),
        b"\r\n" * 100 + EVIL,
    ],
)
def test_http_that_is_for_another_or_could_be(words: bytes, port: int) -> None:
    if port != 80:
        words = words.replace(b"Host: example.com\r", b"Host: example.com:8080\r")
    with pytest.raises(Refused):
        passed(words, port)


@pytest.mark.parametrize(
    "words",
    [
        b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n",
        b"EHLO somebody\r\n",
        b"*1\r\n$4\r\nPING\r\n",
        b"PING\r\n",
        b"0032git-upload-pack /project.git\0host=example.com\0",
        b"\0\0\0\x08\x04\xd2\x16\x2f",
        b"\x80\x2e\x01\x03\x01",
        b"GET /\r\n",
    ],
)
def test_other_protocols_have_other_ports(words: bytes) -> None:
    assert passed(words, 2222) == words
    with pytest.raises(Refused, match="neither TLS nor HTTP"):
        passed(words, 443)


def test_a_websocket_is_nobody_elses_business() -> None:
    asks = request(b"GET / HTTP/1.1", HOST, b"Upgrade: WebSocket", b"Connection: Upgrade")
    screen = Screen(NAME, 80)
    assert screen.feed(asks + b"\x81\x00") == asks
    assert screen.upgrading
    assert screen.upgraded(accepted=True) == b"\x81\x00"
    assert screen.feed(EVIL) == EVIL
    screen = Screen(NAME, 80)
    assert screen.feed(asks + EVIL) == asks
    with pytest.raises(Refused):
        screen.upgraded(accepted=False)


def test_small_chunks_are_not_copied_again_and_again() -> None:
    """A thousand times the work for a thousand chunks, not a million times."""
    screen = Screen(NAME, 80)
    chunks = b"1\r\nx\r\n" * 50_000
    screen.feed(request(POST, HOST, b"Transfer-Encoding: chunked"))
    assert screen.feed(chunks) == chunks


def test_small_records_are_not_read_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slowly they come: who sends a byte must not cost more than a byte's worth of anybody's time."""
    read = 0
    unpack = struct.unpack_from

    def counted(*args: Any) -> Any:
        nonlocal read
        read += 1
        return unpack(*args)

    words = records(b"\x16\x03\x01\0\0\x01\0\x10\0" + bytes(500), 1)
    monkeypatch.setattr(struct, "unpack_from", counted)
    screen = Screen(NAME, 443)
    for byte in words:
        assert screen.feed(bytes((byte,))) == b""
    assert read <= len(words)


def test_who_says_nothing_is_not_heard_out() -> None:
    for words in (b"\r\n" * 32, b"A" * 257):
        with pytest.raises(Refused):
            Screen(NAME, 8080).feed(words)


@given(
    st.binary(max_size=300),
    st.sampled_from([b"", GET, b"\x16\x03\x01", EVIL[:20]]),
    st.sampled_from([80, 99]),
)
def test_whatever_comes(data: bytes, before: bytes, port: int) -> None:
    try:
        out = passed(before + data, port)
    except Refused:
        return
    assert len(out) <= len(before + data)
