"""Ethernet frames, as a machine could send them through its tap, and what comes back."""

from __future__ import annotations

import ipaddress
import struct
from socket import AF_INET, AF_INET6, IPPROTO_ICMPV6, IPPROTO_TCP, IPPROTO_UDP, inet_pton

from skerry.host.netlink import MAC, MACHINE_ADDRESSES

HERE = {4: MACHINE_ADDRESSES[AF_INET], 6: MACHINE_ADDRESSES[AF_INET6]}
"""The machine's addresses, by version."""
IPV4, IPV6, ARP = 0x0800, 0x86DD, 0x0806
SYN, SYN_ACK, ACK, RST = 0x02, 0x12, 0x10, 0x04


def ethernet(kind: int, content: bytes, to: bytes = MAC) -> bytes:
    return to + MAC + struct.pack(">H", kind) + content


def packet(
    protocol: int,
    content: bytes,
    to: str,
    *,
    source: str = "",
    fragment: int = 0,
    options: bytes = b"",
    extension: int | None = None,
) -> bytes:
    """A frame with it. `options` and `fragment` (flags and offset) of IPv4; of IPv6, `content` may begin with a header
    of type `extension`."""
    version = ipaddress.ip_address(to).version
    source = source or HERE[version]
    if version == 6:
        kind = protocol if extension is None else extension
        head = struct.pack(">IHBB", 0x60000000, len(content), kind, 64)
        return ethernet(IPV6, head + inet_pton(AF_INET6, source) + inet_pton(AF_INET6, to) + content)
    words = 5 + len(options) // 4
    head = struct.pack(">BBHHHBBH", 0x40 | words, 0, 4 * words + len(content), 7, fragment, 64, protocol, 0)
    head += inet_pton(AF_INET, source) + inet_pton(AF_INET, to) + options
    return ethernet(IPV4, head[:10] + struct.pack(">H", _checksum(head)) + head[12:] + content)


def udp(to: str, port: int, data: bytes, *, source: str = "", from_port: int = 4000) -> bytes:
    """A datagram, to be the content of a packet."""
    head = struct.pack(">HHHH", from_port, port, 8 + len(data), 0)
    return _with_checksum(IPPROTO_UDP, head + data, 6, source, to)


def tcp(
    to: str,
    port: int,
    flags: int,
    *,
    source: str = "",
    from_port: int = 4000,
    sequence: int = 1,
    ack: int = 0,
) -> bytes:
    head = struct.pack(">HHIIBBHHH", from_port, port, sequence, ack, 0x50, flags, 65535, 0, 0)
    return _with_checksum(IPPROTO_TCP, head, 16, source, to)


def icmp6(to: str, message: bytes, *, source: str = "") -> bytes:
    return _with_checksum(IPPROTO_ICMPV6, message, 2, source, to)


def query(to: str, data: bytes, *, source: str = "", from_port: int = 4000) -> bytes:
    return packet(IPPROTO_UDP, udp(to, 53, data, source=source, from_port=from_port), to, source=source)


def connection(to: str, port: int, flags: int = SYN, *, source: str = "", **more: int) -> bytes:
    return packet(IPPROTO_TCP, tcp(to, port, flags, source=source, **more), to, source=source)


class Answer:
    """A frame that came back."""

    def __init__(self, frame: bytes) -> None:
        self.kind = struct.unpack_from(">H", frame, 12)[0]
        self.frame = frame
        self.protocol, self.source, self.to, self.content = -1, "", "", b""
        if self.kind == IPV4:
            self.protocol, self.content = frame[23], frame[14 + 4 * (frame[14] & 15) :]
            self.source, self.to = (str(ipaddress.IPv4Address(frame[at : at + 4])) for at in (26, 30))
        elif self.kind == IPV6:
            self.protocol, self.content = frame[20], frame[54:]
            self.source, self.to = (str(ipaddress.IPv6Address(frame[at : at + 16])) for at in (22, 38))

    @property
    def ports(self) -> tuple[int, int]:
        """From and to."""
        found: tuple[int, int] = struct.unpack_from(">HH", self.content)
        return found

    @property
    def flags(self) -> int:
        return self.content[13]

    @property
    def sequence(self) -> int:
        found: int = struct.unpack_from(">I", self.content, 4)[0]
        return found

    def __repr__(self) -> str:
        return f"{self.kind:04x} {self.protocol} {self.source} {self.to} {self.content.hex()}"


def _checksum(data: bytes) -> int:
    padded = data + bytes(len(data) % 2)
    total: int = sum(struct.unpack(f">{len(padded) // 2}H", padded))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def _with_checksum(protocol: int, content: bytes, at: int, source: str, to: str) -> bytes:
    version = ipaddress.ip_address(to).version
    addresses = b"".join(ipaddress.ip_address(address).packed for address in (source or HERE[version], to))
    summed = _checksum(addresses + struct.pack(">II", len(content), protocol) + content)
    return content[:at] + struct.pack(">H", summed or 0xFFFF) + content[at + 2 :]
