"""Selects the daemon of a client: that of a home on this machine, or one with a URL.

Precedence: argument, `SKERRY_URL`, `SKERRY_CONTEXT`, `SKERRY_HOME`, current context (`skerry context use`), default
home. Token and CA come from the same source as the URL; if missing there, from `SKERRY_TOKEN` and `SKERRY_CA`.
"""

from __future__ import annotations

import os

from skerry.client import autostart
from skerry.client.contexts import DEFAULT, Contexts
from skerry.errors import InvalidRequest
from skerry.settings import Home

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

    from skerry.client.remote import Remote
    from skerry.client.tls import Tls


class Local:
    """The daemon of a home."""

    __slots__ = ("home",)

    name = DEFAULT
    token = ""
    ca = ""
    host = "skerry"

    def __init__(self, home: Home) -> None:
        self.home = home

    @property
    def url(self) -> str:
        return f"unix://{self.home.socket}"

    def connect(self, start: bool) -> tuple[socket.socket, Tls | None]:
        """Raises DaemonUnavailable, Denied, InvalidRequest, and the error that kept the daemon from starting."""
        return autostart.connect(self.home, start=start), None


if TYPE_CHECKING:
    Endpoint = Local | Remote


def find(home: str | None = None, url: str | None = None, token: str | None = None) -> Endpoint:
    """The selected endpoint. Raises InvalidRequest (contradictory or unsafe values), NotFound (unknown context)."""
    if home is not None and url is not None:
        raise InvalidRequest("pass home or url, not both")
    name, context = ("", {"url": url or ""}) if home is not None or url else _chosen()
    if not context["url"]:
        if token:
            raise InvalidRequest("a token needs a URL", hint="pass url as well, or set SKERRY_URL")
        return Local(Home(home))
    from skerry.client.remote import Remote

    if token is None:
        token = context.get("token") or os.environ.get("SKERRY_TOKEN", "")
    return Remote(context["url"], token, context.get("ca") or os.environ.get("SKERRY_CA", ""), name)


def _chosen() -> tuple[str, dict[str, str]]:
    """Name and entry of the context selected by the environment; its URL is empty for a home."""
    if url := os.environ.get("SKERRY_URL"):
        return "", {"url": url}
    name = os.environ.get("SKERRY_CONTEXT", "")
    if name != DEFAULT and (name or not os.environ.get("SKERRY_HOME")):
        contexts = Contexts.load()
        name = name or contexts.current
        if name != DEFAULT:
            return name, contexts.get(name)
    return DEFAULT, {"url": ""}
