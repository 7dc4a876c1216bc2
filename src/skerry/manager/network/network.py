"""The network of one environment: a proxy that allows what the rules say, and audits every connection."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from skerry.egress.limits import Meter, Traffic
from skerry.egress.proxy import Connection, Denial, Proxy, Witness
from skerry.egress.resolver import resolve
from skerry.egress.rules import Rules
from skerry.errors import SkerryError
from skerry.fairness import budget
from skerry.manager.audit.acts import Act, AuditLog, Subject, note
from skerry.manager.caller import Caller
from skerry.policy import Limits

if TYPE_CHECKING:
    from skerry.host.network import Sockets

ACTION = "network.connect"
ONE_BY_ONE = 60
"""Connections of an environment in a window that get their own rows in the audit."""
WINDOW = 60.0
"""Seconds."""
PLACES_MAX = 100
"""Destinations that are counted by name in a summary row."""


class Network:
    """Created when an environment first gets a network; lasts until the environment ends."""

    def __init__(
        self,
        audit: AuditLog,
        tenant: str,
        subject: Subject,
        traffic: Traffic,
        sockets: Sockets,
        rules: Rules,
        limits: Limits,
        *,
        note_traffic: Callable[[], None],
    ) -> None:
        caller = Caller(tenant=tenant, peer="environment")
        self._witness = witness = _Audited(audit, caller, subject)
        meter = Meter(limits, traffic, note=note_traffic)
        flow = budget().flow(tenant)
        self._proxy = Proxy(rules, sockets.tcp, sockets.udp, witness, resolve, meter, flow)

    @property
    def rules(self) -> Rules:
        return self._proxy.rules

    def change(self, rules: Rules, limits: Limits) -> None:
        self._proxy.change(rules, limits)

    @property
    def told(self) -> dict[str, Any]:
        """Open connections and recent denials."""
        return {
            "connections": len(self._proxy.connections),
            "denials": [asdict(denial) for denial in self._proxy.denials],
        }

    async def close(self) -> None:
        await self._proxy.close()
        self._witness.close()


class _Rest:
    """Connections of one window that share an intent and a result: those after the first few."""

    def __init__(self, act: Act) -> None:
        self.act = act
        self.begun: asyncio.Future[None] = asyncio.ensure_future(act.begin())
        self.begun.add_done_callback(
            lambda begun: begun.cancelled() or begun.exception()
        )  # told to who awaits it
        self.timer: asyncio.TimerHandle | None = None
        self.open = 0
        self.over = False
        """Whether its window has ended: no connection is added any more."""
        self._count = self._failed = self._sent = self._received = self._others = 0
        self._places: Counter[str] = Counter()

    def add(self, connection: Connection) -> None:
        self.open += 1
        self._count += 1
        place = f"{connection.host}:{connection.port}"
        if place in self._places or len(self._places) < PLACES_MAX:
            self._places[place] += 1
        else:
            self._others += 1

    def closed(self, connection: Connection) -> None:
        self.open -= 1
        self._failed += connection.verdict != "allowed"
        self._sent += connection.sent
        self._received += connection.received
        self.end_if_done()

    def end_if_done(self) -> None:
        if self.over and not self.open:
            self.act.end(
                "completed",
                connections=self._count,
                failed=self._failed,
                places=dict(self._places),
                other_places=self._others,
                sent_bytes=self._sent,
                received_bytes=self._received,
            )


class _Audited(Witness):
    """Every connection has an intent before it is made and a result after it; what is refused is a denial.

    After the first ONE_BY_ONE of a window, those that follow in it have one intent and one result together.
    """

    def __init__(self, audit: AuditLog, caller: Caller, subject: Subject) -> None:
        self._audit = audit
        self._caller = caller
        self._subject = subject
        self._open: dict[Connection, Act | _Rest] = {}
        self._since = -math.inf
        self._count = 0
        self._rest: _Rest | None = None

    async def opening(self, connection: Connection) -> None:
        now = time.monotonic()
        if now - self._since >= WINDOW:
            self._since, self._count = now, 0
            self._end_window()
        self._count += 1
        if self._count <= ONE_BY_ONE:
            act = self._act(_told(connection))
            self._open[connection] = act  # before: a connection can be cut while that is being written
            await act.begin()
            return
        if self._rest is None:
            self._rest = _Rest(self._act({**_told(connection), "and_more": True}))
            self._rest.timer = asyncio.get_running_loop().call_later(WINDOW, self._end_window)
        rest = self._open[connection] = self._rest
        rest.add(connection)
        try:
            await asyncio.shield(rest.begun)
        except SkerryError:
            if rest is self._rest:  # the next connection tries again
                self._end_window()
            raise

    def _act(self, told: dict[str, Any]) -> Act:
        # An id of its own tells which result is whose, and what has none after a crash.
        caller = replace(self._caller, request_id=token_hex(8))
        return Act(self._audit, caller, ACTION, self._subject, told)

    def _end_window(self) -> None:
        """Let the result of its connections be written when all of them are closed."""
        rest, self._rest = self._rest, None
        if rest is not None:
            if rest.timer is not None:
                rest.timer.cancel()
            rest.over = True
            rest.end_if_done()

    def close(self) -> None:
        """No connection follows."""
        self._end_window()

    def closed(self, connection: Connection) -> None:
        act = self._open.pop(connection, None)
        if isinstance(act, _Rest):
            act.closed(connection)
        elif act is not None:
            act.end(
                "completed" if connection.verdict == "allowed" else "failed",
                **_told(connection),
                verdict=connection.verdict,
                sent_bytes=connection.sent,
                received_bytes=connection.received,
            )

    def denied(self, denial: Denial) -> None:
        act = Act(self._audit, self._caller, ACTION, self._subject, {})
        detail = {"host": denial.host, "port": denial.port, "reason": denial.reason}
        note(self._audit.audit(self._caller.tenant, act.entry("denial", "denied", detail=detail), later=True))


def _told(connection: Connection) -> dict[str, Any]:
    return {"host": connection.host, "port": connection.port, "address": str(connection.address)}
