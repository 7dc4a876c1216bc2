"""Pruning the audit, on SQLite and on Postgres: what stays can be verified, and nothing goes unnoticed."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from skerry.errors import Conflict, InvalidRequest
from skerry.manager.audit import retention as manager
from skerry.manager.caller import Caller
from skerry.store import Store, audit, environments, retention
from skerry.store.audit import PRUNE, Head
from tests.integration.stores import entry, on, record

NOW = 1_700_000_000.0
"""Long ago."""


async def fill(store: Store, rows: int = 10, **more: Any) -> None:
    """Acts with their results, one row a second."""
    written = [
        entry(request_id=f"r{n // 2}", at=NOW + n, kind="result" if n % 2 else "intent", **more)
        for n in range(rows)
    ]
    await store.write(lambda tx: audit.append(tx, "t", written))


async def prune(store: Store, before: float, caller: Caller | None = None) -> dict[str, Any]:
    return await manager.prune(store, caller or Caller(tenant="t"), before)


async def verify(store: Store, remembered: Head | None = None) -> Any:
    return await store.read(lambda tx: audit.verify(tx, "t", remembered))


async def rows(store: Store) -> list[audit.AuditRow]:
    return await store.read(lambda tx: audit.search(tx, "t", limit=1000))


def test_what_stays_can_be_verified_and_says_what_went(store_url: str) -> None:
    async def test(store: Store) -> None:
        await fill(store)
        kept = await rows(store)
        told = await prune(store, NOW + 6)
        assert told == {"removed": 6, "seq": 6, "hash": kept[5].hash, "unfinished": None}
        after = await rows(store)
        assert after[:-1] == kept[6:]
        assert (after[-1].action, after[-1].seq) == (PRUNE, 11)
        assert after[-1].detail == {"before": NOW + 6, "seq": 6, "hash": kept[5].hash, "removed": 6}
        assert await verify(store) is None
        # What was written down elsewhere can be compared from the anchor on.
        for row in kept[5:]:
            assert await verify(store, Head(row.seq, row.hash)) is None
            broken = await verify(store, Head(row.seq, "0" * 64))
            assert broken.seq == row.seq
        with pytest.raises(InvalidRequest, match="row 5 was pruned"):
            await verify(store, Head(5, kept[4].hash))
        # Again, over the row that told of the first time.
        assert (await prune(store, NOW + 6))["removed"] == 0
        await store.write(lambda tx: audit.append(tx, "t", [entry(at=time.time() + 9, kind="denial")]))
        assert (await prune(store, time.time() + 5))["removed"] == 5
        assert [row.seq for row in await rows(store)] == [12, 13]
        assert await verify(store) is None

    on(store_url, test)


@pytest.mark.parametrize(
    "tamper",
    [
        "UPDATE audit_anchors SET seq = 7, hash = (SELECT hash FROM audit WHERE seq = 7)",
        "UPDATE audit_anchors SET hash = 'x'",
        "DELETE FROM audit_anchors",
        "DELETE FROM audit WHERE seq = 7",
        "UPDATE audit SET outcome = 'x' WHERE seq = 7",
        "UPDATE audit SET detail = '{}' WHERE action = 'audit.prune'",
    ],
)
def test_tampering_is_found_after_a_prune(store_url: str, tamper: str) -> None:
    async def test(store: Store) -> None:
        await fill(store)
        await prune(store, NOW + 6)
        await store.write(lambda tx: tx.run(tamper))
        assert await verify(store) is not None

    on(store_url, test)


def test_removing_rows_without_a_record_is_found(store_url: str) -> None:
    """Whoever sets an anchor by hand, where none was."""

    async def test(store: Store) -> None:
        await fill(store)

        def work(tx: Any) -> None:
            tx.run(
                "INSERT INTO audit_anchors (tenant, seq, hash) SELECT tenant, seq, hash FROM audit WHERE seq = 4"
            )
            tx.run("DELETE FROM audit WHERE seq <= 4")

        await store.write(work)
        broken = await verify(store)
        assert (broken.seq, "no row of the chain says so" in broken.reason) == (5, True)

    on(store_url, test)


def test_an_intent_without_a_result_stays_until_nobody_can_work_on_it(store_url: str) -> None:
    async def test(store: Store) -> None:
        live = record(tenant="t")
        await store.write(lambda tx: environments.insert(tx, live))
        await fill(store, 4)
        began = entry(request_id="long", at=NOW + 4, kind="intent", environment_id=live.id)
        await store.write(lambda tx: audit.append(tx, "t", [began]))
        await fill(store, 4)
        told = await prune(store, NOW + 1000)
        assert (told["removed"], told["unfinished"]) == (4, 5)
        assert (await rows(store))[0].request_id == "long"
        assert await verify(store) is None
        # Its environment has ended, and no daemon has told of it.
        await store.write(
            lambda tx: environments.change(tx, live.id, host=live.host, states=[live.state], to="ended")
        )
        told = await prune(store, NOW + 1000)
        assert (told["removed"], told["unfinished"]) == (5, None)
        [row] = [row for row in await rows(store) if row.request_id == "long"]
        assert (row.kind, row.outcome) == ("result", "internal")
        assert await verify(store) is None

    on(store_url, test)


def test_a_chain_that_does_not_hold_is_not_pruned(store_url: str) -> None:
    async def test(store: Store) -> None:
        await fill(store)
        await store.write(lambda tx: tx.run("UPDATE audit SET peer = 'x' WHERE seq = 3"))
        with pytest.raises(Conflict, match="row 3"):
            await prune(store, NOW + 6)
        assert len(await rows(store)) == 10

    on(store_url, test)


def test_a_crash_before_the_rows_are_deleted_is_made_up_for(store_url: str) -> None:
    async def test(store: Store) -> None:
        await fill(store)
        found = await store.read(lambda tx: retention.find(tx, "t", NOW + 6))
        await store.write(
            lambda tx: retention.prune(tx, "t", found.last, entry(action=PRUNE, kind="lifecycle"))
        )
        assert len(await rows(store)) == 11  # and here the daemon is killed
        assert await verify(store) is None
        assert (await prune(store, NOW + 6))["removed"] == 0
        assert [row.seq for row in await rows(store)] == [7, 8, 9, 10, 11]
        assert await verify(store) is None

    on(store_url, test)


def test_two_daemons_prune_and_write_at_once(store_url: str) -> None:
    async def test(store: Store) -> None:
        other = await Store.open(store_url)
        await fill(store, 60)
        told = await asyncio.gather(
            *(prune(each, NOW + 10 * n) for n in range(1, 7) for each in (store, other)),
            *(fill(each, 4) for each in (store, other) for _ in range(5)),
        )
        await other.close()
        assert sum(each["removed"] for each in told if each is not None) >= 60
        assert await verify(store) is None

    on(store_url, test)


def test_automatic_retention_is_off_unless_it_is_set(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(store: Store) -> None:
        await fill(store)
        monkeypatch.delenv("SKERRY_AUDIT_DAYS", raising=False)
        await manager.retain(store)
        assert len(await rows(store)) == 10
        monkeypatch.setenv("SKERRY_AUDIT_DAYS", "30")
        await manager.retain(store)
        [row] = await rows(store)
        assert (row.action, row.peer, row.detail["removed"]) == (PRUNE, "daemon", 10)
        assert await verify(store) is None
        monkeypatch.setenv("SKERRY_AUDIT_DAYS", "a month")
        with pytest.raises(InvalidRequest, match="SKERRY_AUDIT_DAYS"):
            manager.days()

    on(store_url, test)
