"""The doors of the daemon: its unix socket, and what it listens on beside that.

Every door takes its connections itself, so that it knows how many there are, those in a TLS handshake included.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import ssl
import struct
from abc import abstractmethod
from asyncio import Transport
from collections.abc import Callable, Iterable
from ipaddress import IPv4Address, ip_address, ip_network

import structlog
from starlette.types import Scope

from skerry.daemon import origin
from skerry.daemon.http1.protocol import Admission, HttpProtocol, Timeouts
from skerry.daemon.peers import Peer
from skerry.errors import DaemonUnavailable, Denied
from skerry.manager.capacity import SharedCapacity

CROWD = 4096
"""Connections that one door has at once, at most a quarter of what this process may have open."""
RESERVE = 64
"""Connections above that, or above the share of their address, which are told so; all further ones are closed without a
word."""
AT_ONCE = 64
TRY_AGAIN = 1.0
SHUTDOWN_SECONDS = 5.0

log = structlog.get_logger(component="daemon")


def crowd() -> int:
    """How many connections a door has at once, unless it is told otherwise."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(CROWD, files // 4)


class Door(Admission):
    """One listening socket, and who may come in there."""

    tls: ssl.SSLContext | None = None

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.most = crowd()

    @property
    def most(self) -> int:
        return self._most

    @most.setter
    def most(self, most: int) -> None:
        """How many connections are served at once. No address and no tenant gets more than half of what is left."""
        self._most = most
        self.addresses, self._tenants = SharedCapacity(most), SharedCapacity(most)

    def share(self, tenant: str, instead_of: str | None) -> bool:
        if instead_of is not None:
            self._tenants.give_back(instead_of, 1)
        return self._tenants.take(tenant, 1)

    def leave(self, tenant: str) -> None:
        self._tenants.give_back(tenant, 1)

    @abstractmethod
    def origin(self, sock: socket.socket) -> str | None:
        """What a connection is counted for before anything is known of its tenant; None: nothing."""

    @abstractmethod
    def silence(self, transport: Transport) -> float:
        """Seconds since anything was heard of the machine at the other end."""


class UnixDoor(Door):
    """Open to processes of our own user and of root; all others get 403 for whatever they ask."""

    def identify(self, transport: Transport) -> Peer:
        credentials = _socket(transport).getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        _, uid, _ = struct.unpack("3i", credentials)
        if uid not in (os.geteuid(), 0):
            log.warning("foreign peer refused", uid=uid)
            raise Denied("this daemon belongs to another user", hint="set SKERRY_HOME to your own")
        return Peer(f"uid {uid}", trusted=True)

    def check(self, scope: Scope, target: bytes) -> None:
        pass

    def origin(self, sock: socket.socket) -> str | None:
        return None

    def silence(self, transport: Transport) -> float:
        return 0.0


class TcpDoor(Door):
    """Open to everybody, but nobody is trusted: not even on loopback, where any user of the machine can be."""

    def __init__(self, sock: socket.socket, names: Iterable[str], tls: ssl.SSLContext | None) -> None:
        super().__init__(sock)
        self.tls = tls
        self._names = frozenset(name.lower() for name in names)

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{_address(self.sock.getsockname())}"

    def identify(self, transport: Transport) -> Peer:
        sock = _socket(transport)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        return Peer(_address(transport.get_extra_info("peername")), trusted=False)

    def check(self, scope: Scope, target: bytes) -> None:
        # With a wildcard we listen on all our addresses: the one that was reached is a name of ours, too.
        origin.check(scope, target, self._names | {_bracketed(scope["server"][0])})

    def origin(self, sock: socket.socket) -> str | None:
        """The address; of IPv6 the network of 64 bits, in which one machine has as many as it likes."""
        try:
            address = ip_address(sock.getpeername()[0].partition("%")[0])
        except OSError:  # it is gone again
            return None
        if isinstance(address, IPv4Address):
            return str(address)
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ip_network((int(address) >> 64 << 64, 64)))

    def silence(self, transport: Transport) -> float:
        # Keepalive does not look while something is unsent, and TCP_USER_TIMEOUT also ends those who are well but
        # do not read. Either way an acknowledgement comes at least every two minutes.
        info = _socket(transport).getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
        milliseconds: int = struct.unpack_from("I", info, 56)[0]
        return milliseconds / 1000


class Listener:
    """Takes the connections of one door, until it is closed."""

    def __init__(self, door: Door, make: Callable[[Admission], HttpProtocol], timeouts: Timeouts) -> None:
        self._door = door
        self._make = make
        self._timeouts = timeouts
        self._loop = asyncio.get_running_loop()
        self._arriving: set[asyncio.Task[None]] = set()
        self._open: set[Transport] = set()
        self._told = 0
        """How many of both are only told that there is no room for them."""
        self._timer: asyncio.TimerHandle | None = None
        door.sock.setblocking(False)
        self._listen()
        self._looking = self._loop.create_task(self._look())

    def close(self) -> None:
        """Take no more. Those that are in stay."""
        self._looking.cancel()
        if self._timer is not None:
            self._timer.cancel()
        for task in self._arriving:
            task.cancel()
        self._loop.remove_reader(self._door.sock)
        self._door.sock.close()

    def _listen(self) -> None:
        self._timer = None
        self._loop.add_reader(self._door.sock, self._accept)

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                sock, _ = self._door.sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:  # no descriptor or memory is left; the next try will not do better
                log.error("cannot take connections", error=str(error))
                self._loop.remove_reader(self._door.sock)
                self._timer = self._loop.call_later(TRY_AGAIN, self._listen)
                return
            origin = self._door.origin(sock)
            admission: Admission = self._door
            if len(self._open) + len(self._arriving) - self._told >= self._door.most:
                admission = _Full("too many connections")
            elif origin is not None and not self._door.addresses.take(origin, 1):
                admission = _Full(f"too many connections from {origin}")
            if admission is not self._door:
                origin = None
                if self._told >= RESERVE:
                    sock.close()
                    continue
                self._told += 1
            task = self._loop.create_task(self._admit(sock, admission, origin))
            self._arriving.add(task)
            task.add_done_callback(self._arriving.discard)

    async def _admit(self, sock: socket.socket, admission: Admission, origin: str | None) -> None:
        sock.setblocking(False)
        limits = (
            {"ssl_handshake_timeout": self._timeouts.handshake, "ssl_shutdown_timeout": SHUTDOWN_SECONDS}
            if self._door.tls
            else {}
        )
        http = self._make(admission)
        http.lost.add_done_callback(lambda _: self._left(admission, origin))
        try:
            await self._loop.connect_accepted_socket(lambda: http, sock, ssl=self._door.tls, **limits)
        except OSError as error:  # no TLS, too slow, or gone again
            log.debug("connection failed", error=str(error))
            sock.close()
            http.end()
            return
        except BaseException:
            sock.close()
            http.end()
            raise
        self._open.add(http.transport)
        http.lost.add_done_callback(lambda _: self._open.discard(http.transport))

    def _left(self, admission: Admission, origin: str | None) -> None:
        if admission is not self._door:
            self._told -= 1
        elif origin is not None:
            self._door.addresses.give_back(origin, 1)

    async def _look(self) -> None:
        """End connections to machines that are gone."""
        while True:
            await asyncio.sleep(self._timeouts.silence / 5)
            for transport in list(self._open):
                with contextlib.suppress(OSError):
                    if self._door.silence(transport) > self._timeouts.silence:
                        log.info("nothing is heard of a peer any more")
                        transport.abort()


class _Full(Admission):
    """Tells everybody to come back later."""

    def __init__(self, why: str) -> None:
        self._why = why

    def identify(self, transport: Transport) -> Peer:
        raise DaemonUnavailable(self._why, hint="close some, or try again later")

    def check(self, scope: Scope, target: bytes) -> None:
        pass

    def share(self, tenant: str, instead_of: str | None) -> bool:
        return True

    def leave(self, tenant: str) -> None:
        pass


def _socket(transport: Transport) -> socket.socket:
    sock: socket.socket = transport.get_extra_info("socket")
    return sock


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _address(address: tuple[str, int]) -> str:
    return f"{_bracketed(address[0])}:{address[1]}"
