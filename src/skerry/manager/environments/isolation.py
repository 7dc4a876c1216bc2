"""The least isolation of each tenant's new environments."""

from __future__ import annotations

from skerry.manager.clock import Clock
from skerry.manager.environments.records import Records
from skerry.policy import ISOLATIONS

KNOWN_FOR = 60.0
"""Seconds. The transaction that inserts a row checks it again, so a stale answer is refused, never obeyed."""


class LeastIsolation:
    """What the quota of a tenant asks for, read at most once a minute."""

    def __init__(self, records: Records, clock: Clock) -> None:
        self._records = records
        self._clock = clock
        self._known: dict[str, tuple[float, str]] = {}

    async def of(self, tenant: str) -> str:
        """Raises StoreUnavailable."""
        now = self._clock.time()
        if (known := self._known.get(tenant)) is not None and known[0] > now:
            return known[1]
        for other in [name for name, (until, _) in self._known.items() if until <= now]:
            del self._known[other]
        least = await self._records.least_isolation(tenant) or ISOLATIONS[0]
        self._known[tenant] = (now + KNOWN_FOR, least)
        return least

    def forget(self, tenant: str) -> None:
        """Read it again next time: it has changed, or an environment was refused because another daemon changed it."""
        self._known.pop(tenant, None)
