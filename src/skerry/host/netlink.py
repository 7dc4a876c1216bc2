"""Messages for the kernel's netlink: what makes all traffic of a network namespace arrive at our own sockets.

Every address becomes a local one (a route of the type `local` for everything), and netfilter redirects every TCP
connection that does not go to loopback, and every DNS query, to our ports. Numbers from linux/rtnetlink.h and
linux/netfilter/nf_tables.h.

Everything is rate-limited in the sender's namespace. Connection tracking keeps a redirected connection for two minutes,
in memory that no cgroup is charged for and in a table that all namespaces share; a DNS query costs the daemon more
than its sender. Traffic to loopback is not tracked at all.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from socket import AF_INET, IPPROTO_TCP, IPPROTO_UDP

ROUTE, NETFILTER = 0, 12
"""Protocols of netlink."""

_REQUEST, _ACK, _CREATE, _EXCLUSIVE, _REPLACE, _APPEND = 0x001, 0x004, 0x400, 0x200, 0x100, 0x800
_NESTED = 0x8000
_LOOPBACK = 1  # the first device of every network namespace

_NEW_ROUTE = 24
_TABLE_LOCAL, _PROTOCOL_BOOT, _SCOPE_HOST, _TYPE_LOCAL, _OUT_DEVICE = 255, 3, 254, 2, 4

_SUBSYSTEM = 10
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_NEW_TABLE, _DELETE_TABLE, _NEW_CHAIN, _NEW_RULE = (_SUBSYSTEM << 8 | number for number in (0, 2, 3, 6))
_OUTPUT, _DROP, _ACCEPT = 3, 0, 1
_BEFORE_TRACKING, _AFTER_TRACKING, _REDIRECTING = -300, -150, -100
_VERDICT = 0  # the register for it
_META_L4PROTO = 16
_STATE, _NEW = 0, struct.pack("=I", 8)
_NETWORK_HEADER, _TRANSPORT_HEADER = 1, 2
_EQUAL, _NOT_EQUAL = 0, 1
_REGISTER = 1

_TABLE = b"skerry\0"
NEW_A_SECOND, NEW_AT_ONCE = 1000, 4000
"""Connections, and whatever else begins."""
QUERIES_A_SECOND, QUERIES_AT_ONCE = 1000, 2000


def routes(families: Iterable[int]) -> bytes:
    """Routes that make every address local."""
    return b"".join(
        _message(
            _NEW_ROUTE,
            _CREATE | _REPLACE,
            struct.pack(
                "=BBBBBBBBI", family, 0, 0, 0, _TABLE_LOCAL, _PROTOCOL_BOOT, _SCOPE_HOST, _TYPE_LOCAL, 0
            )
            + _attribute(_OUT_DEVICE, struct.pack("=I", _LOOPBACK)),
        )
        for family in families
    )


def redirections(families: Iterable[int], tcp_port: int, dns_port: int) -> bytes:
    """Rules that redirect TCP to one port of loopback and DNS to another."""
    messages = [_batch(_BATCH_BEGIN)]
    for family in families:
        # A table that is there, an earlier daemon's, goes; one can only be deleted if it is there.
        for kind in (_NEW_TABLE, _DELETE_TABLE, _NEW_TABLE):
            messages.append(_netfilter(kind, family, _attribute(1, _TABLE)))
        elsewhere, dns = _loopback(family, _NOT_EQUAL), (*_protocol(IPPROTO_UDP), *_to_port(53))
        too_many_queries = (*dns, *_drop_above(QUERIES_A_SECOND, QUERIES_AT_ONCE))
        to_itself = (*_loopback(family, _EQUAL), _expression(b"notrack\0", b""))
        # Our answers go to loopback as well, by IPv6, and must find their way back.
        ours = [(*_from_port(port), _verdict(_ACCEPT)) for port in (tcp_port, dns_port)]
        messages += _chain(
            family, b"raw\0", b"filter\0", _BEFORE_TRACKING, too_many_queries, *ours, to_itself
        )
        too_many = (*_new(), *_drop_above(NEW_A_SECOND, NEW_AT_ONCE))
        messages += _chain(family, b"new\0", b"filter\0", _AFTER_TRACKING, too_many)
        queries = (*elsewhere, *dns, *_redirect(dns_port))
        connections = (*elsewhere, *_protocol(IPPROTO_TCP), *_redirect(tcp_port))
        messages += _chain(family, b"output\0", b"nat\0", _REDIRECTING, queries, connections)
    messages.append(_batch(_BATCH_END))
    return b"".join(messages)


def _chain(family: int, name: bytes, kind: bytes, priority: int, *rules: Iterable[bytes]) -> list[bytes]:
    """A chain for outgoing packets, with its rules."""
    hook = _attribute(1, _big(_OUTPUT)) + _attribute(2, struct.pack(">i", priority))
    made = (
        _attribute(1, _TABLE)
        + _attribute(3, name)
        + _attribute(4 | _NESTED, hook)
        + _attribute(5, _big(_ACCEPT))
        + _attribute(7, kind)
    )
    return [_netfilter(_NEW_CHAIN, family, made), *(_rule(family, name, rule) for rule in rules)]


def _message(kind: int, flags: int, body: bytes) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, _REQUEST | _ACK | flags, 0, 0) + body


def _batch(kind: int) -> bytes:
    body = struct.pack(">BBH", 0, 0, _SUBSYSTEM)
    return struct.pack("=IHHII", 16 + len(body), kind, _REQUEST, 0, 0) + body


def _netfilter(kind: int, family: int, attributes: bytes) -> bytes:
    return _message(kind, _CREATE | _APPEND, struct.pack(">BBH", family, 0, 0) + attributes)


def _rule(family: int, chain: bytes, expressions: Iterable[bytes]) -> bytes:
    listed = b"".join(_attribute(1 | _NESTED, expression) for expression in expressions)
    return _netfilter(
        _NEW_RULE, family, _attribute(1, _TABLE) + _attribute(2, chain) + _attribute(4 | _NESTED, listed)
    )


def _loopback(family: int, how: int) -> tuple[bytes, bytes]:
    """127/8 by its first byte, ::1 as a whole."""
    if family == AF_INET:
        return _payload(_NETWORK_HEADER, 16, 1), _compare(how, b"\x7f")
    return _payload(_NETWORK_HEADER, 24, 16), _compare(how, bytes(15) + b"\x01")


def _new() -> tuple[bytes, bytes]:
    """Matches the first packet of a connection."""
    state = _expression(b"ct\0", _attribute(1, _big(_REGISTER)) + _attribute(2, _big(_STATE)))
    return state, _compare(_EQUAL, _NEW)


def _drop_above(a_second: int, at_once: int) -> tuple[bytes, bytes]:
    above = 1
    limit = (
        _attribute(1, struct.pack(">Q", a_second))
        + _attribute(2, struct.pack(">Q", 1))
        + _attribute(3, _big(at_once))
        + _attribute(5, _big(above))
    )
    return _expression(b"limit\0", limit), _verdict(_DROP)


def _verdict(code: int) -> bytes:
    value = _attribute(2 | _NESTED, _attribute(2 | _NESTED, _attribute(1, _big(code))))
    return _expression(b"immediate\0", _attribute(1, _big(_VERDICT)) + value)


def _protocol(number: int) -> tuple[bytes, bytes]:
    meta = _expression(b"meta\0", _attribute(1, _big(_REGISTER)) + _attribute(2, _big(_META_L4PROTO)))
    return meta, _compare(_EQUAL, bytes((number,)))


def _from_port(port: int) -> tuple[bytes, bytes]:
    return _payload(_TRANSPORT_HEADER, 0, 2), _compare(_EQUAL, struct.pack(">H", port))


def _to_port(port: int) -> tuple[bytes, bytes]:
    return _payload(_TRANSPORT_HEADER, 2, 2), _compare(_EQUAL, struct.pack(">H", port))


def _redirect(port: int) -> tuple[bytes, bytes]:
    value = _attribute(2 | _NESTED, _attribute(1, struct.pack(">H", port)))
    return (
        _expression(b"immediate\0", _attribute(1, _big(_REGISTER)) + value),
        _expression(b"redir\0", _attribute(1, _big(_REGISTER))),
    )


def _payload(base: int, offset: int, length: int) -> bytes:
    values = (_REGISTER, base, offset, length)
    return _expression(
        b"payload\0", b"".join(_attribute(kind, _big(value)) for kind, value in enumerate(values, 1))
    )


def _compare(how: int, value: bytes) -> bytes:
    return _expression(
        b"cmp\0",
        _attribute(1, _big(_REGISTER))
        + _attribute(2, _big(how))
        + _attribute(3 | _NESTED, _attribute(1, value)),
    )


def _expression(name: bytes, data: bytes) -> bytes:
    return _attribute(1, name) + _attribute(2 | _NESTED, data)


def _attribute(kind: int, value: bytes) -> bytes:
    padding = -len(value) % 4
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(padding)


def _big(number: int) -> bytes:
    return struct.pack(">I", number)
