"""The audit's chains, on SQLite and on Postgres: what is written is found, and what was tampered with too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from skerry.errors import InvalidRequest, StoreUnavailable
from skerry.store import Connection, Store, audit
from skerry.store.audit import AuditRow, Broken, Head
from tests.integration.stores import NOW, entry, on, writer


async def fill(store: Store, rows: int = 6, tenant: str = "t") -> None:
    await store.write(
        lambda tx: audit.append(tx, tenant, [entry(request_id=f"r{n}", at=NOW + n) for n in range(rows)])
    )


def test_rows_come_back_as_they_were_written(store_url: str) -> None:
    async def test(store: Store) -> None:
        one = entry(at=7, usage={"cpu_seconds": 0.1, "pids": None, "n": 1 << 70}, outcome="completed")
        head = await store.write(lambda tx: audit.append(tx, "t", [one]))
        [row] = await store.read(lambda tx: audit.search(tx, "t"))
        for each in fields(one):
            assert getattr(row, each.name) == getattr(one, each.name)
        assert (row.tenant, row.seq, row.hash) == ("t", 1, head.hash)
        assert await store.read(lambda tx: audit.verify(tx, "t")) is None

    on(store_url, test)


def test_each_tenant_has_a_chain_of_its_own(store_url: str) -> None:
    async def test(store: Store) -> None:
        await fill(store, 2)
        await fill(store, 3, "u")
        await fill(store, 1)
        assert await store.read(audit.tenants) == ["t", "u"]
        heads = [await store.read(lambda tx, t=t: audit.head(tx, t)) for t in "tuv"]  # type: ignore[misc]
        assert [one.seq for one in heads] == [3, 3, 0]
        assert [r.seq for r in await store.read(lambda tx: audit.search(tx, "t"))] == [1, 2, 3]
        for tenant in "tuv":
            assert await store.read(lambda tx, t=tenant: audit.verify(tx, t)) is None  # type: ignore[misc]

    on(store_url, test)


def _columns() -> list[str]:
    return [one.name for one in fields(AuditRow) if one.name not in ("tenant", "seq")]


@pytest.mark.parametrize("column", _columns())
def test_a_change_of_any_column_is_found(store_url: str, column: str) -> None:
    value: Any = {"at": NOW + 99, "detail": '{"argv":["true"]}', "usage": "{}", "kind": "denial"}.get(
        column, "x"
    )

    async def test(store: Store) -> None:
        await fill(store)
        await store.write(
            lambda tx: tx.run(f"UPDATE audit SET {column} = :value WHERE seq = 3", {"value": value})
        )
        broken = await store.read(lambda tx: audit.verify(tx, "t"))
        assert broken is not None
        assert broken.seq == 3

    on(store_url, test)


def _sql(*statements: str) -> Callable[[Connection], None]:
    def work(tx: Connection) -> None:
        for statement in statements:
            assert tx.run(statement) > 0

    return work


def _rewrite(tx: Connection) -> None:
    """Change a row and compute its hash again, as somebody would who knows how."""
    [row] = audit.search(tx, "t", after=2, limit=1)
    [before] = audit.search(tx, "t", after=1, limit=1)
    values = {one.name: getattr(row, one.name) for one in fields(AuditRow) if one.name != "hash"}
    values["action"] = "changed"
    tx.run(
        "UPDATE audit SET action = 'changed', hash = :hash WHERE seq = 3",
        {"hash": audit._link(before.hash, values)},
    )


TAMPERING = {
    "removed": (_sql("DELETE FROM audit WHERE seq = 3"), 3),
    "first removed": (_sql("DELETE FROM audit WHERE seq = 1"), 1),
    "removed and renumbered": (
        _sql("DELETE FROM audit WHERE seq = 3", "UPDATE audit SET seq = seq - 1 WHERE seq = 4"),
        3,
    ),
    "reordered": (
        _sql(
            "UPDATE audit SET seq = 99 WHERE seq = 3",
            "UPDATE audit SET seq = 3 WHERE seq = 4",
            "UPDATE audit SET seq = 4 WHERE seq = 99",
        ),
        3,
    ),
    "last removed": (_sql("DELETE FROM audit WHERE seq = 6"), 6),
    "all removed": (_sql("DELETE FROM audit"), 1),
    "head removed": (_sql("DELETE FROM audit_heads"), 7),
    "head moved": (
        _sql(
            "UPDATE audit_heads SET seq = 5, hash = (SELECT hash FROM audit WHERE seq = 5)",
        ),
        7,
    ),
    "moved to another tenant": (_sql("UPDATE audit SET tenant = 'u' WHERE seq = 6"), 6),
    "changed with its hash": (_rewrite, 4),
    "spaces in JSON": (_sql("UPDATE audit SET detail = detail || ' ' WHERE seq = 3"), 3),
    "no JSON": (_sql("UPDATE audit SET detail = '{' WHERE seq = 3"), 3),
}


@pytest.mark.parametrize("how", list(TAMPERING))
def test_tampering_is_found(store_url: str, how: str) -> None:
    tamper, where = TAMPERING[how]

    async def test(store: Store) -> None:
        await fill(store)
        assert await store.read(lambda tx: audit.verify(tx, "t")) is None
        await store.write(tamper)
        broken = await store.read(lambda tx: audit.verify(tx, "t"))
        assert broken is not None
        assert broken.seq == where, broken

    on(store_url, test)


def test_a_remembered_head_finds_what_was_rewritten_to_the_end(store_url: str) -> None:
    async def test(store: Store) -> None:
        await fill(store)
        remembered = await store.read(lambda tx: audit.head(tx, "t"))
        await fill(store, 2)
        verify = audit.verify
        assert await store.read(lambda tx: verify(tx, "t", remembered)) is None
        assert await store.read(lambda tx: verify(tx, "t", Head(9, "0" * 64))) == Broken(
            9, "the chain ends before the remembered row 9"
        )
        await store.write(_sql("DELETE FROM audit", "DELETE FROM audit_heads"))
        assert await store.read(lambda tx: verify(tx, "t")) is None, "nothing in the store can tell"
        broken = await store.read(lambda tx: verify(tx, "t", remembered))
        assert broken is not None
        assert broken.seq == 1
        await fill(store, 5)
        await fill(store, 5)
        broken = await store.read(lambda tx: verify(tx, "t", remembered))
        assert broken == Broken(6, "not the row that was remembered")

    on(store_url, test)


def test_tail_search_and_export(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "PAGE", 3)  # so that a few rows are many pages

    async def test(store: Store) -> None:
        await fill(store, 10)
        await store.write(
            lambda tx: audit.append(
                tx, "t", [entry(kind="denial", environment_id="f", trace_id="x", at=NOW + 10)]
            )
        )

        async def found(**filters: Any) -> list[int]:
            rows = await store.read(lambda tx: audit.search(tx, "t", **filters))
            exported = [row.seq async for page in audit.pages(store, "t", **filters) for row in page]
            assert [row.seq for row in rows] == exported
            return exported

        assert await found() == list(range(1, 12))
        assert (
            await found(kind="denial") == await found(trace_id="x") == await found(environment_id="f") == [11]
        )
        assert await found(request_id="r4", action="execute", token="abc") == [5]
        assert await found(since=NOW + 8, until=NOW + 10) == [9, 10]
        assert await found(after=9) == [10, 11]
        assert await found(outcome="completed") == []

        async def last(count: int, **filters: Any) -> list[int]:
            after = await store.read(lambda tx: audit.place_before(tx, "t", count, **filters))
            return await found(after=after, **filters)

        assert await last(3) == [9, 10, 11]
        assert await last(11) == await last(100) == list(range(1, 12))
        assert await last(1, request_id="r4") == [5]
        assert await last(0) == []
        assert await store.read(lambda tx: audit.search(tx, "other")) == []
        with pytest.raises(InvalidRequest):
            await store.read(lambda tx: audit.search(tx, "t", limit=0))
        assert await store.read(lambda tx: audit.verify(tx, "t")) is None

    on(store_url, test)


def test_what_cannot_be_stored_is_refused_and_leaves_no_gap(store_url: str) -> None:
    async def test(store: Store) -> None:
        await fill(store, 1)
        bad = [
            (entry(kind="gossip"), StoreUnavailable),
            (entry(request_id="\udcff"), InvalidRequest),
            (entry(detail={"x": float("nan")}), ValueError),
        ]
        for wrong, error in bad:
            with pytest.raises(error):
                await store.write(
                    lambda tx, wrong=wrong: audit.append(tx, "t", [entry(), wrong])  # type: ignore[misc]
                )
        await fill(store, 1)
        assert [r.seq for r in await store.read(lambda tx: audit.search(tx, "t"))] == [1, 2]
        assert await store.read(lambda tx: audit.verify(tx, "t")) is None

    on(store_url, test)


def test_two_processes_make_one_chain(store_url: str) -> None:
    with writer(store_url, "t", rows=40) as one, writer(store_url, "t", rows=40) as two:
        said = [one.communicate()[0], two.communicate()[0]]
    assert [one.returncode, two.returncode] == [0, 0]
    acknowledged = [line.split() for text in said for line in text.splitlines()[1:]]
    assert len(acknowledged) == 2 * 4 * 40

    async def test(store: Store) -> None:
        assert await store.read(lambda tx: audit.verify(tx, "t")) is None
        rows = {row.seq: row async for page in audit.pages(store, "t") for row in page}
        assert len(rows) == 2 * len(acknowledged)
        for name, seq, hash_ in acknowledged:
            assert (rows[int(seq)].request_id, rows[int(seq)].hash) == (name, hash_)

    on(store_url, test)


def test_the_chain_holds_when_many_append_at_once(store_url: str) -> None:
    async def test(store: Store) -> None:
        await asyncio.gather(*(fill(store, 2, f"t{n % 3}") for n in range(60)))
        for n in range(3):
            assert (await store.read(lambda tx, n=n: audit.head(tx, f"t{n}"))).seq == 40  # type: ignore[misc]
            assert await store.read(lambda tx, n=n: audit.verify(tx, f"t{n}")) is None  # type: ignore[misc]

    on(store_url, test)
