"""Who a request over TCP thinks it talks to, and which web page made it.

A web page can make a browser send requests anywhere. With a name of its own that suddenly means our address (DNS
rebinding) it could also read the answers: so only names that are ours are answered. And a browser says which page a
request comes from: none but our own may send any.
"""

from __future__ import annotations

from collections.abc import Container

from starlette.types import Scope

from skerry.errors import Denied, InvalidRequest

LOOPBACK = frozenset(("localhost", "127.0.0.1", "[::1]"))


def check(scope: Scope, names: Container[str]) -> None:
    """`names` are those that this daemon has, in lower case, addresses of IPv6 in brackets.

    Raises InvalidRequest, Denied.
    """
    hosts = [value for name, value in scope["headers"] if name == b"host"]
    if len(hosts) != 1 or not hosts[0]:
        raise InvalidRequest("a request must have one Host header")
    authority = hosts[0].decode("latin-1").lower()
    name = _name(authority)
    if name not in LOOPBACK and name not in names:
        raise Denied(
            f"this daemon is not {name!r}", hint="start it with --host-name for every name that it is to have"
        )
    for header, value in scope["headers"]:
        if header == b"origin" and value.decode("latin-1").lower() != f"{scope['scheme']}://{authority}":
            raise Denied("a page from elsewhere may not use this daemon", hint="its Origin must be the Host")


def _name(authority: str) -> str:
    """Without the port, and without the dot that a full name may end with."""
    if authority.startswith("["):
        return authority.partition("]")[0] + "]"
    return authority.partition(":")[0].removesuffix(".")
