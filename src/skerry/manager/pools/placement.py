"""Where an environment comes from: a cold start, or a pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from socket import socket

import structlog

from skerry.backends.base import Backend, Instance, InstanceSpec
from skerry.errors import SkerryError
from skerry.failpoints import hit
from skerry.guest.channel import Channel
from skerry.manager.pools.interpreters import PrestartedInterpreter
from skerry.manager.pools.pool import Pool, PoolEntry

OpenChannel = Callable[[socket], Awaitable[Channel]]

log = structlog.get_logger(component="manager")


@dataclass(frozen=True, slots=True)
class Placed:
    """A started instance, and the channel to its guest."""

    instance: Instance
    channel: Channel


class Placement(ABC):
    """Starts one environment, and gives back at its end what it took from a pool."""

    interpreter: PrestartedInterpreter | None = None
    """Waits in the environment for a program."""

    def __init__(self, id: str, backend: Backend, open_channel: OpenChannel) -> None:
        self.id = id
        self._backend = backend
        self._open_channel = open_channel

    @abstractmethod
    async def take_ready(self, spec: InstanceSpec) -> Placed | None:
        """An instance that was started ahead of need; None if there is none, or it has just died."""

    async def start(self, spec: InstanceSpec) -> Placed:
        """Raises what `Backend.start` does, and GuestFailed."""
        instance = await self._backend.start(spec)
        hit("create.started")
        channel = await self._open_channel(await self._backend.connect(spec.environment_id))
        hit("create.connected")
        return Placed(instance, channel)

    @abstractmethod
    async def give_back(self) -> None:
        """Undo it before the environment exists."""

    @abstractmethod
    def served(self, seconds: float) -> None:
        """Count the time from the request to the running environment."""

    @abstractmethod
    def ending(self) -> None:
        """The environment is going down."""

    @abstractmethod
    def ended(self) -> None:
        """Nothing of the environment is left."""


class ColdStart(Placement):
    """A new instance, started when it is asked for."""

    async def take_ready(self, spec: InstanceSpec) -> Placed | None:
        return None

    async def give_back(self) -> None:
        pass

    def served(self, seconds: float) -> None:
        pass

    def ending(self) -> None:
        pass

    def ended(self) -> None:
        pass


class FromPool(Placement):
    """An entry of a pool; a cold start that counts for the pool if no entry is ready."""

    def __init__(
        self, id: str, backend: Backend, open_channel: OpenChannel, pool: Pool, entry: PoolEntry | None
    ) -> None:
        super().__init__(id, backend, open_channel)
        self._pool = pool
        self._entry = entry
        self.interpreter = None if entry is None else entry.interpreter

    async def take_ready(self, spec: InstanceSpec) -> Placed | None:
        entry = self._entry
        if entry is None:
            return None
        try:
            entry.channel.check_open()
            entry.backend.settle(entry.id, spec.policy)
        except SkerryError as error:
            log.warning("not from its pool", environment=entry.id, error=str(error))
            self._entry = self.interpreter = None
            self._pool.failed(str(error))
            await entry.remove()
            return None
        entry.channel.stay(spec.orphan)
        hit("pool.settled")
        return Placed(entry.instance, entry.channel)

    async def give_back(self) -> None:
        await self._pool.give_back(self.id, self._entry)

    def served(self, seconds: float) -> None:
        self._pool.waited(seconds)

    def ending(self) -> None:
        if self.interpreter is not None:
            self.interpreter.close()

    def ended(self) -> None:
        self._pool.released(self.id)
