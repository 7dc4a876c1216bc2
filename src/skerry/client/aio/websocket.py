"""One WebSocket to the daemon."""

from __future__ import annotations

from skerry.client import frames
from skerry.client.aio.stream import AsyncStream
from skerry.client.frames import FrameParser
from skerry.client.http1 import Malformed
from skerry.errors import DaemonUnavailable


class AsyncWebSocket:
    """One WebSocket. One task reads; any may send."""

    __slots__ = ("_receiving", "closed", "parser", "stream")

    def __init__(self, stream: AsyncStream, data: bytes) -> None:
        self.stream = stream
        self.parser = FrameParser(data)
        self.closed = False
        self._receiving = False

    async def send(self, message: str | bytes) -> None:
        """Raises DaemonUnavailable when the connection is gone."""
        try:
            await self.stream.send(frames.message(message))
        except OSError as error:
            raise DaemonUnavailable("the daemon closed the connection") from error

    async def receive(self, timeout: float | None = None) -> str | bytes | None:
        """The next message; None when the other side is done. Raises TimeoutError, DaemonUnavailable."""
        while not self.closed:
            got = self.parser.next()
            if got is None:
                await self._fill(timeout)
                continue
            opcode, payload = got
            if opcode == frames.BINARY:
                return payload
            if opcode == frames.TEXT:
                return decode_text(payload)
            await self._control(opcode, payload)
        return None

    async def _fill(self, timeout: float | None) -> None:
        self._receiving = True
        try:
            data = await self.stream.recv(timeout)
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

    async def _control(self, opcode: int, payload: bytes) -> None:
        if opcode == frames.PING:
            await self.stream.send(frames.frame(frames.PONG, payload))
        elif opcode == frames.CLOSE:
            try:  # noqa: SIM105 (contextlib is not worth its time at the start of the CLI)
                await self.stream.send(frames.frame(frames.CLOSE, payload[:2]))
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
