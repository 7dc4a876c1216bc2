"""What a connection says about itself: the name in the first words of TLS, and the Host of every HTTP request.

Nothing is passed on that was not looked at. What can be understood in two ways is refused: the server at the other end
might understand it in the other one.
"""

from __future__ import annotations

import re
import struct

from skerry.egress.names import canonical

HELLO_MAX = 16 << 10
HEAD_MAX = 64 << 10
_METHOD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}[ \t]")
_BEGINS_METHOD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{0,32}")
_NUMBER = re.compile(r"[0-9]{1,18}")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")


class Refused(Exception):
    """What was said does not fit, or cannot be understood. The text is for people."""

    http = False
    """Whether the client speaks HTTP, and could be told."""


def looks_like_tls(data: bytes) -> bool:
    return data[:1] == b"\x16"


def looks_like_http(data: bytes) -> bool | None:
    """None: too little to tell. Servers skip empty lines before a request, and so do we."""
    data = data.lstrip(b"\r\n")
    if not data:
        return None
    if _METHOD.match(data):
        return True
    return None if _BEGINS_METHOD.fullmatch(data) else False


def server_name(data: bytes) -> str | None:
    """The name that a client of TLS asks for, in one form; None while more is needed.

    Raises Refused for what is no greeting, or one without a name.
    """
    hello = b""
    at = 0
    while True:  # the greeting may be spread over several records
        if len(data) < at + 5:
            break
        kind, major, length = data[at], data[at + 1], struct.unpack_from(">H", data, at + 3)[0]
        if kind != 22 or major != 3 or not 0 < length <= HELLO_MAX:
            raise Refused("it is no TLS")
        if len(data) < at + 5 + length:
            break
        hello += data[at + 5 : at + 5 + length]
        at += 5 + length
        if len(hello) >= 4:
            if hello[0] != 1:
                raise Refused("it is no TLS")
            wanted = 4 + int.from_bytes(hello[1:4], "big")
            if wanted > HELLO_MAX:
                raise Refused("its greeting is too long")
            if len(hello) >= wanted:
                return _name_in(hello[4:wanted])
    if len(data) > HELLO_MAX:
        raise Refused("its greeting is too long")
    return None


def _name_in(hello: bytes) -> str:
    try:
        at = 34  # version and random
        at += 1 + hello[at]  # session
        at += 2 + struct.unpack_from(">H", hello, at)[0]  # ciphers
        at += 1 + hello[at]  # compressions
        end = at + 2 + struct.unpack_from(">H", hello, at)[0]
        at += 2
        names: list[bytes] = []
        while at < end:
            kind, length = struct.unpack_from(">HH", hello, at)
            if kind == 0:
                names.append(_only_name(hello[at + 4 : at + 4 + length]))
            at += 4 + length
        if at != end or end > len(hello):
            raise Refused("its greeting is broken")
    except (IndexError, struct.error):
        raise Refused("its greeting is broken") from None
    if len(names) != 1:
        raise Refused("its greeting names no host" if not names else "its greeting names several hosts")
    name = canonical(names[0].decode("latin-1"))
    if name is None:
        raise Refused("its greeting names no host")
    return name


def _only_name(extension: bytes) -> bytes:
    total, kind, length = struct.unpack_from(">HBH", extension)
    if kind != 0 or total != len(extension) - 2 or length != total - 3:
        raise Refused("its greeting is broken")
    return extension[5:]


WEB = (80, 443)
"""Ports at which nothing but HTTP and TLS is spoken, and the client speaks first."""


class Screen:
    """Between a client and the host of one name: finds out what is spoken, and lets through what is for that host."""

    def __init__(self, name: str, port: int) -> None:
        self._name = name
        self._port = port
        self._held = b""
        self._guard: HttpGuard | None = None
        self.decided = False

    def feed(self, data: bytes) -> bytes:
        """What may be passed on of what the client says. Raises Refused."""
        if not self.decided:
            self._held += data
            if not self._decide():
                return b""
            data, self._held = self._held, b""
        if self._guard is None:
            return data
        try:
            return self._guard.feed(data)
        except Refused as refused:
            refused.http = True
            raise

    @property
    def upgrading(self) -> bool:
        """The client asks for another protocol: what follows is held back until the server has answered."""
        return self._guard is not None and self._guard.upgrading

    def upgraded(self, accepted: bool) -> bytes:
        """What was held back. Raises Refused."""
        assert self._guard is not None
        held = self._guard.upgraded(accepted)
        if accepted:
            self._guard = None
        return held

    def _decide(self) -> bool:
        if looks_like_tls(self._held):
            asked = server_name(self._held)
            if asked is not None and asked != self._name:
                raise Refused(f"TLS for {asked}")
            self.decided = asked is not None
            return self.decided
        http = looks_like_http(self._held)
        if http:
            self._guard = HttpGuard(self._name, self._port)
        elif http is False and self._port in WEB:
            raise Refused("neither TLS nor HTTP")
        self.decided = http is not None
        return self.decided


class HttpGuard:
    """Lets the requests to one host through. Feed it what a client sends; it returns what may be passed on."""

    def __init__(self, name: str, port: int) -> None:
        self._name = name
        self._port = port
        self._head = b""
        self._left = 0
        """Bytes of a body, or of a chunk with its end, that are still to come."""
        self._chunked = False
        self._trailers = False
        self.upgrading = False
        """The client asks for another protocol: hold back what follows until the server has answered."""

    def feed(self, data: bytes) -> bytes:
        """Raises Refused."""
        out: list[bytes] = []
        self._head += data
        while self._head and not self.upgrading:
            if self._left:
                out.append(self._head[: self._left])
                taken = len(out[-1])
            elif self._chunked:
                piece = self._next_chunk()
                if piece is None:
                    break
                out.append(piece)
                taken = len(piece)
            else:
                blank = len(self._head) - len(self._head.lstrip(b"\r\n"))
                end = self._head.find(b"\r\n\r\n", blank)
                if end < 0:
                    if len(self._head) > HEAD_MAX:
                        raise Refused("the head of a request is too long")
                    break
                self._read(self._head[blank:end])
                out.append(self._head[blank : end + 4])
                self._head = self._head[end + 4 :]
                continue
            self._left = max(0, self._left - taken)
            self._head = self._head[taken:]
        return b"".join(out)

    def upgraded(self, accepted: bool) -> bytes:
        """What was held back, once the server has answered. Raises Refused."""
        self.upgrading = False
        if accepted:
            held, self._head = self._head, b""
            return held
        return self.feed(b"")

    def _next_chunk(self) -> bytes | None:
        if self._trailers:
            end = self._head.find(b"\r\n")
            if end < 0:
                if len(self._head) > HEAD_MAX:
                    raise Refused("the end of a request is too long")
                return None
            self._chunked = self._trailers = end != 0
            return self._head[: end + 2]
        found = _CHUNK.match(self._head)
        if found is None:
            if len(self._head) > 1024 or b"\n" in self._head:
                raise Refused("a chunk of a request is broken")
            return None
        size = int(found[1], 16)
        self._trailers = size == 0
        self._left = len(found[0]) + (size + 2 if size else 0)
        return found[0] if not size else b""

    def _read(self, head: bytes) -> None:
        lines = head.decode("latin-1").split("\r\n")
        if any("\n" in line or "\r" in line or "\0" in line for line in lines):
            raise Refused("a request is broken")
        words = lines[0].split(" ")
        if len(words) != 3 or words[2] not in ("HTTP/1.1", "HTTP/1.0"):
            raise Refused("it is no HTTP/1.1")
        fields: dict[str, list[str]] = {}
        for line in lines[1:]:
            name, colon, value = line.partition(":")
            if not colon or not name or name != name.strip() or " " in name or "\t" in name:
                raise Refused("a request is broken")
            fields.setdefault(name.lower(), []).append(value.strip(" \t"))
        self._check_target(words[0], words[1], fields.get("host", []))
        self._frame(fields)
        self.upgrading = "upgrade" in fields

    def _check_target(self, method: str, target: str, hosts: list[str]) -> None:
        if method == "CONNECT":
            raise Refused("a tunnel inside a connection")
        if len(hosts) != 1:
            raise Refused("a request must have one Host")
        named = [hosts[0]]
        if not target.startswith("/") and target != "*":
            scheme, separator, rest = target.partition("://")
            if not separator or scheme.lower() not in ("http", "ws"):
                raise Refused("a request is broken")
            named.append(re.split("[/?#]", rest, maxsplit=1)[0])
        for authority in named:
            host, colon, port = authority.rpartition(":")
            if not colon:
                host, port = authority, "80"
            if canonical(host) != self._name or port != str(self._port):
                raise Refused(f"a request for {authority[:100]!r}")

    def _frame(self, fields: dict[str, list[str]]) -> None:
        lengths, codings = fields.get("content-length", []), fields.get("transfer-encoding", [])
        if (lengths and codings) or len(lengths) > 1 or len(codings) > 1:
            raise Refused("a request has two lengths")
        if codings:
            if codings[0].lower() != "chunked":
                raise Refused("a request has an unknown length")
            self._chunked = True
        elif lengths:
            if not _NUMBER.fullmatch(lengths[0]):
                raise Refused("a request has an unknown length")
            self._left = int(lengths[0])
