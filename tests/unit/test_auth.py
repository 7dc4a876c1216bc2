"""The gate: what it tells strangers, and what it believes while tokens are revoked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.types import Scope

from skerry.daemon.auth import Gate
from skerry.daemon.peers import PEER, Peer
from skerry.errors import StoreUnavailable, Unauthorized
from skerry.store import Store, tokens
from skerry.store.tokens import Token
from tests.unit.stubs import asynchronous


def scope_with(token: str) -> Scope:
    headers = [(b"authorization", f"Bearer {token}".encode())]
    return {"headers": headers, "state": {PEER: Peer("192.0.2.7:50312", trusted=False)}}


async def make_token(store: Store) -> tuple[Token, str]:
    return await store.write(lambda tx: tokens.create(tx, tenant="acme", name="x", verbs=["read"], now=1.0))


@asynchronous
async def test_a_token_that_is_revoked_while_it_is_looked_up(tmp_path: Path, monkeypatch: Any) -> None:
    store = await Store.open(f"sqlite://{tmp_path}/store.db")
    token, text = await make_token(store)
    gate = Gate(store)
    read = store.read

    async def read_and_revoke(work: Any) -> Any:
        monkeypatch.setattr(store, "read", read)
        found = await read(work)
        await store.write(lambda tx: tokens.revoke(tx, token.id, now=2.0))
        gate.revoked(token.id)
        return found

    monkeypatch.setattr(store, "read", read_and_revoke)
    with pytest.raises(Unauthorized):
        await gate.caller(scope_with(text), "r1")
    await store.close()


@asynchronous
async def test_what_is_wrong_with_the_store_is_not_told(tmp_path: Path) -> None:
    store = await Store.open(f"sqlite://{tmp_path}/store.db")
    _, text = await make_token(store)
    await store.close()
    with pytest.raises(StoreUnavailable) as caught:
        await Gate(store).caller(scope_with(text), "r1")
    assert str(caught.value) == "tokens cannot be looked up now (try again)"
