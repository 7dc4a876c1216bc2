"""The gate: what it tells strangers, and what it believes while tokens are revoked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.types import Scope

from skerry.daemon import auth
from skerry.daemon.auth import Authenticator
from skerry.daemon.peers import PEER, Peer
from skerry.errors import InvalidRequest, StoreUnavailable, Unauthorized
from skerry.manager.caller import Caller
from skerry.manager.tenants.tokens import Tokens, check_tenant
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
    gate = Authenticator(Tokens(store))
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
        await Authenticator(Tokens(store)).caller(scope_with(text), "r1")
    assert str(caught.value) == "tokens cannot be looked up now (try again)"


@asynchronous
async def test_expired_token_stays_expired_when_the_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await Store.open(f"sqlite://{tmp_path}/store.db")
    _, text = await store.write(
        lambda tx: tokens.create(tx, tenant="acme", name="x", verbs=["read"], now=1000.0, expires_at=2000.0)
    )
    now = 1500.0
    monkeypatch.setattr("skerry.daemon.auth.time.time", lambda: now)
    gate = Authenticator(Tokens(store))
    assert (await gate.caller(scope_with(text), "r1")).tenant == "acme"
    now = 2500.0
    with pytest.raises(Unauthorized):
        await gate.caller(scope_with(text), "r2")
    now = 1500.0
    with pytest.raises(Unauthorized):
        await gate.caller(scope_with(text), "r3")
    await gate._expire()
    with pytest.raises(Unauthorized):  # the next daemon has never seen the later time
        await Authenticator(Tokens(store)).caller(scope_with(text), "r4")
    await store.close()


def test_the_daemons_own_tenant_is_reserved() -> None:
    with pytest.raises(InvalidRequest, match="the daemon's own"):
        check_tenant("skerry")
    with pytest.raises(InvalidRequest, match="the daemon's own"):
        auth.acting(Caller(), {"headers": [(b"skerry-tenant", b"skerry")]})
    check_tenant("skerry-2")
