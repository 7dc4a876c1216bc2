"""Messages for the kernel's netlink: what makes all traffic of a network namespace arrive at our own sockets.

Every address becomes a local one (a route of the type `local` for everything), and netfilter redirects every TCP
connection that does not go to loopback, and every DNS query, to our ports. Numbers from linux/rtnetlink.h and
linux/netfilter/nf_tables.h.

A virtual machine sends whatever frames it likes through a tap device. Of these only whole packets from the machine's
own address pass, and only TCP and DNS queries, to our sockets (`interceptions`). No connection is tracked there: the
kernel's table of them cannot be filled.

Everything is rate-limited in the sender's namespace. Connection tracking keeps a redirected connection for two minutes,
in memory that no cgroup is charged for and in a table that all namespaces share; a DNS query costs the daemon more
than its sender. Traffic to loopback is not tracked at all.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from socket import AF_INET, AF_INET6, IPPROTO_TCP, IPPROTO_UDP, inet_pton

ROUTE, NETFILTER = 0, 12
"""Protocols of netlink."""

_REQUEST, _ACK, _CREATE, _EXCLUSIVE, _REPLACE, _APPEND = 0x001, 0x004, 0x400, 0x200, 0x100, 0x800
_NESTED = 0x8000
_LOOPBACK = 1  # the first device of every network namespace

_NEW_LINK, _NEW_ROUTE = 16, 24
_LINK_UP, _LINK_WITHOUT_ARP, _LINK_ADDRESS = 0x1, 0x80, 1
_TABLE_LOCAL, _PROTOCOL_BOOT, _TYPE_UNICAST, _TYPE_LOCAL, _DESTINATION, _OUT_DEVICE = 255, 3, 1, 2, 1, 4
_SCOPE_LINK, _SCOPE_HOST = 253, 254

TAP_INDEX, TAP_NAME = 1000, "tap0"
MACHINE_ADDRESSES: dict[int, str] = {AF_INET: "192.0.2.2", AF_INET6: "2001:db8::2"}
"""Of a virtual machine, from the ranges for documentation."""
MAC = bytes((2, 0, 0, 0, 0, 2))
"""Of the machine's device and of the tap: a device without ARP sends to its own address."""

_SUBSYSTEM = 10
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_NEW_TABLE, _DELETE_TABLE, _NEW_CHAIN, _NEW_RULE = (_SUBSYSTEM << 8 | number for number in (0, 2, 3, 6))
_PREROUTING, _OUTPUT, _DROP, _ACCEPT = 0, 3, 0, 1
_FIRST, _BEFORE_TRACKING, _AFTER_TRACKING, _REDIRECTING = -450, -300, -150, -100
_VERDICT = 0  # the register for it
_META_L4PROTO = 16
_STATE, _NEW = 0, struct.pack("=I", 8)
_NETWORK_HEADER, _TRANSPORT_HEADER = 1, 2
_EQUAL, _NOT_EQUAL, _AT_LEAST = 0, 1, 5
_REGISTER = 1

_TABLE = b"skerry\0"
NEW_A_SECOND, NEW_AT_ONCE = 1000, 4000
"""Connections, and whatever else begins."""
QUERIES_A_SECOND, QUERIES_AT_ONCE = 1000, 2000


def routes(families: Iterable[int]) -> bytes:
    """Routes that make every address local."""
    return b"".join(_route(family, b"", _LOOPBACK, _SCOPE_HOST, _TYPE_LOCAL) for family in families)


def machine(families: Iterable[int]) -> bytes:
    """Opens the tap, after `routes`, with a route to the machine behind it."""
    flags = _LINK_UP | _LINK_WITHOUT_ARP
    link = struct.pack("=BBHiII", 0, 0, 0, TAP_INDEX, flags, flags)
    messages = [_message(_NEW_LINK, 0, link + _attribute(_LINK_ADDRESS, MAC))]
    for family in families:
        scope = _SCOPE_LINK if family == AF_INET else 0
        messages.append(_route(family, _machine(family), TAP_INDEX, scope, _TYPE_UNICAST))
    return b"".join(messages)


def _machine(family: int) -> bytes:
    return inet_pton(family, MACHINE_ADDRESSES[family])


def _route(family: int, to: bytes, device: int, scope: int, kind: int) -> bytes:
    """In the table of local addresses, which comes before the others."""
    head = struct.pack("=BBBBBBBBI", family, 8 * len(to), 0, 0, _TABLE_LOCAL, _PROTOCOL_BOOT, scope, kind, 0)
    to = _attribute(_DESTINATION, to) if to else b""
    return _message(
        _NEW_ROUTE, _CREATE | _REPLACE, head + to + _attribute(_OUT_DEVICE, struct.pack("=I", device))
    )


def redirections(families: Iterable[int], tcp_port: int, dns_port: int) -> bytes:
    """Rules that redirect TCP to one port of loopback and DNS to another."""
    messages = [_batch(_BATCH_BEGIN)]
    for family in families:
        messages += _fresh_table(family)
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


def interceptions(families: Iterable[int], tcp_port: int) -> bytes:
    """Rules that give the TCP of a machine to the socket at a port, let DNS queries pass, and nothing else.

    For sockets at every address. Before fragments are put together, so that none are.
    """
    messages = [_batch(_BATCH_BEGIN)]
    for family in families:
        messages += _fresh_table(family)
        four = family == AF_INET
        # Without options and extension headers the protocol is found at a fixed place.
        protocol = 9 if four else 6
        dns = (*_header(protocol, _EQUAL, bytes((IPPROTO_UDP,))), *_to_port(53))
        tcp = _header(protocol, _EQUAL, bytes((IPPROTO_TCP,)))
        refused: list[tuple[bytes, ...]] = [
            _header(12 if four else 8, _NOT_EQUAL, _machine(family)),
            # The only address that is not local: it would be sent back.
            _header(16 if four else 24, _EQUAL, _machine(family)),
            _header(16 if four else 24, _AT_LEAST, b"\xe0" if four else b"\xff"),
        ]
        if four:
            fragment = (_payload(_NETWORK_HEADER, 6, 2), _masked(b"\x3f\xff"), _compare(_NOT_EQUAL, bytes(2)))
            refused += [_header(0, _NOT_EQUAL, b"\x45"), _header(16, _EQUAL, b"\x7f"), fragment]
        syn = (_payload(_TRANSPORT_HEADER, 13, 1), _masked(b"\x12"), _compare(_EQUAL, b"\x02"))
        messages += _chain(
            family,
            b"input\0",
            b"filter\0",
            _FIRST,
            *((*match, _verdict(_DROP)) for match in refused),
            (*dns, *_drop_above(QUERIES_A_SECOND, QUERIES_AT_ONCE)),
            (*dns, _verdict(_ACCEPT)),
            (*tcp, *syn, *_drop_above(NEW_A_SECOND, NEW_AT_ONCE)),
            (*tcp, *_give_to(family, tcp_port), _verdict(_ACCEPT)),
            hook=_PREROUTING,
            otherwise=_DROP,
        )
    messages.append(_batch(_BATCH_END))
    return b"".join(messages)


def _fresh_table(family: int) -> list[bytes]:
    """A table that is there, an earlier daemon's, goes; one can only be deleted if it is there."""
    return [
        _netfilter(kind, family, _attribute(1, _TABLE)) for kind in (_NEW_TABLE, _DELETE_TABLE, _NEW_TABLE)
    ]


def _chain(
    family: int,
    name: bytes,
    kind: bytes,
    priority: int,
    *rules: Iterable[bytes],
    hook: int = _OUTPUT,
    otherwise: int = _ACCEPT,
) -> list[bytes]:
    """A chain with its rules, for outgoing packets unless told otherwise."""
    place = _attribute(1, _big(hook)) + _attribute(2, struct.pack(">i", priority))
    made = (
        _attribute(1, _TABLE)
        + _attribute(3, name)
        + _attribute(4 | _NESTED, place)
        + _attribute(5, _big(otherwise))
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


def _give_to(family: int, port: int) -> tuple[bytes, bytes]:
    """To the socket of the connection if there is one, else to the one that listens at the port."""
    value = _attribute(2 | _NESTED, _attribute(1, struct.pack(">H", port)))
    return (
        _expression(b"immediate\0", _attribute(1, _big(_REGISTER)) + value),
        _expression(b"tproxy\0", _attribute(1, _big(family)) + _attribute(3, _big(_REGISTER))),
    )


def _header(offset: int, how: int, value: bytes) -> tuple[bytes, bytes]:
    """Compares bytes of the network header."""
    return _payload(_NETWORK_HEADER, offset, len(value)), _compare(how, value)


def _masked(mask: bytes) -> bytes:
    """The register, of as many bytes, with only these bits."""
    zero = _attribute(1, bytes(len(mask)))
    values = _attribute(1, _big(_REGISTER)) + _attribute(2, _big(_REGISTER)) + _attribute(3, _big(len(mask)))
    return _expression(
        b"bitwise\0", values + _attribute(4 | _NESTED, _attribute(1, mask)) + _attribute(5 | _NESTED, zero)
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
