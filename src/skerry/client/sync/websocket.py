# Generated from aio/websocket.py by scripts/generate_sync.py. Change that file, not this one.
"""One WebSocket to the daemon."""

from __future__ import annotations

from skerry.client import frames
from skerry.client.frames import FrameParser
from skerry.client.http1 import Malformed
from skerry.client.sync.stream import Stream
from skerry.errors import DaemonUnavailable


class WebSocket:
    """One WebSocket. One thread reads; any may send."""

    __slots__ = ("_receiving", "closed", "parser", "stream")

    def __init__(self, stream: Stream, data: bytes) -> None:
        self.stream = stream
        self.parser = FrameParser(data)
        self.closed = False
        self._receiving = False

    def send(self, message: str | bytes) -> None:
        """Raises DaemonUnavailable when the connection is gone."""
        try:
            self.stream.send(frames.message(message))
        except OSError as error:
            raise DaemonUnavailable("the daemon closed the connection") from error

    def receive(self, timeout: float | None = None) -> str | bytes | None:
        """The next message; None when the other side is done. Raises TimeoutError, DaemonUnavailable."""
        while not self.closed:
            got = self.parser.next()
            if got is None:
                self._fill(timeout)
                continue
            opcode, payload = got
            if opcode == frames.BINARY:
                return payload
            if opcode == frames.TEXT:
                return decode_text(payload)
            self._control(opcode, payload)
        return None

    def _fill(self, timeout: float | None) -> None:
        self._receiving = True
        try:
            data = self.stream.recv(timeout)
        except ConnectionError:
            data = b""
        finally:
            self._receiving = False
        if not data:
            gone = not self.closed
            self._lost()
            if gone:
                raise DaemonUnavailable("the daemon closed the connection")
        self.parser.feed(data)

    def _control(self, opcode: int, payload: bytes) -> None:
        if opcode == frames.PING:
            self.stream.send(frames.frame(frames.PONG, payload))
        elif opcode == frames.CLOSE:
            try:  # noqa: SIM105 (contextlib is not worth its time at the start of the CLI)
                self.stream.send(frames.frame(frames.CLOSE, payload[:2]))
            except OSError:
                pass
            self._lost()

    def _lost(self) -> None:
        self.closed = True
        self.stream.close()

    def close(self) -> None:
        """Drop the connection. Whoever is in `receive` gets None."""
        self.closed = True
        if self._receiving:
            self.stream.shutdown()
        else:
            self.stream.close()


def decode_text(payload: bytes) -> str:
    try:
        return payload.decode()
    except UnicodeDecodeError as error:
        raise Malformed("the daemon sent text that is not UTF-8") from error
