"""What one environment can use up of the daemon: connections, bytes, memory, descriptors, the turns of others."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import select
import socket
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skerry.egress import dns, relay, resolver
from skerry.egress import proxy as proxies
from skerry.egress.addresses import Address
from skerry.egress.limits import BUFFER_MAX, FREE_BUFFERS, SURPLUS_MAX, Traffic, all_connections
from skerry.egress.proxy import DENIALS_MAX, TOLD_AT_ONCE
from skerry.fairness import Budget
from skerry.policy import Limits
from tests import support
from tests.integration.egress_world import OK, SILENT, World, in_a_network_of_its_own, world
from tests.integration.test_egress import NAMES, OPEN, PUBLIC, READ, echo, http, question

pytestmark = pytest.mark.root
MANY = """
import selectors
def many(count, host, port, say, at_once=500):
    "Connect, say something, read to the end; how many heard something."
    heard, begun, waiting = 0, 0, selectors.DefaultSelector()
    open_now = 0
    while begun < count or open_now:
        while begun < count and open_now < at_once:
            s = socket.socket()
            s.settimeout(10)
            begun += 1
            try:
                s.connect((host, port))
                s.sendall(say)
            except OSError:
                s.close()
                continue
            s.setblocking(False)
            waiting.register(s, selectors.EVENT_READ)
            open_now += 1
        for key, _ in waiting.select(10):
            try:
                data = key.fileobj.recv(4096)
            except OSError:
                data = b""
            if data:
                heard += 1
            waiting.unregister(key.fileobj)
            key.fileobj.close()
            open_now -= 1
    return heard
"""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that has much to do, a client may take its time before it says something."""
    monkeypatch.setattr(proxies, "REASON_SECONDS", 60.0)


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def settled(it: World) -> None:
    """Until the last connection has ended."""
    while it.proxy.connections:
        await asyncio.gather(
            *(each.task for each in it.proxy.connections if each.task), return_exceptions=True
        )


def test_connections_at_once() -> None:
    async def main() -> None:
        async with world("public", names=NAMES, limits=Limits(connections=5)) as it:
            it.server = echo
            code = (
                "answer = []\n"
                "for number in range(8):\n"
                "    try:\n"
                "        s = kept[number] = socket.create_connection(('9.9.9.9', 22), 10)\n"
                "        s.sendall(b'x')\n"
                "        answer.append(s.recv(1).decode())\n"
                "    except OSError: answer.append('-')\n"
            )
            assert await it.run(code) == ["x"] * 5 + [""] * 3
            assert len(it.arrived) == 5
            _, heard = await it.ask("example.com", 80, http("example.com"))
            assert b"403 Forbidden" in heard
            assert b"its limit of 5 connections at once is reached" in heard
            assert [(denial.host, denial.count) for denial in it.ledger.refused] == [
                ("9.9.9.9", 3),
                ("example.com", 1),
            ]
            await it.run("for s in kept.values(): s.close()\nkept.clear()")
            await settled(it)
            assert await it.run(code) == ["x"] * 5 + [""] * 3
            it.proxy.change(it.proxy.rules, Limits(connections=6))
            assert await it.run(code.replace("range(8)", "(5, 6)")) == ["x", ""]
        assert all_connections.count == 0

    in_a_network_of_its_own(main)


def test_of_too_many_the_oldest_stay() -> None:
    async def main() -> None:
        async with world("public", names=NAMES) as it:
            it.server = echo
            opened = (
                "for number in range(4):\n"
                "    s = kept[number] = socket.create_connection(('9.9.9.9', 22), 10)\n"
                "    s.sendall(b'x')\n"
                "    s.recv(1)\n"
            )
            await it.run(opened)
            it.proxy.change(it.proxy.rules, Limits(connections=2))
            await it.ledger.until(lambda: len(it.ledger.finished) == 2)
            assert {done.verdict for done in it.ledger.finished} == {"cut: not allowed any more"}
            code = (
                "answer = []\n"
                "for s in kept.values():\n"
                "    try:\n"
                "        s.sendall(b'y')\n"
                "        answer.append(s.recv(1).decode())\n"
                "    except OSError: answer.append('-')\n"
            )
            assert await it.run(code) == ["y", "y", "-", "-"]

    in_a_network_of_its_own(main)


def test_a_flood_above_the_limit() -> None:
    """Some are told why; the others are reset, and nothing of any of them is kept."""

    async def main() -> None:
        async with world("public", names=NAMES, limits=Limits(connections=1)) as it:
            it.server = echo
            await it.run(OPEN.format("9.9.9.9", 22, b"x"))
            code = (
                "held = [socket.socket() for _ in range(300)]\n"
                "for s in held: s.connect_ex(('9.9.9.9', 80))\n"  # reset perhaps before it returns
                "kept['held'] = held\n"
            )
            await it.run(code)
            while it.proxy.denied < 300:  # noqa: ASYNC110 -- only the first of a kind is told
                await asyncio.sleep(0)
            assert (len(it.proxy.connections), len(it.proxy._surplus)) == (1, SURPLUS_MAX)
            assert len(it.arrived) == 1
            await it.run("for s in kept.pop('held'): s.close()")

    in_a_network_of_its_own(main)


def test_a_daemon_has_descriptors_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """One environment gets half of what all may have together; the next one half of what is left."""

    async def main() -> None:
        async with world("public", names=NAMES) as it:
            it.server = echo
            monkeypatch.setattr("resource.getrlimit", lambda _: (80, 80))
            code = (
                "answer = []\n"
                "for number in range(20):\n"
                "    s = kept[number] = socket.create_connection(('9.9.9.9', 22), 10)\n"
                "    s.sendall(b'x')\n"
                "    answer.append(s.recv(1).decode())\n"
            )
            assert await it.run(code) == ["x"] * 10 + [""] * 10
            assert "too many connections" in it.ledger.refused[0].reason
            assert all_connections.room == 10
        assert all_connections.room == 20

    in_a_network_of_its_own(main)


def test_bytes() -> None:
    async def main() -> None:
        async with world("public", names=NAMES, limits=Limits(traffic=1000)) as it:
            it.server = echo
            assert await it.run(OPEN.format("9.9.9.9", 22, b"x" * 50)) == "x" * 50
            assert it.traffic == Traffic(50, 50)
            more = f"kept['9.9.9.9'].sendall({b'x' * 901!r})\n" + READ.format("9.9.9.9")
            assert await it.run(more) == "ConnectionResetError"
            await it.ledger.until(lambda: it.ledger.finished)
            reason = (
                "its limit of 1000 B sent and received is used up; env.network.set(traffic=...) changes it"
            )
            assert it.ledger.finished[0].verdict == f"cut: {reason}"
            assert it.traffic == Traffic(50, 50), "what would be too much is not passed on"
            it.asked.clear()
            _, heard = await it.ask("example.com", 80, http("example.com"))
            assert reason.encode() in heard
            assert [(denial.host, denial.reason) for denial in it.ledger.refused] == [
                ("9.9.9.9", reason),
                ("example.com", reason),
            ]
            assert it.asked == [], "nor does a name get out"
            assert len(it.arrived) == 1
            it.server = it.usual_server
            it.proxy.change(it.proxy.rules, Limits(traffic=2000))
            assert await it.ask("example.com", 80, http("example.com")) == ("", OK)
            it.proxy.change(it.proxy.rules, Limits(traffic=100))
            _, heard = await it.ask("example.com", 80, http("example.com"))
            assert b"its limit of 100 B" in heard

    in_a_network_of_its_own(main)


@pytest.mark.usefixtures("all_descriptors")
def test_ten_thousand_attempts_that_are_refused() -> None:
    async def main() -> None:
        async with world("allowlist", names=NAMES) as it:
            before = descriptors()
            assert await it.run(MANY + f"answer = many(1000, '10.0.0.1', 80, {http('x')!r}, 200)") == 1000
            await settled(it)
            memory = resident()
            code = (
                "answer = 0\n"
                "for part in range(90):\n"
                f"    answer += many(100, f'10.0.{{part}}.1', 80, {http('x')!r}, 100)\n"
            )
            assert await it.run(MANY + code) == 9000
            await settled(it)
            assert it.proxy.denied == 10_000
            assert len(it.proxy.denials) == 90
            assert sum(denial.count for denial in it.proxy.denials) == 10_000
            assert resident() - memory < 8 << 20
            assert descriptors() == before
            assert it.arrived == []

    in_a_network_of_its_own(main)


def test_many_different_denials_are_counted_and_not_all_told() -> None:
    async def main() -> None:
        async with world("allowlist") as it:
            for number in range(0, 2000, 50):
                packets = [question(f"n{each}.example") for each in range(number, number + 50)]
                code = (
                    "answer = 0\n"
                    "with socket.socket(2, 2) as s:\n"
                    "    s.settimeout(5)\n"
                    f"    for packet in {packets!r}:\n"
                    "        s.sendto(packet, ('9.9.9.9', 53))\n"
                    "        answer += len(s.recv(512)) > 0\n"
                )
                assert await it.run(code) == 50
            assert it.proxy.denied == 2000
            assert len(it.proxy.denials) == DENIALS_MAX
            assert TOLD_AT_ONCE <= len(it.ledger.refused) < 1000

    in_a_network_of_its_own(main)


@pytest.fixture
def all_descriptors() -> Iterator[None]:
    """As many as this process can have, as a daemon does it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 16_000:
        support.missing(f"no process may have more than {hard} files open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("all_descriptors")
def test_a_thousand_connections_at_once() -> None:
    """All are served, and a second thousand costs nothing more than the first did."""

    async def main() -> None:
        async with world("public", names=NAMES) as it:
            it.server = echo
            code = (
                "import resource\n"
                "resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))\n"
                "held = [socket.create_connection(('9.9.9.9', 22), 30) for _ in range(1000)]\n"
                "for s in held: s.sendall(b'hello')\n"
                "answer = sum(s.recv(5) == b'hello' for s in held)\n"
                "kept['held'] = held\n"
            )
            before = descriptors()
            sizes = []
            for _ in range(3):
                assert await it.run(code) == 1000
                assert len(it.proxy.connections) == 1000
                await it.run("for s in kept.pop('held'): s.close()")
                await settled(it)
                gc.collect()
                sizes.append(resident())
            assert sizes[-1] - sizes[0] < 4 << 20
            it.ledger.finished.clear()
            while descriptors() > before:  # noqa: ASYNC110 -- the servers of this internet end in their own time
                await asyncio.sleep(0)

    in_a_network_of_its_own(main)


@pytest.mark.parametrize("way", ["down", "up"])
def test_a_connection_that_rests_holds_nothing(way: str) -> None:
    """What was passed on is not kept until something else comes."""
    much = b"x" * (1 << 20)

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readexactly(1 if way == "down" else len(much)):
            writer.write(much if way == "down" else b"x")
            await writer.drain()

    code = (
        f"say, hear = {(1, len(much)) if way == 'down' else (len(much), 1)}\n"
        "for number in range(40):\n"
        "    s = kept[number] = socket.create_connection(('9.9.9.9', 22), 10)\n"
        "    s.sendall(b'x' * say)\n"
        "    heard = 0\n"
        "    while heard < hear: heard += len(s.recv(1 << 20))\n"
    )

    async def main() -> None:
        async with world("public", names=NAMES) as it:
            it.server = server
            tracemalloc.start()
            try:
                await it.run(code)
                assert len(it.proxy.connections) == 40
                assert tracemalloc.get_traced_memory()[0] < 2 << 20
            finally:
                tracemalloc.stop()
            await it.run("for s in kept.values(): s.close()")

    in_a_network_of_its_own(main)


def test_the_kernel_holds_no_more_than_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left alone it would take megabytes for each connection that is not read."""
    carried: list[tuple[socket.socket, socket.socket]] = []

    class Seen(relay.Relay):
        def __init__(self, client: socket.socket, server: socket.socket, *more: Any) -> None:
            carried.append((client, server))
            super().__init__(client, server, *more)

    monkeypatch.setattr(proxies, "Relay", Seen)

    def bounds(one: socket.socket) -> tuple[int, int]:
        size = [one.getsockopt(socket.SOL_SOCKET, which) for which in (socket.SO_RCVBUF, socket.SO_SNDBUF)]
        return size[0], size[1]

    def of(size: int) -> tuple[int, int]:
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
            return bounds(one)

    async def main() -> None:
        async with world("public", names=NAMES) as it:
            it.server = echo
            code = (
                "for number in range(20):\n"
                "    s = kept[number] = socket.create_connection(('9.9.9.9', 22), 30)\n"
                "    s.sendall(b'hello')\n"
                "    s.recv(5)\n"
            )
            await it.run(code)
            assert {bounds(client) for client, _ in carried} == {of(proxies.NEAR_BUFFER)}
            assert {bounds(server) for _, server in carried[FREE_BUFFERS:]} == {of(BUFFER_MAX)}
            assert bounds(carried[0][1]) != of(BUFFER_MAX)
            await it.run("for s in kept.values(): s.close()")

    in_a_network_of_its_own(main)


def test_who_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxies, "FIRST_WORDS_SECONDS", 0.05)
    monkeypatch.setattr(relay, "SILENT_SECONDS", 0.05)
    monkeypatch.setattr(relay, "IDLE_SECONDS", 0.2)

    async def main() -> None:
        async with world("public", names=NAMES) as it:
            it.server = echo
            for say in (b"", b"GET / HTTP/1.1\r\n", b"\x16\x03\x01"):
                error, _ = await it.ask("example.com", 80, say)
                assert "ConnectionResetError" in error
            assert (it.arrived, it.ledger.opened, it.proxy.denied) == ([], [], 0)
            error, _ = await it.ask("any.example", 22)
            assert "ConnectionResetError" in error
            error, _ = await it.ask("any.example", 22, b"something")
            assert "ConnectionResetError" in error
            await it.ledger.until(lambda: len(it.ledger.finished) == 2)
            assert {done.verdict for done in it.ledger.finished} == {"failed: nothing was said for too long"}

    in_a_network_of_its_own(main)


def test_who_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next address of the name is tried; if there is none, the client hears of it."""
    monkeypatch.setattr(proxies, "DIAL_SECONDS", 0.1)

    async def main() -> None:
        names = {"a.example": [SILENT, PUBLIC], "b.example": [SILENT], "c.example": [SILENT] * 1000}
        async with world("public", names=names) as it:
            assert await it.ask("a.example", 80, http("a.example")) == ("", OK)
            await it.ledger.until(lambda: it.ledger.finished)
            assert str(it.ledger.finished[0].address) == PUBLIC
            for name in ("b.example", "c.example"):
                error, _ = await it.ask(name, 80, http(name))
                assert "ConnectionResetError" in error
                assert it.proxy.connections == set()
            await it.ledger.until(lambda: len(it.ledger.finished) == 3)
            assert {done.verdict for done in it.ledger.finished[1:]} == {"failed: connection timed out"}

    in_a_network_of_its_own(main)


def test_names_that_take_for_ever_hold_up_their_own_environment_alone() -> None:
    async def main() -> None:
        async with world("public") as it:
            under_way = 0

            async def resolve(name: str) -> list[Address]:
                nonlocal under_way
                under_way += 1
                await asyncio.Event().wait()
                raise AssertionError

            it.proxy._resolver._resolve = resolve
            for number in range(300):
                assert await it.query(question(f"n{number}.example"), timeout=0.001) is None
            assert under_way == resolver.RESOLVING_FIRST
            assert len(it.proxy._queries) == proxies.QUERIES_MAX

    in_a_network_of_its_own(main)


def test_others_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all that has come while the daemon did something else, a part is taken at a time."""
    flood = (
        f"packet = {question('n.example')!r}\n"
        "kept['held'] = [socket.create_connection(('10.0.0.1', 80), 10) for _ in range(300)]\n"
        "with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:\n"
        "    for _ in range(200): s.sendto(packet, ('9.9.9.9', 53))"
    )
    turn = 0
    taken: list[int] = []
    parse, destination = dns.parse, proxies._destination

    def noted(made: Any) -> Any:
        taken.append(turn)
        return made

    monkeypatch.setattr(dns, "parse", lambda packet: noted(parse(packet)))
    monkeypatch.setattr(proxies, "_destination", lambda client: noted(destination(client)))

    async def main() -> None:
        nonlocal turn
        async with world("allowlist") as it:
            flooding = asyncio.create_task(it.run(flood))
            await asyncio.sleep(0)
            # The loop stands still until all has been sent.
            assert select.select([it.agent.control], [], [], 30)[0]
            while len(taken) < 500:
                await asyncio.sleep(0)
                turn += 1
            await flooding
            assert max(Counter(taken).values()) <= 2 * 64

    in_a_network_of_its_own(main)


def test_what_comes_too_often_stays_in_the_kernel() -> None:
    """Queries and connections, of which the daemon and the machine remember something; not what goes to itself."""
    flood = (
        "sent = 0\n"
        "with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:\n"
        "    for number in range(20_000):\n"
        "        try:\n"
        "            s.sendto({0!r}, ({1}, {2}))\n"
        "            sent += 1\n"
        "        except PermissionError: pass\n"
        "tracked = int(open('/proc/sys/net/netfilter/nf_conntrack_count').read())\n"
        "answer = [sent, tracked]"
    )

    async def main() -> None:
        async with world("allowlist") as it:
            for to in ("'9.9.9.9'", "'127.0.0.1'"):
                sent, _ = await it.run(flood.format(question("n.example"), to, 53))
                assert sent < 20_000, to
            before = await it.run(flood.format(b"x", "f'9.9.{number >> 8}.{number & 255}'", 99))
            assert before[0] < 20_000
            itself = await it.run(flood.format(b"x", "'127.0.0.1'", "1024 + number"))
            assert itself[0] == 20_000
            assert itself[1] <= before[1], "nothing of it is remembered"

    in_a_network_of_its_own(main)


FLOODS = {
    "connections": "kept['held'] = [socket.create_connection(('9.9.9.9', 22), 10) for _ in range(100)]",
    "queries": (
        "with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:\n"
        f"    for _ in range(40): s.sendto({question('n.example')!r}, ('9.9.9.9', 53))"
    ),
    "bytes": (
        "s = kept['s'] = socket.create_connection(('9.9.9.9', 22), 10)\n"
        "s.settimeout(1)\n"
        "try: s.sendall(bytes(30_000_000))\n"
        "except TimeoutError: pass"
    ),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_waits_for_the_environments_share_of_the_loop(
    monkeypatch: pytest.MonkeyPatch, flood: str
) -> None:
    """With next to no share, what comes stays in the kernel."""
    monkeypatch.setattr(proxies, "AT_ONCE", 8)
    taken = 0

    async def main() -> None:
        async with world("public", names=NAMES) as it:
            it.server = swallow
            budget = Budget(share=1e-6)
            flow, other = budget.flow("flooder"), budget.flow("neighbour")
            it.proxy._pace.flow = flow

            def counted(work: Any) -> Any:
                def call(*arguments: Any) -> Any:
                    nonlocal taken
                    taken += 1
                    other.spend(0.0)  # somebody else is at work, too
                    flow.spend(0.0005)  # as on a slow machine
                    return work(*arguments)

                return call

            proxy: Any = it.proxy
            if flood == "connections":
                proxy._take = counted(proxy._take)
            elif flood == "queries":
                proxy._take_query = counted(proxy._take_query)
            else:
                proxy._pace.passed_on = counted(proxy._pace.passed_on)
            await it.run(FLOODS[flood])
            for _ in range(200):  # turns of the loop, in which it could take everything
                await asyncio.sleep(0)

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 20):
            pass

    in_a_network_of_its_own(main)
    assert 0 < taken < 20, taken
