"""One way to speak SQL to SQLite and to Postgres.

Statements are written once, in what both understand, with `:name` for parameters. A Connection belongs to one
thread at a time. Its errors are ours:

    StoreUnavailable   the database cannot do it now: gone, full, read-only, locked
    Conflict           a constraint of the schema says no
    InvalidRequest     text that the database cannot hold
    Aborted            the database took the whole transaction back, others may go on; run it again
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

Row = tuple[Any, ...]
Parameters = Mapping[str, Any]


class Aborted(Exception):
    """The transaction is gone and nothing of it was written. Never leaves this package."""


class Connection(ABC):
    """An open transaction, as work sees it."""

    lock: str
    """Ends a SELECT whose rows must not change until the end of the transaction."""

    @abstractmethod
    def rows(self, sql: str, parameters: Parameters = {}) -> list[Row]:  # noqa: B006  (never written to)
        """All rows that a statement gives."""

    @abstractmethod
    def run(self, sql: str, parameters: Parameters = {}) -> int:  # noqa: B006
        """How many rows a statement changed."""

    @abstractmethod
    def begin(self, *, early: bool = False) -> None:
        """With `early`, `commit()` need not wait for the disk, and `sync()` follows."""

    @abstractmethod
    def commit(self) -> None:
        """Returns when everything is on disk; with `early`, when nothing of it can be lost with this process.
        `detail["written"]` of a StoreUnavailable is "unknown" when the answer was lost on the way."""

    @abstractmethod
    def sync(self) -> None:
        """Returns when all that was committed is on disk. Raises StoreUnavailable: then it may be there, or not.

        Any thread may call it, also while the next transaction is open.
        """

    @abstractmethod
    def rollback(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class Database(ABC):
    """Where connections come from."""

    @abstractmethod
    def writer(self, *, repair: bool = False) -> Connection:
        """A connection whose transactions write. Raises StoreUnavailable, StoreUnusable.

        With `repair`, what an earlier one could not sync is on disk before anything is added to it.
        """

    @abstractmethod
    def reader(self) -> Connection:
        """A connection whose transactions see one moment and cannot write."""

    @abstractmethod
    def lock_schema(self, tx: Connection) -> None:
        """Keep every other process from migrating until the end of the transaction."""
