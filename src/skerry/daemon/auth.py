"""Who may do what: the operator on the daemon's own socket everything, all others what their token allows.

A token is known again for a few seconds without asking the store. One that is revoked, or expires, loses the requests
that are under way with it: at once when this daemon is told, within seconds when another one is.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import structlog
from starlette.types import Scope

from skerry.daemon.peers import Peer, cut_of, peer_of
from skerry.errors import Denied, SkerryError, StoreUnavailable, StoreUnusable, Unauthorized
from skerry.manager.caller import Caller
from skerry.manager.tenants.tokens import Tokens, check_tenant
from skerry.store.tokens import Token

LOOK_AGAIN = 2.0
"""Seconds for which the store is believed."""
NOTE_USE = 30.0
"""Seconds between two notes of when tokens were last used."""
KNOWN_MAX = 10_000
HINT = "send `Authorization: Bearer <token>`; `skerry token create` makes one"

_TRACE = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")

log = structlog.get_logger(component="auth")


def refusal(caller: Caller, verb: str) -> Denied:
    """For one whose token does not allow it."""
    return Denied(
        f"token {caller.token} does not allow {verb!r}",
        hint="`skerry token create --verb` makes one that does",
    )


class Authenticator:
    """Knows callers by their connection or their token. `watch()` must run beside it."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._known: dict[bytes, tuple[Token, float]] = {}
        """By the hash of the text: the token, and until when the store need not be asked again."""
        self._under_way: dict[str, set[Callable[[], None]]] = {}
        """By the id of the token: what ends each request with it."""
        self._used: dict[str, float] = {}
        self._revocations = 0
        self._latest = 0.0

    async def caller(self, scope: Scope, request_id: str) -> Caller:
        """Who asks. Raises Unauthorized, StoreUnavailable."""
        authorization = traceparent = ""
        for name, value in scope["headers"]:
            if name == b"authorization":
                if authorization:
                    raise Unauthorized("there are two authorizations", hint=HINT)
                authorization = value.decode("latin-1")
            elif name == b"traceparent":
                traceparent = value.decode("latin-1")
        if not _TRACE.fullmatch(traceparent):
            traceparent = ""
        peer: Peer = peer_of(scope)
        if peer.trusted and not authorization:
            return Caller(peer=peer.address, request_id=request_id, traceparent=traceparent)
        token = await self._token(authorization)
        return Caller(token.tenant, frozenset(token.verbs), token.id, peer.address, request_id, traceparent)

    @contextlib.contextmanager
    def under_way(self, caller: Caller, scope: Scope) -> Iterator[None]:
        """While the block runs, the end of the caller's token ends the connection."""
        if not caller.token:
            yield
            return
        cut = partial(
            cut_of(scope)
        )  # one of its own: the next request on this connection may have begun already
        cuts = self._under_way.setdefault(caller.token, set())
        cuts.add(cut)
        try:
            yield
        finally:
            cuts.discard(cut)
            if not cuts and self._under_way.get(caller.token) is cuts:
                del self._under_way[caller.token]

    def revoked(self, token_id: str) -> None:
        """Forget a token, and end what is under way with it."""
        self._revocations += 1
        self._known = {key: known for key, known in self._known.items() if known[0].id != token_id}
        for cut in tuple(self._under_way.get(token_id, ())):
            cut()

    async def watch(self) -> None:
        """Look again, for as long as it runs, at the tokens of all requests under way."""
        noted = time.monotonic() - NOTE_USE
        while True:
            await asyncio.sleep(LOOK_AGAIN)
            try:
                await self._look()
                if time.monotonic() - noted >= NOTE_USE:
                    noted = time.monotonic()
                    await self.note_use()
                    await self._expire()
            except SkerryError as error:
                log.error("cannot look at tokens", error=str(error))

    def _now(self) -> float:
        """The wall clock, which does not go back here: a token that has expired stays so."""
        self._latest = max(self._latest, time.time())
        return self._latest

    async def _expire(self) -> None:
        """Write down which tokens have expired, for daemons after this one. Raises StoreUnavailable."""
        await self._tokens.expire(self._now())

    async def note_use(self) -> None:
        """Raises StoreUnavailable."""
        used, self._used = self._used, {}
        if used:
            await self._tokens.note_use(used)

    async def _look(self) -> None:
        ids = tuple(self._under_way)
        if not ids:
            return
        found = await self._tokens.get(ids)
        now = self._now()
        for id, token in zip(ids, found, strict=True):
            if token is None or not token.valid_at(now):
                log.warning("token ended: its requests are cut", token=id)
                self.revoked(id)

    async def _token(self, authorization: str) -> Token:
        scheme, _, text = authorization.partition(" ")
        if not authorization:
            raise Unauthorized("a token is needed", hint=HINT)
        if scheme.lower() != "bearer" or not text:
            raise Unauthorized("the authorization is not a bearer token", hint=HINT)
        key = hashlib.sha256(text.encode("latin-1")).digest()
        now = self._now()
        token, until = self._known.get(key, (None, 0.0))
        if token is None or time.monotonic() >= until or not token.valid_at(now):
            seen = None
            while seen != self._revocations:  # what was read before a revocation is worth nothing after it
                seen = self._revocations
                token = await self._look_up(text, now)
            if token is None:
                self._known.pop(key, None)
                raise Unauthorized("the token is unknown, expired or revoked", hint=HINT)
            if len(self._known) >= KNOWN_MAX:
                self._known.clear()
            self._known[key] = token, time.monotonic() + LOOK_AGAIN
        self._used[token.id] = now
        return token

    async def _look_up(self, text: str, now: float) -> Token | None:
        try:
            return await self._tokens.check(text, now)
        except (StoreUnavailable, StoreUnusable) as error:  # whose words are not for strangers
            raise StoreUnavailable("tokens cannot be looked up now", hint="try again") from error


def acting(caller: Caller, scope: Scope) -> Caller:
    """The caller, for the tenant that the request names. Raises Denied, InvalidRequest."""
    tenant = ""
    for name, value in scope["headers"]:
        if name == b"skerry-tenant":
            tenant = value.decode("latin-1")
    if not tenant or tenant == caller.tenant:
        return caller
    check_tenant(tenant)
    if "admin" not in caller.verbs:
        raise Denied(f"{caller.who} is of the tenant {caller.tenant!r}, and may not act for others")
    return replace(caller, tenant=tenant, home=caller.tenant)
