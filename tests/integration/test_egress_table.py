"""Every destination, in every odd spelling: where it comes out, with an allowlist and with all that is public.

Every address of the internet here listens, also those that nobody should reach, and so do the host and a neighbour.
"""

from __future__ import annotations

import pytest

from skerry.egress.names import canonical, from_person
from tests.integration.egress_world import (
    API,
    GATEWAY,
    HOST,
    World,
    in_a_network_of_its_own,
    neighbour,
    world,
)

pytestmark = pytest.mark.root

SITE = "93.184.216.34"
SITE6 = "2606:2800:220:1::34"
ALLOW = (
    "example.com",
    "*.wild.example",
    "alt.example:8443",
    "any.example:*",
    "bücher.example",
    "*.inward.example:*",
    "*.public.example",
    "metadata.google.internal",
    "localhost",
    "printer",
    f"{SITE}:80",
    "2606:2800:220:1::/64:80",
    "10.0.0.0/8:*",
    "169.254.169.254",
    "127.0.0.0/8:*",
    "[::1]:*",
    "::ffff:0:0/96",
    "64:ff9b::/96",
    f"{HOST[1]}:*",
)
SPELLINGS = (
    *("93.184.216.34", "1572395042", "0x5db8d822", "0135.0270.0330.042", "93.12113954", "93.184.55330"),
    *("0x5D.184.0xd8.042", "::ffff:93.184.216.34", "::ffff:5db8:d822"),
)
"""Of one public address, which is allowed."""
PUBLIC = (
    *(
        "1.0.0.1",
        "9.255.255.255",
        "11.0.0.1",
        "100.63.255.255",
        "100.128.0.1",
        "126.255.255.255",
        "128.0.0.1",
    ),
    *(
        "168.63.129.15",
        "168.63.129.17",
        "169.253.255.255",
        "169.255.0.1",
        "172.15.255.255",
        "172.32.0.1",
        "192.0.1.1",
        "192.0.3.1",
    ),
    *("192.31.195.255", "192.31.197.1", "192.52.192.255", "192.52.194.1", "192.88.98.255", "192.88.100.1"),
    *("192.167.255.255", "192.169.0.1", "192.175.47.255", "192.175.49.1", "198.17.255.255", "198.20.0.1"),
    *("198.51.99.255", "198.51.101.1", "203.0.112.255", "203.0.114.1", "223.255.255.255", "93.184.216.35"),
    *("2001:200::1", "2001:db7:ffff::1", "2001:db9::1", "2003::1", "2620:4f:7fff::1", "2620:4f:8001::1"),
    *("3ffe:ffff::1", "3fff:1000::1", "2a00:1450::1", "2000::1"),
)
"""Just outside of what is not."""
INTERNAL = (
    *("0.0.0.1", "0.255.255.255", "10.0.0.0", "10.0.0.1", "10.255.255.255", "100.64.0.1", "100.100.100.200"),
    *(
        "100.127.255.255",
        "127.0.0.1",
        "127.0.0.2",
        "127.255.255.254",
        "168.63.129.16",
        "169.254.0.1",
        "169.254.169.254",
    ),
    *("169.254.170.2", "169.254.255.255", "172.16.0.1", "172.17.0.1", "172.31.255.255", "192.0.0.1"),
    *(
        "192.0.0.192",
        "192.0.0.255",
        "192.0.2.1",
        "192.31.196.1",
        "192.52.193.1",
        "192.88.99.1",
        "192.168.0.1",
    ),
    *("192.168.255.255", "192.175.48.1", "198.18.0.1", "198.18.99.99", "198.19.255.255", "198.51.100.7"),
    *("203.0.113.9", "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.254", "255.255.255.255"),
    *("::1", "::", "::2", "::10.0.0.1", "64:ff9b::a00:1", "64:ff9b::169.254.169.254", "64:ff9b::5db8:d822"),
    *("64:ff9b:1::a00:1", "2002:a00:1::1", "2002:a9fe:a9fe::1", "2002:5db8:d822::1", "2001::1"),
    *("2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001:2::1", "2001:10::1", "2001:20::1", "2001:1ff:ffff::1"),
    *("2001:db8::1", "2620:4f:8000::1", "3fff::1", "3fff:fff::1", "fc00::1", "fd00:ec2::254", "fdff:ffff::1"),
    *("fe80::1", "febf::1", "fec0::1", "ff02::1", "ff0e::1", "100::1", "5f00::1", "4000::1", "1fff::1"),
    *(*HOST, *GATEWAY[:1]),
)
ODD = (
    *("0.0.0.0", "0", "2130706433", "0x7f000001", "017700000001", "127.1", "0x7f.1", "0177.0.0.1"),
    *("167772161", "0xa000001", "012.0.0.1", "10.1", "10.0.1", "2852039166", "0xa9fea9fe", "0xA9.0xFE.43518"),
    *("0251.0376.0251.0376", "192.168.257", "3232235777", "0xc0.0xa8.0x1.0x1", "::ffff:127.0.0.1"),
    *("::ffff:10.0.0.1", "::ffff:a9fe:a9fe", "::ffff:169.254.169.254", "::ffff:0:127.0.0.1", "fe80::1%lo"),
    *("fe80::a9fe:a9fe%1", "0:0:0:0:0:0:0:1", "0:0:0:0:0:ffff:a9fe:a9fe", "FD00::1", "::ffff:192.168.77.2"),
)
"""The inside again, as programs may write it."""

Row = tuple[str, int, str, str]
"""Destination, port, and where it comes out with an allowlist and with all that is public; "" is nowhere."""


def rows() -> list[Row]:
    made: list[Row] = [(text, 80, SITE, SITE) for text in SPELLINGS]
    made += [(text, 443, "", SITE) for text in SPELLINGS[:3]]
    made += [(text, 80, "", text) for text in PUBLIC]
    made += [(text, 80, "", "") for text in (*INTERNAL, *ODD)]
    made += [(text, 8080, "", "") for text in (*HOST, "127.0.0.1", "::1", "10.0.0.1", "169.254.169.254")]
    made += [(text, API, "", "") for text in (*HOST, "127.0.0.1", "::1", GATEWAY[0], "daemon.inward.example")]
    made += [("neighbour.inward.example", port, "", "") for port in (80, 8080)]
    made += [(f"n{number}.inward.example", 80, "", "") for number in range(len(INTERNAL))]
    made += [(f"n{number}.public.example", 80, text, text) for number, text in enumerate(PUBLIC)]
    made += [(SITE6, 80, SITE6, SITE6), ("2606:2800:0220:0001::0034", 80, SITE6, SITE6)]
    made += [("2606:2800:220:2::1", 80, "", "2606:2800:220:2::1"), (SITE, 22, "", SITE), (SITE, 53, "", SITE)]
    here = (
        "example.com",
        "EXAMPLE.com",
        "example.com.",
        "Example.COM.",
        "a.wild.example",
        "a.b.wild.example",
    )
    made += [(name, 80, SITE, SITE) for name in (*here, "A.WILD.example.", "bücher.example", "any.example")]
    made += [("xn--bcher-kva.example", 80, SITE, SITE), ("any.example", 22, SITE, SITE)]
    made += [
        ("example.com", 22, "", SITE),
        ("example.com", 8080, "", SITE),
        ("alt.example", 8443, SITE, SITE),
    ]
    others = (
        "sub.example.com",
        "wild.example",
        "awild.example",
        "a.wild.example.evil.example",
        "evil.example",
    )
    made += [(name, 80, "", SITE) for name in (*others, "example.com.evil.example", "xexample.com")]
    made += [
        ("alt.example", 80, "", SITE),
        ("_under.evil.example", 80, "", SITE),
        ("example.org", 80, "", SITE),
    ]
    made += [
        ("printer", 80, SITE, ""),
        ("com", 80, "", ""),
        ("localhost", 80, "", ""),
        ("a.localhost", 80, "", ""),
    ]
    made += [("metadata.google.internal", 80, "", ""), ("mixed.inward.example", 80, SITE, SITE)]
    made += [("v6.inward.example", 80, SITE6, SITE6), ("nothing.inward.example", 80, "", "")]
    odd = (
        "example.com..",
        ".example.com",
        "example..com",
        "*.wild.example",
        "-a.wild.example",
        "a\0.wild.example",
    )
    made += [
        (name, 80, "", "") for name in (*odd, "exa mple.com", "user@example.com", "example.com:80", "[::1]")
    ]
    made += [("1.2.3.4.wild.example", 80, SITE, SITE), ("x" * 64 + ".wild.example", 80, "", "")]
    made += [
        ("1.2.3.0x7f", 80, "", "1.2.3.127"),
        ("999.999.999.999", 80, "", ""),
        ("example.com%lo", 80, "", ""),
    ]
    return made


def names() -> dict[str, list[str]]:
    known = {
        name: [SITE]
        for destination, _, allowlist, public in rows()
        if (name := canonical(destination)) and (SITE in (allowlist, public) or name in ("printer", "com"))
    }
    known |= {f"n{number}.inward.example": [text] for number, text in enumerate(INTERNAL)}
    known |= {f"n{number}.public.example": [text] for number, text in enumerate(PUBLIC)}
    known["metadata.google.internal"] = ["169.254.169.254", "fd00:ec2::254"]
    known["mixed.inward.example"] = ["10.0.0.1", "::ffff:10.0.0.1", SITE, "169.254.169.254"]
    known["daemon.inward.example"] = [*HOST, "127.0.0.1", "::1"]
    known["neighbour.inward.example"] = ["198.18.0.1", "127.0.0.1", "::1"]
    known["v6.inward.example"] = ["fe80::1", SITE6]
    known["xn--bcher-kva.example"] = [SITE]
    known["localhost"] = known["a.localhost"] = ["127.0.0.1", SITE]
    return known


async def come_out(it: World, destination: str, port: int) -> list[tuple[str, int]]:
    """Where a connection arrives."""
    it.arrived.clear()
    opened = len(it.ledger.opened)
    host = from_person(destination) or "example.com"
    say = f"GET / HTTP/1.1\r\nhost: {host}:{port}\r\n\r\n".encode()
    answer = await it.run(
        f"try: answer = ask({destination!r}, {port}, {say!r})\n"
        "except (UnicodeError, ValueError) as error: answer = {'error': str(error)}"
    )
    heard = bytes.fromhex(answer.get("heard", ""))
    assert heard.startswith(b"HTTP/1.1 200") == bool(it.arrived), (destination, answer)
    dialled = it.ledger.opened[opened:]
    assert [(address, to) for _, to, address in dialled] == it.arrived, (
        "the address that was looked at is dialled"
    )
    return list(it.arrived)


@pytest.mark.parametrize("kind", ["allowlist", "public"])
def test_every_destination(kind: str) -> None:
    assert len(rows()) >= 250

    async def main() -> None:
        allow = ALLOW if kind == "allowlist" else ()
        async with world(kind, allow, names=names()) as it, neighbour(it) as other:
            wrong = []
            for destination, port, allowlist, public in rows():
                wanted = allowlist if kind == "allowlist" else public
                came_out = await come_out(it, destination, port)
                if came_out != ([(wanted, port)] if wanted else []):
                    wrong.append((destination, port, wanted, came_out))
            assert wrong == []
            assert it.datagrams == []
            assert await other.run("answer = arrived()") == []
            itself = "socket.create_connection(('127.0.0.1', 80)).close(); answer = arrived()"
            assert await other.run(itself) == [["127.0.0.1", 80]]

    in_a_network_of_its_own(main)


@pytest.mark.parametrize("kind", ["none", "allowlist"])
def test_nothing_is_allowed(kind: str) -> None:
    """With an empty allowlist, as without any network, not even a name is looked up."""

    async def main() -> None:
        async with world(kind, names=names()) as it:
            for destination, port, _, _ in rows():
                assert await come_out(it, destination, port) == [], destination
            assert (it.asked, it.datagrams) == ([], [])

    in_a_network_of_its_own(main)
