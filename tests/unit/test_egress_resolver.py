"""The names that the daemon looks up by its own resolver."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest

from skerry.egress import resolver
from skerry.egress.resolver import (
    ADDRESSES_MAX,
    RESOLVERS,
    RESOLVING_FIRST,
    RESOLVING_MAX,
    LookupQueue,
    Resolver,
    resolve,
)


def test_a_name_with_thousands_of_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of names may answer with 64 KiB of them. Those that are never tried are not looked at either."""

    def found(*_: Any, **__: Any) -> list[Any]:
        places: list[Any] = [(f"93.184.{number >> 8}.{number & 255}", 0) for number in range(4000)]
        return [(None, None, None, "", place) for place in (*places[:1], *places, ("fe80::1%lo", 0, 0, 1))]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    addresses = asyncio.run(resolve("a.example"))
    assert [str(address) for address in addresses] == [
        f"93.184.0.{number}" for number in range(ADDRESSES_MAX)
    ]


def test_names_that_nobody_answers_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty environments ask for nothing else; some of them are gone since, and their threads are not."""
    silence = threading.Event()

    def getaddrinfo(name: str, *_: Any, **__: Any) -> list[Any]:
        if name.startswith("silent"):
            silence.wait()
        return [(None, None, None, "", ("93.184.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    async def main() -> None:
        queue = LookupQueue()
        greedy = [Resolver(resolve, queue) for _ in range(60)]
        asking = []
        for one in greedy:
            asking += [asyncio.create_task(one.addresses(f"silent{n}.example")) for n in range(20)]
            await asyncio.sleep(0)
        for one in greedy[:6]:
            await one.close()
        async with asyncio.timeout(30):
            [found] = await Resolver(resolve, queue).addresses("friendly.example")
        assert str(found) == "93.184.0.1"
        silence.set()
        await asyncio.gather(*asking, return_exceptions=True)

    try:
        asyncio.run(main())
    finally:
        silence.set()


def test_whoever_has_the_fewest_comes_first() -> None:
    begun: list[asyncio.Future[list[Any]]] = []

    async def never(name: str) -> list[Any]:
        begun.append(asyncio.get_running_loop().create_future())
        return await begun[-1]

    async def ask(queue: LookupQueue, count: int) -> list[asyncio.Task[Any]]:
        one = Resolver(never, queue)
        tasks = [asyncio.create_task(one.addresses(f"n{number}.example")) for number in range(count)]
        for _ in range(10):
            await asyncio.sleep(0)
        return tasks

    async def main() -> None:
        queue = LookupQueue()
        tasks = await ask(queue, 20)
        assert len(begun) == RESOLVING_FIRST
        while len(begun) < RESOLVERS:
            tasks += await ask(queue, 20)
        assert len(tasks) > 12 * 20
        [late] = await ask(queue, 1)
        assert len(begun) == RESOLVERS
        begun[0].set_result([])  # others of the same one wait, and for longer
        for _ in range(10):
            await asyncio.sleep(0)
        begun[RESOLVERS].set_result([])
        async with asyncio.timeout(10):
            assert await late == []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())


def test_answered_names_earn_turns_and_slow_ones_cost_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async def soon(name: str) -> list[Any]:
        return []

    async def main() -> None:
        one = Resolver(soon, LookupQueue())
        for number in range(2 * RESOLVING_MAX):
            await one.addresses(f"n{number}.example")
        assert one.allowed == RESOLVING_MAX
        monkeypatch.setattr(resolver, "SLOW_SECONDS", -1.0)  # from now on every name is slow
        await one.addresses("slow.example")
        assert one.allowed == 1

    asyncio.run(main())
