"""Everything that runs in one environment: how much at once, in which order, and what is remembered of it."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
from collections.abc import Callable, Collection, Coroutine
from typing import Any, ClassVar

from skerry.backends.base import Backend, Sample
from skerry.errors import (
    Busy,
    DaemonUnavailable,
    ExecutionNotFound,
    SkerryError,
    StoreUnavailable,
    stopping,
)
from skerry.failpoints import hit
from skerry.guest.channel import Channel
from skerry.manager.audit.acts import Act, Subject
from skerry.manager.caller import Caller
from skerry.manager.capacity import Room
from skerry.manager.environments.records import Records
from skerry.manager.executions.commands import OUTPUT_LIMIT, Command
from skerry.manager.executions.execution import READER_GRACE, Execution, Launch
from skerry.manager.executions.output import Head, Kept, Log, Recent
from skerry.manager.executions.queue import Line
from skerry.manager.sessions.sessions import Sessions
from skerry.models import Outcome, Usage
from skerry.store.executions import ExecutionRecord

RUNNING_MAX = 256
REMEMBERED_MAX = 32
RECENT_LIMIT = 64 << 10
LARGE_MAX = 256 << 20
"""Bytes of output, beyond the usual limit of each, that all executions of the daemon together may hold."""


class Executions:
    """What runs in one environment, and the last that ran in the background."""

    _large: ClassVar[Room] = Room(LARGE_MAX)
    """Of all environments."""

    def __init__(
        self,
        tenant: str,
        subject: Subject,
        backend: Backend,
        channel: Channel,
        records: Records,
        variables: dict[str, str],
        *,
        touch: Callable[[], None],
        lost: Callable[[str], None],
        secluded: Callable[[], bool],
    ) -> None:
        self.tenant = tenant
        self.environment_id = subject.environment_id
        self._subject = subject
        self.backend = backend
        self.channel = channel
        self._records = records
        self.variables = variables
        self.lost = lost
        """Called with a reason when the guest turns out to be broken."""
        self._secluded = secluded
        """Whether nothing can leave the environment now but what we tell of it."""
        self.oom_kills = 0
        """The last count that was seen."""
        self._touch = touch
        self.log = Log(tenant=tenant)
        self.running: dict[str, Execution] = {}
        self._remembered: dict[str, Execution] = {}
        self._lines: dict[str, Line] = {}
        self.sessions = Sessions(self)
        self.left = False
        """Whether this daemon is stopping and leaves everything to the next one."""
        self._tasks: set[asyncio.Task[Any]] = set()

    def act(self, caller: Caller, action: str, detail: dict[str, Any], *, begun: bool = False) -> Act:
        """Something that is done here, for the audit."""
        return Act(self._records, caller, action, self._subject, detail, begun=begun)

    async def begin(self, act: Act) -> None:
        """Returns when it may be done; only after `on_disk()` may anybody see it. Raises StoreUnavailable."""
        if self._secluded():
            await act.begin_early()
        else:
            await act.begin()

    async def on_disk(self, act: Act) -> None:
        """Raises StoreUnavailable, and the environment ends."""
        try:
            await act.on_disk()
        except StoreUnavailable:
            self.lost("the audit of what was done in it may be lost")
            raise

    def prepare(self, caller: Caller, command: Command, launch: Launch | None = None) -> Execution:
        """One to `run()`; its result holds the first `output_limit` bytes of each stream. Raises Busy."""
        limit = OUTPUT_LIMIT if command.output_limit is None else command.output_limit
        return self._admit(caller, command, Head(limit), 2 * max(0, limit - OUTPUT_LIMIT), launch)

    async def start(self, caller: Caller, command: Command) -> Execution:
        """Start in the background; recent output is kept, and the next daemon takes it over should this one end.

        Raises Busy, InvalidRequest, GuestFailed, StoreUnavailable.
        """
        execution = self._admit(caller, command, Recent(RECENT_LIMIT))
        execution.lasting = True
        await execution.begin()
        try:
            await self._records.started(self.environment_id, execution)
            hit("execute.recorded")
        except BaseException:
            execution.stop(Outcome.INTERNAL, "it could not be written down")
            self.follow(execution)
            raise
        return execution

    async def adopt(self, records: Collection[ExecutionRecord]) -> builtins.list[str]:
        """Go on with what an earlier daemon started in the background; returns what was lost, for people.

        What somebody was waiting for at that daemon is killed. Raises GuestFailed.
        """
        self.sessions.ended_with_daemon = True
        there = {info.id: info for info in await self.channel.processes()}
        lost = []
        for record in records:
            if record.process in there:
                del there[record.process]
                process = await self.channel.attach(record.process)
                execution = Execution.adopted(self, record, process, Recent(RECENT_LIMIT))
                self.running[execution.id] = execution
                self.follow(execution)
            else:
                lost.append(record)
        await asyncio.gather(*(self._end_leftover(info.id) for info in there.values()))
        for record in lost:
            written = self._records.finished(record.id, Outcome.INTERNAL, None)
            written.add_done_callback(_retrieve)
        return [f"{record.id}: {record.command}" for record in lost]

    async def _end_leftover(self, process_id: int) -> None:
        process = await self.channel.attach(process_id)
        await process.kill()
        process.forget()

    async def let_go(self) -> None:
        """Leave everything running, for the next daemon. Whoever waits for something is told DaemonUnavailable."""
        self.left = True
        for execution in self.running.values():
            execution.lasting = False  # it has not ended
        self.sessions.let_go()
        for task in self._tasks:
            task.cancel()
        await self.channel.close(stopping())
        self.log.close(stopping())

    def follow(self, execution: Execution) -> None:
        """Run a started execution to its end in a task of its own, and remember it."""
        self._remembered[execution.id] = execution
        self.spawn(self._followed(execution))

    async def _followed(self, execution: Execution) -> None:
        with contextlib.suppress(StoreUnavailable, DaemonUnavailable):  # nobody waits; the audit has it
            await execution.finish()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Something that goes on by itself, at most as long as the environment does."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def find(self, execution_id: str) -> Execution:
        """Raises ExecutionNotFound."""
        found = self.running.get(execution_id) or self._remembered.get(execution_id)
        if found is None:
            raise ExecutionNotFound(f"no execution {execution_id!r} in environment {self.environment_id}")
        return found

    def list(self) -> list[Execution]:
        return list(({**self._remembered, **self.running}).values())

    def line(self, shell: str) -> Line:
        return self._lines.setdefault(shell, Line())

    def worked(self, seconds: float) -> None:
        """Charge the loop time that output of the environment has cost."""
        self.channel.flow.spend(seconds)

    def reset_peak(self) -> None:
        with contextlib.suppress(SkerryError):
            self.backend.reset_peak(self.environment_id)

    def sample(self) -> Sample:
        try:
            return self.backend.sample(self.environment_id)
        except SkerryError:
            return Sample(None, 0)

    async def usage_since(self, before: Sample) -> tuple[Usage, bool]:
        """What was used since, and whether the kernel killed something for want of memory."""
        try:
            now = await self.backend.usage(self.environment_id, io=False)
        except SkerryError:
            now = Usage()
        cpu = None
        if before.cpu_seconds is not None and now.cpu_seconds is not None:
            cpu = max(0.0, now.cpu_seconds - before.cpu_seconds)
        seen = now.oom_kills or 0
        kills = max(0, seen - before.oom_kills)
        self.oom_kills = max(self.oom_kills, seen)
        usage = Usage(
            cpu_seconds=cpu,
            memory_bytes=now.memory_bytes,
            memory_peak_bytes=now.memory_peak_bytes,
            pids=now.pids,
            oom_kills=kills if now.oom_kills is not None else None,
        )
        return usage, kills > 0

    def leave(self, execution: Execution, line: Line | None) -> None:
        """Called by an execution at its end."""
        if execution.lasting and execution.result is not None:
            written = self._records.finished(
                execution.id, execution.result.outcome, execution.result.exit_code
            )
            written.add_done_callback(_retrieve)
        if self.running.pop(execution.id, None) is not None:
            self._large.give_back(self.tenant, execution.large)
        self._touch()
        if line is not None:
            line.leave()
            if line.empty:
                self._lines.pop(execution.command.shell_id, None)
        ended = [id for id in self._remembered if id not in self.running]
        for id in ended[:-REMEMBERED_MAX]:
            del self._remembered[id]

    async def end(self, outcome: Outcome, message: str) -> None:
        """Close the channel and bring every execution to its result: nothing of this runs on afterwards."""
        for execution in tuple(self.running.values()):
            execution.abandon(outcome, message)
        await self.channel.close()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=READER_GRACE)
            for task in late:
                task.cancel()
        self.log.close()

    def _admit(
        self, caller: Caller, command: Command, kept: Kept, large: int = 0, launch: Launch | None = None
    ) -> Execution:
        if self.left:
            raise stopping()
        if len(self.running) >= RUNNING_MAX:
            raise Busy(
                f"{RUNNING_MAX} executions are running in this environment", hint="wait for some to end"
            )
        if not self._large.take(self.tenant, large):
            raise Busy(
                "too many executions ask for a large output", hint="wait, or lower output_limit, or stream it"
            )
        execution = Execution(self, caller, command, kept, launch)
        execution.large = large
        self.running[execution.id] = execution
        hit("execute.admitted")
        return execution


def _retrieve(written: asyncio.Future[None]) -> None:
    """What cannot be written down now is found out by the next daemon."""
    if not written.cancelled():
        written.exception()
