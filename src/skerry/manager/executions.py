"""Everything that runs in one environment: in order, within limits, and to a truthful result."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from skerry.backends.base import Backend, Sample
from skerry.errors import Busy, Conflict, ExecutionNotFound, GuestFailed, InvalidRequest, SkerryError
from skerry.guest.channel import Channel, Exit, GuestProcess
from skerry.manager.commands import OUTPUT_LIMIT, Command
from skerry.manager.ids import new_id
from skerry.manager.output import STDERR, STDOUT, Entry, Head, Kept, Log, Recent, Tap, joined
from skerry.models import ExecutionInfo, ExecutionResult, Outcome, Usage

RUNNING_MAX = 256
WAITING_MAX = 64
REMEMBERED_MAX = 32
RECENT_LIMIT = 64 << 10
KILL_GRACE = 10.0
"""Seconds within which a guest must have killed what it was told to; one that has not is beyond trust."""
READER_GRACE = 1.0
"""Seconds that a reader has to take the last output of an execution that was killed."""

EXIT_TIMED_OUT, EXIT_INTERNAL, EXIT_KILLED = 124, 125, 137


class Line:
    """The queue before one shell: one command runs, the others wait in the order in which they came."""

    def __init__(self) -> None:
        self._busy = False
        self._waiting: deque[asyncio.Future[bool]] = deque()

    @property
    def empty(self) -> bool:
        return not self._busy

    def join(self) -> asyncio.Future[bool] | None:
        """None: it is your turn. Else a place that becomes True when it is; set it to False to give it up.

        Raises Busy when too many wait.
        """
        if not self._busy:
            self._busy = True
            return None
        if sum(not place.done() for place in self._waiting) >= WAITING_MAX:
            raise Busy(
                f"{WAITING_MAX} commands are waiting for this shell", hint="wait, or use another shell"
            )
        place: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        return place

    def leave(self) -> None:
        """The one whose turn it was is done."""
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(True)
                return
        self._busy = False


class Execution:
    """One run of a command: `begin()`, then `finish()`; `stop()` at any time, from anywhere."""

    def __init__(self, home: Executions, command: Command, kept: Kept) -> None:
        self.id = new_id()
        self.command = command
        self.started_at = time.time()
        self.kept = kept
        self.result: ExecutionResult | None = None
        self.ended: asyncio.Future[ExecutionResult] = asyncio.get_running_loop().create_future()
        self._home = home
        self._start = command.start(home.variables)
        self._process: GuestProcess | None = None
        self._line: Line | None = None
        self._place: asyncio.Future[bool] | None = None
        self._cause: tuple[Outcome, str] | None = None
        self._killer: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._taps: list[Tap] = []
        self._sizes = {STDOUT: 0, STDERR: 0}
        self._before = Sample(None, 0)
        self._began = 0.0

    @property
    def info(self) -> ExecutionInfo:
        result = self.result
        return ExecutionInfo(
            execution_id=self.id,
            environment_id=self._home.environment_id,
            command=self.command.label,
            state="running" if result is None else "ended",
            started_at=self.started_at,
            pid=self._process.pid if self._process is not None else 0,
            pty=self.command.pty is not None,
            outcome="" if result is None else str(result.outcome),
            exit_code=None if result is None else result.exit_code,
        )

    async def run(self, stdin: bytes | None = None) -> ExecutionResult:
        """From begin to end, with `stdin` fed to it. Raises what `begin()` does."""
        await self.begin()
        feeder = asyncio.create_task(self._feed(stdin)) if stdin is not None else None
        try:
            return await self.finish()
        finally:
            if feeder is not None:
                feeder.cancel()

    async def begin(self) -> None:
        """Wait for the shell's turn and start the program. A program that does not exist is no error.

        Raises Busy, InvalidRequest, GuestFailed.
        """
        home = self._home
        try:
            if self.command.shell and not await self._turn():
                return
            if len(home.running) == 1:
                home.reset_peak()
            self._before = home.sample()
            self._began = time.monotonic()
            if home.channel.closed.done():
                raise GuestFailed(f"the guest is gone: {home.channel.closed.result()}")
            self._process = await home.channel.start(self._start)
        except BaseException as error:
            if isinstance(error, GuestFailed) and self._cause is not None:
                return  # the environment went away: `finish()` says so
            self._leave()
            self.ended.cancel()
            raise
        if self._cause is not None:
            self._kill()
        elif self.command.timeout is not None:
            timeout = self.command.timeout
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(
                timeout, self.stop, Outcome.TIMED_OUT, f"killed after {timeout:.10g} s"
            )

    async def finish(self) -> ExecutionResult:
        """Pass the output on until the program has ended."""
        exit: Exit | None = None
        lost = ""
        try:
            if self._process is not None:
                async for stream, data in self._process.output():
                    await self._emit(stream, data)
                exit = await self._process.wait()
                if self._killer is not None:
                    await self._process.kill()  # its end is not the end of what it started
        except GuestFailed as error:
            lost = error.message
        except BaseException:
            self._leave()
            self.ended.cancel()
            raise
        result = await self._conclude(exit, lost)
        self.result = result
        self._leave()
        self.ended.set_result(result)
        return result

    def stop(self, outcome: Outcome, message: str) -> None:
        """Kill it with everything that it started; the first reason given is the one reported."""
        self._give_up(outcome, message)
        if self._process is not None and not self.ended.done():
            self._kill()

    def abandon(self, outcome: Outcome, message: str) -> None:
        """The environment is going away and takes the execution with it."""
        self._give_up(outcome, message)
        for tap in self._taps:
            tap.release()

    async def over(self) -> None:
        """Returns when it has ended, however it did."""
        await asyncio.wait((self.ended,))

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

    async def write(self, data: bytes) -> None:
        """Feed stdin; waits while the program does not read. Raises Conflict, GuestFailed."""
        await self._input().write(data)

    async def close_stdin(self) -> None:
        """Raises Conflict, GuestFailed."""
        await self._input().close_stdin()

    def tap(self) -> Tap:
        """The recent output and, while it runs, what follows: unread, it stops the program. See `untap()`."""
        tap = Tap(self.kept.entries())
        if self.result is None:
            self._taps.append(tap)
        else:
            tap.close()
        return tap

    def untap(self, tap: Tap) -> None:
        if tap in self._taps:
            self._taps.remove(tap)
        tap.close()

    # ---- what happens inside ----

    async def _turn(self) -> bool:
        line = self._home.line(self.command.shell_id)
        self._place = line.join()
        try:
            mine = self._place is None or await self._place
        except asyncio.CancelledError:
            if self._place is not None and self._place.done():
                line.leave()
            raise
        if mine:
            self._line = line
        return mine

    async def _emit(self, stream: int, data: bytes) -> None:
        entry = Entry(time.time(), self.id, stream, data)
        self._sizes[stream] += len(data)
        self.kept.add(entry)
        self._home.log.add(entry)
        if self._taps:
            for tap in tuple(self._taps):
                await tap.put(entry)

    async def _feed(self, data: bytes) -> None:
        # A program may end, or close its stdin, without reading everything.
        with contextlib.suppress(SkerryError):
            await self.write(data)
            await self.close_stdin()

    def _give_up(self, outcome: Outcome, message: str) -> None:
        if self._cause is None and self.result is None:
            self._cause = (outcome, message)
        if self._place is not None and not self._place.done():
            self._place.set_result(False)

    def _kill(self) -> None:
        if self._killer is None:
            self._killer = asyncio.create_task(self._kill_tree())

    async def _kill_tree(self) -> None:
        try:
            async with asyncio.timeout(KILL_GRACE):
                await self._live().kill()
                await asyncio.wait((self.ended,), timeout=READER_GRACE)
                for tap in self._taps:
                    tap.release()
                await self.over()
        except TimeoutError:
            self._home.lost("the guest did not kill what it was told to")
        except SkerryError:
            pass  # the guest is gone or the program has ended: `finish()` knows which

    async def _conclude(self, exit: Exit | None, lost: str) -> ExecutionResult:
        duration = time.monotonic() - self._began if self._process is not None else 0.0
        usage, oom = (Usage(), False) if self._process is None else await self._home.usage_since(self._before)
        code = EXIT_KILLED if exit is None else exit.code
        message = ""
        if self._cause is not None:
            outcome, message = self._cause
            if outcome is Outcome.TIMED_OUT:
                code = EXIT_TIMED_OUT
            elif outcome is Outcome.INTERNAL:
                code = EXIT_INTERNAL
        elif oom and code != 0:
            outcome, code, message = (
                Outcome.OOM_KILLED,
                EXIT_KILLED,
                "killed: the environment's memory is used up",
            )
        elif exit is None:
            outcome, code, message = Outcome.INTERNAL, EXIT_INTERNAL, f"the environment went away: {lost}"
        elif exit.signal is not None:
            outcome = Outcome.SIGNALED
        else:
            outcome = Outcome.FAILED if code else Outcome.COMPLETED
        entries = self.kept.entries()
        return ExecutionResult(
            execution_id=self.id,
            outcome=outcome,
            exit_code=code,
            stdout_bytes=joined(entries, STDOUT),
            stderr_bytes=joined(entries, STDERR),
            stdout_size=max(self._sizes[STDOUT], exit.stdout_size if exit is not None else 0),
            stderr_size=max(self._sizes[STDERR], exit.stderr_size if exit is not None else 0),
            duration_seconds=duration,
            usage=usage,
            message=message,
        )

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for tap in self._taps:
            tap.close()
        self._taps.clear()
        line, self._line = self._line, None
        self._home.leave(self, line)

    def _live(self) -> GuestProcess:
        if self._process is None or self.ended.done():
            state = "has not started yet" if self._process is None else "has ended"
            raise Conflict(f"the execution {state}")
        return self._process

    def _input(self) -> GuestProcess:
        if not self.command.stdin:
            raise Conflict("the execution has no stdin", hint="start it with stdin")
        return self._live()


class Executions:
    """What runs in one environment, and the last that ran in the background."""

    def __init__(
        self,
        environment_id: str,
        backend: Backend,
        channel: Channel,
        variables: dict[str, str],
        *,
        touch: Callable[[], None],
        lost: Callable[[str], None],
    ) -> None:
        self.environment_id = environment_id
        self.backend = backend
        self.channel = channel
        self.variables = variables
        self.lost = lost
        """Called with a reason when the guest turns out to be broken."""
        self.oom_kills = 0
        """The last count that was seen."""
        self._touch = touch
        self.log = Log()
        self.running: dict[str, Execution] = {}
        self._remembered: dict[str, Execution] = {}
        self._lines: dict[str, Line] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def prepare(self, command: Command) -> Execution:
        """One to `run()`; its result holds the first `output_limit` bytes of each stream. Raises Busy."""
        limit = command.output_limit
        return self._admit(command, Head(OUTPUT_LIMIT if limit is None else limit))

    async def start(self, command: Command) -> Execution:
        """Start in the background; recent output is kept. Raises Busy, InvalidRequest, GuestFailed."""
        execution = self._admit(command, Recent(RECENT_LIMIT))
        await execution.begin()
        return execution

    def follow(self, execution: Execution) -> None:
        """Run a started execution to its end in a task of its own, and remember it."""
        self._remembered[execution.id] = execution
        task = asyncio.create_task(execution.finish())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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
        after = self.sample()
        try:
            now = await self.backend.usage(self.environment_id)
        except SkerryError:
            now = Usage()
        cpu = None
        if before.cpu_seconds is not None and after.cpu_seconds is not None:
            cpu = max(0.0, after.cpu_seconds - before.cpu_seconds)
        kills = max(0, after.oom_kills - before.oom_kills)
        self.oom_kills = max(self.oom_kills, after.oom_kills)
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
        self.running.pop(execution.id, None)
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

    def _admit(self, command: Command, kept: Kept) -> Execution:
        if len(self.running) >= RUNNING_MAX:
            raise Busy(
                f"{RUNNING_MAX} executions are running in this environment", hint="wait for some to end"
            )
        execution = Execution(self, command, kept)
        self.running[execution.id] = execution
        return execution
