"""A pool: environments that are started ahead of need.

An entry has its image and the part of its policy that cannot be changed later, its guest is connected, and nothing but
`true` has run in it, or an interpreter that waits for its program. Limits are set and the network is opened when it is
handed out, once. It has no row in the store: if the daemon is killed, its guest ends by itself soon after, and the next
daemon sweeps what is left.

A pool's maximum counts all environments of its kind, cold-started ones too. Requests beyond it queue until one ends.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from socket import socket

import structlog

from skerry.backends.base import Backend, Instance, InstanceSpec
from skerry.backends.registry import Registry
from skerry.errors import (
    Busy,
    GuestFailed,
    InvalidRequest,
    LaunchFailed,
    SkerryError,
    stopping,
)
from skerry.failpoints import hit
from skerry.guest.channel import Channel
from skerry.guest.process import Exit
from skerry.guest.start import Start
from skerry.images.store import Image, ImageStore
from skerry.languages import Language
from skerry.manager.clock import Clock
from skerry.manager.executions.commands import base_variables, program_command
from skerry.manager.images import find_image
from skerry.manager.pools.interpreters import PrestartedInterpreter, prestart
from skerry.models import PoolStats
from skerry.policy import Policy

START_TIMEOUT = 60.0
ORPHAN = 5.0
"""Seconds that an entry outlives a daemon that was killed."""
REFILL_AFTER = 0.05
"""Seconds from a use to the refill, so that the refill does not delay the first command."""
PAUSE_MIN, PAUSE_MAX = 0.5, 30.0
"""Backoff after an entry that could not be started, or died."""
WAITS_KEPT = 1000
IDLE, AGE = 600, 3600
WAIT_MAX = 30.0
"""Seconds that a request waits in the queue of a full pool."""
RENEWED = 4
"""One of this many old entries is replaced at a time, never a whole pool at once."""

log = structlog.get_logger(component="pools")


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """An operator's settings of a pool."""

    name: str
    image: str
    policy: Policy
    minimum: int
    """Entries that are kept ready."""
    maximum: int
    """Limit of entries that are ready, starting or in use. 0 disables the pool."""
    language: Language | None = None
    """Entries run one program in this language, with a pre-started interpreter."""
    after_use: int = 0
    """Minimum of ready entries after a use."""
    idle: float = IDLE
    """Seconds after the last use that `after_use` applies."""
    age: float = AGE
    """Seconds after which an unused entry is replaced: the host that it shows changes."""


@dataclass(eq=False, slots=True)
class PoolEntry:
    """One ready environment."""

    id: str
    digest: str
    backend: Backend
    instance: Instance
    channel: Channel
    made_at: float
    interpreter: PrestartedInterpreter | None = None
    """Waits in it for a program."""

    @property
    def usable(self) -> bool:
        return self.backend.alive(self.id) and (
            self.interpreter is None or not self.interpreter.process.exited
        )

    async def remove(self) -> None:
        """Raises PlatformError."""
        if self.interpreter is not None:
            self.interpreter.close()
        await self.channel.close()
        await self.backend.stop(self.id)


class Pool:
    """Ready environments of one kind."""

    def __init__(
        self,
        settings: PoolSettings,
        registry: Registry,
        images: ImageStore,
        open_channel: Callable[[socket], Awaitable[Channel]],
        clock: Clock,
    ) -> None:
        self.name = settings.name
        self._settings = settings
        self._registry = registry
        self._images = images
        self._open_channel = open_channel
        self._clock = clock
        self._minimum = settings.minimum
        self._maximum = settings.maximum
        self._used_at = -math.inf
        self._queue: deque[asyncio.Future[None]] = deque()
        """Waiting requests. The first is woken when an entry is free, and leaves when it has taken it."""
        self._ready: dict[str, PoolEntry] = {}
        self._making: set[str] = set()
        self._active: set[str] = set()
        self._turn = asyncio.Lock()
        """Held while an entry is started: one at a time."""
        self._filling: asyncio.Task[None] | None = None
        self._discarding: set[asyncio.Task[None]] = set()
        self._checking: set[asyncio.Task[float]] = set()
        self._closed = False
        self._hits = self._misses = self._failures = 0
        self._error = ""
        self._waits: deque[float] = deque(maxlen=WAITS_KEPT)

    @property
    def ids(self) -> set[str]:
        """Ids of entries that are ready or starting."""
        return self._ready.keys() | self._making

    @property
    def images(self) -> set[str]:
        return {entry.digest for entry in tuple(self._ready.values())}

    @property
    def _wanted(self) -> int:
        """Entries that should be ready now."""
        used = self._clock.time() - self._used_at < self._settings.idle
        return max(self._minimum, min(self._settings.after_use, self._maximum) if used else 0)

    def _total(self) -> int:
        return len(self._ready) + len(self._making) + len(self._active)

    def _full(self) -> bool:
        return self._total() >= self._maximum

    async def pick(self) -> Backend:
        """What its entries are made with now. Raises IsolationUnavailable."""
        own = self._settings
        return (await self._registry.pick(own.policy.isolation, image=own.image))[0]

    def serves(self, image: Image, policy: Policy, backend: Backend, language: Language | None) -> bool:
        """True if its entries can become such an environment."""
        own = self._settings
        return (
            self._maximum > 0
            and language == own.language
            and image.name == own.image
            and backend is self._registry.known(own.policy.isolation, own.image)
            and backend.fixed(policy) == backend.fixed(own.policy)
        )

    async def take(self, digest: str, backend: Backend, *, ready: bool) -> tuple[str, PoolEntry | None]:
        """The id of a new environment, and a ready entry with this image, if there is one and `ready` is set.

        The id is to be given back by `released()`. Raises Busy if the pool stays full for WAIT_MAX seconds,
        DaemonUnavailable.
        """
        self._check_open()
        turn: asyncio.Future[None] | None = None
        if self._queue or (self._full() and not self._ready):
            turn = asyncio.get_running_loop().create_future()
            self._queue.append(turn)
        try:
            if turn is not None:
                async with asyncio.timeout(WAIT_MAX):
                    await turn
            entry = self._find(digest) if ready else None
            if entry is None and self._ready and self._full():  # it cannot use those
                self._discard(self._ready.pop(next(iter(self._ready))))
            id_ = backend.reserve() if entry is None else entry.id
            self._active.add(id_)
            self._hits += entry is not None
            self._misses += entry is None
        except TimeoutError:
            raise Busy(
                f"all {self._maximum} environments of the pool {self.name!r} are in use",
                hint="try again later; `maximum` in pools.toml in the daemon's home says how many there may be",
            ) from None
        finally:
            if turn is not None:
                self._queue.remove(turn)
            self._call_next()
        self._used_at = self._clock.time()
        self.refill(REFILL_AFTER)
        return id_, entry

    def _call_next(self) -> None:
        """Wake the first waiting request, if an entry may be free for it."""
        if self._queue and not self._queue[0].done() and (self._ready or not self._full()):
            self._queue[0].set_result(None)

    def _find(self, digest: str) -> PoolEntry | None:
        found = None
        while found is None and self._ready:
            entry = self._ready.pop(next(iter(self._ready)))
            if entry.digest == digest and entry.usable:
                found = entry
            else:
                self._discard(entry)
        return found

    async def give_back(self, environment_id: str, entry: PoolEntry | None) -> None:
        """Remove an entry that was taken and is not needed."""
        if entry is not None:
            await self._remove(entry)
        self.released(environment_id)

    def joined(self, environment_id: str) -> None:
        """Count an environment of this kind that an earlier daemon has made."""
        self._active.add(environment_id)

    def failed(self, why: str) -> None:
        """Count an entry that could not be used: its environment is started cold."""
        self._hits -= 1
        self._misses += 1
        self._failures += 1
        self._error = why

    def waited(self, seconds: float) -> None:
        """Count the time from a request to a running environment."""
        self._waits.append(seconds)

    def released(self, environment_id: str) -> None:
        """An environment that counted is gone: its place is free."""
        if environment_id in self._active:
            self._active.discard(environment_id)
            self._call_next()
            self.refill()

    def refill(self, after: float = 0.0) -> None:
        if self._filling is None and self._missing() and not self._closed:
            self._filling = asyncio.create_task(self._fill(after))

    def _missing(self) -> bool:
        wanted = self._wanted - len(self._ready) - len(self._making)
        return wanted > 0 and not self._full() and not self._queue

    async def _fill(self, after: float) -> None:
        pause = PAUSE_MIN
        try:
            await asyncio.sleep(after)
            while self._missing():
                try:
                    await self._add()
                except SkerryError as error:
                    log.warning("not refilled", pool=self.name, error=str(error), again_after=pause)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, PAUSE_MAX)
        finally:
            self._filling = None

    async def _add(self) -> bool:
        """Start one more entry. False if there are enough."""
        async with self._turn:
            if not self._missing() or self._closed:
                return False
            try:
                entry = await self._make()
            except SkerryError as error:
                self._failures += 1
                self._error = str(error)
                raise
            self._error = ""
            self._making.discard(entry.id)
            self._ready[entry.id] = entry
            self._call_next()
            entry.channel.closed.add_done_callback(lambda closed: self._died(entry, closed.result()))
            if entry.interpreter is not None:
                entry.interpreter.process.exit.add_done_callback(
                    lambda _: self._died(entry, "its interpreter ended")
                )
            return True

    async def _make(self) -> PoolEntry:
        """Start an entry; the caller removes its id from `_making`.

        Raises what a create does; then nothing is left of it.
        """
        settings = self._settings
        backend = await self.pick()
        image = await find_image(self._images, backend, settings.image)
        id_ = backend.reserve()
        self._making.add(id_)
        try:
            async with asyncio.timeout(START_TIMEOUT):
                program = settings.language is not None
                spec = InstanceSpec(id_, image, settings.policy, ORPHAN, program)
                instance = await backend.start(spec)
                hit("pool.started")
                channel = await self._open_channel(await backend.connect(id_))
                await channel.ping()
                await backend.usage(id_, io=False)  # which opens its counters: the first command needs them
                entry = PoolEntry(id_, image.digest, backend, instance, channel, self._clock.time())
                of_image = {**image.env, **instance.variables}
                variables = base_variables(of_image, instance.workspace_path, {})
                if settings.language is None or not backend.gates:
                    # Warms the page and dentry caches for the first command: half a millisecond.
                    await _run_true(channel, variables)
                else:
                    entry.interpreter = await self._prestart(settings.language, variables, entry)
            return entry
        except BaseException as error:
            try:
                await backend.stop(id_)
            finally:
                self._making.discard(id_)
                self._call_next()
            if isinstance(error, TimeoutError):
                raise LaunchFailed(f"it did not start within {START_TIMEOUT:g} s") from error
            raise

    async def _prestart(
        self, language: Language, variables: dict[str, str], entry: PoolEntry
    ) -> PrestartedInterpreter:
        command = program_command(language, entry.instance, self._settings.policy.limits.cpus)
        start = command.start(variables)
        return await prestart(entry.channel, start, entry.backend.gate(entry.id, language.file))

    def _died(self, entry: PoolEntry, why: str) -> None:
        if self._ready.pop(entry.id, None) is not None:
            self._failures += 1
            self._error = f"an entry died: {why}"
            log.warning("died", pool=self.name, environment=entry.id)
            self._discard(entry)
            self._call_next()
            self.refill(PAUSE_MIN)

    def _discard(self, entry: PoolEntry) -> None:
        task = asyncio.create_task(self._remove(entry))
        self._discarding.add(task)
        task.add_done_callback(self._discarding.discard)

    async def _remove(self, entry: PoolEntry) -> None:
        try:
            await entry.remove()
        except SkerryError as error:  # the sweeper will try again
            log.error("not removed", pool=self.name, environment=entry.id, error=str(error))

    async def warmup(self, count: int, maximum: int | None = None) -> None:
        """Warm the pool up to `count` entries, and keep that minimum; `maximum` replaces that of the settings.

        Raises InvalidRequest, and what a create does.
        """
        self._check_open()
        most = self._maximum if maximum is None else maximum
        if count > most:
            raise InvalidRequest(
                f"the pool {self.name!r} has at most {most} entries",
                hint="pools.toml in the daemon's home says how many, or a warm-up with a maximum",
            )
        self._maximum = most
        self._minimum = min(max(self._minimum, count), most)
        await self._drop(self._total() - most)
        while len(self._ready) < count and await self._add():
            pass
        self._check_open()

    async def shrink(self, count: int) -> None:
        """Lower the minimum to `count`, and remove the entries above it."""
        self._minimum, self._used_at = min(self._wanted, count), -math.inf
        await self._drop(len(self._ready) - count)

    async def _drop(self, count: int) -> None:
        """Remove this many ready entries."""
        surplus = list(self._ready.values())[: max(0, count)]
        for entry in surplus:
            del self._ready[entry.id]
        self._call_next()
        await asyncio.gather(*map(self._remove, surplus))

    def tend(self) -> None:
        """Remove surplus entries, and replace old ones. To be called periodically."""
        entries = list(self._ready.values())
        going = entries[: max(0, len(entries) - self._wanted)]
        old = [
            entry
            for entry in entries[len(going) :]
            if self._clock.time() - entry.made_at >= self._settings.age
        ]
        going += old[: -(-len(old) // RENEWED)]
        for entry in going:
            del self._ready[entry.id]
            self._discard(entry)
        self.refill()

    async def health(self) -> float:
        """Start an entry, run a program in it, and remove it; returns the seconds that it took.

        Raises DaemonUnavailable and other SkerryErrors.
        """
        checking = asyncio.create_task(self._check())
        self._checking.add(checking)
        checking.add_done_callback(self._checked)
        return await asyncio.shield(checking)

    def _checked(self, checking: asyncio.Task[float]) -> None:
        self._checking.discard(checking)
        if not checking.cancelled():
            checking.exception()  # retrieved, because the caller may have gone

    async def _check(self) -> float:
        began = time.monotonic()
        async with self._turn:
            self._check_open()
            entry = await self._make()
        try:
            ended = await _run_true(entry.channel, {"PATH": "/usr/bin:/bin"})
            if ended.code:
                raise GuestFailed(f"`true` ended with {ended.code}")
        finally:
            await self._remove(entry)
            self._making.discard(entry.id)  # not before: the sweeper leaves alone what is in the making
            self._call_next()
        return time.monotonic() - began

    def _check_open(self) -> None:
        """Raises DaemonUnavailable."""
        if self._closed:
            raise stopping()

    @property
    def stats(self) -> PoolStats:
        waits = sorted(self._waits)

        def quantile(share: float) -> float:
            return waits[min(len(waits) - 1, int(share * len(waits)))] if waits else 0.0

        return PoolStats(
            pool=self.name,
            image=self._settings.image,
            minimum=self._wanted,
            maximum=self._maximum,
            available=len(self._ready),
            creating=len(self._making),
            active=len(self._active),
            hits=self._hits,
            misses=self._misses,
            failures=self._failures,
            error=self._error,
            wait_p50_seconds=quantile(0.5),
            wait_p95_seconds=quantile(0.95),
            wait_max_seconds=quantile(1.0),
        )

    async def close(self) -> None:
        self._closed = True
        for turn in self._queue:
            if not turn.done():
                turn.set_exception(stopping())
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.wait((self._filling,))
        async with self._turn:
            ready, self._ready = list(self._ready.values()), {}
        await asyncio.gather(*map(self._remove, ready), *self._discarding)
        if self._checking:
            await asyncio.wait(self._checking)


async def _run_true(channel: Channel, variables: dict[str, str]) -> Exit:
    process = await channel.start(Start(argv=["true"], env=variables))
    return await process.wait()
