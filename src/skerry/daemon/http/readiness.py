"""Whether this daemon can start environments, for those who ask often."""

from __future__ import annotations

import asyncio
import os
import time

from skerry.errors import DaemonUnavailable, DiskFull, SkerryError
from skerry.manager.environments.manager import EnvironmentManager
from skerry.policy import MIB, format_size
from skerry.store import Store

KEEP = 2.0
"""Seconds for which an answer is given again: finding out that a backend does not work can take a while."""
SPACE_NEEDED = 64 * MIB


class Readiness:
    def __init__(self, manager: EnvironmentManager, store: Store, home: str) -> None:
        self._manager = manager
        self._store = store
        self._home = home
        self._looking = asyncio.Lock()
        self._until = 0.0
        self._isolation = ""
        self._reason = ""

    async def check(self) -> str:
        """The isolation that environments get. Raises DaemonUnavailable, which says what stands in the way."""
        async with self._looking:
            if time.monotonic() >= self._until:
                try:
                    self._isolation, self._reason = await self._look(), ""
                except SkerryError as error:
                    self._reason = str(error)
                self._until = time.monotonic() + KEEP
        if self._reason:
            raise DaemonUnavailable(f"not ready: {self._reason}", hint="`skerry doctor` looks closer")
        return self._isolation

    async def _look(self) -> str:
        disk = os.statvfs(self._home)
        free = disk.f_bavail * disk.f_frsize
        if free < SPACE_NEEDED:
            raise DiskFull(f"{self._home} has {format_size(free)} left")
        await self._store.check()
        return await self._manager.ready()
