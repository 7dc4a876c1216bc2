"""Latency of each call at each door, throughput of fifty clients, and the cost of an audit row."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import skerry
from benchmarks.measure import Subject, summarize, timed
from skerry.store import Store, audit

CLIENTS = 50
CALLS = 300
"""Calls of each kind at each door: enough for a 99th percentile."""
CREATES = 100

One = tuple[skerry.AsyncClient, skerry.AsyncEnvironment]
"""A client and its environment."""


def latencies(client: skerry.Client) -> dict[str, dict[str, Any]]:
    """Latencies of each kind of call by one client with an open connection. All kinds take turns."""
    taken: dict[str, list[float]] = {name: [] for name in ("create", "execute", "write", "read", "heartbeat")}
    with skerry.Environment(client=client) as env:
        calls: dict[str, Callable[[], object]] = {
            "execute": lambda: env.execute("echo x"),
            "write": lambda: env.files.write("a.txt", b"x" * 1024),
            "read": lambda: env.files.read("a.txt"),
            "heartbeat": env.heartbeat,
        }
        for number in range(-5, CALLS):
            for name, call in calls.items():
                seconds = timed(call)
                if number >= 0:
                    taken[name].append(seconds)
            if number % (CALLS // CREATES) == 0:
                fresh = skerry.Environment(client=client)
                taken["create"].append(timed(fresh.create))
                fresh.delete()
    return {name: asdict(summarize(values)) for name, values in taken.items()}


async def together(make: Callable[[], skerry.AsyncClient]) -> dict[str, dict[str, Any]]:
    """Calls a second and latencies of fifty concurrent clients, each with its own connection and environment."""
    found = {}
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(make()) for _ in range(CLIENTS)]

        async def enter(client: skerry.AsyncClient) -> One:
            env = skerry.AsyncEnvironment(workspace="memory", client=client)
            return client, await stack.enter_async_context(env)

        everyone = await asyncio.gather(*map(enter, clients))
        for name, (call, times) in TOGETHER.items():
            found[name] = await _all_at_once(call, everyone, times)
    return found


async def _execute(one: One) -> None:
    await one[1].run(["true"])


async def _write(one: One) -> None:
    await one[1].files.write("a.txt", b"x" * 1024)


async def _heartbeat(one: One) -> None:
    await one[1].heartbeat()


async def _create(one: One) -> None:
    async with skerry.AsyncEnvironment(workspace="memory", client=one[0]):
        pass


TOGETHER: dict[str, tuple[Callable[[One], Awaitable[None]], int]] = {
    "execute": (_execute, 40),
    "write": (_write, 40),
    "heartbeat": (_heartbeat, 40),
    "create and delete": (_create, 4),
}
"""Calls made by all clients at once, and repetitions of each."""


async def _all_at_once(
    call: Callable[[One], Awaitable[None]], everyone: Sequence[One], times: int
) -> dict[str, Any]:
    taken: list[float] = []

    async def repeat(one: One) -> None:
        for _ in range(times):
            start = time.perf_counter()
            await call(one)
            taken.append(time.perf_counter() - start)

    start = time.perf_counter()
    await asyncio.gather(*map(repeat, everyone))
    rate = len(taken) / (time.perf_counter() - start)
    return {**asdict(summarize(taken)), "per_second": rate}


@contextmanager
def intent(folder: Path) -> Iterator[list[Subject]]:
    """Time to write one audit intent row on the same disk, as before every command."""
    entry = audit.Entry(
        at=time.time(),
        kind="intent",
        action="execute",
        peer="uid 0",
        environment_id="k3v9x1m2p7qa",
        backend="namespace",
        isolation="namespace",
        detail={"command": "echo x", "shell": "main", "user": "appuser"},
    )
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        store = runner.run(Store.open(f"sqlite://{folder}/beside.db"))
        stack.callback(lambda: runner.run(store.close()))

        async def append() -> float:
            start = time.perf_counter()
            await store.write(lambda tx: audit.append(tx, "default", [entry]))
            return time.perf_counter() - start

        yield [Subject(lambda: {"intent": runner.run(append())})]
