"""What the audit tells of connections: each of the first, and the others together."""

from __future__ import annotations

import asyncio
from ipaddress import ip_address
from typing import Any

import pytest

from skerry.egress.proxy import Connection
from skerry.errors import StoreUnavailable
from skerry.manager.audit.acts import Subject
from skerry.manager.caller import Caller
from skerry.manager.network import network
from skerry.manager.network.network import ONE_BY_ONE, PLACES_MAX, _Audited
from skerry.store.audit import Entry

SUBJECT = Subject("k3v9x1m2p7qa", "namespace", "namespace", "sha256:1")


class Rows:
    def __init__(self) -> None:
        self.all: list[Entry] = []
        self.broken = False

    def audit(self, tenant: str, entry: Entry, *, later: bool = False) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.broken:
            future.set_exception(StoreUnavailable("full"))
        else:
            self.all.append(entry)
            future.set_result(None)
        return future

    def of(self, kind: str) -> list[Entry]:
        return [row for row in self.all if row.kind == kind]


def audited() -> tuple[Rows, _Audited]:
    rows: Any = Rows()
    return rows, _Audited(rows, Caller(tenant="acme", peer="environment"), SUBJECT)


def connection(host: str) -> Connection:
    made = Connection(host, 443)
    made.address, made.verdict, made.sent, made.received = ip_address("9.9.9.9"), "allowed", 2, 3
    return made


def test_a_flood_of_connections_writes_a_bounded_number_of_rows() -> None:
    async def main() -> None:
        rows, witness = audited()
        all_ = [connection(f"host{number % 150}") for number in range(1000)]
        await asyncio.gather(*map(witness.opening, all_))
        assert len(rows.of("intent")) == ONE_BY_ONE + 1
        for each in all_:
            witness.closed(each)
        assert len(rows.of("result")) == ONE_BY_ONE
        witness.close()
        last = rows.of("result")[-1].detail
        rest = 1000 - ONE_BY_ONE
        assert (last["connections"], last["failed"]) == (rest, 0)
        assert (last["sent_bytes"], last["received_bytes"]) == (2 * rest, 3 * rest)
        assert len(last["places"]) == PLACES_MAX
        assert sum(last["places"].values()) + last["other_places"] == rest
        ids = [row.request_id for row in rows.of("intent")]
        assert sorted(ids) == sorted(row.request_id for row in rows.of("result"))

    asyncio.run(main())


def test_each_window_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a connection that outlives its window is in the result of that one."""

    async def main() -> None:
        now = 1000.0
        monkeypatch.setattr("skerry.manager.network.network.time.monotonic", lambda: now)
        rows, witness = audited()
        for _ in range(ONE_BY_ONE + 1):
            lasting = connection("slow")
            await witness.opening(lasting)
        now += network.WINDOW
        first = connection("next")
        await witness.opening(first)
        assert rows.of("intent")[-1].detail["host"] == "next"
        assert "and_more" not in rows.of("intent")[-1].detail
        assert rows.of("result") == []
        witness.closed(lasting)
        assert rows.of("result")[-1].detail["connections"] == 1

    asyncio.run(main())


def test_nothing_is_opened_that_cannot_be_written_down() -> None:
    async def main() -> None:
        rows, witness = audited()
        for _ in range(ONE_BY_ONE):
            await witness.opening(connection("a"))
        rows.broken = True
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await witness.opening(connection("b"))
        rows.broken = False
        await witness.opening(connection("c"))
        assert rows.of("intent")[-1].detail["host"] == "c"

    asyncio.run(main())
