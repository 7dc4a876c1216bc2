"""What a policy allows: names, with what is below them, and ranges of addresses; each with its ports."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from skerry.egress.addresses import Address, Network, Ranges, parse_network
from skerry.egress.names import from_person
from skerry.errors import InvalidRequest

WEB = (80, 443)
"""The ports of a rule that says none."""
RULES_MAX = 256
NO_NETWORK = "this environment has no network"
KINDS = ("none", "allowlist", "public")
HINT = "write api.example.com, *.example.com, example.com:8443, example.com:*, 203.0.113.0/24:22 or [2001:db8::1]:22"

_PORT = re.compile(r"[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class Rule:
    """One entry of an allowlist. Either `name` or `network` is set."""

    text: str
    name: str = ""
    below: bool = False
    """`*.name`: what is below the name, not the name itself."""
    network: Network | None = None
    ports: tuple[int, ...] | None = WEB
    """None: all."""

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Raises InvalidRequest."""
        what, port = _split(text)
        ports: tuple[int, ...] | None = WEB
        if port == "*":
            ports = None
        elif port is not None:
            if not _PORT.fullmatch(port) or not 0 < int(port) < 1 << 16:
                raise InvalidRequest(f"{text!r}: there is no port {port!r}", hint="1 to 65535, or *")
            ports = (int(port),)
        if "/" in what or ":" in what or what.replace(".", "").isdigit():
            return cls(text, network=parse_network(what, "the rule"), ports=ports)
        below = what.startswith("*.")
        name = from_person(what.removeprefix("*.") if below else what)
        if name is None or (below and "." not in name):
            raise InvalidRequest(f"{text!r} is not a rule for the network", hint=HINT)
        return cls(text, name=name, below=below, ports=ports)

    def allows_name(self, name: str, port: int | None) -> bool:
        """`port` None: whichever."""
        if not self.name or not self._allows_port(port):
            return False
        return name.endswith(f".{self.name}") if self.below else name == self.name

    def allows_address(self, address: Address, port: int) -> bool:
        network = self.network
        return (
            network is not None
            and network.version == address.version
            and address in network
            and self._allows_port(port)
        )

    def _allows_port(self, port: int | None) -> bool:
        return self.ports is None or port is None or port in self.ports


def _split(text: str) -> tuple[str, str | None]:
    """What is allowed, and the port. An IPv6 address has a port only behind brackets or the length of a range."""
    if text.startswith("["):
        what, closed, rest = text[1:].partition("]")
        if not closed or ":" not in what or (rest and not rest.startswith(":")):
            raise InvalidRequest(f"{text!r} is not a rule for the network", hint=HINT)
        return what, rest[1:] if rest else None
    head, slash, tail = text.rpartition("/")
    if not slash and text.count(":") > 1:
        return text, None
    last, colon, port = tail.partition(":")
    return head + slash + last, port if colon else None


@dataclass(frozen=True, slots=True)
class Rules:
    """What one environment may reach. An address that is not public is never reached, whatever a rule says."""

    kind: str
    """`none`, `allowlist` or `public`."""
    allowed: tuple[Rule, ...]
    ranges: Ranges

    @classmethod
    def parse(cls, kind: str, allowed: Iterable[str], ranges: Ranges) -> Rules:
        """Raises InvalidRequest."""
        if kind not in KINDS:
            raise InvalidRequest(f"there is no network {kind!r}", hint=f"one of {', '.join(KINDS)}")
        rules = tuple(Rule.parse(text) for text in allowed)
        if len(rules) > RULES_MAX:
            raise InvalidRequest(f"{len(rules)} rules are too many", hint=f"at most {RULES_MAX}")
        if kind != "allowlist" and rules:
            raise InvalidRequest(
                f"what is allowed cannot be listed for the network {kind!r}", hint="ask for 'allowlist'"
            )
        return cls(kind, rules, ranges)

    def why_not_name(self, name: str, port: int | None) -> str:
        """Why a name is out of reach, for people; "" if it is not. Its addresses must be looked at as well."""
        if self.kind == "none":
            return NO_NETWORK
        if self.kind == "public":
            # What such a name stands for depends on the machine that asks: it is one of the inside.
            return "" if "." in name else f"{name} is not a public name"
        if any(rule.allows_name(name, port) for rule in self.allowed):
            return ""
        where = name if port is None else f"{name}:{port}"
        return f"{where} is not in this environment's allowlist"

    def why_not_address(self, address: Address, port: int, *, by_name: bool) -> str:
        """The same of an address: one that was asked for as such, or that an allowed name has.

        Whoever asked by name is not told the address: names of the inside have addresses of the inside.
        """
        if self.kind == "none":
            return NO_NETWORK
        if reason := self.ranges.why_not(address):
            return f"{'its address' if by_name else address} is never reached from here: {reason}"
        if by_name or self.kind == "public":
            return ""
        if any(rule.allows_address(address, port) for rule in self.allowed):
            return ""
        return f"{address} port {port} is not in this environment's allowlist"
