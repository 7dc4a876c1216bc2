"""How the store writes: together, each for itself, in order, and only with a schema that it knows."""

from __future__ import annotations

import asyncio
import errno
import os
import queue
import sqlite3
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from skerry.errors import StoreUnavailable, StoreUnusable
from skerry.store import Connection, Store, audit, environments, migrations, quotas
from skerry.store import store as store_module
from skerry.store.quotas import Quota
from tests.integration.stores import entry, on, record


class Gate:
    """Work that holds the writer, so that what comes meanwhile is one batch."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()

    def __call__(self, tx: Connection) -> None:
        self.entered.set()
        assert self.open.wait(30)


async def held(store: Store) -> tuple[Gate, asyncio.Future[None]]:
    gate = Gate()
    first = store.write(gate)
    await asyncio.to_thread(gate.entered.wait, 30)
    return gate, first


def test_what_comes_meanwhile_is_one_transaction(store_url: str) -> None:
    async def test(store: Store) -> None:
        gate, first = await held(store)
        commits = 0
        tx = store._writer._tx
        assert tx is not None
        commit = tx.commit

        def counted() -> None:
            nonlocal commits
            commits += 1
            commit()

        tx.commit = counted  # type: ignore[method-assign]
        order: list[int] = []
        rest = [store.write(lambda tx, n=n: order.append(n)) for n in range(50)]  # type: ignore[misc]
        gate.open.set()
        await asyncio.gather(first, *rest)
        assert order == list(range(50))
        assert commits == 2

    on(store_url, test)


def test_nobody_is_told_before_the_commit(store_url: str) -> None:
    async def test(store: Store) -> None:
        gate, first = await held(store)
        tx = store._writer._tx
        assert tx is not None
        commit, committing, go = tx.commit, threading.Event(), threading.Event()

        def slow() -> None:
            committing.set()
            assert go.wait(30)
            commit()

        tx.commit = slow  # type: ignore[method-assign]
        second = store.write(lambda tx: None)
        gate.open.set()
        await asyncio.to_thread(committing.wait, 30)
        await asyncio.sleep(0.05)  # enough for a premature answer to arrive
        assert not first.done()
        assert not second.done()
        go.set()
        await asyncio.gather(first, second)

    on(store_url, test)


def test_one_that_fails_takes_nothing_of_the_others_along(store_url: str) -> None:
    def half(tx: Connection) -> None:
        quotas.put(tx, Quota(tenant="half"))
        raise ZeroDivisionError

    def broken_sql(tx: Connection) -> None:
        quotas.put(tx, Quota(tenant="broken"))
        tx.run("INSERT INTO audit (tenant) VALUES ('t')")

    def put(name: str, store: Store) -> asyncio.Future[None]:
        return store.write(lambda tx: quotas.put(tx, Quota(tenant=name)))

    async def test(store: Store) -> None:
        gate, first = await held(store)
        rest = [put("a", store), store.write(half), put("b", store), store.write(broken_sql), put("c", store)]
        gate.open.set()
        await first
        a, error, b, refused, c = await asyncio.gather(*rest, return_exceptions=True)
        assert (a, b, c) == (None, None, None)
        assert isinstance(error, ZeroDivisionError)
        assert refused is not None
        with pytest.raises(ZeroDivisionError):
            await store.write(half)
        names = await store.read(lambda tx: tx.rows("SELECT tenant FROM quotas ORDER BY tenant"))
        assert names == [("a",), ("b",), ("c",)]

    on(store_url, test)


def test_a_write_happens_even_if_nobody_waits_any_more(store_url: str) -> None:
    async def test(store: Store) -> None:
        gate, first = await held(store)
        given_up = store.write(lambda tx: quotas.put(tx, Quota(tenant="t", environments=1)))
        given_up.cancel()
        gate.open.set()
        await first
        await store.write(lambda tx: None)
        assert (await store.read(lambda tx: quotas.get(tx, "t"))).environments == 1

    on(store_url, test)


def test_a_read_sees_one_moment_and_cannot_write(store_url: str) -> None:
    async def test(store: Store) -> None:
        looked, go = threading.Event(), threading.Event()

        def twice(tx: Connection) -> tuple[Quota, Quota]:
            before = quotas.get(tx, "t")
            looked.set()
            assert go.wait(30)
            return before, quotas.get(tx, "t")

        reading = store.read(twice)
        await asyncio.to_thread(looked.wait, 30)
        await store.write(lambda tx: quotas.put(tx, Quota(tenant="t", environments=1)))
        go.set()
        before, after = await reading
        assert before == after == Quota(tenant="t")
        with pytest.raises(StoreUnavailable, match="read"):
            await store.read(lambda tx: quotas.put(tx, Quota(tenant="t", environments=2)))
        assert (await store.read(lambda tx: quotas.get(tx, "t"))).environments == 1

    on(store_url, test)


def test_closing_finishes_what_was_queued_and_takes_no_more(store_url: str) -> None:
    async def test() -> None:
        store = await Store.open(store_url)
        queued = [store.write(lambda tx: audit.append(tx, "t", [entry()])) for _ in range(20)]
        await store.close()
        await store.close()
        assert (await asyncio.gather(*queued))[-1].seq == 20
        for refused in (store.write, store.read):
            with pytest.raises(StoreUnavailable, match="closed"):
                refused(lambda tx: None)

    asyncio.run(test())


def test_the_schema_of_a_newer_skerry_is_refused(store_url: str) -> None:
    async def newer(store: Store) -> None:
        await store.write(lambda tx: tx.run("UPDATE schema_version SET version = version + 1"))

    async def nothing(store: Store) -> None: ...

    on(store_url, newer)
    with pytest.raises(StoreUnusable, match=f"version {len(migrations.MIGRATIONS) + 1}"):
        on(store_url, nothing)


def test_an_older_schema_is_brought_up_to_date(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def insert(store: Store) -> None:
        await store.write(lambda tx: environments.insert(tx, record(id="old")))

    async def look(store: Store) -> None:
        assert await store.read(lambda tx: tx.rows("SELECT id, more FROM environments")) == [("old", "x")]

    on(store_url, insert)
    more = ("ALTER TABLE environments ADD COLUMN more TEXT NOT NULL DEFAULT 'x'",)
    wrong = ("CREATE TABLE half (x TEXT)", "CREATE NONSENSE")
    monkeypatch.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, more, wrong))
    with pytest.raises(Exception, match="NONSENSE"):
        on(store_url, look)
    monkeypatch.setattr(migrations, "MIGRATIONS", migrations.MIGRATIONS[:-1])
    on(store_url, look)
    on(store_url, look)


def test_many_may_open_an_empty_store_at_once(store_url: str) -> None:
    async def test() -> None:
        stores = await asyncio.gather(*(Store.open(store_url) for _ in range(6)))
        await asyncio.gather(*(s.write(lambda tx: audit.append(tx, "t", [entry()])) for s in stores))
        assert await stores[0].read(lambda tx: tx.rows("SELECT version FROM schema_version")) == [
            (len(migrations.MIGRATIONS),)
        ]
        await asyncio.gather(*(store.close() for store in stores))

    asyncio.run(test())


class Disk:
    """What syncs a file: each time that the test says so, and with the error that it has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.may = threading.Semaphore(0)
        self.error = 0
        self._fdatasync = os.fdatasync
        monkeypatch.setattr(os, "fdatasync", self._sync)

    def _sync(self, fd: int) -> None:
        self.asked.put(os.readlink(f"/proc/self/fd/{fd}"))
        assert self.may.acquire(timeout=30)
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        self._fdatasync(fd)

    async def wanted(self) -> str:
        return await asyncio.to_thread(self.asked.get, timeout=30)


def _waits(tx: Connection) -> bool:
    """Whether COMMIT returns when the disk has it."""
    return bool(tx.rows("PRAGMA synchronous")[0][0] == 2)


def test_what_is_early_is_told_of_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(store: Store) -> None:
        disk = Disk(monkeypatch)
        early = store.write_early(_waits)
        assert not await early.committed
        assert await disk.wanted() == f"{tmp_path}/store.db-wal"
        # The next transactions do not wait for the disk, unless it is asked for.
        assert not await store.write_early(_waits).committed
        assert await store.write(_waits)
        assert not early.synced.done()
        last = store.write_early(_waits)
        assert not await last.committed
        disk.may.release(100)
        await early.synced
        await last.synced

    on(f"sqlite://{tmp_path}/store.db", test)


def test_many_early_ones_at_once_wait_for_one_sync(tmp_path: Path) -> None:
    async def test(store: Store) -> None:
        gate, first = await held(store)
        many = [store.write_early(_waits) for _ in range(20)]
        gate.open.set()
        await first
        assert all(await asyncio.gather(*(each.committed for each in many)))
        await asyncio.gather(*(each.synced for each in many))

    on(f"sqlite://{tmp_path}/store.db", test)


def test_what_the_disk_does_not_take_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(tenant: str) -> Callable[[Connection], None]:
        return lambda tx: quotas.put(tx, Quota(tenant=tenant))

    async def test(store: Store) -> None:
        disk = Disk(monkeypatch)
        disk.may.release(100)
        await store.write(put("before"))
        await store.read(
            lambda tx: quotas.get(tx, "before")
        )  # or closing the last connection would do it all
        disk.error = errno.EIO
        early = store.write_early(put("a"))
        await early.committed
        with pytest.raises(StoreUnavailable, match="cannot be synced") as caught:
            await early.synced
        assert caught.value.detail == {"written": "unknown"}
        with pytest.raises(StoreUnavailable, match="cannot be synced"):
            await store.write_early(put("b")).synced
        disk.error = 0
        await store.write(put("c"))
        # What could not be synced is in the database itself, or would be lost with what came after it.
        log = tmp_path / "store.db-wal"
        with sqlite3.connect(f"file:{tmp_path}/store.db?immutable=1", uri=True) as without_log:
            there = {tenant for (tenant,) in without_log.execute("SELECT tenant FROM quotas")}
        assert {"before", "a", "b"} <= there
        assert log.stat().st_size > 0

    on(f"sqlite://{tmp_path}/store.db", test)


def test_the_files_of_sqlite_are_private_and_every_commit_is_synced(tmp_path: Path) -> None:
    path = tmp_path / "made" / "store.db"

    async def test(store: Store) -> None:
        await store.write(lambda tx: quotas.put(tx, Quota(tenant="t")))
        names = os.listdir(path.parent)
        assert sorted(names) == ["store.db", "store.db-shm", "store.db-wal"]
        assert {stat.S_IMODE((path.parent / name).stat().st_mode) for name in names} == {0o600}
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        pragmas = ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")  # 2 is FULL
        found = await store.write(lambda tx: [tx.rows(f"PRAGMA {name}")[0][0] for name in pragmas])
        assert found == ["wal", 2, 1, 5000]

    before = os.umask(0)
    try:
        on(f"sqlite://{path}", test)
    finally:
        os.umask(before)


def test_postgres_without_its_driver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    monkeypatch.delitem(sys.modules, "skerry.store.postgres", raising=False)
    with pytest.raises(StoreUnusable, match=r"skerry\[postgres\]"):
        store_module._database("postgresql://127.0.0.1/none")


def test_a_url_with_odd_characters(tmp_path: Path) -> None:
    async def nothing(store: Store) -> None: ...

    on(f"sqlite://{tmp_path}/a%20b%3F.db", nothing)
    assert (tmp_path / "a b?.db").exists()
