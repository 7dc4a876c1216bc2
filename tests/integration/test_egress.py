"""The proxy between an environment's namespaces and an internet of our own: what works, and who tries to get around."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import struct

import pytest

from skerry.egress import proxy as proxies
from skerry.egress import resolver
from skerry.egress.addresses import Address, Ranges
from skerry.egress.limits import Traffic
from skerry.egress.proxy import Connection
from skerry.egress.rules import Rules
from skerry.errors import IsolationUnavailable, PlatformError
from skerry.host.launcher import Helper
from skerry.host.network import catch_all
from skerry.policy import Limits
from tests.integration.egress_world import OK, SILENT, World, in_a_network_of_its_own, world

pytestmark = pytest.mark.root
PUBLIC = "93.184.216.34"
OTHER = "93.184.216.35"
NAMES = {"example.com": [PUBLIC], "evil.example": [OTHER], "any.example": [PUBLIC]}
ALLOW = ["example.com", "any.example:*"]


def http(host: str, path: str = "/") -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode()


def test_a_name_that_is_allowed() -> None:
    async def main() -> None:
        async with world("allowlist", ALLOW, names=NAMES) as it:
            assert await it.ask("example.com", 80, http("example.com")) == ("", OK)
            assert it.arrived == [(PUBLIC, 80)]
            assert it.ledger.opened == [("example.com", 80, PUBLIC)]
            await it.ledger.until(lambda: it.ledger.finished)
            (done,) = it.ledger.finished
            assert (done.sent, done.received) == (len(http("example.com")), len(OK))
            assert it.traffic == Traffic(done.sent, done.received)
            assert done.verdict == "allowed"

    in_a_network_of_its_own(main)


def test_a_name_that_is_not() -> None:
    async def main() -> None:
        async with world("allowlist", ALLOW, names=NAMES) as it:
            error, _ = await it.ask("evil.example", 80, http("evil.example"))
            assert "gaierror" in error
            assert it.asked == []
            _, heard = await it.ask("example.com", 80, http("evil.example"))
            assert b"403 Forbidden" in heard
            assert b"was for something else" in heard
            _, heard = await it.ask(PUBLIC, 80, http("example.com"))
            assert f'ask for it with env.network.allow("{PUBLIC}:80")'.encode() in heard
            assert it.arrived == []
            assert {(denial.host, denial.port) for denial in it.ledger.refused} == {
                ("evil.example", 0),
                ("example.com", 80),
                (PUBLIC, 80),
            }

    in_a_network_of_its_own(main)


def test_a_machine_without_ipv6() -> None:
    """What there is works, and the rest leads nowhere."""
    without = "open('/proc/sys/net/ipv6/conf/all/disable_ipv6', 'w').write('1')"

    async def main() -> None:
        async with world("public", names=NAMES, before=without) as it:
            assert [one.family for one in it.proxy._sockets] == [socket.AF_INET] * 2
            assert await it.ask("example.com", 80, http("example.com")) == ("", OK)
            assert await it.ask(f"::ffff:{OTHER}", 80, http(OTHER)) == ("", OK)
            error, _ = await it.ask("2606:2800:220:1::34", 80, http("example.com"))
            assert error
            _, heard = await it.ask("10.0.0.1", 80, http("10.0.0.1"))
            assert b"never reached" in heard
            assert it.arrived == [(PUBLIC, 80), (OTHER, 80)]

    in_a_network_of_its_own(main)


def test_programs_that_the_daemon_starts_do_not_get_the_sockets() -> None:
    async def main() -> None:
        async with world("public") as it:
            assert [one.get_inheritable() for one in it.proxy._sockets] == [False] * 4

    in_a_network_of_its_own(main)


def test_a_network_that_cannot_be_entered() -> None:
    """It is said in words, and nothing is left open."""
    helper = Helper()
    before = os.listdir("/proc/self/fd")
    with (
        open("/dev/null") as nothing,
        pytest.raises(IsolationUnavailable, match="entering its network failed"),
    ):
        catch_all(helper, nothing.fileno(), rootful=True)
    assert os.listdir("/proc/self/fd") == before
    helper.close()


def test_an_answer_that_changes_after_the_name_was_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was looked at is what is dialled, however often somebody changes his mind."""

    async def main() -> None:
        async with world("allowlist", ALLOW) as it:
            it.names["example.com"] = [PUBLIC]
            assert await it.ask("example.com", 80, http("example.com")) == ("", OK)
            it.names["example.com"] = ["10.0.0.1"]
            asked = len(it.asked)
            assert await it.ask("example.com", 80, http("example.com")) == ("", OK)
            assert (it.arrived, len(it.asked)) == ([(PUBLIC, 80)] * 2, asked)
            # Nothing is kept any more: the answer for the connection is another than for the name.
            monkeypatch.setattr(resolver, "KEEP_RESOLVED", 0.0)
            it.proxy._resolver._known.clear()
            standing = str(it.proxy._synthetic.address("example.com"))
            _, heard = await it.ask(standing, 80, http("example.com"))
            assert b"never reached" in heard
            assert b"10.0.0.1" not in heard, "addresses of the inside are not told"
            flips = iter([PUBLIC, "10.0.0.1"] * 4)

            async def resolve(name: str) -> list[Address]:
                return [ipaddress.ip_address(next(flips))]

            it.proxy._resolver._resolve = resolve
            heard = b"".join([(await it.ask(standing, 80, http("example.com")))[1] for _ in range(8)])
            assert (heard.count(OK), heard.count(b"403")) == (4, 4)
            assert {address for address, _ in it.arrived} == {PUBLIC}

    in_a_network_of_its_own(main)


def test_a_redirect_inward() -> None:
    async def main() -> None:
        async with world("public", names={**NAMES, "inward.example": ["169.254.169.254"]}) as it:
            for place in ("http://169.254.169.254/", "http://inward.example/", "http://[::ffff:10.0.0.1]/"):

                async def redirect(
                    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, place: str = place
                ) -> None:
                    await reader.read(65536)
                    writer.write(
                        f"HTTP/1.1 302 Found\r\nlocation: {place}\r\ncontent-length: 0\r\n\r\n".encode()
                    )

                it.server = redirect
                it.arrived.clear()
                said = await it.run(
                    "import urllib.request\n"
                    "try: answer = urllib.request.urlopen('http://example.com/').status\n"
                    "except urllib.error.HTTPError as error: answer = [error.code, error.read().decode()]"
                )
                assert said[0] == 403
                assert "never reached" in said[1]
                assert it.arrived == [(PUBLIC, 80)]

    in_a_network_of_its_own(main)


def test_tls_for_another_host_is_told_so() -> None:
    code = (
        "context = ssl._create_unverified_context()\n"
        "try:\n"
        "    with socket.create_connection(('example.com', 443), 10) as s:\n"
        "        context.wrap_socket(s, server_hostname={!r})\n"
        "except ssl.SSLError as error: answer = error.reason\n"
    )

    async def main() -> None:
        async with world("allowlist", ALLOW, names=NAMES) as it:
            for name in ("evil.example", "sub.example.com", PUBLIC):
                assert await it.run(code.format(name)) == "TLSV1_ALERT_ACCESS_DENIED"
            assert it.arrived == []
            await it.run(code.format("example.com"))
            assert it.arrived == [(PUBLIC, 443)]

    in_a_network_of_its_own(main)


def question(name: str, kind: int = 1) -> bytes:
    labels = b"".join(bytes((len(label),)) + label.encode() for label in name.split(".") if label)
    return struct.pack(">HHHHHH", 7, 0x100, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">HH", kind, 1)


def test_questions_are_no_way_out() -> None:
    """A name that is not allowed is not looked up, whatever is asked about it; nor is anything but addresses."""
    a, txt, null, srv, any_kind, https = 1, 16, 10, 33, 255, 65

    async def main() -> None:
        async with world("allowlist", [*ALLOW, "*.wild.example"], names=NAMES) as it:
            for kind in (a, txt, null, srv, any_kind, https):
                for name in (
                    "c2VjcmV0.evil.example",
                    "example.com.evil.example",
                    "1.0.0.10.in-addr.arpa",
                    "com",
                    "",
                ):
                    for server in ("9.9.9.9", "127.0.0.1", "::1", "2620:fe::fe", "10.0.0.1"):
                        answer = await it.query(question(name, kind), server)
                        assert answer is not None
                        assert answer[3] & 0xF == 3, (kind, name, server)
            assert it.asked == []
            for kind in (txt, null, srv, any_kind, https):
                answer = await it.query(question("example.com", kind))
                assert answer is not None
                assert (answer[3] & 0xF, answer[6:8]) == (0, b"\0\0"), (
                    "there is such a name, without an answer"
                )
            for packet in (b"", b"x", question("a.b")[:-1], b"\0" * 5000, question("a.b") * 200):
                await it.query(packet, timeout=0.05)
            assert set(it.asked) == {"example.com"}
            # Other ports and servers by TCP.
            await it.run("s = socket.socket(2, 2); s.sendto(b'x', ('9.9.9.9', 123)); s.close()")
            _, heard = await it.ask("9.9.9.9", 53, b"\0\x1e" + question("evil.example"))
            assert heard == b""
            assert (it.datagrams, it.arrived) == ([], [])

    in_a_network_of_its_own(main)


def test_who_has_an_address_is_not_asked_for() -> None:
    """With all that is public allowed: names of addresses are of the inside as well."""

    async def main() -> None:
        async with world("public") as it:
            for name in (
                "1.0.0.10.in-addr.arpa",
                "8.b.d.0.1.0.0.2.ip6.arpa",
                "arpa",
                "localhost",
                "a.localhost",
            ):
                assert await it.query(question(name, 12)) is not None
            assert it.asked == []

    in_a_network_of_its_own(main)


def test_addresses_that_stand_for_names_are_never_dialled() -> None:
    async def main() -> None:
        everything = Ranges(public=(ipaddress.ip_network("0.0.0.0/0"),))
        async with world("public", ranges=everything) as it:
            _, heard = await it.ask("198.18.99.99", 80, http("example.com"))
            assert b"no name belongs to" in heard
            assert it.arrived == []

    in_a_network_of_its_own(main)


def test_many_names() -> None:
    """Names beyond the last one that is kept take the place of the oldest, and no address stands for two."""

    standing = resolver.SyntheticAddresses()
    first = [standing.address(f"n{number}.example") for number in range(resolver.NAMES_MAX)]
    assert len(set(first)) == resolver.NAMES_MAX
    assert standing.address("n0.example") == first[0]
    assert standing.address("new.example") == first[1]
    assert standing.name(first[1]) == "new.example"
    assert {standing.name(address) for address in first} == {
        *(f"n{number}.example" for number in range(resolver.NAMES_MAX) if number != 1),
        "new.example",
    }


def rules(kind: str, *allow: str) -> Rules:
    return Rules.parse(kind, allow, Ranges())


OPEN = (
    "s = kept[{0!r}] = socket.create_connection(({0!r}, {1}), 10)\n"
    "s.sendall({2!r})\n"
    "answer = s.recv(100).decode()"
)
READ = (
    "try: answer = kept[{0!r}].recv(100).decode()\nexcept OSError as error: answer = type(error).__name__\n"
)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


def test_rules_that_change() -> None:
    async def main() -> None:
        names = {**NAMES, "b.example": [OTHER]}
        async with world("public", names=names) as it:
            it.server = echo
            hosts = ("any.example", "b.example", "9.9.9.9", "1.1.1.1")
            for host in hosts:
                assert await it.run(OPEN.format(host, 22, b"hello\n")) == "hello\n"
            it.proxy.change(rules("allowlist", "any.example:22", "9.9.9.9:*"), Limits())
            assert await it.run(READ.format("b.example")) == "ConnectionResetError"
            assert await it.run(READ.format("1.1.1.1")) == "ConnectionResetError"
            await it.ledger.until(lambda: len(it.ledger.finished) == 2)
            assert {done.verdict for done in it.ledger.finished} == {"cut: not allowed any more"}
            for host in ("any.example", "9.9.9.9"):
                assert await it.run(f"kept[{host!r}].sendall(b'again')\n" + READ.format(host)) == "again"
            assert (await it.ask("b.example", 22))[0].startswith("gaierror")
            it.proxy.change(rules("allowlist", "b.example:22"), Limits())
            assert await it.run(READ.format("any.example")) == "ConnectionResetError"
            assert await it.run(OPEN.format("b.example", 22, b"new\n")) == "new\n"
            it.proxy.change(rules("none"), Limits())
            assert await it.run(READ.format("b.example")) == "ConnectionResetError"
            assert it.proxy.connections == set()

    in_a_network_of_its_own(main)


def test_rules_that_change_while_a_connection_is_made() -> None:
    """Between the decision and the dialling: nothing arrives that is not allowed at that moment."""

    async def main() -> None:
        async with world("public", names=NAMES) as it:

            async def opening(connection: Connection) -> None:
                it.proxy.change(rules("none"), Limits())
                await asyncio.sleep(0)

            it.ledger.opening = opening  # type: ignore[method-assign]
            error, _ = await it.ask("example.com", 80, http("example.com"))
            assert "ConnectionResetError" in error
            assert it.arrived == []
            # What the audit has of it by then has an end there, too.
            await it.ledger.until(lambda: it.ledger.finished)
            assert it.ledger.finished[0].verdict == "cut: not allowed any more"

    in_a_network_of_its_own(main)


def test_rules_that_change_while_the_first_address_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxies, "DIAL_SECONDS", 0.1)

    async def main() -> None:
        async with world("public", names={"a.example": [SILENT, PUBLIC]}) as it:

            async def opening(connection: Connection) -> None:
                internal = Ranges(internal=(ipaddress.ip_network(PUBLIC),))
                it.proxy.change(Rules.parse("public", [], internal), Limits())

            it.ledger.opening = opening  # type: ignore[method-assign]
            error, _ = await it.ask("a.example", 80, http("a.example"))
            assert "ConnectionResetError" in error
            assert it.arrived == []

    in_a_network_of_its_own(main)


def test_what_cannot_be_noted_does_not_happen() -> None:
    async def main() -> None:
        async with world("public", names=NAMES) as it:

            async def opening(connection: Connection) -> None:
                raise PlatformError("the disk is full")

            it.ledger.opening = opening  # type: ignore[method-assign]
            error, _ = await it.ask("example.com", 80, http("example.com"))
            assert "ConnectionResetError" in error
            assert it.arrived == []
            await it.ledger.until(lambda: it.ledger.finished)
            assert it.ledger.finished[0].verdict == "failed: the disk is full"

    in_a_network_of_its_own(main)


def test_nobody_is_called_before_it_is_known_for_whom() -> None:
    async def main() -> None:
        async with world("allowlist", ALLOW, names=NAMES) as it:
            words = http("evil.example")
            heard = await it.run(
                "with socket.create_connection(('example.com', 80), 10) as s:\n"
                f"    for byte in {words!r}: s.sendall(bytes((byte,)))\n"
                "    answer = s.recv(100).decode()"
            )
            assert "403" in heard
            assert it.arrived == []

    in_a_network_of_its_own(main)


def test_a_second_request_for_another() -> None:
    async def main() -> None:
        async with world("allowlist", ALLOW, names=NAMES) as it:
            seen = b""

            async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                nonlocal seen
                while data := await reader.read(65536):
                    seen += data
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

            it.server = server
            first = http("example.com")
            assert "200 OK" in await it.run(OPEN.format("example.com", 80, first))
            again = f"kept['example.com'].sendall({http('evil.example')!r})\n" + READ.format("example.com")
            assert "403" in await it.run(again)
            assert seen == first
            await it.ledger.until(lambda: it.ledger.finished)
            assert it.ledger.finished[0].verdict.startswith("denied")

    in_a_network_of_its_own(main)


def test_a_server_that_speaks_first() -> None:
    async def main() -> None:
        async with world("allowlist", ALLOW, names=NAMES) as it:

            async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                writer.write(b"SSH-2.0-server\r\n")
                writer.write(b"heard " + await reader.readline())

            it.server = server
            code = (
                "with socket.create_connection(('any.example', 22), 10) as s:\n"
                "    first = s.recv(100)\n"
                "    s.sendall(b'SSH-2.0-OpenSSH_9.2p1 Debian-2\\r\\n')\n"
                "    answer = (first + s.recv(100)).decode()"
            )
            assert await it.run(code) == "SSH-2.0-server\r\nheard SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n"

    in_a_network_of_its_own(main)


def test_a_websocket() -> None:
    async def main() -> None:
        async with world("allowlist", ALLOW, names=NAMES) as it:

            async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")
                writer.write(await reader.readexactly(4))

            it.server = server
            asks = http("example.com").replace(b"close", b"upgrade\r\nupgrade: websocket")
            _, heard = await it.ask("example.com", 80, asks + b"\x81\x02hi")
            assert heard.endswith(b"\r\n\r\n\x81\x02hi")

    in_a_network_of_its_own(main)


async def _sum(it: World) -> None:
    """A client that ends its side, and hears all that comes after that."""

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.read()
        writer.write(data[::-1])

    it.server = server
    code = (
        "import os, threading\n"
        "data = os.urandom(5_000_000)\n"
        "with socket.create_connection(('any.example', 5000), 30) as s:\n"
        "    s.sendall(b'\\0' + data)\n"
        "    s.shutdown(socket.SHUT_WR)\n"
        "    heard = b''.join(iter(lambda: s.recv(1 << 20), b''))\n"
        "answer = heard == data[::-1] + b'\\0'"
    )
    assert await it.run(code) is True


def test_each_side_ends_by_itself() -> None:
    async def main() -> None:
        async with world("allowlist", ALLOW, names=NAMES) as it:
            await _sum(it)
            await it.ledger.until(lambda: it.ledger.finished)
            (done,) = it.ledger.finished
            assert (done.sent, done.received, done.verdict) == (5_000_001, 5_000_001, "allowed")

    in_a_network_of_its_own(main)


def test_what_is_broken_off_does_not_look_complete() -> None:
    async def main() -> None:
        async with world("public", names=NAMES) as it:

            async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await reader.read(10)
                writer.write(b"half")
                await writer.drain()
                await reader.read(10)
                reset = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)

            it.server = server
            assert await it.run(OPEN.format("any.example", 22, b"\0")) == "half"
            more = "kept['any.example'].sendall(b'x')\n" + READ.format("any.example")
            assert await it.run(more) == "ConnectionResetError"

    in_a_network_of_its_own(main)
