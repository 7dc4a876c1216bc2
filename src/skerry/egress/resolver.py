"""Names of one environment: the addresses that they have, and the one that stands for each inside."""

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

STANDING_FOR = ipaddress.ip_network("198.18.0.0/15")
NAMES_MAX = 10_000
ADDRESSES_MAX = 8
"""Of one name, that are tried."""
RESOLVING_FIRST, RESOLVING_MAX = 2, 8
RESOLVERS = 128
"""Names that are looked up at once: for one environment, at first and at most, and for all together."""
SLOW_SECONDS = 1.0
"""An environment with a lookup that took longer gets one at a time, until its names are answered sooner."""
KEEP_RESOLVED = 30.0

Resolve = Callable[[str], Awaitable[list[Address]]]


class Standing:
    """Addresses of our own making that stand for names. When there are too many, the one that was asked for the longest
    time ago goes."""

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
                found = IPv4Address(int(STANDING_FOR.network_address) + 2 + len(self._addresses))
            self._names[found] = name
        self._addresses[name] = found  # the one that was asked for last is the last to go
        return found

    def name(self, address: Address) -> str | None:
        return self._names.get(address) if isinstance(address, IPv4Address) else None


class Turns:
    """Lookups of all environments together.

    A name that nobody answers takes many seconds. So that such names leave room for those of others, an environment
    begins with few turns, gets more while its names are answered soon, and one when they are not; never more than a
    quarter of what is left. The one with the fewest under way comes first.
    """

    def __init__(self, most: int = RESOLVERS) -> None:
        self._most = most
        self._running: dict[Resolver, int] = {}
        self._waiting: dict[Resolver, deque[asyncio.Future[None]]] = {}

    async def begin(self, who: Resolver) -> None:
        """Returns when it is its turn; `end()` gives that back."""
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
            if not turn.done():  # else it was given up
                self._running[who] = running + 1
                turn.set_result(None)


everybody = Turns()


class Resolver:
    """Looks names up, each once at a time, and remembers them for a while."""

    def __init__(self, resolve: Resolve, turns: Turns = everybody) -> None:
        self.allowed = RESOLVING_FIRST
        """Lookups at once."""
        self._resolve = resolve
        self._turns = turns
        self._known: dict[str, tuple[float, list[Address]]] = {}
        self._looking: dict[str, asyncio.Task[list[Address]]] = {}

    async def addresses(self, name: str) -> list[Address]:
        """None if there is no such name. Raises OSError."""
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
            await self._turns.begin(self)
            # It goes on, and takes its place, when nobody waits for it any more: a thread cannot be stopped.
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
        self._turns.end(self)
        if not looking.cancelled():
            looking.exception()  # whoever waits has it, too

    async def close(self) -> None:
        """Look for nothing any more."""
        tasks = list(self._looking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


_resolvers = ThreadPoolExecutor(RESOLVERS, "skerry-resolve")
"""Not the loop's own threads: a slow name would hold up everybody else who needs one."""


async def resolve(name: str) -> list[Address]:
    """By the daemon's own resolver. Raises OSError; an empty list when there is no such name."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.run_in_executor(_resolvers, _look_up, name)
    except socket.gaierror as error:
        if error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", -5)):
            return []
        raise
    return [ipaddress.ip_address(text) for text in found]


def _look_up(name: str) -> list[str]:
    """For a thread: an answer can have thousands of addresses. Raises OSError."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(place[0]).partition("%")[0] for *_, place in found))[:ADDRESSES_MAX]
