"""Parses received bytes in slices of loop time.

One read brings up to 256 KiB. That is little as a body, but it may be ten thousand pipelined requests or frames, and
parsing those at once would stop the event loop for tenths of a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter

from skerry.fairness import SLICE, Line

PIECE_MIN, PIECE_MAX = 512, 8 << 10
"""Bytes parsed in one step: fewer after a slow step. 8 KiB are a thousand frames at most."""
BYTE_SECONDS = 0.6e-9
"""Loop time charged for a received byte, beside the time of the parser.

The copy alone takes 0.13 ns. With 0.2 a client that sent as fast as it could stayed within its fair share by the books,
and kept the loop busy with receiving, pausing and resuming: a neighbour's read took 6.6 ms instead of 1.8.
"""


class Feed:
    """Passes what a transport receives to `parse`, and pauses the transport while bytes are held back.

    `ready` tells whether the parser takes more now; call `go_on()` when that may have changed. `line` gives the queue
    of the sender's tenant, which is charged for the time.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        parse: Callable[[bytes], None],
        ready: Callable[[], bool],
        line: Callable[[], Line],
    ) -> None:
        self._transport = transport
        self._parse = parse
        self._ready = ready
        self._line = line
        self._held, self._at = b"", 0
        """The last bytes received, and how many of them were parsed."""
        self._piece = PIECE_MAX
        self._paused = False
        """By the owner, with `pause()`."""
        self._transport_paused = False
        self._turn: asyncio.Task[None] | None = None

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def waits(self) -> bool:
        """True while received bytes are held back."""
        return self._at < len(self._held) or self._turn is not None

    def pause(self) -> None:
        self._paused = True
        self._update()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self.go_on()

    def take(self, data: bytes) -> None:
        """Accept bytes from the transport."""
        self._held, self._at = self._held[self._at :] + data, 0
        if self._turn is None:
            self._step(len(data))

    def go_on(self) -> None:
        """Continue if `ready` allows it."""
        if self._at < len(self._held):
            self._plan()
        self._update()

    def drop(self) -> None:
        """Discard what is held, and stop."""
        self._held, self._at = b"", 0
        if self._turn is not None:
            self._turn.cancel()

    def _plan(self) -> None:
        """Continue at the sender's next turn."""
        if self._turn is None and not self._paused and self._ready():
            self._turn = asyncio.get_running_loop().create_task(self._wait())

    def _step(self, received: int = 0) -> None:
        spent = 0.0
        while self._at < len(self._held) and spent < SLICE and not self._paused and self._ready():
            piece = self._held[self._at : self._at + self._piece]
            self._at += len(piece)
            began = perf_counter()
            self._parse(piece)
            taken = perf_counter() - began
            spent += taken
            if taken > SLICE:
                self._piece = PIECE_MIN
            elif taken < SLICE / 4:
                self._piece = min(2 * self._piece, PIECE_MAX)
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
            self._step()
        except BaseException:  # as the event loop does when `take` fails
            self._transport.abort()
            raise

    def _update(self) -> None:
        pause = self._paused or self.waits
        if pause != self._transport_paused and not self._transport.is_closing():
            self._transport_paused = pause
            (self._transport.pause_reading if pause else self._transport.resume_reading)()
