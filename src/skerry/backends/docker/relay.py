"""Streams to guests whose socket only the engine can reach: `skerry-guest relay`, started in the container."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Coroutine
from typing import Any

from skerry.backends.docker.engine import STDOUT, EngineClient, Stream, close_stream
from skerry.errors import GuestFailed, SkerryError
from skerry.host import injected

PIECE = 64 * 1024
LINGER = 10.0
"""Seconds for a relay to end after the daemon's last word."""


class Relays:
    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._running: set[asyncio.Task[None]] = set()

    async def open(self, container: str, user: str, ended: Coroutine[Any, Any, None]) -> socket.socket:
        """A stream to the guest in a container, until `ended`. The relay runs as `user`. Raises GuestFailed."""
        end = asyncio.create_task(ended)
        try:
            stream = await self._engine.execute(container, [injected.PROGRAM, "relay", injected.SOCKET], user)
        except SkerryError as error:
            end.cancel()
            raise GuestFailed(f"the guest cannot be reached: {error.message}", hint=error.hint) from error
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        task = asyncio.create_task(self._copy(stream, ours, end))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return theirs

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)

    async def _copy(self, stream: Stream, sock: socket.socket, end: asyncio.Task[None]) -> None:
        """Until either side ends. An engine may keep the stream of a container that has ended."""
        told = asyncio.create_task(self._to_guest(stream, sock))
        heard = asyncio.create_task(self._from_guest(stream, sock))
        ways = [end, told, heard]
        try:
            done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            if done == {told}:  # the engine drops what is on its way to the guest when its stream is closed
                await asyncio.wait([end, heard], timeout=LINGER, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.wait(ways)
            await close_stream(stream)
            sock.close()

    async def _to_guest(self, stream: Stream, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError, SkerryError):
            while data := await loop.sock_recv(sock, PIECE):
                await self._engine.tell(stream, data)
            self._engine.end_input(stream)

    async def _from_guest(self, stream: Stream, sock: socket.socket) -> None:
        """Goes on when nobody listens any more: what was said to the guest is still to be passed on."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(SkerryError):
            while (heard := await self._engine.heard(stream)) is not None:
                if heard[0] == STDOUT:
                    with contextlib.suppress(OSError):
                        await loop.sock_sendall(sock, heard[1])
