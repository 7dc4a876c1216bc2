"""A backend, a guest and a clock that tests lead by the hand."""

from __future__ import annotations

import asyncio
import functools
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, cast

from skerry.backends.base import Capabilities, ImageSource, Instance, InstanceSpec, Sample
from skerry.backends.registry import Registry
from skerry.errors import EnvironmentNotFound, GuestFailed, ImageNotFound, SkerryError
from skerry.fairness import budget
from skerry.guest.channel import Channel, GuestProcessInfo
from skerry.guest.process import Exit
from skerry.guest.start import Start
from skerry.host.network import Sockets
from skerry.ids import new_id
from skerry.images.store import Image, ImageStore
from skerry.manager.caller import Caller
from skerry.manager.environments.environment import Environment
from skerry.manager.environments.manager import EnvironmentManager
from skerry.manager.environments.records import Records
from skerry.manager.executions.execution import Execution
from skerry.manager.pools.pool import PoolSettings
from skerry.models import Enforcement, Outcome, State, Usage
from skerry.policy import Policy
from skerry.store import Written
from skerry.store.audit import AuditRow, Entry
from skerry.store.environments import EnvironmentRecord
from skerry.store.executions import ExecutionRecord

PATIENCE = 20.0
Test = Callable[..., Coroutine[Any, Any, None]]


def asynchronous(test: Test) -> Callable[..., None]:
    """Run an async test in a loop of its own; an error that nobody retrieved fails it."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        unhandled: list[dict[str, Any]] = []

        async def main() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
            await test(*args, **kwargs)

        asyncio.run(main())
        assert not unhandled

    return run


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until something has happened."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        await asyncio.sleep(0)


class StubClock:
    """Time that stands still until it is moved."""

    class Timer:
        def __init__(self, when: float, callback: Callable[..., Any]) -> None:
            self.when = when
            self.callback = callback
            self.canceled = False

        def cancel(self) -> None:
            self.canceled = True

    def __init__(self) -> None:
        self.now = 1000.0
        self.timers: list[StubClock.Timer] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[..., Any], /) -> Timer:
        self.timers.append(StubClock.Timer(when, callback))
        return self.timers[-1]

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            self.timers = [timer for timer in self.timers if not timer.canceled]
            due = min(
                (timer for timer in self.timers if timer.when <= end), key=lambda t: t.when, default=None
            )
            if due is None:
                break
            self.timers.remove(due)
            self.now = max(self.now, due.when)
            due.callback()
        self.now = end


class StubProcess:
    """A program that writes and ends when the test says so."""

    pid = 42

    def __init__(self, number: int, start: Start, channel: StubChannel) -> None:
        self.id = number
        self.start = start
        self.killed = False
        self.forgotten = False
        self.signals: list[int] = []
        self.sizes: list[tuple[int, int]] = []
        self.stdin = b""
        self.stdin_closed = False
        self._channel = channel
        self._queue: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue()
        self._exit: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()

    def emit(self, data: bytes, stream: int = 1) -> None:
        self._queue.put_nowait((stream, data))

    def end(self, code: int = 0, signal: int | None = None, stdout_size: int = 0) -> None:
        if not self._exit.done():
            self._exit.set_result(
                Exit(
                    code=code,
                    signal=signal,
                    stdout_size=stdout_size,
                    stderr_size=0,
                    cpu_seconds=0.0,
                    max_rss=0,
                )
            )
            self._queue.put_nowait(None)

    def forget(self) -> None:
        self.forgotten = True

    def lose(self, error: SkerryError) -> None:
        if not self._exit.done():
            self._exit.set_exception(error)
            self._exit.exception()
            self._queue.put_nowait(None)

    async def output(self) -> AsyncIterator[tuple[int, bytes]]:
        while (item := await self._queue.get()) is not None:
            yield item
        if self._exit.exception() is not None:
            await self._exit

    async def wait(self) -> Exit:
        return await self._exit

    async def write(self, data: bytes) -> None:
        self.stdin += data

    async def close_stdin(self) -> None:
        self.stdin_closed = True

    def signal(self, number: int) -> None:
        self.signals.append(number)

    def resize(self, rows: int, cols: int) -> None:
        self.sizes.append((rows, cols))

    async def kill(self) -> None:
        self.killed = True
        if self._channel.obeys:
            self.end(137, 9)


class StubChannel:
    """The guest of one environment. `true` ends at once; with `program`, every other start runs that at once."""

    def __init__(self, program: Callable[[StubProcess], None] | None = None) -> None:
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.started: list[StubProcess] = []
        self.obeys = True
        self.start_error: Exception | None = None
        self.error: SkerryError | None = None
        self.stays = 0.0
        self.flow = budget().flow()
        self._program = program

    async def start(self, start: Start) -> StubProcess:
        await asyncio.sleep(0)
        self.check_open()
        if self.start_error is not None:
            raise self.start_error
        process = StubProcess(len(self.started) + 1, start, self)
        if start.argv == ["true"]:
            process.end()
            return process
        self.started.append(process)
        if self._program is not None:
            self._program(process)
        return process

    async def nth(self, number: int) -> StubProcess:
        """The process that was started as the n-th, from 1, once it has been."""
        await until(lambda: len(self.started) >= number)
        return self.started[number - 1]

    def break_down(self, reason: str) -> None:
        if not self.closed.done():
            self.closed.set_result(reason)
            for process in self.started:
                process.lose(self.error or GuestFailed(reason))

    def check_open(self) -> None:
        if self.closed.done():
            raise self.error or GuestFailed(self.closed.result())

    async def ping(self) -> None:
        self.check_open()

    async def processes(self) -> list[GuestProcessInfo]:
        self.check_open()
        return []

    def stay(self, seconds: float) -> None:
        self.stays = seconds

    async def close(self, error: SkerryError | None = None) -> None:
        self.error = error
        self.break_down("closed")


class StubBackend:
    """Remembers what lives. `fault(step, id)` may raise at: start, started, connect, open, settle, stop, stopped."""

    name = "stub"
    isolation = "namespace"
    gates = True
    images: ImageSource | None = None
    ahead = True

    def __init__(self) -> None:
        self.living: set[str] = set()
        self.stops: list[str] = []
        self.channels: dict[str, StubChannel] = {}
        self.delivered: dict[str, dict[str, bytes]] = {}
        self.oom_kills = 0
        self.cpu_seconds = 0.0
        self.resets = 0
        self.closed = False
        self.died: dict[str, asyncio.Event] = {}
        self.fault: Callable[[str, str], None] = lambda step, id: None
        self.program: Callable[[StubProcess], None] | None = None
        self._opening: dict[int, str] = {}

    async def capabilities(self) -> Capabilities:
        return Capabilities(True)

    def reserve(self) -> str:
        return new_id()

    async def start(self, spec: InstanceSpec) -> Instance:
        self.fault("start", spec.environment_id)
        self.died[spec.environment_id] = asyncio.Event()
        for _ in range(5):  # a start has many steps, and each leaves something
            self.living.add(spec.environment_id)
            await asyncio.sleep(0)
        self.fault("started", spec.environment_id)
        return Instance(spec.environment_id, "memory", "/workspace")

    def gate(self, environment_id: str, name: str) -> str:
        raise NotImplementedError

    def disk(self, policy: Policy) -> int:
        return policy.limits.disk

    def fixed(self, policy: Policy) -> tuple[object, ...]:
        return ()

    def settle(self, environment_id: str, policy: Policy) -> None:
        self.fault("settle", environment_id)

    def enforced(self, environment_id: str) -> list[Enforcement]:
        return []

    async def adopt(self, spec: InstanceSpec) -> Instance:
        if spec.environment_id not in self.living:
            raise EnvironmentNotFound("it is gone")
        self.died[spec.environment_id] = asyncio.Event()
        return Instance(spec.environment_id, "memory", "/workspace")

    async def connect(self, environment_id: str) -> socket.socket:
        self.fault("connect", environment_id)
        sock = socket.socket(socket.AF_UNIX)
        self._opening[sock.fileno()] = environment_id
        return sock

    async def open_channel(self, sock: socket.socket) -> Channel:
        environment_id = self._opening.pop(sock.fileno())
        sock.close()
        await asyncio.sleep(0)
        self.fault("open", environment_id)
        self.channels[environment_id] = StubChannel(self.program)
        return cast(Channel, self.channels[environment_id])

    def path_rules(self) -> str:
        return ""

    async def open_network(self, environment_id: str) -> Sockets:
        return Sockets([], [])

    async def deliver(
        self, environment_id: str, files: Mapping[str, bytes], links: Mapping[str, str]
    ) -> None:
        self.delivered[environment_id] = dict(files)

    async def stop(self, environment_id: str) -> None:
        self.stops.append(environment_id)
        self.fault("stop", environment_id)
        await asyncio.sleep(0)
        self.living.discard(environment_id)
        self.fault("stopped", environment_id)

    def alive(self, environment_id: str) -> bool:
        return environment_id in self.living

    async def wait(self, environment_id: str) -> None:
        await self.died[environment_id].wait()

    async def list(self) -> list[str]:
        return sorted(self.living)

    async def usage(self, environment_id: str, *, io: bool = True) -> Usage:
        return Usage(
            cpu_seconds=self.cpu_seconds, memory_bytes=1, memory_peak_bytes=2, oom_kills=self.oom_kills
        )

    def sample(self, environment_id: str) -> Sample:
        return Sample(self.cpu_seconds, self.oom_kills)

    def share(self, environment_id: str, group: str) -> None:
        pass

    def reset_peak(self, environment_id: str) -> None:
        self.resets += 1

    def prepared(self) -> int:
        return 0

    async def close(self) -> None:
        self.closed = True


class StubImages:
    def get(self, ref: str) -> Image:
        if ref != "host":
            raise ImageNotFound(f"no image {ref!r}")
        return cast(Image, StubImage())


class StubImage:
    name = ref = "host"
    digest = "sha256:0"

    def __init__(self) -> None:
        self.env: dict[str, str] = {}


class StubRecords:
    """Takes note of everything at once, and remembers nothing."""

    def created(self, environment: Environment, intent: Entry) -> Written[str | None]:
        future: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        future.set_result(None)
        return Written(future, self._done())

    def changed(
        self, environment: Environment, state: State, entry: Entry | None = None
    ) -> asyncio.Future[None]:
        return self._done()

    def audit(self, tenant: str, entry: Entry, *, later: bool = False) -> asyncio.Future[None]:
        return self._done()

    def audit_early(self, tenant: str, entry: Entry) -> Written[None]:
        return Written(self.audit(tenant, entry), self._done())

    def started(self, environment_id: str, execution: Execution) -> asyncio.Future[None]:
        return self._done()

    def finished(self, execution_id: str, outcome: Outcome, exit_code: int | None) -> asyncio.Future[None]:
        return self._done()

    async def live(self) -> list[EnvironmentRecord]:
        return []

    async def ended(self) -> list[EnvironmentRecord]:
        return []

    async def executions(self, environment_id: str) -> list[ExecutionRecord]:
        return []

    async def unfinished(self, environment: Environment) -> list[AuditRow]:
        return []

    def kept(self, sizes: dict[str, int], kind: str, *, within: str | None = None) -> asyncio.Future[None]:
        return self._done()

    async def least_isolation(self, tenant: str) -> str | None:
        return None

    async def crowded(self, tenants: Sequence[str]) -> list[str]:
        return []

    def _done(self) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.set_result(None)
        return future


def make_manager(
    backend: StubBackend,
    clock: StubClock | None = None,
    records: Records | None = None,
    pools: Iterable[PoolSettings] = (),
) -> EnvironmentManager:
    return EnvironmentManager(
        Registry([backend]),
        cast(ImageStore, StubImages()),
        records or StubRecords(),
        clock=clock,
        open_channel=backend.open_channel,
        pools=pools,
    )


POLICY = Policy()
CALLER = Caller(peer="uid 0", request_id="9f86d081884c7d65")
