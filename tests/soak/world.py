"""The daemon that random histories are made with, its tenants, and what was found to be broken."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from skerry import AsyncClient, Client, SkerryError
from skerry.errors import DaemonUnavailable
from tests import histories, support
from tests.integration.daemon import Daemon
from tests.integration.nursery import Nursery
from tests.soak import plan

TENANTS = ("alder", "birch", "cedar")
SMALL, SMALL_MAX = "small", 4
"""A tenant with a quota, and how many environments it may have."""
REFUSED = ("busy", "limit_reached")
"""Told to callers who came at a bad moment; nothing was done."""
GONE = ("environment_ended", "environment_not_found")
PAUSE = 0.05
"""Seconds before a caller tries again who was told that no daemon is there."""
LONGEST = 60.0
"""Seconds after which a call counts as lost; a busy machine takes some for a call."""
STARTS = 5
"""How often a daemon is started that does not come up."""
T = TypeVar("T")


class Unanswered(Exception):
    """The caller gave up, or the daemon went away: nobody knows what happened."""


class Refusal(Exception):
    """The daemon said no, or answered something that cannot be (`strange`)."""

    def __init__(self, why: object, code: str = "strange") -> None:
        super().__init__(f"{code}: {why}")
        self.code = code


@dataclass
class Stats:
    answered: Counter[str] = field(default_factory=Counter)
    unanswered: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    slowest_stop: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.answered.total()} calls answered, {self.unanswered.total()} not, "
            f"refused: {dict(self.refused)}, faults: {dict(self.faults)}, slowest end {self.slowest_stop:.1f} s"
        )


class World:
    """The daemon, its tenants, and everything that was found to be broken."""

    def __init__(self, home: Path, seed: int, daemons: Nursery, seconds: float) -> None:
        self.home = home
        self.seed = seed
        self.stats = Stats()
        self.broken: list[str] = []
        self.ended: dict[str, float] = {}
        """Environments that somebody was told the end of, and when."""
        self.known: dict[str, str] = {}
        """The tenants of all environments whose ids anybody was told."""
        self.created: set[str] = set()
        """Those whose create was answered."""
        self.acts: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
        """By tenant, what was acknowledged: action, environment, and a word that is in its intent."""
        self.names: dict[str, histories.History] = defaultdict(lambda: histories.History(time.monotonic))
        """By tenant, the creates and deletes of those who compete for names."""
        self.unanswered_creates: Counter[str] = Counter()
        self.epoch = 0
        self.stopping = False
        """From the moment that a daemon is told to end until the next one serves."""
        self.up = asyncio.Event()
        self.over = time.monotonic() + seconds
        self._daemons = daemons
        self._running: AbstractContextManager[Daemon] | None = None
        self.daemon: Daemon | None = None
        self._port = support.free_port()
        self._tokens: dict[str, str] = {}

    @property
    def running(self) -> bool:
        return time.monotonic() < self.over

    def fail(self, what: str, trace: Any = ()) -> None:
        lines = [f"at {time.monotonic():.3f}, daemon {self.epoch}: {what}", *map(str, trace)]
        self.broken.append("\n    ".join(lines))

    def start(self) -> None:
        """Blocks until the next daemon of this home serves."""
        options = ("--listen", f"127.0.0.1:{self._port}")
        for _ in range(STARTS):
            self._running = self._daemons.started(self.home, *options)
            self.daemon = self._running.__enter__()
            self.epoch += 1
            self.stopping = False
            if self.daemon.process.poll() is None:
                return
            self._running.__exit__(None, None, None)
            log = (self.home / "daemon.log").read_text(errors="replace").splitlines()
            self.fail(f"a daemon did not start: {log[-1:]}")
            time.sleep(1.0)
        raise RuntimeError("no daemon starts any more")

    def end(self, kind: str) -> None:
        """Blocks until it has ended."""
        assert self.daemon is not None
        assert self._running is not None
        self.stopping = True
        number = {"kill": signal.SIGKILL, "stop": signal.SIGTERM, "delete": signal.SIGINT}[kind]
        self.daemon.process.send_signal(number)
        self.daemon.process.wait(support.STOP_SECONDS)
        self._running.__exit__(None, None, None)
        self.daemon = None

    def introduce(self) -> None:
        """Give every tenant its token and the small one its quota."""
        with Client(str(self.home)) as operator:
            for tenant in (*TENANTS, SMALL, "default"):
                verbs = ["create", "delete", "execute", "read", "write", "audit"]
                verbs += ["admin"] if tenant == "default" else []
                self._tokens[tenant] = operator.create_token("soak", tenant=tenant, verbs=verbs)["token"]
            operator.set_quota(SMALL, environments=SMALL_MAX)

    def client(self, tenant: str) -> AsyncClient:
        return AsyncClient(url=f"http://127.0.0.1:{self._port}", token=self._tokens[tenant])

    async def ask(self, what: str, call: Awaitable[T], gives_up: float | None = None) -> T:
        """The answer. Raises Unanswered and Refusal."""
        try:
            async with asyncio.timeout(LONGEST if gives_up is None else gives_up):
                answer = await call
        except TimeoutError:
            self.stats.unanswered[what] += 1
            if gives_up is None:
                self.fail(f"{what} had no answer in {LONGEST:.0f} s")
            raise Unanswered from None
        except DaemonUnavailable:
            self.stats.unanswered[what] += 1
            await asyncio.sleep(PAUSE)
            raise Unanswered from None
        except SkerryError as error:
            self.stats.refused[error.code] += 1
            raise Refusal(error, error.code) from None
        self.stats.answered[what] += 1
        return answer

    def acknowledged(self, tenant: str, action: str, environment: str, word: str = "") -> None:
        self.acts[tenant].append((action, environment, word))

    async def fault(self) -> None:
        """Kill and stop the daemon until the time is over; each time the next one takes over."""
        loop, control = (
            asyncio.get_running_loop(),
            ThreadPoolExecutor(1),
        )  # not the one that clients connect in
        for fault in plan.faults(self.seed):
            await asyncio.sleep(min(fault.after, max(0.0, self.over - time.monotonic())))
            if not self.running:
                control.shutdown()
                return
            self.stats.faults[fault.kind] += 1
            begun = time.monotonic()
            await loop.run_in_executor(control, self.end, fault.kind)
            self.stats.slowest_stop = max(self.stats.slowest_stop, time.monotonic() - begun)
            self.up.clear()
            await loop.run_in_executor(control, self.start)
            self.up.set()


async def create(world: World, client: AsyncClient, tenant: str, action: plan.Action, **options: Any) -> str:
    """A new environment's id. Raises Unanswered and Refusal."""
    body = {"workspace": "memory", **options}
    key = body.pop("key", None)
    try:
        answer: dict[str, Any] = await world.ask(
            "create", client.transport.call("POST", "/environments", json=body, key=key), action.gives_up
        )
    except Unanswered:
        world.unanswered_creates[tenant] += 1
        raise
    made: str = answer["environment_id"]
    world.known[made] = tenant
    world.created.add(made)
    world.acknowledged(tenant, "environment.create", made)
    return made


async def delete(world: World, client: AsyncClient, environment: str, gives_up: float | None = None) -> None:
    """Raises Unanswered and Refusal."""
    await world.ask("delete", client.transport.call("DELETE", f"/environments/{environment}"), gives_up)
    world.ended.setdefault(environment, time.monotonic())
    if environment in world.created:  # else it may have been found by its name before it was there
        world.acknowledged(world.known[environment], "environment.delete", environment)
