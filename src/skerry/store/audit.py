"""The audit: rows that are only ever added, each tied to the one before it.

Every tenant has a chain of its own. Rows are numbered from 1 without gaps, and

    hash = sha256(hash of the row before, then the canonical JSON of all other columns)

with 64 zeros before the first. Number and hash of the last row are also kept outside of the rows, in the
tenant's *head*; appending locks it, so several daemons make one chain.

The oldest rows of a chain can be pruned (see `retention`). Number and hash of the last row that was removed are then
the tenant's *anchor*, which takes the place of the 64 zeros, and a row of the chain, `audit.prune`, has both in its
detail.

What `verify` finds: a row that was changed, removed, inserted or moved, also at the end. What it cannot find:
the work of somebody who can write to the whole database and computes all hashes again from some row on, head
included, or removes a tenant's rows together with its head. Against that, write a head down elsewhere from
time to time and give it to `verify`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from skerry.errors import Conflict, InvalidRequest, StoreUnavailable
from skerry.store.connection import Connection
from skerry.store.table import MOST_OF_A_PAGE, Table, Where, canonical, page_size

if TYPE_CHECKING:
    from skerry.store.store import Store

PAGE = 500
UNFINISHED_IN = 1000
PRUNE = "audit.prune"
_START = "0" * 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An entry for the audit. Must not contain secrets."""

    at: float
    kind: str
    """`intent`, `result`, `denial` or `lifecycle`."""
    action: str
    """The verb: `execute`, `file.write`, `environment.delete`, ..."""
    request_id: str = ""
    trace_id: str = ""
    token: str = ""
    """The id of the token it came with."""
    peer: str = ""
    """Where it came from: an address, or the credentials of the other end of the socket."""
    environment_id: str = ""
    backend: str = ""
    isolation: str = ""
    image_digest: str = ""
    detail: dict[str, Any] = field(default_factory=dict)
    """argv, cwd, names of variables, sizes and hashes: what JSON can hold."""
    outcome: str = ""
    usage: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRow(Entry):
    tenant: str
    seq: int
    hash: str


@dataclass(frozen=True, slots=True)
class Head:
    seq: int
    hash: str


@dataclass(frozen=True, slots=True)
class Broken:
    """Where a chain stops to hold, and how."""

    seq: int
    reason: str


_entry_columns = tuple(one.name for one in fields(Entry))
_table = Table("audit", AuditRow, documents=("detail", "usage"))
# Without "on conflict do nothing": a row that is not written must be an error.
_insert = "INSERT INTO audit ({}) VALUES ({})".format(
    ", ".join(_table.columns), ", ".join(f":{column}" for column in _table.columns)
)


def append(tx: Connection, tenant: str, entries: Iterable[Entry]) -> Head:
    """Add entries at the end of the tenant's chain; its new head. Raises StoreUnavailable."""
    last = lock_head(tx, tenant)
    seq, previous = last.seq, last.hash
    for entry in entries:
        seq += 1
        values: dict[str, Any] = {name: getattr(entry, name) for name in _entry_columns}
        values.update(tenant=tenant, seq=seq, at=float(entry.at))
        previous = values["hash"] = _link(previous, values)
        try:
            tx.run(_insert, _table.dump(values))
        except Conflict as error:  # a constraint or a trigger that somebody added
            raise StoreUnavailable(error.message) from error
    tx.run(
        "UPDATE audit_heads SET seq = :seq, hash = :hash WHERE tenant = :tenant",
        {"tenant": tenant, "seq": seq, "hash": previous},
    )
    return Head(seq, previous)


def unfinished(tx: Connection, tenant: str, environment_id: str) -> list[AuditRow]:
    """The intents in an environment that have no result, among its last rows."""
    filters = {"environment_id": environment_id}
    after = place_before(tx, tenant, UNFINISHED_IN, **filters)
    rows = search(tx, tenant, after=after, limit=UNFINISHED_IN, **filters)
    results = {(row.request_id, row.action) for row in rows if row.kind == "result"}
    return [row for row in rows if row.kind == "intent" and (row.request_id, row.action) not in results]


def head(tx: Connection, tenant: str) -> Head:
    """The last row's number and hash; (0, zeros) for a tenant without rows."""
    found = tx.rows("SELECT seq, hash FROM audit_heads WHERE tenant = :tenant", {"tenant": tenant})
    return Head(*found[0]) if found else Head(0, _START)


def anchor(tx: Connection, tenant: str) -> Head:
    """Number and hash of the last row that was pruned; (0, zeros) if none was."""
    found = tx.rows("SELECT seq, hash FROM audit_anchors WHERE tenant = :tenant", {"tenant": tenant})
    return Head(*found[0]) if found else Head(0, _START)


def tenants(tx: Connection) -> list[str]:
    """All tenants that have a chain."""
    found = tx.rows("SELECT tenant FROM audit_heads UNION SELECT tenant FROM audit ORDER BY tenant")
    return [row[0] for row in found]


def verify(tx: Connection, tenant: str, remembered: Head | None = None) -> Broken | None:
    """The first place at which the tenant's chain does not hold; None when all of it does, and when the row that
    `remembered` names is in it. See the top of this module for what cannot be found.

    Raises InvalidRequest if the remembered row was pruned.
    """
    pruned = last = anchor(tx, tenant)
    if remembered is not None and remembered.seq < pruned.seq:
        raise InvalidRequest(
            f"row {remembered.seq} was pruned", hint=f"compare with row {pruned.seq} or a later one"
        )
    if remembered is not None and remembered.seq == pruned.seq and remembered != pruned:
        return Broken(pruned.seq, "not the row that was remembered")
    recorded = Head(0, _START)
    for row in rows_from(tx, tenant, last.seq):
        broken = check(row, last)
        if broken is not None:
            return broken
        last = Head(row["seq"], row["hash"])
        if remembered is not None and remembered.seq == last.seq and remembered != last:
            return Broken(last.seq, "not the row that was remembered")
        if row["action"] == PRUNE:
            detail = json.loads(row["detail"])
            recorded = Head(detail.get("seq"), detail.get("hash"))
    if recorded != pruned:
        return Broken(pruned.seq + 1, "rows before it were removed, and no row of the chain says so")
    if head(tx, tenant) != last:
        return Broken(last.seq + 1, "the rows do not end where the head says")
    if remembered is not None and remembered.seq > last.seq:
        return Broken(last.seq + 1, f"the chain ends before the remembered row {remembered.seq}")
    return None


def search(
    tx: Connection, tenant: str, *, after: int = 0, limit: int = 100, **filters: Any
) -> list[AuditRow]:
    """The first rows after row `after` that fit, the oldest first. For the filters see `_fitting`."""
    where = _fitting(tenant, **filters).add("seq > :after", after=after)
    return _table.select(
        tx, f"{where} ORDER BY seq LIMIT :size", {**where.parameters, "size": page_size(limit)}
    )


async def pages(
    store: Store, tenant: str, *, after: int = 0, **filters: Any
) -> AsyncIterator[list[AuditRow]]:
    """All that `search` finds. No transaction is open while a page is looked at."""
    while page := await store.read(partial(search, tenant=tenant, after=after, limit=PAGE, **filters)):
        yield page
        after = page[-1].seq


def place_before(tx: Connection, tenant: str, last: int, **filters: Any) -> int:
    """The `after` with which `search` gives the last so many rows that fit."""
    where = _fitting(tenant, **filters)
    found = tx.rows(
        f"SELECT seq FROM audit {where} ORDER BY seq DESC LIMIT 1 OFFSET :last",
        {**where.parameters, "last": last},
    )
    return int(found[0][0]) if found else 0


def _fitting(
    tenant: str, *, since: float | None = None, until: float | None = None, **equal: str | None
) -> Where:
    """`since` is included, `until` is not; all others are columns and what must be in them, None for anything."""
    where = Where().equal(tenant=tenant, **equal)
    if since is not None:
        where.add("at >= :since", since=since)
    if until is not None:
        where.add("at < :until", until=until)
    return where


def _link(previous: str, values: dict[str, Any]) -> str:
    """The hash of a row whose documents are values, not text."""
    return hashlib.sha256((previous + canonical(values)).encode()).hexdigest()


def lock_head(tx: Connection, tenant: str) -> Head:
    """The head, which no other transaction changes until the end of this one."""
    sql = f"SELECT seq, hash FROM audit_heads WHERE tenant = :tenant{tx.lock}"
    found = tx.rows(sql, {"tenant": tenant})
    if not found:
        tx.run(
            "INSERT INTO audit_heads (tenant, seq, hash) VALUES (:tenant, 0, :hash) ON CONFLICT DO NOTHING",
            {"tenant": tenant, "hash": _START},
        )
        found = tx.rows(sql, {"tenant": tenant})
    return Head(*found[0])


def rows_from(tx: Connection, tenant: str, seq: int) -> Iterator[dict[str, Any]]:
    """All rows after this one, as they are stored."""
    while rows := _table.rows(
        tx,
        "WHERE tenant = :tenant AND seq > :seq ORDER BY seq LIMIT :size",
        {"tenant": tenant, "seq": seq, "size": MOST_OF_A_PAGE},
    ):
        for values in rows:
            row = dict(zip(_table.columns, values, strict=True))
            seq = row["seq"]
            yield row


def load(row: dict[str, Any]) -> AuditRow:
    """One of `rows_from`."""
    return _table.load(tuple(row[column] for column in _table.columns))


def check(row: dict[str, Any], last: Head) -> Broken | None:
    """The mistake in a stored row that follows `last`."""
    if row["seq"] != last.seq + 1:
        return Broken(last.seq + 1, f"missing; the next row is {row['seq']}")
    values = {name: value for name, value in row.items() if name != "hash"}
    try:
        for name in ("detail", "usage"):
            if values[name] is not None:
                values[name] = json.loads(values[name])
                if canonical(values[name]) != row[name]:
                    return Broken(row["seq"], f"{name} is not as it was written")
        if _link(last.hash, values) == row["hash"]:
            return None
    except (TypeError, ValueError):  # not JSON, or of another type
        pass
    return Broken(row["seq"], "changed: its hash does not follow from it and the row before")
