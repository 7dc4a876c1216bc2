"""Who is at the other end of a connection. Each door puts this into the `state` of the ASGI scope."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from starlette.types import Scope

PEER = "skerry.peer"
CUT = "skerry.cut"
GONE = "skerry.gone"
SHARE = "skerry.share"
LINE = "skerry.line"


@dataclass(frozen=True, slots=True)
class Peer:
    address: str
    """For people and for the audit: `uid 1000`, `192.0.2.7:50312`."""
    trusted: bool
    """The kernel vouches for it: a process of our own user, or of root, on the unix socket. All others need a
    token."""

    @property
    def host(self) -> str:
        """The address without a port."""
        return self.address.rpartition(":")[0] or self.address


def peer_of(scope: Scope) -> Peer:
    return cast(Peer, scope["state"][PEER])


def cut_of(scope: Scope) -> Callable[[], None]:
    """What ends the connection at once, whatever is under way on it."""
    return cast(Callable[[], None], scope["state"][CUT])


def gone_of(scope: Scope) -> Callable[[], bool]:
    """What tells whether the client has closed the connection, also if the event loop has not noticed yet."""
    return cast(Callable[[], bool], scope["state"][GONE])


def take_share(scope: Scope, tenant: str) -> bool:
    """Count the connection as one of the tenant's. False if its share of the door's connections is used up."""
    share: Callable[[str], bool] | None = scope["state"].get(SHARE)
    return share is None or share(tenant)
