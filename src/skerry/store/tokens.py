"""Tokens: `skt_<id>_<secret>`, of which only a digest of the secret is kept.

The secret is 256 random bits, so its SHA-256 cannot be guessed back and needs no slow hash. The digest covers
the id too: a row cannot be given the digest of another one.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from skerry.ids import new_id
from skerry.store.connection import Connection
from skerry.store.table import Table, Where

PREFIX = "skt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    id: str
    tenant: str
    name: str
    verbs: list[str]
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None
    last_used_at: float | None = None

    def valid_at(self, now: float) -> bool:
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


# The digest is no field of a Token, so that it goes nowhere.
_table = Table("tokens", Token, documents=("verbs",))
_insert = _table.insertion((*_table.columns, "digest"))


def create(
    tx: Connection,
    *,
    tenant: str,
    name: str,
    verbs: Iterable[str],
    now: float,
    expires_at: float | None = None,
) -> tuple[Token, str]:
    """A new token, and its text, which is nowhere else and cannot be had again."""
    token_id, secret = new_id(), secrets.token_urlsafe(32)
    token = Token(
        id=token_id,
        tenant=tenant,
        name=name,
        verbs=sorted(set(verbs)),
        created_at=now,
        expires_at=expires_at,
    )
    tx.run(_insert, {**_table.values(token), "digest": _digest(token_id, secret)})
    return token, f"{PREFIX}_{token_id}_{secret}"


def check(tx: Connection, text: str, *, now: float) -> Token | None:
    """The token with this text, if it is one, not expired and not revoked."""
    prefix, _, rest = text.partition("_")
    token_id, _, secret = rest.partition("_")
    if prefix != PREFIX or not secret or not text.isascii() or "\0" in text:
        return None
    found = tx.rows("SELECT digest FROM tokens WHERE id = :id", {"id": token_id})
    if not found or not hmac.compare_digest(found[0][0], _digest(token_id, secret)):
        return None
    token = get(tx, token_id)
    return token if token is not None and token.valid_at(now) else None


def get(tx: Connection, token_id: str) -> Token | None:
    found = _table.select(tx, "WHERE id = :id", {"id": token_id})
    return found[0] if found else None


def find(tx: Connection, *, tenant: str | None = None) -> list[Token]:
    """All, the revoked and expired too, the oldest first."""
    where = Where().equal(tenant=tenant)
    return _table.select(tx, f"{where} ORDER BY created_at, id", where.parameters)


def revoke(tx: Connection, token_id: str, *, now: float, tenant: str | None = None) -> bool:
    """Returns False if there was no such token, or it was already revoked."""
    where = Where().equal(id=token_id, tenant=tenant).add("revoked_at IS NULL")
    return tx.run(f"UPDATE tokens SET revoked_at = :now {where}", {**where.parameters, "now": now}) == 1


_EXPIRED = "WHERE revoked_at IS NULL AND expires_at <= :now"


def expired(tx: Connection, *, now: float) -> bool:
    """True if `expire()` would remove something."""
    return bool(tx.rows(f"SELECT id FROM tokens {_EXPIRED} LIMIT 1", {"now": now}))


def expire(tx: Connection, *, now: float) -> None:
    """Revoke the tokens that have expired: a clock that is set back later does not revive them."""
    tx.run(f"UPDATE tokens SET revoked_at = expires_at {_EXPIRED}", {"now": now})


def used(tx: Connection, last: Mapping[str, float]) -> None:
    """Note when each of these tokens was last used. `check` only reads: a write for each request would cost more
    than the request, so who checks collects these and writes them now and then."""
    for token_id, at in sorted(last.items()):  # in one order, so that two daemons cannot deadlock
        tx.run(
            "UPDATE tokens SET last_used_at = :at"
            " WHERE id = :id AND (last_used_at IS NULL OR last_used_at < :at)",
            {"id": token_id, "at": at},
        )


def _digest(token_id: str, secret: str) -> str:
    return hashlib.sha256(f"{PREFIX}_{token_id}_{secret}".encode()).hexdigest()
