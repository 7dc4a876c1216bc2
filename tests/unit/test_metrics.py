"""What is counted, and how it is told."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from skerry.daemon.metrics import BOUNDS, Metrics, WriteMetrics
from skerry.errors import QuotaExceeded, StoreUnavailable
from skerry.manager.environments.records import StoredRecords
from skerry.models import Outcome
from skerry.store import Store
from skerry.store.audit import Entry
from tests.unit.stubs import asynchronous


def told(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """What a real parser reads: by name and values of labels."""
    families = text_string_to_metric_families("\n".join(metrics.lines()) + "\n")
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def entry(action: str, outcome: str, kind: str = "result", **detail: object) -> Entry:
    return Entry(at=0.0, kind=kind, action=action, outcome=outcome, detail=detail)


def test_a_parser_reads_it() -> None:
    metrics = Metrics()
    metrics.requests.add("execute", "200")
    metrics.requests.add("execute", "200")
    for seconds in (BOUNDS[0], BOUNDS[0] * 1.01, 1e6):
        metrics.request_seconds.observe(seconds, "execute")
    found = told(metrics)
    assert found["skerry_requests_total", "execute", "200"] == 2
    buckets = [found["skerry_request_seconds_bucket", "execute", str(bound)] for bound in BOUNDS]
    assert buckets == [1] + [2] * (len(BOUNDS) - 1)
    assert found["skerry_request_seconds_bucket", "execute", "+Inf"] == 3
    assert found["skerry_request_seconds_count", "execute"] == 3
    assert found["skerry_request_seconds_sum", "execute"] == BOUNDS[0] * 2.01 + 1e6


def test_what_has_not_happened_is_zero_if_it_has_no_labels() -> None:
    assert told(Metrics())["skerry_store_failures_total",] == 0


def test_the_audit_tells_what_happened() -> None:
    metrics = Metrics()
    metrics.happened(entry("execution", "", "intent"))
    metrics.happened(entry("execution", "failed", duration_seconds=0.25))
    metrics.happened(entry("execution", "busy"))
    for outcome, reason in (
        (Outcome.CANCELED, "deleted"),
        (Outcome.CANCELED, "expired: idle for 1 s"),
        (Outcome.OOM_KILLED, "out of memory"),
        (Outcome.INTERNAL, "the guest died"),
    ):
        metrics.happened(entry("environment.end", str(outcome), "lifecycle", reason=reason))
    found = told(metrics)
    assert found["skerry_actions_total", "execution", "failed"] == 1
    assert found["skerry_actions_total", "execution", "busy"] == 1
    assert ("skerry_actions_total", "execution", "") not in found
    assert found["skerry_execution_seconds_count",] == 1
    ended = {key[1]: value for key, value in found.items() if key[0] == "skerry_environments_ended_total"}
    assert ended == {"deleted": 1, "expired": 1, "out_of_memory": 1, "failed": 1}


class AnsweringStore:
    """Writes nothing: `error`, or success, is what becomes of all work."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def write(self, work: Any, *, later: bool = False) -> asyncio.Future[None]:
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._error is None:
            written.set_result(None)
        else:
            written.set_exception(self._error)
        return written


@pytest.mark.parametrize(
    ("error", "rows", "failures"),
    [(None, 2, 0), (StoreUnavailable("read-only"), 0, 2), (QuotaExceeded("no more"), 0, 0)],
)
@asynchronous
async def test_what_cannot_be_written_is_counted(error: Exception | None, rows: int, failures: int) -> None:
    metrics = Metrics()
    records = StoredRecords(cast(Store, AnsweringStore(error)), "host", WriteMetrics(metrics))
    for later in (False, True):
        await asyncio.wait((records.audit("acme", entry("execution", "", "intent"), later=later),))
        await asyncio.sleep(0)
    found = told(metrics)
    assert found.get(("skerry_audit_rows_total", "intent"), 0) == rows
    assert found["skerry_audit_failures_total",] == found["skerry_store_failures_total",] == failures
    assert found["skerry_store_write_seconds_count",] == 1  # for the other one nobody waited
