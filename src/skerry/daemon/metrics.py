"""What the daemon counts, for Prometheus: plain numbers, and their text form.

Only the event loop's thread writes them, so nothing is locked. Labels are words of ours (operations, actions,
outcomes, states), never ids or names: nobody can make more of them. Tenants, which operators make, are bounded.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from skerry.daemon.accounts import Accounts
from skerry.errors import SkerryError
from skerry.models import Outcome
from skerry.store.audit import Entry

MEDIA = "text/plain; version=0.0.4; charset=utf-8"
BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0, 600.0)
"""Seconds."""


class Counter:
    """How often something happened, for each value of its labels."""

    __slots__ = ("labels", "name", "text", "values")

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self.name, self.text, self.labels = name, text, labels
        self.values: dict[tuple[str, ...], int] = {} if labels else {(): 0}

    def add(self, *labels: str) -> None:
        self.values[labels] = self.values.get(labels, 0) + 1

    def lines(self) -> Iterator[str]:
        return samples(self.name, self.text, "counter", self.labels, self.values)


class Histogram:
    """How long something took, for each value of its labels."""

    __slots__ = ("_counts", "_sums", "labels", "name", "text")

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self.name, self.text, self.labels = name, text, labels
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}

    def observe(self, seconds: float, *labels: str) -> None:
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._counts[labels] = [0] * (len(BOUNDS) + 1)
            self._sums[labels] = 0.0
        counts[bisect_left(BOUNDS, seconds)] += 1
        self._sums[labels] += seconds

    def lines(self) -> Iterator[str]:
        yield from _head(self.name, self.text, "histogram")
        for labels, counts in self._counts.items():
            total = 0
            for bound, count in zip((*BOUNDS, "+Inf"), counts, strict=True):
                total += count
                yield f"{self.name}_bucket{_labels((*self.labels, 'le'), (*labels, str(bound)))} {total}"
            yield f"{self.name}_sum{_labels(self.labels, labels)} {self._sums[labels]!r}"
            yield f"{self.name}_count{_labels(self.labels, labels)} {total}"


class Metrics:
    """Everything that is counted as it happens."""

    def __init__(self) -> None:
        self.requests = Counter(
            "skerry_requests_total", "Requests that were answered.", "operation", "status"
        )
        self.request_seconds = Histogram(
            "skerry_request_seconds", "From a request to the beginning of its answer.", "operation"
        )
        self.under_way = 0
        self.accounts = Accounts()
        self.actions = Counter(
            "skerry_actions_total", "What was done, or refused, as the audit tells it.", "action", "outcome"
        )
        self.ended = Counter("skerry_environments_ended_total", "Environments that ended.", "reason")
        self.execution_seconds = Histogram("skerry_execution_seconds", "How long programs ran.")
        self.audit_rows = Counter("skerry_audit_rows_total", "Rows written to the audit.", "kind")
        self.audit_failures = Counter("skerry_audit_failures_total", "Rows that could not be written.")
        self.store_seconds = Histogram("skerry_store_write_seconds", "From a write to its commit.")
        self.store_failures = Counter("skerry_store_failures_total", "Writes that failed.")
        self.others: list[Callable[[], Iterator[str]]] = []
        """What other parts count, in the text form."""

    def lines(self) -> Iterator[str]:
        yield from samples(
            "skerry_requests_under_way", "Requests and streams.", "gauge", (), {(): self.under_way}
        )
        for family in vars(self).values():
            if isinstance(family, Counter | Histogram):
                yield from family.lines()
        for lines in self.others:
            yield from lines()
        for name, text, values in self.accounts.families():
            yield from samples(name, text, "counter", ("tenant",), values)

    def happened(self, entry: Entry) -> None:
        """Count what a row of the audit tells."""
        if entry.kind == "intent":
            return
        self.actions.add(entry.action, entry.outcome)
        if entry.action == "execution" and "duration_seconds" in entry.detail:
            self.execution_seconds.observe(entry.detail["duration_seconds"])
        elif entry.action == "environment.end":
            self.ended.add(_why(entry))


class WriteMetrics:
    """Counts what the manager writes to the store, and how long that takes."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def wrote(
        self,
        written: asyncio.Future[Any],
        tenant: str | None,
        entry: Entry | None = None,
        *,
        rows: int = 1,
        later: bool = False,
    ) -> None:
        accounts = self._metrics.accounts
        if tenant is not None:
            accounts.of(tenant).rows += rows
        if entry is not None:
            self._metrics.happened(entry)
            if tenant is not None:
                accounts.happened(tenant, entry)
        written.add_done_callback(partial(self._written, 0.0 if later else time.perf_counter(), entry))

    def _written(self, since: float, entry: Entry | None, written: asyncio.Future[Any]) -> None:
        metrics = self._metrics
        if written.cancelled():
            return
        if since:  # what somebody waited for
            metrics.store_seconds.observe(time.perf_counter() - since)
        error = written.exception()
        if isinstance(error, SkerryError) and error.status < 500:
            return  # refused, as by a quota
        if error is not None:
            metrics.store_failures.add()
            if entry is not None:
                metrics.audit_failures.add()
        elif entry is not None:
            metrics.audit_rows.add(entry.kind)


def samples(
    name: str, text: str, kind: str, labels: tuple[str, ...], values: Mapping[Any, float]
) -> Iterator[str]:
    """One family in the text form. The values are by those of the labels, as tuples."""
    yield from _head(name, text, kind)
    for given, value in values.items():
        yield f"{name}{_labels(labels, given)} {value!r}"


def _head(name: str, text: str, kind: str) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"


def _labels(names: Iterable[str], values: Iterable[str]) -> str:
    pairs = ",".join(f'{name}="{value}"' for name, value in zip(names, values, strict=True))
    return f"{{{pairs}}}" if pairs else ""


def _why(entry: Entry) -> str:
    if entry.outcome == Outcome.OOM_KILLED:
        return "out_of_memory"
    if entry.outcome == Outcome.INTERNAL:
        return "failed"
    return "expired" if str(entry.detail["reason"]).startswith("expired") else "deleted"
