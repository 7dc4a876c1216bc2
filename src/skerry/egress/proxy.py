"""The egress proxy of an environment: intercepts its DNS and TCP, applies the rules, and relays what is allowed.

    environment ──TCP to anywhere──> our socket in its namespace ──> decision ──> the address that was checked
                ──DNS────────────> our socket in its namespace ──> a synthetic address for the name

DNS answers an allowed name with a synthetic address, so that a connection to it tells the name. The name is resolved
once, every address is checked, and one of the checked addresses is dialled. Nothing is relayed before the Host or SNI
that the client sends has been checked too.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import struct
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from ipaddress import IPv4Address
from typing import Any

from skerry.egress import dns
from skerry.egress.addresses import Address
from skerry.egress.limits import Meter
from skerry.egress.names import canonical
from skerry.egress.pace import Pace
from skerry.egress.relay import Relay
from skerry.egress.resolver import SYNTHETIC, Resolve, Resolver, SyntheticAddresses
from skerry.egress.rules import Rules
from skerry.egress.sniff import WEB, Refused, Screen, looks_like_http, looks_like_tls
from skerry.errors import SkerryError
from skerry.fairness import SLICE, Flow
from skerry.policy import KIB, Limits

DENIALS_MAX = 100
TOLD_AT_ONCE, TOLD_PER_SECOND = 100, 1.0
"""Rate limit of denials reported to the witness; the others are only counted."""
QUERIES_MAX = 64
AT_ONCE = 64
"""Packets or connections accepted in one turn of the loop."""
DIAL_SECONDS = 15.0
FIRST_WORDS_SECONDS = 30.0
REASON_SECONDS = 2.0
PACKET = 4096
NEAR_BUFFER = 192 * KIB
"""Socket buffer toward the environment, in each direction; its round trip is short, so more would not be faster."""
_ORIGINAL_DESTINATION = 80
_ANCILLARY = socket.CMSG_SPACE(20)
_TRANSPARENT = {socket.AF_INET: (socket.IPPROTO_IP, 19), socket.AF_INET6: (socket.IPPROTO_IPV6, 75)}

Sender = tuple[list[tuple[int, int, bytes]], Any]
"""Of a datagram: the address to which it came, as the kernel tells and takes it, and its own."""
_RESET = struct.pack("ii", 1, 0)
_ACCESS_DENIED = bytes((21, 3, 1, 0, 2, 2, 49))
"""TLS: a fatal alert."""


@dataclass(slots=True)
class Denial:
    """A refused destination and how often, for those who maintain the allowlist."""

    at: float
    host: str
    port: int
    """0 for a DNS query."""
    reason: str
    count: int = 1


@dataclass(slots=True, eq=False)
class Connection:
    """One connection of an environment."""

    host: str
    """The destination: a name or an address."""
    port: int
    address: Address | None = None
    sent: int = 0
    received: int = 0
    verdict: str = "allowed"
    began: float = field(default_factory=time.time)
    opened: bool = False
    """True once the witness's `opening` was called."""
    task: asyncio.Task[None] | None = None


class Witness:
    """Receives every decision. `opening` may raise SkerryError to prevent the connection."""

    async def opening(self, connection: Connection) -> None:
        """Called before dialling, with the first address to try."""

    def closed(self, connection: Connection) -> None:
        """Called once for every `opening`, with the address tried last."""

    def denied(self, denial: Denial) -> None:
        """Called for the first denial of each kind, rate-limited."""


class _Denied(Exception):
    """Refused by the rules or the limits. The text is shown to users."""


class _Cut(Exception):
    """An open connection must end. The text is shown to users."""


class Proxy:
    """The proxy of one environment. `change()` replaces the rules at any time."""

    def __init__(
        self,
        rules: Rules,
        tcp: list[socket.socket],
        udp: list[socket.socket],
        witness: Witness,
        resolve: Resolve,
        meter: Meter,
        flow: Flow,
    ) -> None:
        """Takes ownership of the sockets, which must be non-blocking. `flow` is charged for loop time."""
        self.rules = rules
        self.denials: deque[Denial] = deque(maxlen=DENIALS_MAX)
        self.denied = 0
        """Number of refusals."""
        self.connections: set[Connection] = set()
        self._surplus: set[Connection] = set()
        """Connections above the limit, open only to receive the reason."""
        self._meter = meter
        self._witness = witness
        self._tell = float(TOLD_AT_ONCE)
        self._told_at = time.monotonic()
        self._resolver = Resolver(resolve)
        self._synthetic = SyntheticAddresses()
        self._queries: set[asyncio.Task[None]] = set()
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._pace = Pace(flow)
        self._paused = False
        self._tcp, self._udp, self._sockets = tcp, udp, [*tcp, *udp]
        self._listen()

    def change(self, rules: Rules, limits: Limits) -> None:
        """Apply new rules and limits, also to open connections; above the limit the oldest stay."""
        self.rules = rules
        self._meter.change(limits)
        kept = 0
        for connection in sorted(self.connections, key=lambda each: each.began):
            if connection.verdict != "allowed" or connection.task is None:
                continue
            if self._why_not(connection) or kept >= limits.connections:
                connection.verdict = "cut: not allowed any more"
                connection.task.cancel()
            else:
                kept += 1

    async def close(self) -> None:
        """Cancel every connection and close the sockets."""
        self._closed = True
        self._pace.close()
        for one in self._sockets:
            if one.fileno() >= 0:
                self._loop.remove_reader(one)
                one.close()
        connections = (each.task for each in self.connections | self._surplus if each.task is not None)
        tasks = [*self._queries, *connections]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._resolver.close()

    # ---- turns ----

    def _listen(self) -> None:
        self._paused = False
        if self._closed:
            return
        for listener in self._tcp:
            self._loop.add_reader(listener, self._accept, listener)
        for asked in self._udp:
            self._loop.add_reader(asked, self._take_queries, asked)

    def _spend(self, seconds: float) -> None:
        """Charge work. Beyond the allowance, stop reading until the next turn: input stays in the kernel."""
        if self._pace.spend(seconds) or self._paused:
            return
        self._paused = True
        for one in self._sockets:
            self._loop.remove_reader(one)
        self._pace.later(self._listen)

    def _why_not(self, connection: Connection) -> str:
        name = canonical(connection.host)
        if name is not None and (reason := self.rules.why_not_name(name, connection.port)):
            return reason
        if connection.address is None:
            return ""
        return self.rules.why_not_address(connection.address, connection.port, by_name=name is not None)

    # ---- names ----

    def _take_queries(self, asked: socket.socket) -> None:
        began = time.perf_counter()
        for _ in range(AT_ONCE):
            try:
                packet, arrived_at, _, sender = asked.recvmsg(PACKET, _ANCILLARY)
            except OSError:
                break
            self._take_query(asked, packet, (arrived_at, sender))
            if time.perf_counter() - began >= SLICE:
                break
        self._spend(time.perf_counter() - began)

    def _take_query(self, asked: socket.socket, packet: bytes, sender: Sender) -> None:
        question = dns.parse(packet)
        if question is None:
            if (answer := dns.broken(packet)) is not None:
                _reply(asked, answer, sender)
        elif len(self._queries) < QUERIES_MAX:
            task = self._loop.create_task(self._pace.metered(self._answer, asked, sender, question))
            self._queries.add(task)
            task.add_done_callback(self._queries.discard)

    async def _answer(self, asked: socket.socket, sender: Sender, question: dns.Question) -> None:
        code, address, reason = await self._look_up(question)
        _reply(asked, dns.answer(question, code, address, reason), sender)

    async def _look_up(self, question: dns.Question) -> tuple[int, IPv4Address | None, str]:
        name = canonical(question.name)
        if name is None or _is_below(name, "arpa"):
            return dns.NO_SUCH_NAME, None, ""
        if _is_below(name, "localhost"):
            return dns.NO_ERROR, IPv4Address("127.0.0.1") if question.kind == dns.A else None, ""
        if reason := self.rules.why_not_name(name, None):
            self._deny(name, 0, reason)
            return dns.NO_SUCH_NAME, None, _words(reason, name)
        try:
            # Without traffic left, skip the lookup: the connection reports the reason, which most programs show.
            if not self._meter.spent() and not await self._resolver.addresses(name):
                return dns.NO_SUCH_NAME, None, ""
        except OSError:
            return dns.SERVER_FAILURE, None, ""
        if question.kind != dns.A:
            return dns.NO_ERROR, None, ""
        return dns.NO_ERROR, self._synthetic.address(name), ""

    # ---- connections ----

    def _accept(self, listener: socket.socket) -> None:
        began = time.perf_counter()
        for _ in range(AT_ONCE):
            try:
                client, _ = listener.accept()
            except BlockingIOError:
                break
            except ConnectionError:
                continue
            except OSError:  # too many open descriptors
                self._loop.remove_reader(listener)
                self._loop.call_later(0.1, self._accept_again, listener)
                break
            self._take(client)
            if time.perf_counter() - began >= SLICE:
                break
        self._spend(time.perf_counter() - began)

    def _take(self, client: socket.socket) -> None:
        try:
            client.setblocking(False)
            _hold(client, NEAR_BUFFER)
            address, port = _destination(client)
        except OSError:  # already closed
            client.close()
            return
        name = self._synthetic.name(address)
        connection = Connection(name or str(address), port, None if name else address)
        full = self._meter.enter(len(self.connections))
        if full and not self._meter.enter_surplus(len(self._surplus)):
            self._deny(connection.host, port, full)
            _close(client, reset=True)
            return
        (self._surplus if full else self.connections).add(connection)
        serving = self._pace.metered(self._serve, client, connection, name, full)
        connection.task = self._loop.create_task(serving)
        # A callback, not the task itself: a task cancelled before its first step never runs.
        connection.task.add_done_callback(partial(self._ended, client, connection))

    def _accept_again(self, listener: socket.socket) -> None:
        if not self._closed and not self._paused:
            self._loop.add_reader(listener, self._accept, listener)

    async def _serve(
        self, client: socket.socket, connection: Connection, name: str | None, full: str
    ) -> None:
        """`full` is the reason why it is above the limit, or empty."""
        try:
            if full:
                raise _Denied(full)
            await self._carry(client, connection, name)
        except _Denied as denied:
            await self._refuse(client, connection, str(denied), None)
        except Refused as refused:
            reason = f"the connection was for something else: {refused}"
            await self._refuse(client, connection, reason, refused.protocol)
        except _Cut as cut:
            connection.verdict = f"cut: {cut}"
            self._deny(connection.host, connection.port, str(cut))
        except (OSError, SkerryError) as error:
            connection.verdict = f"failed: {error}"
        except asyncio.CancelledError:
            if connection.verdict == "allowed":
                connection.verdict = "cut: the environment has ended"
            raise

    def _ended(self, client: socket.socket, connection: Connection, _: asyncio.Task[None]) -> None:
        # Reset: an aborted transfer must not look complete.
        _close(client, reset=connection.verdict.startswith(("cut", "failed")))
        self.connections.discard(connection)
        self._surplus.discard(connection)
        self._meter.leave()
        if connection.opened:
            self._witness.closed(connection)

    async def _carry(self, client: socket.socket, connection: Connection, name: str | None) -> None:
        """Raises _Denied, Refused, _Cut, OSError, SkerryError."""
        if reason := self._meter.spent() or self._why_not(connection):
            raise _Denied(reason)
        if connection.address is None:
            assert name is not None
            addresses = await self._resolver.addresses(name)
        elif connection.address in SYNTHETIC:
            raise _Denied("no name belongs to this synthetic address")
        else:
            addresses = [connection.address]
        self._reachable(addresses, connection, name)
        screen = Screen(name, connection.port) if name else None
        first = b""
        if screen is not None and connection.port in WEB:
            first = await _first_words(client, screen)
        # The rules may have changed meanwhile.
        addresses = self._reachable(addresses, connection, name)
        connection.address = addresses[0]
        connection.opened = True
        await self._witness.opening(connection)
        server = await self._dial(addresses, connection)
        try:
            count = partial(self._count, connection)
            await Relay(client, server, screen, count, self._meter.piece, self._pace).run(first)
        except BaseException:
            _close(server, reset=True)
            raise
        server.close()

    def _reachable(self, addresses: list[Address], connection: Connection, name: str | None) -> list[Address]:
        """The addresses that the rules allow. Raises _Denied if there are none."""
        reason = "the name has no address"
        found: list[Address] = []
        for address in addresses:
            why = self.rules.why_not_address(address, connection.port, by_name=name is not None)
            if why:
                reason = why
            else:
                found.append(address)
        if not found:
            raise _Denied(reason)
        return found

    async def _dial(self, addresses: list[Address], connection: Connection) -> socket.socket:
        """Connect to the first address that answers. Raises OSError."""
        failure = OSError("the rules no longer allow it")
        last = self._loop.time() + 2 * DIAL_SECONDS
        for address in addresses:
            connection.address = address
            if self._why_not(connection):
                continue
            family = socket.AF_INET if address.version == 4 else socket.AF_INET6
            server = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            if buffer := self._meter.buffer():
                _hold(server, buffer)
            try:
                async with asyncio.timeout_at(min(last, self._loop.time() + DIAL_SECONDS)):
                    await self._loop.sock_connect(server, (str(address), connection.port))
                server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                server.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                return server
            except TimeoutError:
                server.close()
                failure = OSError("connection timed out")
            except OSError as error:
                server.close()
                failure = error
            except BaseException:
                server.close()
                raise
        raise failure

    def _count(self, connection: Connection, sent: int, received: int) -> None:
        """Raises _Cut."""
        if not self._meter.count(sent, received):
            raise _Cut(self._meter.spent())
        connection.sent += sent
        connection.received += received

    async def _refuse(
        self, client: socket.socket, connection: Connection, reason: str, protocol: str | None
    ) -> None:
        """Send the reason if the client speaks HTTP or TLS. `protocol` None: read its first bytes to find out."""
        connection.verdict = f"denied: {reason}"
        self._deny(connection.host, connection.port, reason)
        with contextlib.suppress(OSError):
            async with asyncio.timeout(REASON_SECONDS):
                if protocol is None:
                    said = await self._loop.sock_recv(client, PACKET)
                    protocol = "http" if looks_like_http(said) else "tls" if looks_like_tls(said) else ""
                if not protocol:
                    return
                words = _words(reason, connection.host, connection.port)
                await self._loop.sock_sendall(
                    client, _forbidden(words) if protocol == "http" else _ACCESS_DENIED
                )
                client.shutdown(socket.SHUT_WR)
                while await self._loop.sock_recv(client, PACKET):
                    pass  # closing with unread data would reset the connection and discard the answer

    def _deny(self, host: str, port: int, reason: str) -> None:
        self.denied += 1
        for known in self.denials:
            if (known.host, known.port, known.reason) == (host, port, reason):
                known.count += 1
                known.at = time.time()
                return
        denial = Denial(time.time(), host, port, reason)
        self.denials.append(denial)
        now = time.monotonic()
        self._tell = min(self._tell + (now - self._told_at) * TOLD_PER_SECOND, float(TOLD_AT_ONCE))
        self._told_at = now
        if self._tell >= 1:
            self._tell -= 1
            self._witness.denied(denial)


def _words(reason: str, host: str, port: int = 0) -> str:
    where = f"[{host}]" if ":" in host else host
    where = f"{where}:{port}" if port else where
    hint = f'; ask for it with env.network.allow("{where}")' if "allowlist" in reason else ""
    return f"skerry: egress to {where} is refused: {reason}{hint}"


def _forbidden(words: str) -> bytes:
    text = f"{words}\n".encode()
    return (
        b"HTTP/1.1 403 Forbidden\r\ncontent-type: text/plain; charset=utf-8\r\n"
        b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(text), text)
    )


def _is_below(name: str, top: str) -> bool:
    return name == top or name.endswith(f".{top}")


def _reply(asked: socket.socket, packet: bytes, sender: Sender) -> None:
    """From the address that was asked, if the socket tells it."""
    arrived_at, address = sender
    with contextlib.suppress(OSError):
        asked.sendmsg([packet], arrived_at, 0, address)


def _hold(one: socket.socket, size: int) -> None:
    """Limit the kernel's socket buffers, in each direction, approximately."""
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        one.setsockopt(socket.SOL_SOCKET, option, size)


def _close(one: socket.socket, *, reset: bool) -> None:
    if reset:
        with contextlib.suppress(OSError):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    one.close()


async def _first_words(client: socket.socket, screen: Screen) -> bytes:
    """The client's first bytes that may be relayed. Raises Refused, OSError."""
    loop = asyncio.get_running_loop()
    passed = b""
    try:
        async with asyncio.timeout(FIRST_WORDS_SECONDS):
            while not passed:
                data = await loop.sock_recv(client, PACKET)
                if not data:
                    raise OSError("the client said nothing")
                passed = screen.feed(data)
    except TimeoutError:
        raise OSError("the client said nothing for too long") from None
    return passed


def _destination(client: socket.socket) -> tuple[Address, int]:
    """The original destination, before the redirect. Raises OSError."""
    if client.getsockopt(*_TRANSPARENT[client.family]):  # it was not redirected
        host, port, *_ = client.getsockname()
        return ipaddress.ip_address(host), port
    if client.family == socket.AF_INET:
        raw = client.getsockopt(socket.SOL_IP, _ORIGINAL_DESTINATION, 16)
        return IPv4Address(raw[4:8]), int(struct.unpack(">H", raw[2:4])[0])
    raw = client.getsockopt(socket.IPPROTO_IPV6, _ORIGINAL_DESTINATION, 28)
    return ipaddress.IPv6Address(raw[8:24]), int(struct.unpack(">H", raw[2:4])[0])
