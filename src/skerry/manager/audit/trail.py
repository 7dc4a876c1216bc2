"""Reading, verifying and pruning the audit of a tenant."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from skerry.errors import Busy, StoreUnavailable
from skerry.manager.audit import retention
from skerry.manager.caller import Caller
from skerry.store import Store, audit
from skerry.store.audit import AuditRow, Broken, Head

LOOK_AGAIN = 0.5
"""Seconds between two looks for new rows: another daemon may have written them."""


class AuditTrail:
    """The audit in the store. Every method may raise StoreUnavailable."""

    def __init__(self, store: Store) -> None:
        self._store = store
        # Verifying reads all rows, which can take long. One at a time, so that other readers of the store get on.
        self._verification = asyncio.Lock()
        self._verifying: set[str] = set()
        """Tenants; each may wait once, so that none fills the queue."""

    async def settle(self) -> None:
        """Returns when results that were noted before are written: nobody waits for them otherwise."""
        with contextlib.suppress(StoreUnavailable):
            await self._store.write(lambda tx: None)

    async def place_before(self, tenant: str, last: int, filters: dict[str, Any]) -> int:
        """The `after` with which `pages` begins with this many rows from the end."""
        return await self._store.read(lambda tx: audit.place_before(tx, tenant, last, **filters))

    async def pages(
        self, tenant: str, after: int, filters: dict[str, Any], *, follow: bool
    ) -> AsyncGenerator[list[AuditRow], None]:
        """Rows behind `after`, oldest first; with `follow` it goes on with new ones."""
        while True:
            last = await self._store.read(lambda tx: audit.head(tx, tenant))
            if last.seq > after or not follow:
                async for page in audit.pages(self._store, tenant, after=after, **filters):
                    yield page
                    after = page[-1].seq
                after = max(after, last.seq)  # rows that do not fit are not looked at again
            if not follow:
                return
            await asyncio.sleep(LOOK_AGAIN)

    async def verify(self, tenant: str, remembered: Head | None) -> tuple[Broken | None, Head, Head]:
        """What is broken (or None), the last row, and the last row that was pruned. Raises Busy."""
        if tenant in self._verifying:
            raise Busy("this audit is being verified already", hint="wait for the answer")
        self._verifying.add(tenant)
        try:
            async with self._verification:
                await self.settle()
                return await self._store.read(
                    lambda tx: (
                        audit.verify(tx, tenant, remembered),
                        audit.head(tx, tenant),
                        audit.anchor(tx, tenant),
                    )
                )
        finally:
            self._verifying.discard(tenant)

    async def prune(self, caller: Caller, before: float) -> dict[str, Any]:
        """See `retention.prune`."""
        async with self._verification:
            await self.settle()
            return await retention.prune(self._store, caller, before)

    async def retain(self) -> None:
        """See `retention.retain`."""
        await retention.retain(self._store)
