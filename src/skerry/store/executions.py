"""Running executions, so that a crash can be distinguished from an end."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from skerry.models import Outcome
from skerry.store.connection import Connection
from skerry.store.table import DAY, Table, Where, page_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionRecord:
    id: str
    environment_id: str
    command: str
    """For people."""
    process: int = 0
    """The guest's number for it."""
    detail: dict[str, Any] = field(default_factory=dict)
    """What its manager needs to take it over again. No secret may be in it."""
    started_at: float
    ended_at: float | None = None
    outcome: str = ""
    exit_code: int | None = None


LONGEST_COMMAND = 1000
_table = Table("executions", ExecutionRecord, documents=("detail",))


def insert(tx: Connection, record: ExecutionRecord) -> None:
    """Raises Conflict if the environment does not exist."""
    # Arguments may be any bytes and any length; a column of text may not.
    text = record.command[:LONGEST_COMMAND].encode(errors="backslashreplace").decode().replace("\0", "\\0")
    _table.insert(tx, replace(record, command=text))


def finish(
    tx: Connection, execution_id: str, *, outcome: str, exit_code: int | None, ended_at: float
) -> bool:
    """Returns False if it had already ended: the first end counts."""
    return (
        tx.run(
            "UPDATE executions SET outcome = :outcome, exit_code = :exit_code, ended_at = :ended_at"
            " WHERE id = :id AND ended_at IS NULL",
            {"id": execution_id, "outcome": outcome, "exit_code": exit_code, "ended_at": ended_at},
        )
        == 1
    )


def find(
    tx: Connection, environment_id: str, *, running: bool | None = None, limit: int = 100
) -> list[ExecutionRecord]:
    """The newest first. Raises InvalidRequest for a limit that cannot be."""
    where = Where().equal(environment_id=environment_id)
    if running is not None:
        where.add("ended_at IS NULL" if running else "ended_at IS NOT NULL")
    return _table.select(
        tx,
        f"{where} ORDER BY started_at DESC, id LIMIT :size",
        {**where.parameters, "size": page_size(limit)},
    )


def mark_lost(tx: Connection, environment_ids: Collection[str], *, now: float) -> list[ExecutionRecord]:
    """End all that still run in these environments, as the platform's fault; what they are now."""
    lost: list[ExecutionRecord] = []
    for environment_id in environment_ids:
        lost += _table.select(
            tx,
            f"WHERE environment_id = :id AND ended_at IS NULL ORDER BY started_at, id{tx.lock}",
            {"id": environment_id},
        )
    for one in lost:
        finish(tx, one.id, outcome=Outcome.INTERNAL, exit_code=None, ended_at=now)
    return [replace(one, outcome=str(Outcome.INTERNAL), ended_at=now) for one in lost]


def purge(tx: Connection, *, now: float) -> int:
    """Forget executions that ended more than a day ago; how many those were."""
    return tx.run("DELETE FROM executions WHERE ended_at < :before", {"before": now - DAY})
