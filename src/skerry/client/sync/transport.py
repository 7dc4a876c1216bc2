# Generated from aio/transport.py by scripts/generate_sync.py. Change that file, not this one.
"""Requests, responses and WebSockets over reused connections."""

from __future__ import annotations

import json as json_module
import os

from skerry.client import endpoint, frames, http1
from skerry.client.http1 import Malformed
from skerry.client.sync.stream import Stream
from skerry.client.sync.websocket import WebSocket
from skerry.errors import DaemonUnavailable, PlatformError, SkerryError, from_dict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, Self

    from skerry.client.http1 import Query

IDLE_MAX = 8
LINE_MAX = 16 << 20
_REPEATABLE = ("GET", "PUT", "DELETE")


class Transport:
    """Sends requests to one daemon, which `skerry.client.endpoint` selects. Connects on the first request.

    Every request raises the SkerryError of the daemon's answer, DaemonUnavailable if no daemon runs and none can be
    started, and PlatformError for an invalid answer.
    """

    __slots__ = ("_headers", "_idle", "_pid", "endpoint")

    def __init__(
        self,
        home: str | None = None,
        url: str | None = None,
        token: str | None = None,
        traceparent: str | None = None,
    ) -> None:
        self.endpoint = endpoint.find(home, url, token)
        self._headers = [("host", self.endpoint.host)]
        if self.endpoint.token:
            self._headers.append(("authorization", f"Bearer {self.endpoint.token}"))
        if tenant := os.environ.get("SKERRY_TENANT", ""):
            self._headers.append(("skerry-tenant", http1.field_value(tenant, "SKERRY_TENANT")))
        if trace := http1.traceparent(traceparent or os.environ.get("TRACEPARENT", "")):
            self._headers.append(("traceparent", trace))
        self._idle: list[Stream] = []
        self._pid = os.getpid()

    def __getstate__(self) -> tuple[Any, ...]:
        """Copies and pickles get connections of their own. A pickle contains the token."""
        return self.endpoint, self._headers

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.endpoint, self._headers = state
        self._idle, self._pid = [], os.getpid()

    def call(
        self,
        method: str,
        path: str,
        *,
        query: Query | None = None,
        json: Any = None,
        body: bytes | Iterator[bytes] | None = None,
        start: bool = True,
        key: str | None = None,
    ) -> Any:
        """Send a request and return the JSON of its response."""
        response = self.send(method, path, query=query, json=json, body=body, start=start, key=key)
        content = response.read()
        try:
            return json_module.loads(content)
        except ValueError as error:
            raise Malformed(
                f"the daemon's answer to {method} {path} is not JSON: {content[:80]!r}"
            ) from error

    def send(
        self,
        method: str,
        path: str,
        *,
        query: Query | None = None,
        json: Any = None,
        body: bytes | Iterator[bytes] | None = None,
        start: bool = True,
        accept: str = "*/*",
        key: str | None = None,
    ) -> Response:
        """Send a request and return its response when the head has arrived; the body is still to be read.

        `start=False` does not start a daemon. `key` is the idempotency key.
        """
        headers = [*self._headers, ("accept", accept)]
        if key is not None:
            headers.append(("idempotency-key", http1.field_value(key, "the key")))
        if json is not None:
            body = json_module.dumps(json).encode()
            headers.append(("content-type", "application/json"))
        elif body is not None:
            headers.append(("content-type", "application/octet-stream"))
        chunked = body is not None and not isinstance(body, bytes)
        if chunked:
            headers.append(("transfer-encoding", "chunked"))
        elif body is not None or method not in ("GET", "DELETE"):
            headers.append(("content-length", str(len(body) if isinstance(body, bytes) else 0)))
        head = http1.request_head(method, http1.target(path, query), headers)
        first = head + body if isinstance(body, bytes) else head
        rest = None if body is None or isinstance(body, bytes) else body
        response = self._exchange(method, first, rest, start)
        if response.status >= 300:
            failure = _failure(response)
            undone = method in _REPEATABLE or failure.detail.get("begun") is False
            if not isinstance(failure, DaemonUnavailable) or rest is not None or not undone:
                try:
                    raise failure
                finally:
                    del failure  # its traceback refers to this frame: a cycle would keep the connection open
            # The daemon is stopping: the next one serves it.
            self.close()
            response = self._exchange(method, first, None, start)
            if response.status >= 300:
                raise _failure(response)
        return response

    def websocket(self, path: str) -> WebSocket:
        """Open a WebSocket."""
        head = http1.request_head("GET", path, [*self._headers, *frames.HANDSHAKE])
        response = self._exchange("GET", head, None, True)
        if response.status >= 300:
            raise _failure(response)
        if response.status != 101 or response.headers.get("sec-websocket-accept") != frames.ACCEPT:
            response.close()
            raise Malformed(f"the daemon did not open a WebSocket for {path}")
        return WebSocket(*response.detach())

    def close(self) -> None:
        """Close the idle connections. The transport can still be used."""
        while self._idle:
            self._idle.pop().close()

    def gone(self, timeout: float) -> None:
        """Wait until the daemon closes an idle connection, as it does when it ends. Raises TimeoutError."""
        stream = self._reuse()
        if stream is not None:
            try:
                stream.recv(timeout)
            except ConnectionError:
                pass
            finally:
                stream.close()

    def _exchange(self, method: str, head: bytes, body: Iterator[bytes] | None, start: bool) -> Response:
        stream = self._reuse()
        if stream is not None:
            response = Response(self, stream, method)
            written = stream.written
            try:
                return response.exchange(head, body)
            except _Closed as closed:
                nothing_sent = stream.written == written
                repeatable = method in _REPEATABLE and body is None and not closed.answered
                if not nothing_sent and not repeatable:
                    raise
        return Response(self, Stream.open(self.endpoint, start), method).exchange(head, body)

    def _reuse(self) -> Stream | None:
        """An idle connection that still works, or None. A forked process closes its copies of its parent's."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self.close()
        while True:
            try:
                stream = self._idle.pop()
            except IndexError:
                return None
            if not stream.stale():
                return stream
            stream.close()

    def keep(self, stream: Stream) -> None:
        """Keep a connection whose response has been read, for the next request."""
        if len(self._idle) < IDLE_MAX:
            self._idle.append(stream)
        else:
            stream.close()


class _Closed(DaemonUnavailable):
    """The connection broke before the head of the response. `answered`: a part of it had arrived."""

    answered = False


class Response:
    """A response. Read it, iterate over it or close it, to free its connection."""

    __slots__ = ("_parser", "_pending", "_stream", "_transport")

    def __init__(self, transport: Transport, stream: Stream, method: str) -> None:
        self._transport = transport
        self._stream: Stream | None = stream
        self._parser = http1.ResponseParser(method)
        self._pending = b""

    @property
    def status(self) -> int:
        return self._parser.status

    @property
    def headers(self) -> dict[str, str]:
        """Names in lower case."""
        return self._parser.headers

    def exchange(self, head: bytes, body: Iterator[bytes] | None) -> Self:
        """Send the request and read the head of the response."""
        assert self._stream is not None
        try:
            try:
                self._stream.send(head)
                if body is not None:
                    for data in body:
                        if data:
                            self._stream.send(http1.chunk(data))
                    self._stream.send(http1.chunk(b""))
            except ConnectionError:
                # A daemon may refuse a body without reading all of it; its answer can still be read.
                if body is None:
                    raise
            while not self._parser.status:
                self._pending += self._receive()
        except ConnectionError as error:
            self.close()
            closed = _Closed("the daemon closed the connection")
            closed.answered = bool(self._parser.rest)
            raise closed from error
        except BaseException:
            self.close()
            raise
        return self

    def read(self) -> bytes:
        """The (rest of the) body."""
        parts: list[bytes] = []
        for part in self:
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def lines(self) -> Iterator[Any]:
        """The body as newline-delimited JSON, line by line as it arrives."""
        rest = b""
        for data in self:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line:
                    yield _json_line(line)
            if len(rest) > LINE_MAX:
                self.close()
                raise Malformed(f"the daemon sent a line of more than {LINE_MAX} bytes")
        if rest:
            yield _json_line(rest)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        while True:
            if self._pending:
                data, self._pending = self._pending, b""
                return data
            if self._stream is None:
                raise StopIteration
            if self._parser.done:
                self._release()
                continue
            try:
                self._pending = self._receive()
            except ConnectionError as error:
                self.close()
                raise DaemonUnavailable(
                    "the daemon closed the connection in the middle of a response"
                ) from error
            except BaseException:
                self.close()
                raise

    def _receive(self) -> bytes:
        assert self._stream is not None
        data = self._stream.recv()
        if not data and not self._parser.status:
            raise ConnectionError("closed before the response")
        return self._parser.feed(data)

    def _release(self) -> None:
        stream, self._stream = self._stream, None
        if stream is None:
            return
        if self._parser.keep_alive and not self._parser.rest:
            self._transport.keep(stream)
        else:
            stream.close()

    def detach(self) -> tuple[Stream, bytes]:
        """Take over the connection: returns the stream, and the bytes that followed the response."""
        assert self._stream is not None
        stream, self._stream = self._stream, None
        return stream, self._parser.rest

    def close(self) -> None:
        """Stop reading. Closes the connection, unless the body has been read."""
        if self._parser.done:
            self._release()
        elif self._stream is not None:
            self._stream.close()
            self._stream = None


def _json_line(line: bytes) -> Any:
    try:
        return json_module.loads(line)
    except ValueError as error:
        raise Malformed(f"the daemon sent a line that is not JSON: {line[:80]!r}") from error


def _failure(response: Response) -> SkerryError:
    """The error of a response with status 300 or more: redirects are not followed."""
    content = response.read()
    try:
        body = json_module.loads(content)
    except ValueError:
        body = None
    if not isinstance(body, dict) or "code" not in body:
        return PlatformError(f"the daemon answered with status {response.status}: {content[:200]!r}")
    return from_dict(body)
