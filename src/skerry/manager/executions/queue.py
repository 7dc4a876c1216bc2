"""One after the other."""

from __future__ import annotations

import asyncio
from collections import deque

from skerry.errors import Busy

WAITING_MAX = 64


class Line:
    """The queue before one shell or session: one runs, the others wait in the order in which they came."""

    def __init__(self) -> None:
        self._busy = False
        self._waiting: deque[asyncio.Future[bool]] = deque()

    @property
    def empty(self) -> bool:
        return not self._busy

    def join(self) -> asyncio.Future[bool] | None:
        """None: it is your turn. Else a place that becomes True when it is; set it to False to give it up.

        Raises Busy when too many wait.
        """
        if not self._busy:
            self._busy = True
            return None
        if sum(not place.done() for place in self._waiting) >= WAITING_MAX:
            raise Busy(
                f"{WAITING_MAX} commands are waiting already", hint="wait, or use another shell or session"
            )
        place: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        return place

    def withdraw(self, place: asyncio.Future[bool] | None) -> None:
        """Whoever waited at this place was cancelled. If its turn had come, it is the next one's."""
        if place is not None and place.done() and not place.cancelled() and place.result():
            self.leave()

    def leave(self) -> None:
        """The one whose turn it was is done."""
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(True)
                return
        self._busy = False
