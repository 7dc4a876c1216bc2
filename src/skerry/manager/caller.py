"""The caller of a request: tenant, token and permissions."""

from __future__ import annotations

from dataclasses import dataclass, replace

VERBS = ("read", "create", "execute", "write", "delete", "images", "audit", "admin")
"""What a token can allow: look at things and read files, create environments, run things in them, write files,
delete environments, change images, read the tenant's audit, and run the daemon (tokens, quotas, all tenants)."""
DEFAULT_TENANT = "default"
OWN_TENANT = "skerry"
"""The daemon's own tenant, for work that serves all tenants. No token can be for it."""
_ALL = frozenset(VERBS)


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of one request. Without a token: the operator, on the daemon's own socket."""

    tenant: str = DEFAULT_TENANT
    verbs: frozenset[str] = _ALL
    token: str = ""
    """Its id."""
    peer: str = ""
    """Where the request came from: `uid 1000`, or an address."""
    request_id: str = ""
    traceparent: str = ""
    """The W3C trace context that came with the request, if any."""
    home: str = ""
    """The caller's own tenant, while it acts for another."""

    @property
    def trace_id(self) -> str:
        return self.traceparent[3:35]

    @property
    def itself(self) -> Caller:
        """The caller in its own tenant: actions on the daemon are audited there, whatever tenant it acts for."""
        return replace(self, tenant=self.home, home="") if self.home else self

    @property
    def who(self) -> str:
        """For people."""
        return f"token {self.token}" if self.token else self.peer
