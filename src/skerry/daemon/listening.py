"""Opening the doors for others: `--listen HOST:PORT`, with TLS wherever somebody could listen in."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections.abc import Sequence

from skerry.daemon.doors import TcpDoor
from skerry.errors import InvalidRequest

BACKLOG = 1024


def open_doors(
    listen: Sequence[str], names: Sequence[str], cert: str | None, key: str | None
) -> list[TcpDoor]:
    """A door for each address that one of `listen` (`HOST:PORT`) means; `names` are the daemon's other names.

    Raises InvalidRequest: also for an address that is not loopback without TLS, as others could read the tokens.
    """
    tls = _context(cert, key)
    doors: list[TcpDoor] = []
    try:
        for place in listen:
            host, _ = _parse(place)
            for family, address in _addresses(place, tls is not None):
                host_name = f"[{host}]" if ":" in host else host
                doors.append(TcpDoor(_bind(place, family, address), [host_name, *names], tls))
    except BaseException:
        for door in doors:
            door.sock.close()
        raise
    return doors


def grpc_addresses(place: str, *, secure: bool) -> list[str]:
    """All that `HOST:PORT` means, as numbers. Raises InvalidRequest as `open_doors()` does."""
    found = (address for _, address in _addresses(place, secure))
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in found]


def _addresses(place: str, secure: bool) -> list[tuple[int, tuple[str, int]]]:
    """(family, address), each once."""
    found = _resolve(place, *_parse(place))
    if not secure and not all(ipaddress.ip_address(address[0]).is_loopback for _, address in found):
        raise InvalidRequest(
            f"cannot listen on {place} without TLS: others could read the tokens",
            hint="give --tls-cert and --tls-key, or listen on 127.0.0.1",
        )
    return found


def _context(cert: str | None, key: str | None) -> ssl.SSLContext | None:
    if not cert and not key:
        return None
    if not cert or not key:
        raise InvalidRequest("--tls-cert and --tls-key go together")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(cert, key, password=lambda: "")  # nobody is there to be asked for one
    except OSError as error:  # an SSLError is one
        raise InvalidRequest(
            f"cannot use the certificate {cert} with the key {key}: {error.strerror or error}",
            hint="both must be files in PEM form, and the key without a password",
        ) from error
    return context


def _parse(place: str) -> tuple[str, int]:
    host, colon, port = place.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not colon or not host or not (port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        raise InvalidRequest(
            f"{place!r} is not an address to listen on",
            hint="write HOST:PORT, e.g. 127.0.0.1:7443 or [::1]:7443",
        )
    return host, int(port)


def _resolve(place: str, host: str, port: int) -> list[tuple[int, tuple[str, int]]]:
    try:
        found = socket.getaddrinfo(host.encode(), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise InvalidRequest(f"cannot listen on {place}: {error.strerror}") from error
    return list(dict.fromkeys((int(family), (str(to[0]), port)) for family, _, _, _, to in found))


def _bind(place: str, family: int, address: tuple[str, int]) -> socket.socket:
    try:
        return socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as error:
        raise InvalidRequest(f"cannot listen on {place}: {error.strerror}") from error
