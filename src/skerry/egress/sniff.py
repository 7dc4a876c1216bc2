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
_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]"
_BEGINS_REQUEST = re.compile(_TOKEN + rb"{0,256}(?:$|[ \t])")
_ENDLESS = re.compile(rb"[\r\n]{64}|[\r\n]*" + _TOKEN + rb"{257}")
"""Empty lines, or a method, that some server might take for the beginning of a request, and we would for ever."""
_REQUEST = re.compile(rb"(" + _TOKEN + rb"{1,32}) ([!-~\x80-\xff]+) HTTP/1\.([01])")
_FIELD = re.compile(rb"(" + _TOKEN + rb"+):[ \t]*([\t -~\x80-\xff]*?)[ \t]*")
_LENGTH = re.compile(r"[0-9]{1,18}")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")
_CHUNK_MAX = 1024


class Refused(Exception):
    """What was said does not fit, or cannot be understood. The text is for people."""

    protocol = ""
    """`http` or `tls`, in which the client could be told."""


def looks_like_tls(data: bytes) -> bool:
    return data[:1] == b"\x16"


def looks_like_http(data: bytes) -> bool | None:
    """None: too little to tell. Servers skip empty lines before a request, and so do we.

    The first line tells: that of SSH and of many others begins like a request and does not end like one.
    """
    data = data.lstrip(b"\r\n")
    line, newline, _ = data.partition(b"\n")
    if newline:
        return b"HTTP/" in line.upper()
    if not _BEGINS_REQUEST.match(line) or b"\0" in line:
        return False
    return True if len(line) > HEAD_MAX else None


class Greeting:
    """The first words of a client of TLS, which may be spread over many records."""

    def __init__(self) -> None:
        self._at = 0
        """Where the first record begins that is not whole yet: the others are not looked at again."""
        self._message = bytearray()

    def server_name(self, data: bytes) -> str | None:
        """The name that is asked for, in one form; None while more is needed. `data` is all that has come.

        Raises Refused for what is no greeting, or one without a name.
        """
        while len(data) >= self._at + 5:
            kind, major, _, length = struct.unpack_from(">BBBH", data, self._at)
            if kind != 22 or major != 3 or not 0 < length <= HELLO_MAX:
                raise Refused("it is no TLS")
            end = self._at + 5 + length
            if len(data) < end:
                break
            self._message += data[self._at + 5 : end]
            self._at = end
            if len(self._message) >= 4:
                if self._message[0] != 1:
                    raise Refused("it is no TLS")
                wanted = 4 + int.from_bytes(self._message[1:4], "big")
                if wanted > HELLO_MAX:
                    raise Refused("its greeting is too long")
                if len(self._message) >= wanted:
                    return _name_in(bytes(self._message[4:wanted]))
        if len(data) > HELLO_MAX:
            raise Refused("its greeting is too long")
        return None


def _name_in(hello: bytes) -> str:
    try:
        at = 34  # version and random
        at += 1 + hello[at]  # session
        at += 2 + struct.unpack_from(">H", hello, at)[0]  # ciphers
        at += 1 + hello[at]  # compressions
        if at == len(hello):
            raise Refused("its greeting names no host")
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
        self._greeting = Greeting()
        self._guard: HttpGuard | None = None
        self._decided = False

    def feed(self, data: bytes) -> bytes:
        """What may be passed on of what the client says. Raises Refused."""
        if not self._decided:
            self._held += data
            if not self._decide():
                if len(self._held) > HEAD_MAX:
                    raise Refused("it says nothing that can be understood")
                return b""
            data, self._held = self._held, b""
        if self._guard is None:
            return data
        try:
            return self._guard.feed(data)
        except Refused as refused:
            refused.protocol = "http"
            raise

    @property
    def upgrading(self) -> bool:
        """The client asks for another protocol: what follows is held back until the server has answered."""
        return self._guard is not None and self._guard.upgrading

    def upgraded(self, accepted: bool) -> bytes:
        """What was held back. Raises Refused."""
        guard = self._guard
        assert guard is not None
        if accepted:
            self._guard = None
            return guard.held
        guard.upgrading = False
        return self.feed(b"")

    def _decide(self) -> bool:
        if looks_like_tls(self._held):
            try:
                asked = self._greeting.server_name(self._held)
                if asked is not None and asked != self._name:
                    raise Refused(f"TLS for {asked}")
            except Refused as refused:
                refused.protocol = "tls"
                raise
            self._decided = asked is not None
            return self._decided
        if _ENDLESS.match(self._held):
            raise Refused("it says nothing that can be understood")
        http = looks_like_http(self._held)
        if http:
            self._guard = HttpGuard(self._name, self._port)
        elif http is False and self._port in WEB:
            raise Refused("neither TLS nor HTTP")
        self._decided = http is not None
        return self._decided


class HttpGuard:
    """Lets the requests to one host through. Feed it what a client sends; it returns what may be passed on."""

    def __init__(self, name: str, port: int) -> None:
        self._name = name
        self._port = port
        self.held = b""
        """What has come, and could not be passed on yet."""
        self._seen = 0
        """So much of the head of a request has come, without its end: it is not searched again."""
        self._left = 0
        """Bytes of a body, or of a chunk with its end, that are still to come."""
        self._end_of_chunk = False
        """After those come the two bytes that end a chunk."""
        self._chunked = False
        self._trailers = False
        self._first = True
        self.upgrading = False
        """The first request asks for a websocket: what follows is held back until it is known who will read it.

        Whatever else is asked for, what follows must be requests still.
        """

    def feed(self, data: bytes) -> bytes:
        """Raises Refused."""
        data = self.held + data if self.held else data
        out: list[bytes] = []
        at = 0
        while at < len(data) and not self.upgrading:
            if self._left:
                step = min(self._left, len(data) - at)
                self._left -= step
            elif self._end_of_chunk:
                step = self._after_chunk(data, at)
            elif self._trailers:
                step = self._trailer(data, at)
            elif self._chunked:
                step = self._chunk(data, at)
            else:
                while at < len(data) and data[at] in b"\r\n":
                    at += 1
                step = self._head(data, at)
            if not step:
                break
            out.append(data[at : at + step])
            at += step
        self.held = data[at:]
        return b"".join(out)

    def _head(self, data: bytes, at: int) -> int:
        begin = max(at, at + self._seen - 3)
        end = data.find(b"\r\n\r\n", begin)
        until = len(data) if end < 0 else end
        if until - at > HEAD_MAX:
            raise Refused("the head of a request is too long")
        if data.count(b"\n", begin, until) != data.count(b"\r\n", max(at, begin - 1), until):
            raise Refused("a request is broken")
        self._seen = len(data) - at if end < 0 else 0
        if end < 0:
            return 0
        self._read(data[at:end])
        return end + 4 - at

    def _chunk(self, data: bytes, at: int) -> int:
        found = _CHUNK.match(data, at, at + _CHUNK_MAX)
        if found is None:
            if len(data) - at >= _CHUNK_MAX or b"\n" in data[at:]:
                raise Refused("a chunk of a request is broken")
            return 0
        self._left = int(found[1], 16)
        self._trailers = not self._left
        self._end_of_chunk = not self._trailers
        return found.end() - at

    def _after_chunk(self, data: bytes, at: int) -> int:
        if not b"\r\n".startswith(data[at : at + 2]):
            raise Refused("a chunk of a request is broken")
        if len(data) - at < 2:
            return 0
        self._end_of_chunk = False
        return 2

    def _trailer(self, data: bytes, at: int) -> int:
        end = data.find(b"\r\n", at)
        line = data[at : at + HEAD_MAX + 1] if end < 0 else data[at:end]
        if len(line) > HEAD_MAX or b"\n" in line:
            raise Refused("the end of a request is broken")
        if end < 0:
            return 0
        self._chunked = self._trailers = bool(line)
        return end + 2 - at

    def _read(self, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        request = _REQUEST.fullmatch(first)
        if request is None:
            raise Refused("it is no HTTP/1.1")
        fields: dict[bytes, list[str]] = {}
        for line in lines:
            field = _FIELD.fullmatch(line)
            if field is None:
                raise Refused("a request is broken")
            fields.setdefault(field[1].lower(), []).append(field[2].decode("latin-1"))
        self._check_target(request[1], request[2].decode("latin-1"), fields.get(b"host", []))
        self._frame(fields, old=request[3] == b"0")
        asked = [each.lower() for each in fields.get(b"upgrade", [])]
        bare = not self._left and not self._chunked
        self.upgrading = self._first and bare and asked == ["websocket"]
        self._first = False

    def _check_target(self, method: bytes, target: str, hosts: list[str]) -> None:
        if method.upper() == b"CONNECT":
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
            host, colon, port = authority.partition(":")
            if canonical(host) != self._name or (colon and port != str(self._port)):
                raise Refused(f"a request for {authority[:100]!r}")

    def _frame(self, fields: dict[bytes, list[str]], *, old: bool) -> None:
        lengths, codings = fields.get(b"content-length", []), fields.get(b"transfer-encoding", [])
        if (lengths and codings) or len(lengths) > 1 or len(codings) > 1:
            raise Refused("a request has two lengths")
        if codings:
            if old or codings[0].lower() != "chunked":
                raise Refused("a request has an unknown length")
            self._chunked = True
        elif lengths:
            if not _LENGTH.fullmatch(lengths[0]):
                raise Refused("a request has an unknown length")
            self._left = int(lengths[0])
