"""HTTP/1.1 as bytes: requests out, responses in. No I/O.

Strict: an ambiguous response is refused.
"""

from __future__ import annotations

from skerry.errors import DaemonUnavailable, InvalidRequest, PlatformError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    Query = Mapping[str, str | int | bool | None]

HEAD_MAX = 64 << 10
"""Bytes of the first line and headers, and of the trailers after a chunked body."""
CHUNK_LINE_MAX = 1 << 10

_SAFE = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_QUOTED = [chr(byte) if byte in _SAFE else f"%{byte:02X}" for byte in range(256)]


class Malformed(PlatformError):
    """The daemon sent something that is not a valid HTTP response or WebSocket frame."""


def quote(text: str) -> str:
    """Percent-encode for a path segment or a query; surrogate escapes become the bytes they stand for."""
    return "".join([_QUOTED[byte] for byte in text.encode("utf-8", "surrogateescape")])


def target(path: str, query: Query | None = None) -> str:
    """A request target. Values of None are left out, booleans become 0 and 1."""
    if not query:
        return path
    pairs = [
        f"{name}={quote(str(int(value) if isinstance(value, bool) else value))}"
        for name, value in query.items()
        if value is not None
    ]
    return f"{path}?{'&'.join(pairs)}" if pairs else path


def traceparent(text: str) -> str:
    """The text if it is a valid W3C trace context, else ""."""
    version, _, rest = text.partition("-")
    trace, _, rest = rest.partition("-")
    span, _, flags = rest.partition("-")
    for part, length in ((version, 2), (trace, 32), (span, 16), (flags, 2)):
        if len(part) != length or part.strip("0123456789abcdef"):
            return ""
    return text if version != "ff" and trace.strip("0") and span.strip("0") else ""


def request_head(method: str, target: str, headers: Iterable[tuple[str, str]]) -> bytes:
    """The request line and headers. Raises InvalidRequest if they are too long for any daemon."""
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers)]
    head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
    if len(head) > HEAD_MAX:
        # The daemon would refuse it and close the connection while we still send, so its answer would be lost.
        raise InvalidRequest(
            "a name or path is too long", hint=f"request line and headers take at most {HEAD_MAX} bytes"
        )
    return head


def field_value(text: str, what: str) -> str:
    """The text, checked for use as a header value. Raises InvalidRequest."""
    if not text.isascii() or not text.isprintable():
        raise InvalidRequest(f"{what} contains characters that a header cannot carry")
    return text


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body; empty data makes the last one."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class ResponseParser:
    """Parses one response: `feed()` takes received bytes and returns those of the body.

    `status` is 0 until the head has been read. After `done`, `rest` holds bytes that followed the response.
    Raises Malformed.
    """

    __slots__ = (
        "_chunked",
        "_head_only",
        "_in_trailers",
        "_left",
        "done",
        "headers",
        "keep_alive",
        "rest",
        "status",
    )

    def __init__(self, method: str) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.keep_alive = False
        self.done = False
        self.rest = b""
        self._head_only = method == "HEAD"
        self._chunked = False
        self._in_trailers = False
        self._left: int | None = None
        """Bytes until the end of the body or chunk (with its line end); None until the connection closes."""

    def feed(self, data: bytes) -> bytes:
        """Take received bytes and return the body bytes in them. Empty data means the connection was closed."""
        if not data:
            return self._eof()
        self.rest += data
        while not self.status:
            end = self.rest.find(b"\r\n\r\n")
            if end > HEAD_MAX or (end < 0 and len(self.rest) > HEAD_MAX):
                raise Malformed(f"the daemon's response has more than {HEAD_MAX} bytes of headers")
            if end < 0:
                return b""
            head, self.rest = self.rest[:end], self.rest[end + 4 :]
            self._read_head(head)
        if self.done:
            return b""
        if self._chunked:
            return self._read_chunks()
        if self._left is None:
            body, self.rest = self.rest, b""
            return body
        body, self.rest = self.rest[: self._left], self.rest[self._left :]
        self._left -= len(body)
        self.done = self._left == 0
        return body

    def _eof(self) -> bytes:
        if not self.status or self._chunked or self._left is not None:
            raise DaemonUnavailable("the daemon closed the connection in the middle of a response")
        self.done = True
        return b""

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        code = rest[:3]
        if (
            version not in ("HTTP/1.1", "HTTP/1.0")
            or not (code.isascii() and code.isdigit())
            or rest[3:4].strip()
        ):
            raise Malformed(f"not an HTTP response: {first[:80]!r}")
        headers: dict[str, str] = {}
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon or not name or name != name.strip() or "\n" in line or "\r" in line:
                raise Malformed(f"not an HTTP header: {line[:80]!r}")
            name = name.lower()
            if name in headers and name in ("content-length", "transfer-encoding"):
                raise Malformed(f"the response has {name} twice")
            headers[name] = value.strip()
        status = int(code)
        if 100 <= status < 200 and status != 101:
            return
        self.status, self.headers = status, headers
        self._frame_body(version)

    def _frame_body(self, version: str) -> None:
        connection = self.headers.get("connection", "").lower()
        self.keep_alive = version == "HTTP/1.1" and "close" not in connection
        length, coding = self.headers.get("content-length"), self.headers.get("transfer-encoding")
        if coding is not None:
            if coding.lower() != "chunked" or length is not None:
                raise Malformed(f"cannot read a body with transfer-encoding {coding[:40]!r}")
            self._chunked, self._left = True, 0
        elif length is not None:
            if not (length.isascii() and length.isdigit() and len(length) < 19):
                raise Malformed(f"not a content-length: {length[:40]!r}")
            self._left = int(length)
        else:
            self.keep_alive = False
        self.done = (
            self._head_only or self.status in (101, 204, 304) or (self._left == 0 and not self._chunked)
        )

    def _read_chunks(self) -> bytes:
        """`_left` counts down through a chunk and its CRLF; 0 means a size line comes next."""
        out: list[bytes] = []
        buffer, at = self.rest, 0
        while True:
            if self._in_trailers:
                end = buffer.find(b"\r\n", at)
                if end < 0:
                    break
                self.done = end == at
                at = end + 2
                if self.done:
                    break
            elif not self._left:
                end = buffer.find(b"\r\n", at, at + CHUNK_LINE_MAX)
                if end < 0:
                    if len(buffer) - at >= CHUNK_LINE_MAX:
                        raise Malformed("a chunk of the response has no size")
                    break
                size = _chunk_size(buffer[at:end])
                at = end + 2
                self._in_trailers = size == 0
                self._left = size + 2
            elif self._left > 2:
                piece = buffer[at : at + self._left - 2]
                if not piece:
                    break
                out.append(piece)
                at += len(piece)
                self._left -= len(piece)
            else:
                if len(buffer) - at < 2:
                    break
                if buffer[at : at + 2] != b"\r\n":
                    raise Malformed("a chunk of the response is longer than its size line")
                at += 2
                self._left = 0
        self.rest = buffer[at:]
        if self._in_trailers and len(self.rest) > HEAD_MAX:
            raise Malformed("the response has endless trailers")
        return out[0] if len(out) == 1 else b"".join(out)


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip(b" \t")
    if not 0 < len(digits) <= 15 or digits.strip(b"0123456789abcdefABCDEF"):
        raise Malformed(f"not the size of a chunk: {line[:40]!r}")
    return int(digits, 16)
