"""Random histories: many concurrent clients of a real daemon that is killed and stopped every few seconds.

    python -m tests.soak.histories --seed 7 --seconds 60 --store sqlite

Clients of several tenants act as `plan` says and give up at random moments. Every answer is checked against what was
answered before; what was not answered may have happened or not. At the end everything is looked at once more,
rows are compared with the host, and the audit with what was acknowledged.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from skerry import AsyncClient, Client
from tests import histories, leaks, postgres, support
from tests.integration import agreement
from tests.integration.nursery import nursery
from tests.soak import plan
from tests.soak.owner import owner
from tests.soak.world import (
    REFUSED,
    SMALL,
    SMALL_MAX,
    TENANTS,
    Refusal,
    Unanswered,
    World,
    create,
    delete,
)

OWNERS = 24
NAMED = 6
KEYED = 4
LIMITED = 4
PROGRAMS = 3
SHORT = 3
SHORT_LIFETIME = 2.0
GRACE = 60.0
"""Seconds that an environment has at least after a restart of the daemon, once."""
SLACK = 60.0
"""Seconds by which something may be late on a busy machine before it counts as lost."""
DESCRIPTORS = 12
"""How many more than a fresh daemon one may have open that has no environments any more."""


Actor = Callable[[World, str, int], Coroutine[Any, Any, None]]


async def named(world: World, tenant: str, number: int) -> None:
    """Competes for a name with others of its tenant."""
    history = world.names[tenant]
    async with world.client(tenant) as client:
        for action in plan.actions(world.seed, f"named{number}"):
            await world.up.wait()
            if not world.running:
                return
            name = f"name-{action.path}"
            made = ""
            try:
                with history.call("create", name=name) as call:
                    try:
                        made = await create(world, client, tenant, action, name=name)
                        call.answer = {"environment_id": made}
                    except Refusal as refusal:
                        call.error = refusal.code
                        # `environment_ended`: somebody found it by its name and deleted it before it was ready.
                        if refusal.code not in ("conflict", "environment_ended", *REFUSED):
                            world.fail(f"create with the name {name}: {refusal}")
            except Unanswered:
                pass
            if not made:
                # Whoever has it now: its creator may never have been told.
                made = await _find(world, client, tenant, name)
            if made:
                try:
                    with history.call("delete", environment=made) as call:
                        await delete(world, client, made, action.gives_up)
                except Unanswered:
                    pass
                except Refusal as refusal:
                    if refusal.code not in REFUSED:
                        world.fail(f"delete of {made}: {refusal}")


async def _find(world: World, client: AsyncClient, tenant: str, name: str) -> str:
    """The id of the environment with this name, if there is one."""
    try:
        found = await world.ask("list", client.environments(name=name))
    except (Unanswered, Refusal):
        return ""
    if len(found) > 1:
        world.fail(f"{len(found)} environments have the name {name}: {found}")
    for info in found:
        world.known.setdefault(info.environment_id, tenant)
    return found[0].environment_id if found else ""


async def keyed(world: World, tenant: str, number: int) -> None:
    """Repeats a create with the same key until it is answered: all answers are about one environment."""
    async with world.client(tenant) as client:
        for action in plan.actions(world.seed, f"keyed{number}"):
            await world.up.wait()
            if not world.running:
                return
            key = f"{number}-{action.number}"
            tries = [_with_key(world, client, tenant, action, key) for _ in range(1 + int(action.chance * 3))]
            made = {one for one in await asyncio.gather(*tries) if one}
            for _ in range(10):
                if made:
                    break
                await world.up.wait()
                made |= {await _with_key(world, client, tenant, action, key)} - {""}
            if len(made) > 1:
                world.fail(f"the key {key} has made {made}")
            for environment in made:
                try:
                    await delete(world, client, environment, action.gives_up)
                except Unanswered:
                    pass
                except Refusal as refusal:
                    world.fail(f"delete of {environment}: {refusal}")


async def _with_key(world: World, client: AsyncClient, tenant: str, action: plan.Action, key: str) -> str:
    try:
        return await create(world, client, tenant, action, key=key)
    except Unanswered:
        return ""
    except Refusal as refusal:
        if refusal.code not in REFUSED:
            world.fail(f"create with the key {key}: {refusal}")
        return ""


async def limited(world: World, tenant: str, number: int) -> None:
    """Creates as many as its tenant's quota has room for, and looks whether there are ever more."""
    mine: list[str] = []
    async with world.client(tenant) as client:
        for action in plan.actions(world.seed, f"limited{number}"):
            await world.up.wait()
            if not world.running:
                return
            try:
                if action.chance < 0.6 or not mine:
                    mine.append(await create(world, client, tenant, action))
                else:
                    await delete(world, client, mine[-1], action.gives_up)
                    mine.pop()
                listed = await world.ask("list", client.environments())
                quota = await world.ask("quota", client.quota(tenant))
                running = sum(info.state == "running" for info in listed)
                if running > SMALL_MAX or quota["used"]["environments"] > SMALL_MAX:
                    world.fail(f"{running} environments run, {quota} with a quota of {SMALL_MAX}")
            except Unanswered:
                pass
            except Refusal as refusal:
                # `environment_ended`: another one took it for one that nobody knows of, see below.
                if refusal.code not in ("quota_exceeded", "environment_ended", *REFUSED):
                    world.fail(f"in a small tenant: {refusal}")
                # What nobody was told of has room, too; somebody has to make some.
                if refusal.code == "quota_exceeded" and not mine:
                    await _forget_orphans(world, client, tenant)


async def _forget_orphans(world: World, client: AsyncClient, tenant: str) -> None:
    """Delete what a create has made whose answer nobody got."""
    try:
        for info in await world.ask("list", client.environments()):
            if info.environment_id not in world.known:
                world.known[info.environment_id] = tenant
                await delete(world, client, info.environment_id)
    except (Unanswered, Refusal):
        pass


async def programs(world: World, tenant: str, number: int) -> None:
    """Programs that run once."""
    async with world.client(tenant) as client:
        for action in plan.actions(world.seed, f"programs{number}"):
            await world.up.wait()
            if not world.running:
                return
            word, epoch = f"p{number}x{action.number}", world.epoch
            try:
                result = await world.ask(
                    "program", client.execute_code("python", f"print('{word}')"), action.gives_up
                )
            except Unanswered:
                continue
            except Refusal as refusal:
                if refusal.code not in REFUSED:
                    world.fail(f"a program: {refusal}")
                continue
            if result.outcome == "canceled" and (world.stopping or epoch != world.epoch):
                continue  # it ends with its daemon
            if (result.outcome, result.stdout) != ("completed", f"{word}\n"):
                world.fail(f"the program {word} gave {result}")


async def short(world: World, tenant: str, number: int) -> None:
    """Environments that expire: told is told, and a crash loop does not keep them alive."""
    async with world.client(tenant) as client:
        for action in plan.actions(world.seed, f"short{number}"):
            await world.up.wait()
            if not world.running:
                return
            born = time.monotonic()
            try:
                made = await create(world, client, tenant, action, lifetime=SHORT_LIFETIME)
            except (Unanswered, Refusal):
                continue
            while world.running:
                await world.up.wait()
                await asyncio.sleep(0.3)
                try:
                    answer = await world.ask("look", client.transport.call("GET", f"/environments/{made}"))
                except (Unanswered, Refusal):
                    continue
                if answer["state"] == "ended":
                    world.ended.setdefault(made, time.monotonic())
                    if not answer["ended_reason"].startswith("expired"):
                        world.fail(f"{made} ended: {answer['ended_reason']}; nobody deleted it")
                    break
                lived = time.monotonic() - born
                if lived > SHORT_LIFETIME + GRACE + SLACK:
                    world.fail(f"{made} with a lifetime of {SHORT_LIFETIME} s lives for {lived:.0f} s")
                    break


async def pools(world: World, tenant: str, number: int) -> None:
    """An operator who changes the pool all the time."""
    async with world.client(tenant) as client:
        for action in plan.actions(world.seed, f"pools{number}"):
            await world.up.wait()
            if not world.running:
                return
            calls: list[Callable[[], Awaitable[Any]]] = [
                client.pools,
                lambda: client.warm_up_pool("default", 3),
                lambda: client.shrink_pool("default", 1),
                lambda: client.check_pool("default"),
                lambda: client.transport.call("GET", "/metrics"),
            ]
            try:
                await world.ask("pool", calls[int(action.chance * 4)](), action.gives_up)
            except Unanswered:
                pass
            except Refusal as refusal:
                if refusal.code not in REFUSED:
                    world.fail(f"a call about the pool: {refusal}")
            await asyncio.sleep(0.2)


def _actors() -> Iterator[tuple[Actor, str, int]]:
    for number in range(OWNERS):
        yield owner, TENANTS[number % len(TENANTS)], number
    for number in range(NAMED):
        yield named, TENANTS[number % 2], number
    for number in range(KEYED):
        yield keyed, TENANTS[number % len(TENANTS)], number
    for number in range(LIMITED):
        yield limited, SMALL, number
    for number in range(PROGRAMS):
        yield programs, TENANTS[number % len(TENANTS)], number
    for number in range(SHORT):
        yield short, TENANTS[number % len(TENANTS)], number
    yield pools, "default", 0


async def _load(world: World) -> None:
    world.up.set()
    faults = asyncio.create_task(world.fault())
    actors = [asyncio.create_task(actor(world, tenant, number)) for actor, tenant, number in _actors()]
    await asyncio.gather(faults, *actors)


async def _afterwards(world: World) -> None:
    """The daemon of the last moments: nothing that ended is back, the audit has every act, all is deleted."""
    listed: dict[str, str] = {}
    for tenant in (*TENANTS, SMALL):
        async with world.client(tenant) as client:
            for info in await client.environments():
                listed[info.environment_id] = tenant
                if info.environment_id in world.ended:
                    world.fail(f"{info.environment_id} is back, though its end was told: {info}")
                if world.known.get(info.environment_id, tenant) != tenant:
                    world.fail(f"{info.environment_id} is listed for {tenant}, too")
            orphans = sum(found == tenant and id_ not in world.known for id_, found in listed.items())
            if orphans > world.unanswered_creates[tenant]:
                world.fail(f"{orphans} environments that nobody asked for in {tenant}")
            await _check_audit(world, client, tenant)
            for environment, owner in listed.items():
                if owner == tenant:
                    await client.transport.call("DELETE", f"/environments/{environment}")


async def _check_audit(world: World, client: AsyncClient, tenant: str) -> None:
    """Every acknowledged act has its intent and its result.

    The result of a delete is written after the answer: a kill in between takes it, and then the row about the end of
    the environment, which is written before, says the same.
    """
    verified = await client.verify_audit()
    if not verified["intact"]:
        world.fail(f"the audit of {tenant} is broken: {verified}")
    intents: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    results: Counter[tuple[str, str]] = Counter()
    rows: dict[str, list[str]] = defaultdict(list)
    ends: set[str] = set()
    async for row in client.audit():
        place = row["action"], row["environment_id"]
        rows[row["environment_id"]].append(
            f"{row['seq']} {row['at']:.3f} {row['kind']} {row['action']} {row['request_id']} {row['outcome']}"
        )
        if row["kind"] == "intent":
            intents[place].append((row["request_id"], str(row["detail"])))
        elif row["kind"] == "result":
            results[row["request_id"], row["action"]] += 1
        elif row["kind"] == "lifecycle":
            ends.add(row["environment_id"])
    for action, environment, word in world.acts[tenant]:
        found = [request for request, detail in intents[action, environment] if word in detail]
        if not found:
            world.fail(f"no intent in the audit: {action} {environment} {word}", rows[environment][-20:])
        elif not any(results[request, action] for request in found) and not (
            action == "environment.delete" and environment in ends
        ):
            world.fail(f"no result in the audit: {action} {environment} {word}", rows[environment][-20:])


def _descriptors(world: World) -> Counter[str]:
    """What the daemon has open, by kind, with empty pools."""
    assert world.daemon is not None
    with Client(str(world.home)) as operator:
        for pool in operator.pools():
            operator.shrink_pool(pool.pool, 0)
    found: Counter[str] = Counter()
    folder = f"/proc/{world.daemon.process.pid}/fd"
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            found[re.sub(r"\d+|/instances/\w+", "#", os.readlink(f"{folder}/{name}"))] += 1
    return found


def run(home: Path, seed: int, seconds: float) -> World:
    """One history of this length. Returns what was found; the home has no environments and no daemon any more."""
    (home / "pools.toml").write_text("[default]\nminimum = 2\n")
    with nursery() as daemons:
        world = World(home, seed, daemons, seconds)
        world.start()
        try:
            world.introduce()
            asyncio.run(_load(world))
            asyncio.run(_afterwards(world))
            open_at_end = _settled(lambda: _descriptors(world))
            world.end("stop")
            left = agreement.check(home)
            if left:
                world.fail(f"environments are left: {left}")
            world.start()
            fresh = _settled(lambda: _descriptors(world))
            if open_at_end.total() > fresh.total() + DESCRIPTORS:
                world.fail(f"descriptors more than in a fresh daemon: {open_at_end - fresh}")
        finally:
            if world.daemon is not None:
                world.end("delete")
        world.broken += leaks.of_home(home)
        for tenant, history in world.names.items():
            world.broken += [f"names of {tenant}: {why}" for why in histories.names(history)]
    return world


def _settled(measure: Callable[[], Counter[str]]) -> Counter[str]:
    """The least of some seconds: what is being closed is not a leak."""
    found = []
    for _ in range(30):
        found.append(measure())
        time.sleep(0.1)
    return min(found, key=Counter.total)


def report(world: World) -> str:
    """What was done, and everything that is broken, each with the calls that led to it."""
    told = [f"seed {world.seed}: {world.stats}", *(f"BROKEN {broken}" for broken in world.broken)]
    firsts = Counter(re.sub(r"\w{12}|[\d.]+", "#", broken.split("\n")[0])[:100] for broken in world.broken)
    told += [f"{count} times: {what}" for what, count in firsts.most_common()]
    return "\n".join([*told, f"seed {world.seed}: {len(world.broken)} broken"])


@contextmanager
def store(kind: str) -> Iterator[str]:
    """What SKERRY_DATABASE must be for this kind of store; empty for a file in the home."""
    if kind == "sqlite":
        yield ""
        return
    with postgres.server() as server:
        yield server.new_database()


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.soak.histories", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--store", choices=("sqlite", "postgres"), default="sqlite")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with store(arguments.store) as url, support.temporary_home() as home:
        if url:
            os.environ["SKERRY_DATABASE"] = url
        world = run(home, arguments.seed, arguments.seconds)
    print(report(world))
    return 1 if world.broken else 0


if __name__ == "__main__":
    sys.exit(main())
