"""Tokens: who may use this daemon over its doors, and what they allow."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence

from skerry.errors import InvalidRequest
from skerry.manager.audit.acts import operator_entry
from skerry.manager.caller import OWN_TENANT, VERBS, Caller
from skerry.store import Connection, Store, audit, tokens
from skerry.store.tokens import Token

DEFAULT_VERBS = ("read", "create", "execute", "write", "delete")
NAME_MAX = 100
_TENANT = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}")


def check_tenant(name: str) -> None:
    """Raises InvalidRequest."""
    if not _TENANT.fullmatch(name):
        raise InvalidRequest(
            f"{name!r} is not a name for a tenant", hint="a letter or digit, then up to 62 of a-z 0-9 _ . -"
        )
    if name == OWN_TENANT:
        raise InvalidRequest(f"the tenant {name!r} is the daemon's own", hint="choose another name")


class Tokens:
    """The tokens in the store. Every method may raise StoreUnavailable."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def create(
        self, caller: Caller, tenant: str, name: str, verbs: Sequence[str], lifetime: float | None
    ) -> tuple[Token, str]:
        """A new token, and its text, which is not stored. Raises InvalidRequest."""
        unknown = sorted(set(verbs) - set(VERBS))
        if unknown or not verbs:
            what = f"there is no verb {unknown[0]!r}" if unknown else "a token without a verb allows nothing"
            raise InvalidRequest(what, hint=f"known: {', '.join(VERBS)}")
        if not 0 < len(name) <= NAME_MAX or not name.isprintable():
            raise InvalidRequest(f"the name of a token has 1 to {NAME_MAX} printable characters")
        check_tenant(tenant)
        now = time.time()
        expires = None if lifetime is None else now + lifetime

        def work(tx: Connection) -> tuple[Token, str]:
            token, text = tokens.create(
                tx, tenant=tenant, name=name, verbs=verbs, now=now, expires_at=expires
            )
            detail = {"id": token.id, "name": token.name, "tenant": tenant, "verbs": token.verbs}
            audit.append(tx, *operator_entry(caller, "token.create", detail))
            return token, text

        return await self._store.write(work)

    async def list(self, tenant: str | None) -> list[Token]:
        """Those of a tenant or of all, the revoked and expired too, oldest first."""
        return await self._store.read(lambda tx: tokens.find(tx, tenant=tenant))

    async def revoke(self, caller: Caller, token_id: str) -> bool:
        """False if there is no such token. Revoking one again succeeds."""

        def work(tx: Connection) -> bool:
            found = tokens.get(tx, token_id)
            if found is None:
                return False
            tokens.revoke(tx, token_id, now=time.time())
            detail = {"id": found.id, "name": found.name, "tenant": found.tenant}
            audit.append(tx, *operator_entry(caller, "token.revoke", detail))
            return True

        return await self._store.write(work)

    async def check(self, text: str, now: float) -> Token | None:
        """The token with this text, if it is valid."""
        return await self._store.read(lambda tx: tokens.check(tx, text, now=now))

    async def get(self, ids: Sequence[str]) -> Sequence[Token | None]:
        return await self._store.read(lambda tx: [tokens.get(tx, id) for id in ids])

    async def expire(self, now: float) -> None:
        """Revoke the tokens that have expired: a clock that is set back later does not revive them."""
        if await self._store.read(lambda tx: tokens.expired(tx, now=now)):
            await self._store.write(lambda tx: tokens.expire(tx, now=now))

    async def note_use(self, used: Mapping[str, float]) -> None:
        """Record when each of these tokens was last used."""
        await self._store.write(lambda tx: tokens.used(tx, used))
