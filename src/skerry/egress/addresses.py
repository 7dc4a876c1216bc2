"""Which addresses are public, and which never are.

From the IANA registries of special-purpose addresses for IPv4 and IPv6. What is not known to be public is not: of IPv6
only the range that is given out to networks counts, and no form that has an IPv4 address inside it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

from skerry.errors import InvalidRequest

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_NOT_PUBLIC = {
    "0.0.0.0/8": "this network",
    "10.0.0.0/8": "a private range",
    "100.64.0.0/10": "the range of carrier-grade NAT",
    "127.0.0.0/8": "loopback",
    "168.63.129.16/32": "the machine below those of Azure, with their settings and secrets",
    "169.254.0.0/16": "the link-local range, with the metadata of clouds",
    "172.16.0.0/12": "a private range",
    "192.0.0.0/24": "reserved for protocols",
    "192.0.2.0/24": "reserved for documentation",
    "192.31.196.0/24": "reserved for AS112",
    "192.52.193.0/24": "reserved for AMT",
    "192.88.99.0/24": "the range of 6to4 relays",
    "192.168.0.0/16": "a private range",
    "192.175.48.0/24": "reserved for AS112",
    "198.18.0.0/15": "reserved for benchmarks",
    "198.51.100.0/24": "reserved for documentation",
    "203.0.113.0/24": "reserved for documentation",
    "224.0.0.0/4": "multicast",
    "240.0.0.0/4": "reserved",
    "2001::/23": "reserved for protocols, Teredo among them",
    "2001:db8::/32": "reserved for documentation",
    "2002::/16": "the range of 6to4, with an IPv4 address inside",
    "2620:4f:8000::/48": "reserved for AS112",
    "3fff::/20": "reserved for documentation",
}
_GIVEN_OUT = ipaddress.ip_network("2000::/3")
_OTHERS = {
    "::1/128": "loopback",
    "::/128": "no address",
    "::ffff:0:0/96": "an IPv4 address in another form",
    "64:ff9b::/96": "the range of NAT64, with an IPv4 address inside",
    "64:ff9b:1::/48": "the range of NAT64, with an IPv4 address inside",
    "fc00::/7": "a unique local range",
    "fe80::/10": "the link-local range",
    "ff00::/8": "multicast",
}
_NEVER = [
    ipaddress.ip_network(text)
    for text in ("0.0.0.0/8", "127.0.0.0/8", "224.0.0.0/4", "::/128", "::1/128", "::ffff:0:0/96", "ff00::/8")
]
"""No operator can make these public: they are this machine, or mean another address than they say."""
_WORDS = [(ipaddress.ip_network(text), words) for text, words in {**_NOT_PUBLIC, **_OTHERS}.items()]


@dataclass(frozen=True, slots=True)
class Ranges:
    """What counts as public here: what an operator says, and else what the registries say."""

    public: tuple[Network, ...] = ()
    internal: tuple[Network, ...] = ()
    own: Callable[[], Container[Address]] = frozenset
    """The addresses of this machine, which are never public."""

    def why_not(self, address: Address) -> str:
        """Why an address is not public, for people; "" for one that is."""
        if address in self.own():
            return "an address of this machine"
        if _within(address, self.internal):
            return "internal here"
        if _within(address, self.public) and not _within(address, _NEVER):
            return ""
        if getattr(address, "scope_id", None):
            return "an address of one link"
        for network, words in _WORDS:
            if address.version == network.version and address in network:
                return words
        if address.version == 6 and address not in _GIVEN_OUT:
            return "not given out to anybody"
        return ""


def _within(address: Address, networks: Iterable[Network]) -> bool:
    return any(address.version == network.version and address in network for network in networks)


def parse_network(text: str, what: str) -> Network:
    """An address or a range, in the one way to write it. Raises InvalidRequest."""
    try:
        if "%" in text:
            raise ValueError("a range is not of one link")
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise InvalidRequest(f"{what} {text!r} is not an address or a range: {error}") from error
