"""Environments: which there are, whose they are, how long they live, and why they ended."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from skerry.errors import Conflict
from skerry.models import State
from skerry.store.connection import Connection
from skerry.store.table import DAY, Page, Table, Where, from_cursor, page_size, to_cursor


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentRecord:
    id: str
    tenant: str
    host: str
    """The daemon that owns it; no other may change this row."""
    backend: str
    name: str = ""
    """Unique among the live ones of its tenant, unless empty."""
    state: str = State.CREATING
    image: str
    image_digest: str
    isolation: str
    policy: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    cpus: float
    memory: int
    disk: int = 0
    """Bytes that its workspace may fill."""
    lifetime: float
    idle: float
    created_at: float
    active_at: float
    """When it was last known to be in use."""
    expires_at: float
    boot_id: str = ""
    """Of the host, when its instance was started."""
    instance: dict[str, Any] = field(default_factory=dict)
    """The state needed to resume the environment after a restart."""
    created_by: str = ""
    """`token <id>` or `uid <n>`, say."""
    usage: dict[str, Any] | None = None
    ended_at: float | None = None
    ended_reason: str = ""
    outcome: str = ""


_BEFORE = {
    State.CREATING: {State.CREATING},
    State.RUNNING: {State.CREATING, State.RUNNING},
    State.DELETING: {State.CREATING, State.RUNNING, State.DELETING},
    State.ENDED: {State.CREATING, State.RUNNING, State.DELETING},
}
"""The states from which a row may enter each state. No row goes back, however late an update comes."""
_FIXED = {"id", "tenant", "host", "name", "state", "created_at", "created_by"}
_table = Table("environments", EnvironmentRecord, documents=("policy", "variables", "instance", "usage"))


def insert(tx: Connection, record: EnvironmentRecord) -> None:
    """Raises Conflict when a live environment of this tenant has the name."""
    if not _table.insert(tx, record):
        raise Conflict(
            f"there is an environment named {record.name!r}", hint="delete it, or choose another name"
        )


def get(tx: Connection, environment_id: str, *, tenant: str | None = None) -> EnvironmentRecord | None:
    where = Where().equal(id=environment_id, tenant=tenant)
    found = _table.select(tx, str(where), where.parameters)
    return found[0] if found else None


def change(
    tx: Connection,
    environment_id: str,
    *,
    host: str,
    states: Collection[str],
    to: str | None = None,
    expired_at: float | None = None,
    **values: Any,
) -> bool:
    """Compare and set: whether the environment was this host's and in one of `states`, and now is in `to`
    (None: stays where it is) with these columns set. Otherwise nothing changes, and no row ever goes back to an
    earlier state.

    With `expired_at` also only if its lease ends at or before that time still: a heartbeat that came first wins.
    """
    wrong = values.keys() - (set(_table.columns) - _FIXED)
    if wrong:
        raise TypeError(f"not a column that changes: {', '.join(sorted(wrong))}")
    if to is not None:
        values["state"] = to
        states = _BEFORE[State(to)].intersection(states)
    where = Where().equal(id=environment_id, host=host).one_of("state", states)
    if expired_at is not None:
        where.add("expires_at <= :expired_at", expired_at=expired_at)
    sets = ", ".join(f"{column} = :new_{column}" for column in values)
    new = {f"new_{column}": value for column, value in _table.dump(values).items()}
    return tx.run(f"UPDATE environments SET {sets} {where}", {**where.parameters, **new}) == 1


def renew(
    tx: Connection,
    environment_id: str,
    *,
    host: str,
    active_at: float,
    expires_at: float,
) -> bool:
    """Heartbeat: whether the environment still lives and its lease now ends at `expires_at`. A lease never gets
    shorter by this."""
    return (
        tx.run(
            "UPDATE environments SET"
            " active_at = CASE WHEN active_at > :active_at THEN active_at ELSE :active_at END,"
            " expires_at = CASE WHEN expires_at > :expires_at THEN expires_at ELSE :expires_at END"
            " WHERE id = :id AND host = :host AND state IN ('creating', 'running')",
            {"id": environment_id, "host": host, "active_at": active_at, "expires_at": expires_at},
        )
        == 1
    )


def find(
    tx: Connection,
    *,
    tenant: str | None = None,
    host: str | None = None,
    states: Collection[str] | None = None,
    ended: bool | None = None,
    name: str | None = None,
    image: str | None = None,
    cursor: str = "",
    limit: int = 100,
) -> Page[EnvironmentRecord]:
    """The newest first. Raises InvalidRequest for a cursor or limit that cannot be."""
    where = Where().equal(tenant=tenant, host=host, name=name, image=image).one_of("state", states)
    if ended is not None:
        where.add("state = 'ended'" if ended else "state <> 'ended'")
    if cursor:
        at, last = from_cursor(cursor)
        where.add("(created_at, id) < (:at, :last)", at=at, last=last)
    size = page_size(limit)
    found = _table.select(
        tx,
        f"{where} ORDER BY created_at DESC, id DESC LIMIT :size",
        {**where.parameters, "size": size + 1},
    )
    items = found[:size]
    return Page(items, to_cursor(items[-1].created_at, items[-1].id) if len(found) > size else "")


def live(tx: Connection, host: str) -> list[EnvironmentRecord]:
    """All of this host's that have not ended: what a daemon must find again, and a sweep compares."""
    return _table.select(
        tx, "WHERE host = :host AND state <> 'ended' ORDER BY created_at, id", {"host": host}
    )


def claim_key(
    tx: Connection, *, tenant: str, key: str, body_hash: str, environment_id: str, now: float
) -> str | None:
    """None: the key is this create's now. Else the id of the environment that the first create with it made.

    To be called in the transaction of `insert`. A key is free again after a day. Raises Conflict when the
    first create had another body.
    """
    values = {
        "tenant": tenant,
        "key": key,
        "body_hash": body_hash,
        "environment_id": environment_id,
        "now": now,
    }
    tx.run(
        "DELETE FROM idempotency_keys WHERE tenant = :tenant AND key = :key AND created_at < :before",
        {"tenant": tenant, "key": key, "before": now - DAY},
    )
    claimed = tx.run(
        "INSERT INTO idempotency_keys (tenant, key, body_hash, environment_id, created_at)"
        " VALUES (:tenant, :key, :body_hash, :environment_id, :now) ON CONFLICT DO NOTHING",
        values,
    )
    if claimed:
        return None
    first = tx.rows(
        "SELECT body_hash, environment_id FROM idempotency_keys WHERE tenant = :tenant AND key = :key",
        {"tenant": tenant, "key": key},
    )
    if first[0][0] != body_hash:
        raise Conflict(
            "this idempotency key was used for another request", hint="take a new key for a new request"
        )
    return str(first[0][1])


def release_key(tx: Connection, environment_id: str) -> None:
    """Forget the key of a create that failed, if it had one, so that it can be tried again."""
    tx.run("DELETE FROM idempotency_keys WHERE environment_id = :id", {"id": environment_id})


def purge(tx: Connection, *, now: float) -> int:
    """Forget environments that ended more than a day ago, with their executions, and old idempotency keys;
    how many environments those were."""
    before = {"before": now - DAY}
    tx.run("DELETE FROM idempotency_keys WHERE created_at < :before", before)
    return tx.run("DELETE FROM environments WHERE state = 'ended' AND ended_at < :before", before)


def without_means(values: dict[str, Any]) -> dict[str, Any]:
    """The columns of an environment that has ended, without what only something running could use."""
    return {"variables": {}, "policy": {**values["policy"], "allow": []}}


def forget_means(tx: Connection, host: str) -> None:
    """Do that for all ended environments: earlier versions kept everything."""
    kept = tx.rows(
        "SELECT id, policy FROM environments WHERE host = :host AND state = 'ended'"
        " AND (variables <> :none OR policy NOT LIKE :no_rules)",
        {"host": host, "none": "{}", "no_rules": '%"allow":[]%'},
    )
    for environment_id, policy in kept:
        new = _table.dump(without_means({"policy": json.loads(policy)}))
        tx.run(
            "UPDATE environments SET variables = :variables, policy = :policy WHERE id = :id",
            {"id": environment_id, **new},
        )
