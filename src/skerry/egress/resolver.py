"""Name resolution for one environment: real addresses outside, a synthetic address for each name inside."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from ipaddress import IPv4Address

from skerry.egress.addresses import Address

SYNTHETIC = ipaddress.ip_network("198.18.0.0/15")
NAMES_MAX = 10_000
ADDRESSES_MAX = 8
"""Addresses of one name that are tried."""
RESOLVING_FIRST, RESOLVING_MAX = 2, 8
RESOLVERS = 128
"""Concurrent lookups: of one environment, at first and at most, and of all environments together."""
SLOW_SECONDS = 1.0
"""A lookup that takes longer reduces its environment to one at a time, until answers come faster again."""
KEEP_RESOLVED = 30.0

Resolve = Callable[[str], Awaitable[list[Address]]]


class SyntheticAddresses:
    """Maps names to addresses of 198.18.0.0/15 and back. Evicts the least recently used name."""

    def __init__(self) -> None:
        self._names: dict[IPv4Address, str] = {}
        self._addresses: dict[str, IPv4Address] = {}

    def address(self, name: str) -> IPv4Address:
        found = self._addresses.pop(name, None)
        if found is None:
            if len(self._addresses) >= NAMES_MAX:
                oldest = next(iter(self._addresses))
                found = self._addresses.pop(oldest)
            else:
                found = IPv4Address(int(SYNTHETIC.network_address) + 2 + len(self._addresses))
            self._names[found] = name
        self._addresses[name] = found  # moves to the end: most recently used
        return found

    def name(self, address: Address) -> str | None:
        return self._names.get(address) if isinstance(address, IPv4Address) else None


class LookupQueue:
    """Fair share of the resolver threads.

    A name that no server answers blocks a thread for many seconds. So an environment starts with a low limit, which
    rises while its names resolve fast and drops to 1 when they do not. No environment gets more than a quarter of the
    free threads. The one with the fewest running lookups is served first.
    """

    def __init__(self, most: int = RESOLVERS) -> None:
        self._most = most
        self._running: dict[Resolver, int] = {}
        self._waiting: dict[Resolver, deque[asyncio.Future[None]]] = {}

    async def begin(self, who: Resolver) -> None:
        """Returns when a lookup may start; every one needs an `end()`."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(who, deque()).append(turn)
        self._give()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.end(who)
            raise

    def end(self, who: Resolver) -> None:
        self._running[who] -= 1
        if not self._running[who]:
            del self._running[who]
        self._give()

    def _give(self) -> None:
        while self._waiting and (left := self._most - sum(self._running.values())):
            may = [
                each
                for each in self._waiting
                if self._running.get(each, 0) < max(1, min(each.allowed, left // 4))
            ]
            if not may:
                return
            who = min(may, key=lambda each: self._running.get(each, 0))
            running = self._running.get(who, 0)
            turn = self._waiting[who].popleft()
            if not self._waiting[who]:
                del self._waiting[who]
            if not turn.done():  # else it was cancelled
                self._running[who] = running + 1
                turn.set_result(None)


all_lookups = LookupQueue()


class Resolver:
    """Resolves names with a cache; concurrent requests for one name share a lookup."""

    def __init__(self, resolve: Resolve, queue: LookupQueue = all_lookups) -> None:
        self.allowed = RESOLVING_FIRST
        """Concurrent lookups."""
        self._resolve = resolve
        self._queue = queue
        self._known: dict[str, tuple[float, list[Address]]] = {}
        self._looking: dict[str, asyncio.Task[list[Address]]] = {}

    async def addresses(self, name: str) -> list[Address]:
        """The addresses of a name, empty if it does not exist. Raises OSError."""
        until, found = self._known.get(name, (0.0, []))
        if time.monotonic() < until:
            return found
        task = self._looking.get(name)
        if task is None:
            task = self._looking[name] = asyncio.create_task(self._find(name))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    async def _find(self, name: str) -> list[Address]:
        try:
            await self._queue.begin(self)
            # Shielded: a thread cannot be stopped, and keeps its place until it ends.
            looking = asyncio.ensure_future(self._resolve(name))
            looking.add_done_callback(partial(self._done, time.monotonic()))
            found = (await asyncio.shield(looking))[:ADDRESSES_MAX]
        finally:
            del self._looking[name]
        if len(self._known) >= NAMES_MAX:
            self._known.clear()
        self._known[name] = time.monotonic() + KEEP_RESOLVED, found
        return found

    def _done(self, began: float, looking: asyncio.Future[list[Address]]) -> None:
        slow = time.monotonic() - began > SLOW_SECONDS
        self.allowed = 1 if slow else min(RESOLVING_MAX, self.allowed + 1)
        self._queue.end(self)
        if not looking.cancelled():
            looking.exception()  # retrieved; callers get it from the task

    async def close(self) -> None:
        """Cancel all lookups."""
        tasks = list(self._looking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


_resolvers = ThreadPoolExecutor(RESOLVERS, "skerry-resolve")
"""Not the loop's default executor: slow names would block its other users."""


async def resolve(name: str) -> list[Address]:
    """Resolve with the system's resolver. Returns an empty list for an unknown name. Raises OSError."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.run_in_executor(_resolvers, _look_up, name)
    except socket.gaierror as error:
        if error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", -5)):
            return []
        raise
    return [ipaddress.ip_address(text) for text in found]


def _look_up(name: str) -> list[str]:
    """Runs in a thread. Truncates, because an answer can have thousands of addresses. Raises OSError."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(place[0]).partition("%")[0] for *_, place in found))[:ADDRESSES_MAX]
