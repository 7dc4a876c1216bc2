"""Retention of the audit: prunes rows that are older than `SKERRY_AUDIT_DAYS`."""

from __future__ import annotations

import math
import os
import time
from typing import Any

import structlog

from skerry.errors import InvalidRequest, SkerryError
from skerry.manager.audit.acts import entry, operator_entry
from skerry.manager.caller import Caller
from skerry.store import Connection, Store, audit, retention

DAYS = "SKERRY_AUDIT_DAYS"
DAY = 86400.0

log = structlog.get_logger(component="audit")


async def prune(store: Store, caller: Caller, before: float) -> dict[str, Any]:
    """Remove rows of the caller's tenant that are older than `before`, and record that in its chain.

    Stops at the first intent that has no result and may still get one. If the caller acts for another tenant, its own
    audit records it too.
    Returns `removed`, the new anchor as `seq` and `hash`, and `unfinished`: the row that kept more from going, or None.
    Raises Conflict if the chain does not hold, StoreUnavailable.
    """
    tenant = caller.tenant
    found = await store.read(lambda tx: retention.find(tx, tenant, before))
    rows = found.unfinished
    settled = await store.write(lambda tx: retention.settle(tx, tenant, rows, time.time())) if rows else 0
    if settled:
        found = await store.read(lambda tx: retention.find(tx, tenant, before))
    pruned = entry(caller, audit.PRUNE, "lifecycle", "completed", detail={"before": before})

    def work(tx: Connection) -> int:
        removed = retention.prune(tx, tenant, found.last, pruned)
        if removed and caller.itself.tenant != tenant:
            detail = {"tenant": tenant, "seq": found.last.seq, "removed": removed}
            audit.append(tx, *operator_entry(caller, "tenant.audit.prune", detail))
        return removed

    removed = await store.write(work)
    await sweep(store, tenant)
    anchor = await store.read(lambda tx: audit.anchor(tx, tenant))
    unfinished = found.unfinished[0].seq if found.unfinished else None
    return {"removed": removed, "seq": anchor.seq, "hash": anchor.hash, "unfinished": unfinished}


async def sweep(store: Store, tenant: str) -> None:
    """Delete rows before the anchor. Raises StoreUnavailable."""
    while await store.write(lambda tx: retention.sweep(tx, tenant)):
        pass


def days() -> float | None:
    """Days that rows are kept; None keeps them for ever. Raises InvalidRequest."""
    given = os.environ.get(DAYS)
    if not given:
        return None
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise InvalidRequest(f"{DAYS} must be a number of days above 0, not {given!r}")
    return value


async def retain(store: Store) -> None:
    """Prune the audits of all tenants. To be called periodically."""
    kept = days()
    for tenant in await store.read(audit.tenants):
        try:
            if kept is None:
                await sweep(store, tenant)  # what a crash has left of a prune
            else:
                caller = Caller(tenant=tenant, peer="daemon")
                pruned = await prune(store, caller, time.time() - kept * DAY)
                if pruned["removed"]:
                    log.info("audit pruned", tenant=tenant, rows=pruned["removed"], up_to=pruned["seq"])
        except SkerryError as error:
            log.error("audit not pruned", tenant=tenant, error=str(error))
