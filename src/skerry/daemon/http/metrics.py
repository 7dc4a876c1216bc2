"""The operation that tells Prometheus what was counted, and what is there at the moment."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from starlette.responses import Response

from skerry._version import VERSION
from skerry.daemon.http.operations import Call, Operation
from skerry.daemon.metrics import MEDIA, samples
from skerry.manager.environments.manager import EnvironmentManager

PLAIN = "text/plain"


async def metrics(call: Call) -> Response:
    lines = (*_there(call.manager), *_pools(call.manager), *_process(), *call.engine.metrics.lines())
    return Response("\n".join(lines) + "\n", headers={"content-type": MEDIA})


def _there(manager: EnvironmentManager) -> Iterator[str]:
    live = manager.census()
    states = Counter((str(environment.state), environment.backend.name) for environment in live)
    running = sum(len(environment.executions.running) for environment in live if environment.executions)
    yield from samples("skerry_info", "The daemon.", "gauge", ("version",), {(VERSION,): 1})
    yield from samples("skerry_environments", "Live ones.", "gauge", ("state", "backend"), states)
    yield from samples("skerry_executions_running", "Programs that run.", "gauge", (), {(): running})
    yield from samples(
        "skerry_instances_prepared", "Made ahead of need.", "gauge", ("backend",), manager.prepared()
    )


def _pools(manager: EnvironmentManager) -> Iterator[str]:
    found = manager.pools.stats
    entries = {
        (stats.pool, state): getattr(stats, state)
        for stats in found
        for state in ("available", "creating", "active")
    }
    yield from samples("skerry_pool_entries", "Of pools.", "gauge", ("pool", "state"), entries)
    waits = {
        (stats.pool, quantile): getattr(stats, f"wait_{name}_seconds")
        for stats in found
        for name, quantile in (("p50", "0.5"), ("p95", "0.95"), ("max", "1"))
    }
    text = "From a request to a running environment, of the last thousand."
    yield from samples("skerry_pool_wait_seconds", text, "gauge", ("pool", "quantile"), waits)
    for name, text in (
        ("minimum", "So many are kept ready."),
        ("maximum", "No more than so many are there."),
    ):
        limits = {(stats.pool,): getattr(stats, name) for stats in found}
        yield from samples(f"skerry_pool_{name}", text, "gauge", ("pool",), limits)
    for name, text in (
        ("hits", "Environments that came from a pool."),
        ("misses", "Environments that could have, had one been ready."),
        ("failures", "Entries that could not be made, or died."),
    ):
        values = {(stats.pool,): getattr(stats, name) for stats in found}
        yield from samples(f"skerry_pool_{name}_total", text, "counter", ("pool",), values)


def _process() -> Iterator[str]:
    cpu = os.times()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    ago = time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    for name, text, kind, value in (
        ("process_cpu_seconds_total", "User and system.", "counter", cpu.user + cpu.system),
        ("process_resident_memory_bytes", "Resident memory.", "gauge", resident),
        ("process_open_fds", "Open files.", "gauge", len(os.listdir("/proc/self/fd"))),
        ("process_start_time_seconds", "Unix time.", "gauge", time.time() - ago),
    ):
        yield from samples(name, text, kind, (), {(): value})


OPERATIONS = (
    Operation(
        name="metrics",
        method="GET",
        path="/metrics",
        tag="daemon",
        verb="admin",
        summary="Metrics in the Prometheus text format",
        text="The latency of each operation is in `skerry_request_seconds`; of one environment, `usage` tells more. "
        "All tenants are in these numbers.",
        handler=metrics,
        media=(PLAIN,),
    ),
)
