"""What each tenant makes the daemon do: time of the event loop, bytes, rows and connections.

Only the event loop's thread writes them. Counted since the daemon started.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from starlette.types import Message, Receive, Send

from skerry.fairness import STRANGERS
from skerry.store.audit import Entry

TENANTS_MAX = 100
"""Tenants that have an account of their own; all that come later share OTHERS, so that metrics stay small."""
OTHERS, NOBODY = "(others)", "(nobody)"
"""Cannot be names of tenants. What needs no token is charged to NOBODY."""


@dataclass(slots=True)
class Account:
    requests: int = 0
    loop_seconds: float = 0.0
    """Time of the event loop, which all tenants share, for its requests, streams, guests and connections."""
    received_bytes: int = 0
    """Bodies of its requests."""
    sent_bytes: int = 0
    """Bodies of the answers."""
    rows: int = 0
    """Written to the audit and to the tables of environments and executions."""
    connections: int = 0
    """Made by its environments, and ended."""
    network_sent_bytes: int = 0
    network_received_bytes: int = 0


class Accounts:
    """By tenant."""

    def __init__(self) -> None:
        self.nobody = Account()
        self._all = {NOBODY: self.nobody}

    def of(self, tenant: str) -> Account:
        found = self._all.get(tenant)
        if found is None:
            name = tenant if len(self._all) < TENANTS_MAX else OTHERS
            found = self._all.setdefault(name, Account())
        return found

    def charge(self, group: str, seconds: float) -> None:
        """Time of the event loop that a flow of `skerry.fairness` took. Groups that are no tenants are NOBODY."""
        account = self.nobody if group in ("", STRANGERS) else self.of(group)
        account.loop_seconds += seconds

    def told(self, tenant: str) -> dict[str, Any]:
        """What is known of it. Makes no account."""
        return asdict(self._all.get(tenant, Account()))

    def happened(self, tenant: str, entry: Entry) -> None:
        """Count what a row of the audit tells of connections."""
        if entry.action == "network.connect" and entry.kind == "result":
            account = self.of(tenant)
            account.connections += entry.detail.get("connections", 1)
            account.network_sent_bytes += entry.detail.get("sent_bytes", 0)
            account.network_received_bytes += entry.detail.get("received_bytes", 0)

    def families(self) -> Iterator[tuple[str, str, Mapping[tuple[str], float]]]:
        """Name, text and values of each, for Prometheus."""
        for field, text in _FAMILIES.items():
            values = {(tenant,): getattr(account, field) for tenant, account in self._all.items()}
            yield f"skerry_tenant_{field}_total", text, values


_FAMILIES = {
    "requests": "Requests, by tenant.",
    "loop_seconds": "Time of the event loop for requests, streams, guests and connections, by tenant.",
    "received_bytes": "Bodies of requests, by tenant.",
    "sent_bytes": "Bodies of answers, by tenant.",
    "rows": "Rows written to the store, by tenant.",
    "connections": "Connections that environments made and that have ended, by tenant.",
    "network_sent_bytes": "Bytes that environments sent, by tenant.",
    "network_received_bytes": "Bytes that environments received, by tenant.",
}


def counted(receive: Receive, send: Send, account: Account) -> tuple[Receive, Send]:
    """The two ends of a connection, with what goes through them charged."""

    async def receive_counted() -> Message:
        message = await receive()
        account.received_bytes += len(
            message.get("body") or message.get("bytes") or message.get("text") or b""
        )
        return message

    def send_counted(message: Message) -> Awaitable[None]:
        account.sent_bytes += len(message.get("body") or message.get("bytes") or message.get("text") or b"")
        return send(message)

    return receive_counted, send_counted
