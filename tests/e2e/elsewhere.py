"""A daemon for others: with a door beside its unix socket, and a token for whoever comes in there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests import certificates, support
from tests.integration.daemon import Daemon, started

DOORS = ("unix", "tcp", "tls")
VERBS = ["read", "create", "execute", "write", "delete", "images", "audit", "admin"]


@dataclass(frozen=True)
class Elsewhere:
    """`variables` are what a client needs to get in."""

    door: str
    daemon: Daemon
    url: str
    token_id: str
    variables: dict[str, str]

    @property
    def token(self) -> str:
        return self.variables["SKERRY_TOKEN"]


@contextmanager
def daemon_for_others(door: str, *options: str) -> Iterator[Elsewhere]:
    """A daemon that is reached through this door with a token that allows everything."""
    more = {"unix": (), "tcp": ("--listen", "127.0.0.1:0"), "tls": ("--listen", "127.0.0.1:0", *_tls())}[door]
    with support.temporary_home() as home, started(home, "--foreground", *more, *options) as daemon:
        found = re.findall(r"listening on (\S+)", (home / "daemon.log").read_text())
        made = daemon.call("POST", "/tokens", {"name": "test", "verbs": VERBS}, expect=201)
        variables = {"SKERRY_URL": found[-1], "SKERRY_TOKEN": made["token"]}
        if door == "tls":
            variables["SKERRY_CA"] = certificates.make().ca
        yield Elsewhere(door, daemon, found[-1], made["id"], variables)


def _tls() -> tuple[str, ...]:
    made = certificates.make()
    return "--tls-cert", made.cert, "--tls-key", made.key
