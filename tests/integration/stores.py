"""What the tests of the store share: open ones, records, and programs that use one and get killed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from skerry.ids import new_id
from skerry.store import Store
from skerry.store.audit import Entry
from skerry.store.environments import EnvironmentRecord

NOW = 1_800_000_000.25

WRITER = """
import asyncio, os, sys
from skerry.store import Store, audit
from tests.integration.stores import entry
url, tenant, writers, rows = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
print("imported", flush=True)

async def write(store, name):
    for n in range(rows):
        pair = [entry(request_id=f"{name}-{n}"), entry(request_id=f"{name}-{n}", kind="result")]
        head = await store.write(lambda tx: audit.append(tx, tenant, pair))
        os.write(1, f"{name}-{n} {head.seq} {head.hash}\\n".encode())

async def main():
    store = await Store.open(url)
    await asyncio.gather(*(write(store, f"{os.getpid()}-{w}") for w in range(writers)))
    await store.close()

asyncio.run(main())
"""
"""Appends pairs of rows, and prints of each its name and the new head when it was acknowledged."""


def on(url: str, test: Callable[[Store], Awaitable[None]]) -> None:
    """Run a test with an open store."""

    async def run() -> None:
        store = await Store.open(url)
        try:
            await test(store)
        finally:
            await store.close()

    asyncio.run(run())


def writer(url: str, tenant: str, *, writers: int = 4, rows: int = 10**9) -> subprocess.Popen[str]:
    """A process that runs WRITER."""
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, url, tenant, str(writers), str(rows)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )


def record(**values: Any) -> EnvironmentRecord:
    return replace(
        EnvironmentRecord(
            id=new_id(),
            tenant="t",
            host="h",
            backend="fake",
            image="debian",
            image_digest="sha256:1",
            isolation="namespace",
            policy={"network": "none", "limits": {"cpus": 0.5}},
            variables={"A": "ä\udcff\0"},
            cpus=0.5,
            memory=1 << 40,
            lifetime=3600.0,
            idle=600.0,
            created_at=NOW,
            active_at=NOW,
            expires_at=NOW + 600,
        ),
        **values,
    )


def entry(**values: Any) -> Entry:
    return replace(
        Entry(
            at=NOW,
            kind="intent",
            action="execute",
            token="abc",
            peer="127.0.0.1:5",
            environment_id="e",
            backend="fake",
            isolation="namespace",
            image_digest="sha256:1",
            detail={"argv": ["echo", "\udcff\0ä"], "cwd": "/workspace", "variables": ["A"]},
        ),
        **values,
    )
