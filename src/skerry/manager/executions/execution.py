"""One run of a command, from its place in a shell's queue to its result."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from skerry.errors import (
    Conflict,
    DaemonUnavailable,
    GuestFailed,
    InvalidRequest,
    SkerryError,
    StoreUnavailable,
    stopping,
)
from skerry.failpoints import hit
from skerry.guest.channel import Channel
from skerry.guest.process import Exit, GuestProcess
from skerry.guest.start import Restrictions, Start
from skerry.manager.audit.acts import Digest
from skerry.manager.caller import Caller
from skerry.manager.clock import since_boot
from skerry.manager.executions.commands import Command
from skerry.manager.executions.output import STDERR, STDOUT, KeptOutput
from skerry.manager.executions.queue import RunQueue
from skerry.manager.executions.run import EXIT_INTERNAL, EXIT_KILLED, EXIT_TIMED_OUT, Run
from skerry.manager.executions.runtime import Runtime
from skerry.models import ExecutionInfo, ExecutionResult, Outcome, Usage

if TYPE_CHECKING:
    from skerry.store.executions import ExecutionRecord

HASHED_AT_ONCE = 1 << 20
"""Bytes; about a millisecond of work."""
KILL_GRACE = 40.0
"""Seconds within which a guest must confirm a kill. On a starved machine it takes up to 25: see docs/adr/0004."""
READER_GRACE = 1.0
"""Seconds that readers have to take the last output of a killed execution."""

Launch = Callable[[Channel, Start], Awaitable[GuestProcess]]
"""How a program is started. Raises what `Channel.start` does."""


class Execution(Run):
    """One run of a command: `begin()`, then `finish()`; `stop()` at any time, from anywhere."""

    def __init__(
        self,
        runtime: Runtime,
        caller: Caller,
        command: Command,
        kept: KeptOutput,
        on_end: Callable[[Execution], None],
        launch: Launch | None = None,
        restrictions: Restrictions | None = None,
    ) -> None:
        super().__init__(runtime, kept)
        self.caller = caller
        self.command = command
        self.started_at = time.time()
        self.result: ExecutionResult | None = None
        self.ended: asyncio.Future[ExecutionResult] = asyncio.get_running_loop().create_future()
        self._on_end = on_end
        self._start = command.start(runtime.variables, caller.traceparent, restrictions)
        self._launch = launch
        self._act = runtime.act(caller, "execution", {"execution_id": self.id, **command.told})
        self._process: GuestProcess | None = None
        self._queue: RunQueue | None = None
        self._killer: asyncio.Task[None] | None = None
        self._fed = Digest()
        self.large = 0
        """Bytes of output, beyond the usual limit, that are reserved for it."""
        self.lasting = False
        """It is recorded, and the next daemon takes it over."""

    @classmethod
    def adopted(
        cls,
        runtime: Runtime,
        record: ExecutionRecord,
        process: GuestProcess,
        kept: KeptOutput,
        on_end: Callable[[Execution], None],
    ) -> Execution:
        """An execution that an earlier daemon began, to be followed to its end."""
        detail = record.detail
        caller = Caller(tenant=runtime.tenant, **detail["caller"])
        command = Command(
            text=record.command,
            user=detail["user"],
            stdin=detail["stdin"],
            pty=detail["pty"] and tuple(detail["pty"]),
            timeout=detail["timeout"],
            profile=detail.get("profile", ""),
        )
        execution = cls(runtime, caller, command, kept, on_end)
        execution.id, execution.started_at, execution.lasting = record.id, record.started_at, True
        execution._act = runtime.act(caller, "execution", {}, begun=True)
        execution._process, execution._before = process, runtime.sample()
        # Since boot, so that a jump of the wall clock neither ends nor prolongs it.
        ran = max(0.0, since_boot() - detail["began"])
        execution._began = time.monotonic() - ran
        if command.timeout is not None:
            execution._limit_time(max(0.0, command.timeout - ran))
        return execution

    @property
    def process_id(self) -> int:
        """The guest's process id; 0 before the start."""
        return 0 if self._process is None else self._process.id

    @property
    def info(self) -> ExecutionInfo:
        result = self.result
        return ExecutionInfo(
            execution_id=self.id,
            environment_id=self._runtime.environment_id,
            command=self.command.label,
            state="running" if result is None else "ended",
            started_at=self.started_at,
            pid=self._process.pid if self._process is not None else 0,
            pty=self.command.pty is not None,
            outcome="" if result is None else str(result.outcome),
            exit_code=None if result is None else result.exit_code,
            profile=self.command.profile,
        )

    @property
    def kept_from(self) -> int:
        """Bytes of output, of both streams together, that came before the kept ones."""
        return sum(seen.size for seen in self._seen.values()) - self.kept.size

    async def run(self, stdin: bytes | bytearray | None = None) -> ExecutionResult:
        """Begin, feed `stdin`, and finish. Raises what `begin()` and `finish()` do."""
        await self.begin()
        feeder = asyncio.create_task(self._feed(stdin)) if stdin is not None else None
        try:
            return await self.finish()
        finally:
            if feeder is not None:
                feeder.cancel()

    async def begin(self) -> None:
        """Wait for the shell's queue and start the program. A missing program is not an error.

        Raises Busy, InvalidRequest, GuestFailed, StoreUnavailable.
        """
        runtime = self._runtime
        try:
            await runtime.begin(self._act)
            hit("execute.intended")
            if self.command.shell and not await self._turn():
                return
            self._start_clock(alone=runtime.executing == 1)
            self._start.keep = self.lasting
            if self._launch is None:
                self._process = await runtime.channel.start(self._start)
            else:
                self._process = await self._launch(runtime.channel, self._start)
            hit("execute.started")
        except BaseException as error:
            if isinstance(error, GuestFailed) and self._cause is not None:
                return  # the environment went away: `finish()` says so
            self._act.failed(error)
            self._leave()
            self.ended.cancel()
            raise
        if self._cause is not None:
            self._kill()
        elif self.command.timeout is not None:
            self._limit_time(self.command.timeout)

    async def finish(self) -> ExecutionResult:
        """Pass the output on until the program has ended, and return the result.

        Raises StoreUnavailable (nobody may see what it did), DaemonUnavailable (the next daemon follows it).
        """
        exit: Exit | None = None
        lost = ""
        try:
            await self._runtime.on_disk(self._act)
            if self._process is not None:
                async for stream, data in self._process.output():
                    await self._emit(stream, data)
                    hit("execute.output")
                exit = await self._process.wait()
                hit("execute.ended")
                if self._killer is not None:
                    await self._process.kill()  # its end is not the end of what it started
        except GuestFailed as error:
            lost = error.message
        except BaseException as error:
            # What the next daemon takes over has its result there.
            if isinstance(error, StoreUnavailable) or (
                isinstance(error, DaemonUnavailable) and not self._start.keep
            ):
                self._act.failed(error)
            if self._process is not None and not self._start.keep:
                self._runtime.spawn(_kill(self._process))  # nobody knows of it any more
            self._leave()
            self.ended.cancel()
            raise
        if exit is not None and self.lasting and self._process is not None:
            self._process.forget()
        result = await self._conclude(exit, lost)
        self.result = result
        hit("execute.concluded")
        self._audit(result)
        self._leave()
        self.ended.set_result(result)
        return result

    def stop(self, outcome: Outcome, message: str) -> None:
        """Kill it with all its children; the first reason given is the one reported."""
        self._give_up(outcome, message)
        if self._process is not None and not self.ended.done():
            self._kill()

    def abandon(self, outcome: Outcome, message: str) -> None:
        """The environment is going away and takes the execution with it."""
        self._give_up(outcome, message)
        self.release()

    async def over(self) -> None:
        """Wait until it has ended. Raises DaemonUnavailable if it is left to the next daemon."""
        await asyncio.wait((self.ended,))
        if self.result is None and self._runtime.left:
            raise stopping()

    def signal(self, number: int) -> None:
        """Raises InvalidRequest, Conflict."""
        if not 1 <= number <= 64:
            raise InvalidRequest(f"{number} is not a signal", hint="1 to 64; 2 is SIGINT, 15 is SIGTERM")
        self._live().signal(number)

    def resize(self, rows: int, cols: int) -> None:
        """Raises InvalidRequest, Conflict."""
        if not (0 < rows < 1 << 16 and 0 < cols < 1 << 16):
            raise InvalidRequest("a terminal has between 1 and 65535 rows and columns")
        if self.command.pty is None:
            raise Conflict("the execution has no terminal")
        self._live().resize(rows, cols)

    async def write(self, data: bytes | bytearray) -> None:
        """Feed stdin; waits while the program does not read. Raises Conflict, GuestFailed."""
        process = self._input()
        for at in range(0, len(data), HASHED_AT_ONCE):
            if at:
                await asyncio.sleep(0)
            self._fed.update(data[at : at + HASHED_AT_ONCE])
        await process.write(data)

    async def close_stdin(self) -> None:
        """Raises Conflict, GuestFailed."""
        await self._input().close_stdin()

    # ---- what happens inside ----

    def _limit_time(self, seconds: float) -> None:
        self._limit(seconds, f"killed after {self.command.timeout:.10g} s")

    async def _turn(self) -> bool:
        queue = self._runtime.queue(self.command.shell_id)
        if mine := await self._wait_turn(queue):
            self._queue = queue
        return mine

    def _audit(self, result: ExecutionResult) -> None:
        """Audit the result. Hashes are of the output that was passed on: all of it, unless there was a limit."""
        detail: dict[str, Any] = {
            "execution_id": self.id,
            "exit_code": result.exit_code,
            "duration_seconds": result.duration_seconds,
            "stdout": {**self._seen[STDOUT].told(), "size": result.stdout_size},
            "stderr": {**self._seen[STDERR].told(), "size": result.stderr_size},
        }
        if self.command.stdin:
            detail["stdin"] = self._fed.told()
        self._act.end(str(result.outcome), result.usage, **detail)

    async def _feed(self, data: bytes | bytearray) -> None:
        # A program may end, or close its stdin, without reading everything.
        with contextlib.suppress(SkerryError):
            await self.write(data)
            await self.close_stdin()

    def _give_up(self, outcome: Outcome, message: str) -> None:
        if self._cause is None and self.result is None:
            self._cause = (outcome, message)
        self._give_up_place()

    def _kill(self) -> None:
        if self._killer is None:
            self._killer = asyncio.create_task(self._kill_tree())

    async def _kill_tree(self) -> None:
        try:
            async with asyncio.timeout(KILL_GRACE):
                await self._live().kill()
                await asyncio.wait((self.ended,), timeout=READER_GRACE)
                self.release()
                await self.over()
        except TimeoutError:
            self._runtime.lost("the guest did not kill what it was told to")
        except SkerryError:
            pass  # the guest is gone or the program has ended: `finish()` knows which

    async def _conclude(self, exit: Exit | None, lost: str) -> ExecutionResult:
        duration = time.monotonic() - self._began if self._process is not None else 0.0
        usage, oom = (
            (Usage(), False) if self._process is None else await self._runtime.usage_since(self._before)
        )
        code = EXIT_KILLED if exit is None else exit.code
        message = ""
        if self._cause is not None:
            outcome, message = self._cause
            if outcome is Outcome.TIMED_OUT:
                code = EXIT_TIMED_OUT
            elif outcome is Outcome.INTERNAL:
                code = EXIT_INTERNAL
        elif oom and code != 0:
            outcome, code = Outcome.OOM_KILLED, EXIT_KILLED
            message = "killed: the environment's memory is used up"
        elif exit is None:
            outcome, code, message = Outcome.INTERNAL, EXIT_INTERNAL, f"the environment went away: {lost}"
        elif exit.signal is not None:
            outcome = Outcome.SIGNALED
        else:
            outcome = Outcome.FAILED if code else Outcome.COMPLETED
        return ExecutionResult(
            execution_id=self.id,
            outcome=outcome,
            exit_code=code,
            stdout_bytes=self.kept.joined(STDOUT),
            stderr_bytes=self.kept.joined(STDERR),
            stdout_size=max(self._seen[STDOUT].size, exit.stdout_size if exit is not None else 0),
            stderr_size=max(self._seen[STDERR].size, exit.stderr_size if exit is not None else 0),
            duration_seconds=duration,
            usage=usage,
            message=message,
            profile=self.command.profile,
        )

    def _leave(self) -> None:
        super()._leave()
        queue, self._queue = self._queue, None
        if queue is not None:
            self._runtime.leave_queue(self.command.shell_id, queue)
        self._on_end(self)

    def _live(self) -> GuestProcess:
        if self._process is None or self.ended.done():
            state = "has not started yet" if self._process is None else "has ended"
            raise Conflict(f"the execution {state}")
        return self._process

    def _input(self) -> GuestProcess:
        if not self.command.stdin:
            raise Conflict("the execution has no stdin", hint="start it with stdin")
        return self._live()


async def _kill(process: GuestProcess) -> None:
    with contextlib.suppress(SkerryError):
        await process.kill()
