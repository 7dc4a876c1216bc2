"""Records as rows of their tables."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from skerry.errors import InvalidRequest
from skerry.store.connection import Connection, Parameters, Row

R = TypeVar("R")
DAY = 86400.0
MOST_OF_A_PAGE = 1000

canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode
"""The one text for a value: sorted keys, no spaces, ASCII."""


@dataclass(frozen=True, slots=True)
class Page(Generic[R]):
    items: list[R]
    next: str
    """The cursor of the page after this one; empty on the last."""


class Table(Generic[R]):
    """A table with one column for each field of a dataclass. Fields in `documents` are JSON, kept as text: no
    database reorders its keys, and both can hold every string in it."""

    def __init__(self, name: str, record: type[R], documents: Iterable[str] = ()) -> None:
        self.name = name
        self.columns = tuple(field.name for field in fields(record))  # type: ignore[arg-type]
        self._record = record
        self._documents = frozenset(documents)
        self._positions = [i for i, column in enumerate(self.columns) if column in self._documents]
        self._select = f"SELECT {', '.join(self.columns)} FROM {name} "
        self._insert = self.insertion(self.columns)

    def insertion(self, columns: Iterable[str]) -> str:
        """The statement that inserts a row, unless a unique index already has it."""
        names, values = ", ".join(columns), ", ".join(f":{column}" for column in columns)
        return f"INSERT INTO {self.name} ({names}) VALUES ({values}) ON CONFLICT DO NOTHING"

    def insert(self, tx: Connection, record: R) -> bool:
        """Returns False if a unique index already has it."""
        return tx.run(self._insert, self.values(record)) == 1

    def values(self, record: R) -> dict[str, Any]:
        return self.dump({column: getattr(record, column) for column in self.columns})

    def select(self, tx: Connection, rest: str, parameters: Parameters) -> list[R]:
        return [self.load(row) for row in tx.rows(self._select + rest, parameters)]

    def rows(self, tx: Connection, rest: str, parameters: Parameters) -> list[Row]:
        """As stored: documents are text."""
        return tx.rows(self._select + rest, parameters)

    def dump(self, values: dict[str, Any]) -> dict[str, Any]:
        """Column values as they are stored."""
        for column in self._documents & values.keys():
            if values[column] is not None:
                values[column] = canonical(values[column])
        return values

    def load(self, row: Row) -> R:
        values = list(row)
        for i in self._positions:
            if values[i] is not None:
                values[i] = json.loads(values[i])
        return self._record(**dict(zip(self.columns, values, strict=True)))


class Where:
    """The conditions of a statement, and their parameters."""

    def __init__(self) -> None:
        self.parameters: dict[str, Any] = {}
        self._conditions: list[str] = []

    def equal(self, **values: Any) -> Where:
        """A condition for each that is not None."""
        for column, value in values.items():
            if value is not None:
                self.add(f"{column} = :{column}", **{column: value})
        return self

    def one_of(self, column: str, values: Iterable[str] | None) -> Where:
        """The column has one of these; None: any."""
        if values is not None:
            names = {f"{column}_{n}": value for n, value in enumerate(values)}
            listed = ", ".join(f":{name}" for name in names)
            self.add(f"{column} IN ({listed})" if names else "1 = 0", **names)
        return self

    def add(self, condition: str, **parameters: Any) -> Where:
        self._conditions.append(condition)
        self.parameters.update(parameters)
        return self

    def __str__(self) -> str:
        return "WHERE " + " AND ".join(self._conditions) if self._conditions else ""


def page_size(limit: int) -> int:
    """Raises InvalidRequest."""
    if not 1 <= limit <= MOST_OF_A_PAGE:
        raise InvalidRequest(f"limit must be between 1 and {MOST_OF_A_PAGE}, not {limit}")
    return limit


def to_cursor(at: float, last_id: str) -> str:
    return base64.urlsafe_b64encode(f"{at!r} {last_id}".encode()).decode().rstrip("=")


def from_cursor(cursor: str) -> tuple[float, str]:
    """Raises InvalidRequest."""
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars="-_", validate=True).decode()
        at, last_id = text.split(" ")
        return float(at), last_id
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(
            "not a cursor of this list", hint="pass `next` of the page before, unchanged"
        ) from error
