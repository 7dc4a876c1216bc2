"""Quotas: how much of everything a tenant may use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from skerry.manager.audit.acts import operator_entry
from skerry.manager.caller import Caller
from skerry.manager.tenants.tokens import check_tenant
from skerry.store import Connection, Store, audit, quotas
from skerry.store.quotas import Quota


class Quotas:
    """The quotas in the store. Both methods may raise StoreUnavailable."""

    def __init__(self, store: Store, changed: Callable[[str], None]) -> None:
        """`changed` is told the tenant whose quota was set."""
        self._store = store
        self._changed = changed

    async def get(self, tenant: str) -> tuple[Quota, Quota]:
        """What the tenant may use, and what it uses."""
        return await self._store.read(lambda tx: (quotas.get(tx, tenant), quotas.in_use(tx, tenant)))

    async def set(self, caller: Caller, quota: Quota) -> Quota:
        """Returns what the tenant uses. Its environments stay. Raises InvalidRequest."""
        check_tenant(quota.tenant)

        def work(tx: Connection) -> Quota:
            quotas.put(tx, quota)
            audit.append(tx, *operator_entry(caller, "quota.set", asdict(quota)))
            return quotas.in_use(tx, quota.tenant)

        used = await self._store.write(work)
        self._changed(quota.tenant)
        return used
