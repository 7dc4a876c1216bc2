"""What comes in on a connection, handed to its parser for a slice of time; the rest when it is the sender's turn again.

One read brings up to 256 KiB. As a body that is nothing, but it may be ten thousand requests or frames, and to parse
those at once would stop the event loop for tenths of a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import Any

from skerry.fairness import SLICE, Line

LEAST, MOST = 512, 8 << 10
"""Bytes that are one step of parsing: fewer if the one before took long. 8 KiB are a thousand frames at most."""
BYTE_SECONDS = 0.6e-9
"""Loop time that is charged for a byte received, beside what the parser takes.

The copy alone takes 0.13 ns. With 0.2 a client that sent as fast as it could stayed within its fair share by the books,
and kept the loop busy with receiving, pausing and resuming: a neighbour's read took 6.6 ms instead of 1.8.
"""


class Intake:
    """Stands between a transport and its protocol, which sees it as the transport.

    `feed` is given the pieces. `ready` says whether the protocol takes more just now; it calls `go_on()` when that may
    have changed. `line` is the sender's.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        feed: Callable[[bytes], None],
        ready: Callable[[], bool],
        line: Callable[[], Line],
    ) -> None:
        self._transport = transport
        self._feed = feed
        self._ready = ready
        self._line = line
        self._held, self._at = b"", 0
        """What was received last, and how much of it was parsed."""
        self._piece = MOST
        self._paused = False
        """By the protocol."""
        self._stopped = False
        """Whether the transport is paused."""
        self._turn: asyncio.Task[None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def pause_reading(self) -> None:
        self._paused = True
        self._update()

    def resume_reading(self) -> None:
        self._paused = False
        self.go_on()

    @property
    def waits(self) -> bool:
        """Whether something is held back."""
        return self._at < len(self._held) or self._turn is not None

    def take(self, data: bytes) -> None:
        """What the transport has received."""
        self._held, self._at = self._held[self._at :] + data, 0
        if self._turn is None:
            self._some(len(data))

    def go_on(self) -> None:
        """The protocol may take more."""
        if self._at < len(self._held):
            self._plan()
        self._update()

    def _plan(self) -> None:
        """Go on when it is the sender's turn."""
        if self._turn is None and not self._paused and self._ready():
            self._turn = asyncio.get_running_loop().create_task(self._wait())

    def drop(self) -> None:
        """Nothing more is wanted."""
        self._held, self._at = b"", 0
        if self._turn is not None:
            self._turn.cancel()

    def _some(self, received: int = 0) -> None:
        spent = 0.0
        while self._at < len(self._held) and spent < SLICE and not self._paused and self._ready():
            piece = self._held[self._at : self._at + self._piece]
            self._at += len(piece)
            began = perf_counter()
            self._feed(piece)
            taken = perf_counter() - began
            spent += taken
            if taken > SLICE:
                self._piece = LEAST
            elif taken < SLICE / 4:
                self._piece = min(2 * self._piece, MOST)
        within = self._line().flow.spend(spent + received * BYTE_SECONDS)
        if self._at < len(self._held) or not within:
            self._plan()
        self._update()

    async def _wait(self) -> None:
        try:
            await self._line().pause()
        finally:
            self._turn = None
        try:
            self._some()
        except BaseException:  # as the event loop does when `take` fails
            self._transport.abort()
            raise

    def _update(self) -> None:
        stop = self._paused or self.waits
        if stop != self._stopped and not self._transport.is_closing():
            self._stopped = stop
            (self._transport.pause_reading if stop else self._transport.resume_reading)()
