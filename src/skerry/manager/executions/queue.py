"""FIFO queues before shells and sessions, which run one thing at a time."""

from __future__ import annotations

import asyncio
from collections import deque

from skerry.errors import Busy

WAITING_MAX = 64


class RunQueue:
    """The queue of one shell or session: one run holds it, the others wait in the order of their arrival."""

    def __init__(self) -> None:
        self._held = False
        self._waiting: deque[asyncio.Future[bool]] = deque()

    @property
    def idle(self) -> bool:
        return not self._held

    def join(self) -> asyncio.Future[bool] | None:
        """Returns None if the queue was idle and is now held by the caller.

        Otherwise a future that becomes True when the caller holds the queue; to leave early, set it to False.
        Raises Busy when too many wait.
        """
        if not self._held:
            self._held = True
            return None
        if sum(not place.done() for place in self._waiting) >= WAITING_MAX:
            raise Busy(
                f"{WAITING_MAX} commands are waiting already", hint="wait, or use another shell or session"
            )
        place: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        return place

    def withdraw(self, place: asyncio.Future[bool] | None) -> None:
        """Release the queue if it was given to a waiter that has been cancelled."""
        if place is not None and place.done() and not place.cancelled() and place.result():
            self.leave()

    def leave(self) -> None:
        """Give the queue to the next waiter."""
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(True)
                return
        self._held = False
