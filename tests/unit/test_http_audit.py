"""Reading the audit costs others nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skerry.daemon.http import audit as operations
from skerry.errors import Busy
from skerry.manager.audit import trail as module
from skerry.manager.audit.trail import AuditTrail
from skerry.manager.caller import Caller
from skerry.store import Store, audit
from skerry.store.audit import Entry
from tests.unit.stubs import asynchronous


def call_of(trail: AuditTrail, tenant: str = "acme") -> Any:
    return SimpleNamespace(caller=Caller(tenant), engine=SimpleNamespace(audit=trail))


async def append(store: Store, action: str) -> None:
    await store.write(lambda tx: audit.append(tx, "acme", [Entry(at=1.0, kind="intent", action=action)]))


@asynchronous
async def test_rows_that_do_not_fit_are_looked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await Store.open(f"sqlite://{tmp_path}/store.db")
    pages, begins, looked = audit.pages, [], asyncio.Event()

    async def watched(store: Store, tenant: str, *, after: int, **filters: Any) -> AsyncIterator[Any]:
        begins.append(after)
        async for page in pages(store, tenant, after=after, **filters):
            yield page
        looked.set()

    monkeypatch.setattr(audit, "pages", watched)
    monkeypatch.setattr(module, "LOOK_AGAIN", 0.01)
    for _ in range(3):
        await append(store, "other")
    rows = operations._rows(call_of(AuditTrail(store)), 0, True, {"action": "wanted"})
    first = asyncio.create_task(anext(rows))
    await looked.wait()
    await append(store, "wanted")
    assert json.loads(await first)["seq"] == 4
    assert begins == [0, 3]
    await rows.aclose()
    await store.close()


@asynchronous
async def test_one_verification_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await Store.open(f"sqlite://{tmp_path}/store.db")
    at_work, most = 0, 0
    read = store.read

    async def watched(work: Any) -> Any:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        try:
            return await read(work)
        finally:
            at_work -= 1

    monkeypatch.setattr(store, "read", watched)
    trail = AuditTrail(store)
    asked = [operations.verify_audit(call_of(trail, tenant), None, "") for tenant in ("a", "a", "b", "c")]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert [isinstance(answer, Busy) for answer in answers] == [False, True, False, False]
    assert most == 1
    await operations.verify_audit(call_of(trail, "a"), None, "")
    await store.close()
