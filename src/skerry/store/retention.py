"""Pruning the audit: the oldest rows of a chain go, and the rest can still be verified.

One transaction appends the row that says so and moves the anchor; the rows before the anchor are deleted after that, a
few at a time, so that nobody waits for long. A crash in between leaves rows that nobody looks at, for the next `sweep`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from skerry.errors import Conflict
from skerry.store import audit
from skerry.store.audit import AuditRow, Entry, Head
from skerry.store.connection import Connection
from skerry.store.table import DAY

AT_ONCE = 1000
"""Rows that one transaction deletes."""
LOOK_AHEAD = 100_000
"""Recent rows among which the results of old intents are looked for."""
LOST = "internal"


@dataclass(frozen=True, slots=True)
class Prunable:
    last: Head
    """The last row that may go."""
    unfinished: tuple[AuditRow, ...]
    """Old intents that have no result. The first of them stays, with all after it."""


def find(tx: Connection, tenant: str, before: float) -> Prunable:
    """What may be pruned: rows that are older than `before`, up to the first intent that has no result yet.

    Looks at the chain on the way. Raises Conflict where it does not hold: what is evidence stays.
    """
    last = audit.anchor(tx, tenant)
    old, ahead = last, 0
    begun: dict[tuple[str, str], dict[str, Any]] = {}
    recent = False
    for row in audit.rows_from(tx, tenant, last.seq):
        recent = recent or row["at"] >= before
        ahead += recent
        if recent and (not begun or ahead > LOOK_AHEAD):
            break
        broken = audit.check(row, last)
        if broken is not None:
            raise Conflict(
                f"the audit does not hold at row {broken.seq}: {broken.reason}",
                hint="nothing was pruned; keep a copy of the database",
            )
        last = Head(row["seq"], row["hash"])
        act = (row["request_id"], row["action"])
        if row["kind"] == "result":
            begun.pop(act, None)
        elif row["kind"] == "intent" and not recent:
            begun.setdefault(act, row)
        if not recent:
            old = last
    unfinished = sorted(begun.values(), key=lambda row: row["seq"])
    if unfinished:
        old = _row(tx, tenant, unfinished[0]["seq"] - 1)
    return Prunable(old, tuple(audit.load(row) for row in unfinished))


def settle(tx: Connection, tenant: str, rows: Iterable[AuditRow], now: float) -> int:
    """Give a result to intents that nobody can be working on any more; how many.

    Those are more than a day old, and in no environment that lives: the daemon was killed before it could tell.
    """
    dead = []
    for row in rows:
        live = tx.rows(
            "SELECT 1 FROM environments WHERE id = :id AND state <> 'ended'", {"id": row.environment_id}
        )
        if not live and row.at < now - DAY:
            columns = {one.name: getattr(row, one.name) for one in fields(Entry)}
            told = {"reason": "the daemon ended before it was known"}
            dead.append(Entry(**{**columns, "at": now, "kind": "result", "outcome": LOST, "detail": told}))
    if dead:
        audit.append(tx, tenant, dead)
    return len(dead)


def prune(tx: Connection, tenant: str, last: Head, entry: Entry) -> int:
    """Remove the rows up to `last`; how many those are. `entry` tells of it in the chain.

    The rows themselves are deleted by `sweep`. Raises Conflict if `last` is not a row of the chain.
    """
    head = audit.lock_head(tx, tenant)
    before = audit.anchor(tx, tenant)
    removed = last.seq - before.seq
    if removed <= 0:  # another daemon was first
        return 0
    if last.seq > head.seq or _row(tx, tenant, last.seq) != last:
        raise Conflict(f"row {last.seq} of the audit is not what it was")
    detail = {**entry.detail, "seq": last.seq, "hash": last.hash, "removed": removed}
    audit.append(tx, tenant, (replace(entry, detail=detail),))
    tx.run(
        "INSERT INTO audit_anchors (tenant, seq, hash) VALUES (:tenant, :seq, :hash)"
        " ON CONFLICT (tenant) DO UPDATE SET seq = excluded.seq, hash = excluded.hash",
        {"tenant": tenant, "seq": last.seq, "hash": last.hash},
    )
    return removed


def sweep(tx: Connection, tenant: str) -> int:
    """Delete some rows before the anchor; how many. To be called until there are none."""
    values: dict[str, Any] = {"tenant": tenant, "seq": audit.anchor(tx, tenant).seq}
    found = tx.rows("SELECT MIN(seq) FROM audit WHERE tenant = :tenant AND seq <= :seq", values)
    if found[0][0] is None:
        return 0
    values["to"] = min(values["seq"], found[0][0] + AT_ONCE - 1)
    return tx.run(
        "DELETE FROM audit WHERE tenant = :tenant AND seq <= :to", {"tenant": tenant, "to": values["to"]}
    )


def _row(tx: Connection, tenant: str, seq: int) -> Head:
    anchor = audit.anchor(tx, tenant)
    if seq == anchor.seq:
        return anchor
    found = tx.rows(
        "SELECT seq, hash FROM audit WHERE tenant = :tenant AND seq = :seq", {"tenant": tenant, "seq": seq}
    )
    return Head(*found[0]) if found else anchor
