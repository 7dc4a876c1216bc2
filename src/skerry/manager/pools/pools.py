"""All pools of a daemon, and which of them an environment comes from."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

from skerry.backends.base import Backend
from skerry.backends.registry import Registry
from skerry.errors import IsolationUnavailable, NotFound
from skerry.images.store import Image, ImageStore
from skerry.languages import Language
from skerry.manager.clock import Clock
from skerry.manager.pools.placement import ColdStart, FromPool, OpenChannel, Placement
from skerry.manager.pools.pool import Pool, PoolSettings
from skerry.models import PoolStats
from skerry.policy import Policy


class Pools:
    """All pools of a daemon, by name."""

    def __init__(
        self,
        settings: Iterable[PoolSettings],
        registry: Registry,
        images: ImageStore,
        open_channel: OpenChannel,
        clock: Clock,
    ) -> None:
        self._open_channel = open_channel
        self._pools = {each.name: Pool(each, registry, images, open_channel, clock) for each in settings}

    def begin(self) -> None:
        """Start filling them in the background."""
        for pool in self._pools.values():
            pool.refill()

    def tend(self) -> None:
        for pool in self._pools.values():
            pool.tend()

    async def prepare(self) -> None:
        """Find out which backend each pool uses: `adopt` cannot wait for it."""
        for pool in self._pools.values():
            with contextlib.suppress(IsolationUnavailable):
                await pool.pick()

    async def place(
        self,
        image: Image,
        policy: Policy,
        backend: Backend,
        language: Language | None = None,
        *,
        poolable: bool = True,
        use_ready: bool = True,
    ) -> Placement:
        """Where a new environment comes from: a pool of its kind, or a cold start.

        Without `use_ready` no ready entry is taken, though it counts for its pool. Raises Busy, DaemonUnavailable.
        """
        pool = self._fitting(image, policy, backend, language) if poolable else None
        if pool is None:
            return ColdStart(backend.reserve(), backend, self._open_channel)
        id_, entry = await pool.take(image.digest, backend, ready=use_ready)
        return FromPool(id_, backend, self._open_channel, pool, entry)

    def adopt(self, environment_id: str, image: Image, policy: Policy, backend: Backend) -> Placement:
        """The placement of an environment that an earlier daemon has made: it counts for its pool."""
        pool = self._fitting(image, policy, backend, None)
        if pool is None:
            return ColdStart(environment_id, backend, self._open_channel)
        pool.joined(environment_id)
        return FromPool(environment_id, backend, self._open_channel, pool, None)

    def _fitting(
        self, image: Image, policy: Policy, backend: Backend, language: Language | None
    ) -> Pool | None:
        return next(
            (pool for pool in self._pools.values() if pool.serves(image, policy, backend, language)), None
        )

    def find(self, name: str) -> Pool:
        """Raises NotFound."""
        if name not in self._pools:
            raise NotFound(f"no pool {name!r}", hint=f"there are: {', '.join(self._pools)}")
        return self._pools[name]

    @property
    def images(self) -> set[str]:
        """Digests of the images of entries."""
        return {digest for pool in self._pools.values() for digest in pool.images}

    @property
    def stats(self) -> list[PoolStats]:
        return [pool.stats for pool in self._pools.values()]

    def __contains__(self, environment_id: str) -> bool:
        """True for the id of an entry that is ready or starting."""
        return any(environment_id in pool.ids for pool in self._pools.values())

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))
