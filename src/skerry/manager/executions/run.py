"""What the run of a command and a call in a session have in common."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod

from skerry.backends.base import Sample
from skerry.ids import new_id
from skerry.manager.audit.acts import Digest
from skerry.manager.executions.output import STDERR, STDOUT, Chunk, KeptOutput, Tap
from skerry.manager.executions.queue import RunQueue
from skerry.manager.executions.runtime import Runtime
from skerry.models import Outcome

EXIT_TIMED_OUT, EXIT_INTERNAL, EXIT_KILLED = 124, 125, 137


class Run(ABC):
    """One run in an environment: its place in a queue, time limit, usage, and output for readers and the result."""

    def __init__(self, runtime: Runtime, kept: KeptOutput) -> None:
        self.id = new_id()
        self.kept = kept
        self._runtime = runtime
        self._place: asyncio.Future[bool] | None = None
        self._cause: tuple[Outcome, str] | None = None
        """Why it was stopped: the first reason given."""
        self._timer: asyncio.TimerHandle | None = None
        self._taps: list[Tap] = []
        self._seen = {STDOUT: Digest(), STDERR: Digest()}
        self._before = Sample(None, 0)
        self._began = 0.0
        self._left = False

    @abstractmethod
    def stop(self, outcome: Outcome, message: str) -> None:
        """End it early; the first reason given is the one reported."""

    def tap(self) -> Tap:
        """The kept output and, while it runs, what follows: unread, it stops the program. See `untap()`."""
        tap = Tap(self.kept.blocks(), tenant=self._runtime.tenant)
        if self._left:
            tap.close()
        else:
            self._taps.append(tap)
        return tap

    def untap(self, tap: Tap) -> None:
        if tap in self._taps:
            self._taps.remove(tap)
        tap.close()

    def release(self) -> None:
        """Stop waiting for slow readers."""
        for tap in self._taps:
            tap.release()

    async def _wait_turn(self, queue: RunQueue) -> bool:
        """True if it holds the queue now; False if it was stopped before. Raises Busy."""
        self._place = queue.join()
        try:
            return self._place is None or await self._place
        except asyncio.CancelledError:
            queue.withdraw(self._place)
            raise

    def _give_up_place(self) -> None:
        if self._place is not None and not self._place.done():
            self._place.set_result(False)

    def _start_clock(self, *, alone: bool) -> None:
        """Measure usage from now on; `alone`: no other run of the environment needs the peak so far."""
        if alone:
            self._runtime.reset_peak()
        self._before = self._runtime.sample()
        self._began = time.monotonic()

    def _limit(self, seconds: float, message: str) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self.stop, Outcome.TIMED_OUT, message)

    async def _emit(self, stream: int, data: bytes) -> None:
        began = time.perf_counter()
        entry = Chunk(time.time(), self.id, stream, data)
        self._seen[stream].update(data)
        self.kept.add(entry)
        self._runtime.log.add(entry)
        self._runtime.charge(time.perf_counter() - began)
        if self._taps:
            for tap in tuple(self._taps):
                await tap.put(entry)

    def _leave(self) -> None:
        """Release timer and readers: nothing follows."""
        self._left = True
        if self._timer is not None:
            self._timer.cancel()
        for tap in self._taps:
            tap.close()
        self._taps.clear()
