"""A daemon with a URL: `https://host:port`, `http://127.0.0.1:port`, `unix:///path/daemon.sock`."""

from __future__ import annotations

import socket

from skerry.client import autostart
from skerry.errors import DaemonUnavailable, Denied, InvalidRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl
    from typing import Any

    from skerry.client.tls import Tls

CONNECT_SECONDS = 10.0
PORTS = {"http": 80, "https": 443}
_FORMS = "a URL is https://HOST[:PORT], http://127.0.0.1:PORT or unix:///PATH/daemon.sock"


class Remote:
    """Its messages never contain the token.

    Raises InvalidRequest for an invalid URL or token, and for a token that would be sent unencrypted over a network.
    """

    __slots__ = ("_context", "_name", "_path", "_port", "_tls", "ca", "host", "name", "token", "url")

    home = None

    def __init__(self, url: str, token: str = "", ca: str = "", name: str = "") -> None:
        scheme, rest = _split(url)
        self.name = name
        self.url = url
        self.token = token
        self.ca = ca
        self.host = "skerry"
        """The value of the Host header."""
        self._path = rest if scheme == "unix" else ""
        self._tls = scheme == "https"
        self._context: ssl.SSLContext | None = None
        if scheme != "unix":
            self._name, port = _authority(rest)
            self._port = port or PORTS[scheme]
            name = f"[{self._name}]" if ":" in self._name else self._name
            self.host = name if self._port == PORTS[scheme] else f"{name}:{self._port}"
            self.url = f"{scheme}://{self.host}"
        if any(not "!" <= character <= "~" for character in token):
            raise InvalidRequest("the token contains invalid characters", hint="does it contain a space?")
        if token and scheme == "http" and not is_loopback(self._name):
            raise InvalidRequest(
                f"refusing to send a token unencrypted to {self.url}",
                hint="use https, or an ssh tunnel to a local port",
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return Remote, (self.url, self.token, self.ca, self.name)

    def connect(self, start: bool) -> tuple[socket.socket, Tls | None]:
        """Connect. `start` is ignored: a remote daemon is never started.

        Raises DaemonUnavailable, Denied, InvalidRequest for a CA that cannot be read.
        """
        try:
            if self._path:
                return autostart.dial(self._path), None
            # As bytes: a str would load the IDNA codec, which raises errors of its own.
            address: Any = (self._name.encode(), self._port)
            sock = socket.create_connection(address, CONNECT_SECONDS)
        except OSError as error:
            raise self._unreachable(error) from error
        try:
            _keep_alive(sock)
            tls = self._encrypt(sock) if self._tls else None
            sock.settimeout(None)
        except BaseException:
            sock.close()
            raise
        return sock, tls

    def _encrypt(self, sock: socket.socket) -> Tls:
        from ssl import SSLCertVerificationError

        from skerry.client.tls import Tls, make_context

        if self._context is None:
            self._context = make_context(self.ca)
        tls = Tls(self._context, self._name)
        try:
            tls.handshake(sock)
        except SSLCertVerificationError as error:
            raise Denied(
                f"cannot verify the certificate of {self.url}: {error.verify_message}",
                hint="for a private CA, set SKERRY_CA to its certificate file",
            ) from error
        except OSError as error:
            raise self._unreachable(error) from error
        return tls

    def _unreachable(self, error: OSError) -> DaemonUnavailable:
        return DaemonUnavailable(
            f"cannot reach {self.url}: {error.strerror or error}",
            hint="is the URL right, and a daemon listening there (skerry serve --listen)?",
        )


def is_loopback(name: str) -> bool:
    """Whether this is a loopback address or `localhost`."""
    if name == "localhost" or name == "::1":
        return True
    try:
        return socket.inet_aton(name)[0] == 127 and name.count(".") == 3
    except OSError:
        return False


def _split(url: str) -> tuple[str, str]:
    """(scheme, rest). Messages do not repeat a URL that could contain a password."""
    scheme, separator, rest = url.partition("://")
    scheme = scheme.lower()
    if not separator or (scheme not in PORTS and scheme != "unix"):
        raise InvalidRequest("not the URL of a daemon", hint=_FORMS)
    if scheme == "unix":
        if not rest.startswith("/"):
            raise InvalidRequest(f"{url} has no absolute path", hint=_FORMS)
        return scheme, rest
    if "@" in rest:
        raise InvalidRequest("the URL must not contain a user name", hint="pass the token in SKERRY_TOKEN")
    return scheme, rest.removesuffix("/")


def _authority(text: str) -> tuple[str, int]:
    """(host, port or 0)"""
    if text.startswith("["):
        name, bracket, port = text[1:].partition("]")
        try:
            socket.inet_pton(socket.AF_INET6, name)
        except OSError:
            bracket = ""
    else:
        name, colon, port = text.partition(":")
        bracket, port = "]", colon + port
    fine = bracket and name and all(c.isascii() and (c.isalnum() or c in "-._:") for c in name)
    digits = port[1:]
    if port and not (
        port[0] == ":" and digits.isascii() and digits.isdecimal() and 0 < int(digits) < 1 << 16
    ):
        fine = ""
    if not fine:
        raise InvalidRequest(f"{text!r} is not a host and a port", hint=_FORMS)
    return name.lower(), int(digits or 0)


def _keep_alive(sock: socket.socket) -> None:
    """Send without delay, and notice within a minute that a silent peer is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
