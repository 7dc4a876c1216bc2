"""Who a request over TCP thinks it talks to, and which web page made it.

A web page can make a browser send requests anywhere. With a name of its own that suddenly means our address (DNS
rebinding) it could also read the answers: so only names that are ours are answered. And a browser says which page a
request comes from: none but our own may send any.
"""

from __future__ import annotations

import re
from collections.abc import Container

from starlette.types import Scope

from skerry.errors import Denied, InvalidRequest

LOOPBACK = frozenset(("localhost", "127.0.0.1", "[::1]"))


_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(?::([0-9]{1,5}))?", re.ASCII)
_ABSOLUTE = re.compile(rb"https?://([^/?#]*)", re.IGNORECASE)


def check(scope: Scope, target: bytes, names: Container[str]) -> None:
    """Check which host a request is for, and which page sent it.

    `target` is the request's target as it was sent. `names` are the names of this daemon, in lower case, IPv6 addresses
    in brackets. Raises InvalidRequest, Denied.
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
    # An absolute target says which host is meant, whatever the header says.
    if not target.startswith(b"/"):
        absolute = _ABSOLUTE.match(target)
        if absolute is None or absolute[1].decode("latin-1").lower() != authority:
            raise InvalidRequest(
                "the target of the request is not a path of the host in its Host header",
                hint="begin it with a slash",
            )
    for header, value in scope["headers"]:
        if header == b"origin" and value.decode("latin-1").lower() != f"{scope['scheme']}://{authority}":
            raise Denied("a page from elsewhere may not use this daemon", hint="its Origin must be the Host")


def _name(authority: str) -> str:
    """The host of `host` or `host:port`, without the dot that may end a full name. Raises InvalidRequest."""
    found = _AUTHORITY.fullmatch(authority)
    if found is None or (found[2] is not None and not 0 < int(found[2]) < 1 << 16):
        raise InvalidRequest("the Host header is not a host", hint="send `host` or `host:port`, nothing else")
    return found[1].removesuffix(".")
