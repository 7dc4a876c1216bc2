"""The executions of one environment: admission, history, and takeover by the next daemon."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
from collections.abc import Callable, Collection
from typing import ClassVar, Protocol

from skerry.errors import Busy, DaemonUnavailable, ExecutionNotFound, StoreUnavailable, stopping
from skerry.failpoints import hit
from skerry.manager.caller import Caller
from skerry.manager.capacity import SharedCapacity
from skerry.manager.executions.commands import OUTPUT_LIMIT, Command
from skerry.manager.executions.execution import READER_GRACE, Execution, Launch
from skerry.manager.executions.output import FirstOutput, KeptOutput, RecentOutput
from skerry.manager.executions.runtime import Runtime
from skerry.models import Outcome
from skerry.store.executions import ExecutionRecord

RUNNING_MAX = 256
REMEMBERED_MAX = 32
RECENT_LIMIT = 64 << 10
LARGE_MAX = 256 << 20
"""Bytes of output, beyond the usual limit of each, that all executions of the daemon together may hold."""


class ExecutionRecords(Protocol):
    """Where executions that outlive the daemon are written down. Both may raise StoreUnavailable."""

    def started(self, environment_id: str, execution: Execution) -> asyncio.Future[None]: ...

    def finished(
        self, execution_id: str, outcome: Outcome, exit_code: int | None
    ) -> asyncio.Future[None]: ...


class Executions:
    """Running executions of one environment, and the last ones that ran in the background."""

    _large: ClassVar[SharedCapacity] = SharedCapacity(LARGE_MAX)
    """Shared by all environments."""

    def __init__(self, runtime: Runtime, records: ExecutionRecords, *, touch: Callable[[], None]) -> None:
        self.runtime = runtime
        self._records = records
        self._touch = touch
        self.running: dict[str, Execution] = {}
        self._remembered: dict[str, Execution] = {}

    def prepare(self, caller: Caller, command: Command, launch: Launch | None = None) -> Execution:
        """An execution to `run()`; its result holds the first `output_limit` bytes of each stream. Raises Busy."""
        limit = OUTPUT_LIMIT if command.output_limit is None else command.output_limit
        return self._admit(caller, command, FirstOutput(limit), 2 * max(0, limit - OUTPUT_LIMIT), launch)

    async def start(self, caller: Caller, command: Command) -> Execution:
        """Start in the background; recent output is kept, and the next daemon takes it over should this one end.

        Raises Busy, InvalidRequest, GuestFailed, StoreUnavailable.
        """
        execution = self._admit(caller, command, RecentOutput(RECENT_LIMIT))
        execution.lasting = True
        await execution.begin()
        try:
            await self._records.started(self.runtime.environment_id, execution)
            hit("execute.recorded")
        except BaseException:
            execution.stop(Outcome.INTERNAL, "it could not be written down")
            self.follow(execution)
            raise
        return execution

    async def adopt(self, records: Collection[ExecutionRecord]) -> builtins.list[str]:
        """Follow what an earlier daemon started in the background; returns descriptions of what was lost.

        Commands that callers of that daemon waited for are killed. Raises GuestFailed.
        """
        there = {info.id: info for info in await self.runtime.channel.processes()}
        lost = []
        for record in records:
            if record.process in there:
                del there[record.process]
                process = await self.runtime.channel.attach(record.process)
                execution = Execution.adopted(
                    self.runtime, record, process, RecentOutput(RECENT_LIMIT), self._ended
                )
                self._add(execution)
                self.follow(execution)
            else:
                lost.append(record)
        await asyncio.gather(*(self.runtime.channel.end(info.id) for info in there.values()))
        for record in lost:
            written = self._records.finished(record.id, Outcome.INTERNAL, None)
            written.add_done_callback(_retrieve)
        return [f"{record.id}: {record.command}" for record in lost]

    async def let_go(self) -> None:
        """Leave everything running, for the next daemon. Callers that wait get DaemonUnavailable."""
        for execution in self.running.values():
            execution.lasting = False  # it has not ended
        await self.runtime.let_go(stopping())

    def follow(self, execution: Execution) -> None:
        """Follow a started execution in a background task, and remember its result."""
        self._remembered[execution.id] = execution
        self.runtime.spawn(self._followed(execution))

    async def _followed(self, execution: Execution) -> None:
        with contextlib.suppress(StoreUnavailable, DaemonUnavailable):  # nobody waits; the audit has it
            await execution.finish()

    def find(self, execution_id: str) -> Execution:
        """Raises ExecutionNotFound."""
        found = self.running.get(execution_id) or self._remembered.get(execution_id)
        if found is None:
            raise ExecutionNotFound(
                f"no execution {execution_id!r} in environment {self.runtime.environment_id}"
            )
        return found

    def list(self) -> list[Execution]:
        return list(({**self._remembered, **self.running}).values())

    async def end(self, outcome: Outcome, message: str) -> None:
        """Close the channel and end every execution: nothing runs on afterwards."""
        for execution in tuple(self.running.values()):
            execution.abandon(outcome, message)
        await self.runtime.close(READER_GRACE)

    def _admit(
        self, caller: Caller, command: Command, kept: KeptOutput, large: int = 0, launch: Launch | None = None
    ) -> Execution:
        if self.runtime.left:
            raise stopping()
        if len(self.running) >= RUNNING_MAX:
            raise Busy(
                f"{RUNNING_MAX} executions are running in this environment", hint="wait for some to end"
            )
        restrictions = self.runtime.restrictions(command.profile)
        if not self._large.take(self.runtime.tenant, large):
            raise Busy(
                "too many executions ask for a large output", hint="wait, or lower output_limit, or stream it"
            )
        execution = Execution(self.runtime, caller, command, kept, self._ended, launch, restrictions)
        execution.large = large
        self._add(execution)
        hit("execute.admitted")
        return execution

    def _add(self, execution: Execution) -> None:
        self.running[execution.id] = execution
        self.runtime.executing += 1

    def _ended(self, execution: Execution) -> None:
        if execution.lasting and execution.result is not None:
            written = self._records.finished(
                execution.id, execution.result.outcome, execution.result.exit_code
            )
            written.add_done_callback(_retrieve)
        if self.running.pop(execution.id, None) is not None:
            self.runtime.executing -= 1
            self._large.give_back(self.runtime.tenant, execution.large)
        self._touch()
        ended = [id for id in self._remembered if id not in self.running]
        for id in ended[:-REMEMBERED_MAX]:
            del self._remembered[id]


def _retrieve(written: asyncio.Future[None]) -> None:
    """A failed write is harmless: the next daemon finds out what has ended."""
    if not written.cancelled():
        written.exception()
