"""How much a tenant may have at once."""

from __future__ import annotations

from dataclasses import dataclass

from skerry.errors import QuotaExceeded
from skerry.store.connection import Connection
from skerry.store.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """None: as much as there is."""

    tenant: str
    environments: int | None = None
    cpus: float | None = None
    memory: int | None = None


_table = Table("quotas", Quota)


def put(tx: Connection, quota: Quota) -> None:
    """Set or replace the quota of a tenant; environments that it has already stay."""
    tx.run(
        "INSERT INTO quotas (tenant, environments, cpus, memory)"
        " VALUES (:tenant, :environments, :cpus, :memory) ON CONFLICT (tenant) DO UPDATE SET"
        " environments = excluded.environments, cpus = excluded.cpus, memory = excluded.memory",
        _table.values(quota),
    )


def get(tx: Connection, tenant: str) -> Quota:
    found = _table.select(tx, "WHERE tenant = :tenant", {"tenant": tenant})
    return found[0] if found else Quota(tenant=tenant)


def in_use(tx: Connection, tenant: str) -> Quota:
    """What the tenant's environments that have not ended may use together."""
    [(environments, cpus, memory)] = tx.rows(
        "SELECT COUNT(*), COALESCE(SUM(cpus), 0.0), COALESCE(SUM(memory), 0) FROM environments"
        " WHERE tenant = :tenant AND state <> 'ended'",
        {"tenant": tenant},
    )
    return Quota(tenant=tenant, environments=environments, cpus=float(cpus), memory=int(memory))


def check(tx: Connection, tenant: str, *, cpus: float, memory: int) -> None:
    """Raises QuotaExceeded when the tenant cannot have one more environment of this size.

    To be called in the transaction that inserts it: until its end no other daemon passes here for this tenant.
    """
    found = _table.select(tx, f"WHERE tenant = :tenant{tx.lock}", {"tenant": tenant})
    if not found:
        return
    [quota] = found
    has = in_use(tx, tenant)
    for what, limit, used, more in (
        ("environments", quota.environments, has.environments, 1),
        ("cpus", quota.cpus, has.cpus, cpus),
        ("memory", quota.memory, has.memory, memory),
    ):
        # Sums of floats like 0.1 are a little off.
        if limit is not None and (used or 0) + more > limit * (1 + 1e-9):
            raise QuotaExceeded(
                f"the quota of {what} is {limit:g}: {used:g} in use, {more:g} more asked for",
                hint="delete environments, or ask for less",
                detail={"quota": what, "limit": limit, "used": used, "asked": more},
            )
