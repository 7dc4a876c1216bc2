"""What carries the bytes of one connection, once it is known where they may go.

It is made for uvloop, whose `sock_recv` waits for its turn even if there is something to read: nobody who is fast
enough can hold up the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

from skerry.egress.pace import Pace
from skerry.egress.sniff import Screen

SILENT_SECONDS = 30.0
"""For how long both may say nothing at first."""
IDLE_SECONDS = 3600.0
_ACCEPTED = b"HTTP/1.1 101"


class Relay:
    """Both ways, until both have ended."""

    def __init__(
        self,
        client: socket.socket,
        server: socket.socket,
        screen: Screen | None,
        count: Callable[[int, int], None],
        piece: Callable[[], int],
        pace: Pace,
    ) -> None:
        """`count` is told how much will be sent and received before it is passed on, and may raise to end it all.
        `piece` says how many bytes may be held at a time, each way. Every piece waits for its turn at `pace`."""
        self._loop = asyncio.get_running_loop()
        self._client = client
        self._server = server
        self._screen = screen
        self._count = count
        self._piece = piece
        self._pace = pace
        self._moved = 0
        self._said = b""
        """The first bytes of the server."""
        self._answered: asyncio.Future[None] = self._loop.create_future()
        """Done when there are enough of those, or no more."""

    async def run(self, first: bytes) -> None:
        """`first` is passed on before all else. Raises OSError, Refused, and what the counters raise."""
        self._moved = len(first)
        metered = self._pace.metered
        ways = {
            asyncio.create_task(metered(self._upwards, first)),
            asyncio.create_task(metered(self._downwards)),
        }
        try:
            left = ways
            while left:
                before = self._moved
                patience = IDLE_SECONDS if before else SILENT_SECONDS
                done, left = await asyncio.wait(left, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                for way in done:
                    way.result()
                if not done and self._moved == before:
                    raise TimeoutError("nothing was said for too long")
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _upwards(self, passed: bytes) -> None:
        screen = self._screen
        while True:
            if passed:
                self._count(len(passed), 0)
                await self._loop.sock_sendall(self._server, passed)
                passed = b""  # or it would be kept until something else comes
            if screen is not None and screen.upgrading:
                await self._answered
                passed = screen.upgraded(self._said.startswith(_ACCEPTED))
                continue
            await self._pace.turn()
            data = await self._loop.sock_recv(self._client, self._piece())
            self._pace.passed_on(len(data))
            if not data:
                _end(self._server)
                return
            self._moved += len(data)
            passed = data if screen is None else screen.feed(data)
            del data

    async def _downwards(self) -> None:
        try:
            while True:
                await self._pace.turn()
                data = await self._loop.sock_recv(self._server, self._piece())
                if not data:
                    break
                self._pace.passed_on(len(data))
                self._moved += len(data)
                if not self._answered.done():
                    self._said += data[: len(_ACCEPTED)]
                    if len(self._said) >= len(_ACCEPTED):
                        self._answered.set_result(None)
                self._count(0, len(data))
                await self._loop.sock_sendall(self._client, data)
                del data
        finally:
            if not self._answered.done():
                self._answered.set_result(None)
        _end(self._client)


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other side has left altogether
        one.shutdown(socket.SHUT_WR)
