"""Single-flight: concurrent requests for the same thing share one task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from skerry.errors import stopping

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class SingleFlight(Generic[K, V]):
    """Runs at most one task for each key. A caller that is cancelled does not cancel it for the others."""

    def __init__(self) -> None:
        self._tasks: dict[K, asyncio.Task[V]] = {}
        self._closed = False

    async def run(self, key: K, work: Callable[[], Coroutine[Any, Any, V]]) -> V:
        """Join the task of this key, or start it with `work()`; returns its result.

        Raises what the work raises, and DaemonUnavailable once `close()` was called.
        """
        if self._closed:
            raise stopping()
        task = self._tasks.get(key)
        if task is None or task.done():  # a result is not a cache: it may be stale already
            task = self._tasks[key] = asyncio.create_task(work())
            task.add_done_callback(lambda done: self._finished(key, done))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise stopping() from None
            raise

    async def close(self) -> None:
        """Cancel the tasks under way, and refuse new ones."""
        self._closed = True
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks.values()))

    def _finished(self, key: K, task: asyncio.Task[V]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]
        if not task.cancelled():
            task.exception()  # retrieved here, because every caller may have been cancelled
