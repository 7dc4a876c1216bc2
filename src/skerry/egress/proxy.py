"""The proxy: takes what an environment sends, decides, and takes it where it may go.

    environment ──TCP to anywhere──> our socket in its namespace ──> decision ──> the address that was looked at
                ──DNS────────────> our socket in its namespace ──> an address that stands for the name

A name is answered with an address of our own making, which stands for it; what connects there wants that name. The
name is resolved once, every address of it is looked at, and one of those is dialled. Nothing is passed on before it
has been found out what the client says about itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from typing import Any, cast

from skerry.egress import dns
from skerry.egress.addresses import Address
from skerry.egress.names import canonical
from skerry.egress.rules import Rules
from skerry.egress.sniff import WEB, Refused, Screen, looks_like_http
from skerry.errors import SkerryError

STANDING_FOR = ipaddress.ip_network("198.18.0.0/15")
NAMES_MAX = 10_000
CONNECTIONS_MAX = 512
DENIALS_MAX = 100
QUERIES_MAX = 64
DIAL_SECONDS = 15.0
FIRST_WORDS_SECONDS = 30.0
KEEP_RESOLVED = 30.0
REASON_SECONDS = 2.0
BUFFER = 128 << 10
_ORIGINAL_DESTINATION = 80

Resolve = Callable[[str], Awaitable[list[Address]]]
Sender = tuple[str | Any, int]


@dataclass(slots=True)
class Denial:
    """What was refused, and how often; for whoever has to decide what to allow."""

    at: float
    host: str
    port: int
    """0: only its name was asked for."""
    reason: str
    count: int = 1


@dataclass(slots=True, eq=False)
class Connection:
    """One that was let through."""

    host: str
    """The name that it was made to, or the address."""
    port: int
    address: Address | None = None
    sent: int = 0
    received: int = 0
    verdict: str = "allowed"
    began: float = field(default_factory=time.time)
    task: asyncio.Task[None] | None = None


class Witness:
    """Is told of every decision. May raise SkerryError from `opening`, and then nothing is opened."""

    async def opening(self, connection: Connection) -> None: ...

    def closed(self, connection: Connection) -> None: ...

    def denied(self, denial: Denial) -> None: ...


class _Questions(asyncio.DatagramProtocol):
    """Passes on what comes."""

    def __init__(self, asked: Callable[[asyncio.DatagramTransport, bytes, Sender], None]) -> None:
        self._asked = asked

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: Sender) -> None:
        self._asked(self._transport, data, addr)


class Proxy:
    """Of one environment. `rules` may be replaced at any time by `change()`."""

    def __init__(
        self,
        rules: Rules,
        tcp: list[socket.socket],
        udp: list[socket.socket],
        witness: Witness,
        resolve: Resolve,
    ) -> None:
        self.rules = rules
        self.denials: deque[Denial] = deque(maxlen=DENIALS_MAX)
        self.connections: set[Connection] = set()
        self.sent = self.received = 0
        self._witness = witness
        self._resolve = resolve
        self._sockets = [*tcp, *udp]
        self._names: dict[IPv4Address, str] = {}
        self._standing: dict[str, IPv4Address] = {}
        self._resolved: dict[str, tuple[float, list[Address]]] = {}
        self._queries = 0
        self._tasks = {asyncio.create_task(self._accept(listener)) for listener in tcp}
        self._tasks |= {asyncio.create_task(self._listen(asked)) for asked in udp}

    def change(self, rules: Rules) -> None:
        """From now on these count, also for connections that are open."""
        self.rules = rules
        for connection in tuple(self.connections):
            if self._why_not(connection) and connection.task is not None:
                connection.verdict = "cut: not allowed any more"
                connection.task.cancel()

    async def close(self) -> None:
        tasks = [*self._tasks, *(each.task for each in self.connections if each.task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for one in self._sockets:
            one.close()

    def _why_not(self, connection: Connection) -> str:
        name = canonical(connection.host)
        if name is not None and (reason := self.rules.why_not_name(name, connection.port)):
            return reason
        if connection.address is None:
            return ""
        return self.rules.why_not_address(connection.address, connection.port, by_name=name is not None)

    # ---- names ----

    async def _listen(self, asked: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(lambda: _Questions(self._asked), sock=asked)
        try:
            await loop.create_future()
        finally:
            transport.close()

    def _asked(self, transport: asyncio.DatagramTransport, packet: bytes, sender: Sender) -> None:
        question = dns.parse(packet)
        if question is None or self._queries >= QUERIES_MAX:
            return
        task = asyncio.create_task(self._answer(transport, sender, question))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(
        self, transport: asyncio.DatagramTransport, sender: Sender, question: dns.Question
    ) -> None:
        self._queries += 1
        try:
            code, address, reason = await self._look_up(question)
        finally:
            self._queries -= 1
        transport.sendto(dns.answer(question, code, address, reason), sender)

    async def _look_up(self, question: dns.Question) -> tuple[int, IPv4Address | None, str]:
        name = canonical(question.name)
        if name is None or name.endswith(".arpa") or name == "arpa":
            return dns.NO_SUCH_NAME, None, ""
        if reason := self.rules.why_not_name(name, None):
            self._deny(name, 0, reason)
            return dns.NO_SUCH_NAME, None, self._words(reason, name)
        try:
            if not await self._addresses(name):
                return dns.NO_SUCH_NAME, None, ""
        except OSError:
            return dns.SERVER_FAILURE, None, ""
        if question.kind != dns.A:
            return dns.NO_ERROR, None, ""
        return dns.NO_ERROR, self._stand_for(name), ""

    def _stand_for(self, name: str) -> IPv4Address:
        found = self._standing.pop(name, None)
        if found is None:
            if len(self._standing) >= NAMES_MAX:
                oldest = next(iter(self._standing))
                found = self._standing.pop(oldest)
            else:
                found = IPv4Address(int(STANDING_FOR.network_address) + 2 + len(self._standing))
            self._names[found] = name
        self._standing[name] = found  # the one that was asked for last is the last to go
        return found

    async def _addresses(self, name: str) -> list[Address]:
        """Raises OSError."""
        now = time.monotonic()
        until, found = self._resolved.get(name, (0.0, []))
        if now >= until:
            found = await self._resolve(name)
            if len(self._resolved) >= NAMES_MAX:
                self._resolved.clear()
            self._resolved[name] = now + KEEP_RESOLVED, found
        return found

    # ---- connections ----

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(listener)
            except OSError:  # too many descriptors, or a client that left again
                await asyncio.sleep(0.1)
                continue
            client.setblocking(False)
            if len(self.connections) >= CONNECTIONS_MAX:
                client.close()
                continue
            address, port = _destination(client)
            name = self._names.get(address) if isinstance(address, IPv4Address) else None
            connection = Connection(name or str(address), port, None if name else address)
            self.connections.add(connection)
            connection.task = asyncio.create_task(self._serve(client, connection, name))

    async def _serve(self, client: socket.socket, connection: Connection, name: str | None) -> None:
        try:
            reason = self._why_not(connection)
            if not name and connection.address in STANDING_FOR:
                reason = "nothing stands for this address"
            if reason:
                await self._refuse(client, connection, reason)
                return
            await self._carry(client, connection, name)
        except Refused as refused:
            reason = f"the connection was for something else: {refused}"
            await self._refuse(client, connection, reason, heard=refused.http)
        except (OSError, SkerryError) as error:
            connection.verdict = f"failed: {error}"
        finally:
            client.close()
            self.connections.discard(connection)
            if connection.address is not None and not connection.verdict.startswith("denied"):
                self.sent += connection.sent
                self.received += connection.received
                self._witness.closed(connection)

    async def _carry(self, client: socket.socket, connection: Connection, name: str | None) -> None:
        loop = asyncio.get_running_loop()
        addresses = [connection.address] if connection.address is not None else []
        if name:
            why = ""
            for address in await self._addresses(name):
                why = self.rules.why_not_address(address, connection.port, by_name=True)
                if not why:
                    addresses.append(address)
            if not addresses:
                await self._refuse(client, connection, why or "the name has no address")
                return
        screen = Screen(name, connection.port) if name else None
        first = b""
        if screen is not None and connection.port in WEB:
            first = await _first_words(client, screen)
        connection.address = addresses[0]
        await self._witness.opening(connection)
        server = await _dial(loop, addresses, connection)
        try:
            await _Relay(client, server, connection, screen).run(first)
        finally:
            server.close()

    async def _refuse(
        self, client: socket.socket, connection: Connection, reason: str, heard: bool | None = None
    ) -> None:
        """Say why, if the client speaks HTTP; `heard`: whether it does, if that is known."""
        connection.verdict = f"denied: {reason}"
        self._deny(connection.host, connection.port, reason)
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            async with asyncio.timeout(REASON_SECONDS):
                if heard is None:
                    heard = looks_like_http(await loop.sock_recv(client, 4096))
                if heard:
                    text = f"{self._words(reason, connection.host, connection.port)}\n".encode()
                    head = (
                        b"HTTP/1.1 403 Forbidden\r\ncontent-type: text/plain; charset=utf-8\r\n"
                        b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(text)
                    )
                    await loop.sock_sendall(client, head + text)
                    client.shutdown(socket.SHUT_WR)
                    while await loop.sock_recv(client, BUFFER):
                        pass  # closing with something unread would take the words back

    def _words(self, reason: str, host: str, port: int = 0) -> str:
        where = f"{host}:{port}" if port else host
        hint = f'; ask for it with env.network.allow("{where}")' if "allowlist" in reason else ""
        return f"skerry: egress to {where} is refused: {reason}{hint}"

    def _deny(self, host: str, port: int, reason: str) -> None:
        for known in self.denials:
            if (known.host, known.port, known.reason) == (host, port, reason):
                known.count += 1
                known.at = time.time()
                return
        denial = Denial(time.time(), host, port, reason)
        self.denials.append(denial)
        self._witness.denied(denial)


async def _first_words(client: socket.socket, screen: Screen) -> bytes:
    """What may be passed on of what the client says first. Raises Refused, OSError."""
    loop = asyncio.get_running_loop()
    passed = b""
    async with asyncio.timeout(FIRST_WORDS_SECONDS):
        while not screen.decided:
            data = await loop.sock_recv(client, BUFFER)
            if not data:
                raise Refused("it said nothing")
            passed += screen.feed(data)
    return passed


def _destination(client: socket.socket) -> tuple[Address, int]:
    """Where the client wanted to go, before it was redirected to us."""
    if client.family == socket.AF_INET:
        raw = client.getsockopt(socket.SOL_IP, _ORIGINAL_DESTINATION, 16)
        return IPv4Address(raw[4:8]), int(struct.unpack(">H", raw[2:4])[0])
    raw = client.getsockopt(socket.IPPROTO_IPV6, _ORIGINAL_DESTINATION, 28)
    return ipaddress.IPv6Address(raw[8:24]), int(struct.unpack(">H", raw[2:4])[0])


async def _dial(
    loop: asyncio.AbstractEventLoop, addresses: list[Address], connection: Connection
) -> socket.socket:
    """The first that answers. Raises OSError."""
    failure: OSError = OSError("no address")
    for address in addresses:
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        server = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                await loop.sock_connect(server, (str(address), connection.port))
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.address = address
            return server
        except (OSError, TimeoutError) as error:
            server.close()
            failure = error if isinstance(error, OSError) else OSError("it does not answer")
        except BaseException:
            server.close()
            raise
    raise failure


class _Relay:
    """Both ways, until both have ended."""

    def __init__(
        self, client: socket.socket, server: socket.socket, connection: Connection, screen: Screen | None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._client = client
        self._server = server
        self._connection = connection
        self._screen = screen
        self._answer: asyncio.Future[bytes] | None = None
        """The first bytes that the server says to a request for another protocol."""

    async def run(self, first: bytes) -> None:
        """Raises OSError, Refused."""
        ways = [asyncio.create_task(self._upwards(first)), asyncio.create_task(self._downwards())]
        try:
            done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_EXCEPTION)
            for way in done:
                way.result()
        finally:
            for way in ways:
                way.cancel()
            await asyncio.wait(ways)

    async def _upwards(self, passed: bytes) -> None:
        screen = self._screen
        while True:
            await self._send(passed)
            if screen is not None and screen.upgrading:
                self._answer = self._loop.create_future()
                accepted = (await self._answer).startswith(b"HTTP/1.1 101")
                await self._send(screen.upgraded(accepted))
                if screen.upgrading:
                    raise Refused("several protocols at once")
            data = await self._loop.sock_recv(self._client, BUFFER)
            if not data:
                self._server.shutdown(socket.SHUT_WR)
                return
            passed = data if screen is None else screen.feed(data)

    async def _downwards(self) -> None:
        said = b""
        while data := await self._loop.sock_recv(self._server, BUFFER):
            if self._answer is not None and not self._answer.done():
                said += data[:12]
                if len(said) >= 12:
                    self._answer.set_result(said)
                    said = b""
            await self._loop.sock_sendall(self._client, data)
            self._connection.received += len(data)
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(said)
        self._client.shutdown(socket.SHUT_WR)

    async def _send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._server, data)
        self._connection.sent += len(data)


async def resolve(name: str) -> list[Address]:
    """By the daemon's own resolver. Raises OSError; an empty list when there is no such name."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", -5)):
            return []
        raise
    addresses: list[Address] = []
    for _, _, _, _, place in found:
        address = ipaddress.ip_address(str(place[0]).partition("%")[0])
        if address not in addresses:
            addresses.append(address)
    return addresses
