"""Rows of what has ended are not kept for ever, also by a daemon that is never started again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from skerry.settings import Home
from skerry.store import Connection, Store
from tests.integration.daemon import started

TABLES = ("environments", "executions", "idempotency_keys")


def rows(home: Path) -> dict[str, int]:
    def read(tx: Connection) -> dict[str, int]:
        return {table: tx.rows(f"SELECT count(*) FROM {table}")[0][0] for table in TABLES}

    async def ask() -> dict[str, int]:
        store = await Store.open(Home(str(home)).database)
        try:
            return await store.read(read)
        finally:
            await store.close()

    return asyncio.run(ask())


@pytest.mark.parametrize(("day", "kept"), [("0", 1), ("3600", 3)])
def test_a_running_daemon_deletes_old_rows(
    home: Path, day: str, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`day` is what a day is to the daemon: what ended before it is forgotten, the rest is kept."""
    monkeypatch.setenv("DAY_SECONDS", day)
    with started(home, "--backend", "fake", module="tests.soak.compressed") as daemon:
        for number in range(3):
            key = {"idempotency-key": f"k{number}"}
            status, _, _ = daemon.raw("POST", "/environments", {"name": f"n{number}"}, key)
            assert status == 201
            body = {"argv": ["sleep", "1000"]}
            daemon.call("POST", f"/environments/n{number}/executions", body, expect=201)
            daemon.call("DELETE", f"/environments/n{number}")
        found = rows(home)
    assert found["environments"] == kept
    # With no retention at all, those of the last environment are old by the time of its end.
    assert found["executions"] in ({kept} if kept == 3 else {0, 1})
    assert found["idempotency_keys"] in ({kept} if kept == 3 else {0, 1})
