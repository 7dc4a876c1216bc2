"""The environment in which the tools of one server work."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from skerry.client.aio.client import AsyncClient
from skerry.client.aio.environment import AsyncEnvironment
from skerry.errors import EnvironmentEnded, NotFound, SkerryError
from skerry.models import State

HEARTBEAT_SECONDS = 120.0


class Place:
    """The environment `ref`, which is left as it is, or one of its own, as `wanted`.

    Its own is made when it is first needed, kept alive, made anew when it has ended all the same, and deleted by
    `close()`.
    """

    def __init__(self, ref: str, wanted: dict[str, Any]) -> None:
        self.client = AsyncClient()
        self._ref = ref
        self._wanted = wanted
        self._environment: AsyncEnvironment | None = None
        self._finding: asyncio.Task[tuple[AsyncEnvironment, str]] | None = None
        self._alive: asyncio.Task[None] | None = None

    async def environment(self) -> tuple[AsyncEnvironment, str]:
        """It, and words for the model when it is another than before. Raises SkerryError.

        A call that is canceled meanwhile does not cancel this: an environment that was just made would be lost.
        """
        if self._finding is None or self._finding.done():
            self._finding = asyncio.ensure_future(self._found())
        return await asyncio.shield(self._finding)

    async def _found(self) -> tuple[AsyncEnvironment, str]:
        if self._ref:
            return await AsyncEnvironment.get(self._ref, self.client), ""
        found = self._environment
        why = await _ended(found) if found is not None else ""
        if found is not None and not why:
            return found, ""
        self._environment = await AsyncEnvironment(**self._wanted, client=self.client).create()
        self._alive = self._alive or asyncio.create_task(self._keep_alive())
        words = f"The environment had ended ({why}). This is a new one: files and state are gone."
        return self._environment, words if why else ""

    async def _keep_alive(self) -> None:
        """Nobody may call a tool for hours. Should this program die, the lease is not renewed, and runs out."""
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            if self._environment is not None:
                with suppress(SkerryError):
                    await self._environment.heartbeat()

    async def close(self) -> None:
        """Raises SkerryError when the environment could not be deleted."""
        if self._alive is not None:
            self._alive.cancel()
        if self._finding is not None:
            with suppress(SkerryError):
                await self._finding
        environment, self._environment = self._environment, None
        try:
            if environment is not None:
                await environment.delete()
        finally:
            self.client.close()


async def _ended(environment: AsyncEnvironment) -> str:
    """Why it has ended; nothing while it runs."""
    try:
        info = await environment.info()
    except (NotFound, EnvironmentEnded) as error:
        return error.message
    return "" if info.state == State.RUNNING else info.ended_reason or info.state
