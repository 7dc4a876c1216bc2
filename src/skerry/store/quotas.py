"""How much a tenant may have at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from skerry.errors import IsolationUnavailable, QuotaExceeded
from skerry.policy import ISOLATIONS, format_size
from skerry.store.connection import Connection
from skerry.store.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """None: as much as there is."""

    tenant: str
    environments: int | None = None
    cpus: float | None = None
    memory: int | None = None
    disk: int | None = None
    """Bytes: of workspaces, as large as they may get, and of what is kept beside them."""
    isolation: str | None = None
    """The least that its new environments have."""


_table = Table("quotas", Quota)


def put(tx: Connection, quota: Quota) -> None:
    """Set or replace the quota of a tenant; environments that it has already stay."""
    tx.run(
        "INSERT INTO quotas (tenant, environments, cpus, memory, disk, isolation)"
        " VALUES (:tenant, :environments, :cpus, :memory, :disk, :isolation) ON CONFLICT (tenant) DO UPDATE SET"
        " environments = excluded.environments, cpus = excluded.cpus, memory = excluded.memory,"
        " disk = excluded.disk, isolation = excluded.isolation",
        _table.values(quota),
    )


def get(tx: Connection, tenant: str) -> Quota:
    found = _table.select(tx, "WHERE tenant = :tenant", {"tenant": tenant})
    return found[0] if found else Quota(tenant=tenant)


def in_use(tx: Connection, tenant: str) -> Quota:
    """What the tenant's environments that have not ended may use together, and what is kept for it on disk."""
    has = _of_environments(tx, tenant)
    return replace(has, disk=(has.disk or 0) + _kept(tx, tenant))


def _of_environments(tx: Connection, tenant: str) -> Quota:
    [(environments, cpus, memory, disk)] = tx.rows(
        "SELECT COUNT(*), COALESCE(SUM(cpus), 0.0), COALESCE(SUM(memory), 0), COALESCE(SUM(disk), 0)"
        " FROM environments WHERE tenant = :tenant AND state <> 'ended'",
        {"tenant": tenant},
    )
    return Quota(
        tenant=tenant, environments=environments, cpus=float(cpus), memory=int(memory), disk=int(disk)
    )


def _kept(tx: Connection, tenant: str) -> int:
    found = tx.rows("SELECT COALESCE(SUM(bytes), 0) FROM kept WHERE tenant = :tenant", {"tenant": tenant})
    return int(found[0][0])


def keep(tx: Connection, host: str, kind: str, sizes: Mapping[str, int]) -> None:
    """Replace what a host keeps of this kind: bytes by tenant. A tenant that is left out keeps nothing."""
    tx.run("DELETE FROM kept WHERE host = :host AND kind = :kind", {"host": host, "kind": kind})
    for tenant, size in sizes.items():
        tx.run(
            "INSERT INTO kept (host, tenant, kind, bytes) VALUES (:host, :tenant, :kind, :size)",
            {"host": host, "tenant": tenant, "kind": kind, "size": size},
        )


def check_kept(tx: Connection, tenant: str) -> None:
    """Raises QuotaExceeded if the tenant's workspaces and stored data exceed its disk quota."""
    found = _table.select(tx, f"WHERE tenant = :tenant{tx.lock}", {"tenant": tenant})
    limit = found[0].disk if found else None
    used = in_use(tx, tenant).disk or 0
    if limit is not None and used > limit:
        raise _exceeded("disk", limit, used, 0)


def crowded(tx: Connection, tenant: str) -> bool:
    """True if the tenant's workspaces and stored data exceed its disk quota."""
    limit = get(tx, tenant).disk
    return limit is not None and (in_use(tx, tenant).disk or 0) > limit


def check(tx: Connection, tenant: str, *, cpus: float, memory: int, disk: int, isolation: str) -> None:
    """Raises QuotaExceeded when the tenant cannot have one more environment of this size, and IsolationUnavailable
    when it may not have one with so little isolation.

    To be called in the transaction that inserts it: until its end no other daemon passes here for this tenant. What is
    kept beside workspaces does not count here: it is a cache, which gives way.
    """
    found = _table.select(tx, f"WHERE tenant = :tenant{tx.lock}", {"tenant": tenant})
    if not found:
        return
    [quota] = found
    if quota.isolation and (
        isolation not in ISOLATIONS or ISOLATIONS.index(isolation) < ISOLATIONS.index(quota.isolation)
    ):
        raise IsolationUnavailable(
            f"environments of tenant {tenant!r} have at least isolation {quota.isolation!r}, not {isolation!r}",
            hint="repeat the request: this has just been set",
        )
    has = _of_environments(tx, tenant)
    for what, limit, used, more in (
        ("environments", quota.environments, has.environments, 1),
        ("cpus", quota.cpus, has.cpus, cpus),
        ("memory", quota.memory, has.memory, memory),
        ("disk", quota.disk, has.disk, disk),
    ):
        # Sums of floats like 0.1 are a little off.
        slack = 1 + 1e-9 if isinstance(limit, float) else 1
        if limit is not None and (used or 0) + more > limit * slack:
            raise _exceeded(what, limit, used or 0, more)


def _exceeded(what: str, limit: float, used: float, more: float) -> QuotaExceeded:
    def text(value: float) -> str:
        return format_size(int(value)) if what in ("memory", "disk") else f"{value:g}"

    return QuotaExceeded(
        f"the quota of {what} is {text(limit)}: {text(used)} in use, {text(more)} more asked for",
        hint="delete environments, or ask for less",
        detail={"quota": what, "limit": limit, "used": used, "asked": more},
    )
