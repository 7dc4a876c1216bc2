"""Sessions with an interpreter, which keeps its state from one call to the next.

A session in Python or JavaScript is one interpreter that runs our runner (`skerry.runners`). Its stdin brings
requests, its stdout and stderr belong to the user's code, and its replies come on a separate stream. User code can
forge any of these: that can corrupt results of its own session, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

from skerry.errors import (
    Conflict,
    DaemonUnavailable,
    GuestFailed,
    InvalidRequest,
    SessionNotFound,
    SkerryError,
    stopping,
)
from skerry.guest.frames import ProtocolError
from skerry.guest.process import REPLIES, Exit, GuestProcess
from skerry.guest.replies import Parser
from skerry.manager.caller import Caller
from skerry.manager.executions.commands import Command
from skerry.manager.executions.output import Chunk
from skerry.manager.executions.queue import RunQueue
from skerry.manager.executions.runtime import Runtime
from skerry.manager.sessions.calls import LIST_SECONDS, SessionCall, SessionCode
from skerry.models import Outcome, SessionInfo, Variable
from skerry.runners import RUNNERS, Runner

START_SECONDS = 30.0
END_SECONDS = 1.0
"""Seconds that an interpreter has to exit when its session is closed, before it is killed."""
NOT_FOUND = 127
LIMITS_MEMORY = ("python",)


class Interpreter:
    """One session, with an interpreter that runs our runner."""

    def __init__(self, runtime: Runtime, id: str, language: str, command: Command) -> None:
        self.id = id
        self.runtime = runtime
        self.language = language
        self.queue = RunQueue()
        self.current: SessionCall | None = None
        self.interrupted = False
        """The last call was interrupted; the signal may arrive after its end."""
        self.started_at = time.time()
        self._command = command
        self.runner: Runner = RUNNERS[language]
        self._process: GuestProcess | None = None
        self._parser = Parser()
        self._over = asyncio.Event()
        """Set when the last interpreter has sent everything."""
        self._over.set()
        self._calls = 0
        self._message = ""
        self._killed = ""
        self._changing = asyncio.Lock()
        """Held while its interpreter is started or ended."""
        self.closed = False

    @property
    def info(self) -> SessionInfo:
        state = "crashed" if self._process is None else "idle" if self.queue.idle else "busy"
        return SessionInfo(
            session_id=self.id,
            environment_id=self.runtime.environment_id,
            language=self.language,
            state=state,
            started_at=self.started_at,
            calls=self._calls,
            message=self._message,
        )

    async def start(self, caller: Caller) -> None:
        """Start the interpreter. Raises InvalidRequest (no interpreter in this image, no such directory),
        LimitReached, GuestFailed.
        """
        async with self._changing:
            await self._start()

    async def _start(self) -> None:
        await self._over.wait()  # or output of the last one would be taken for the new one's
        start = self._command.start(self.runtime.variables)
        start.argv, start.stdin, start.replies = self.runner.argv, True, True
        process = await self.runtime.channel.start(start)
        self._process, self._parser, self._message, self._killed = process, Parser(), "", ""
        self._calls, self.started_at, self.interrupted = 0, time.time(), False
        self._over = over = asyncio.Event()
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def pumped(_: object) -> None:
            over.set()
            if not ready.done():  # it was cancelled before it began
                ready.set_exception(self._failure(None, "the environment went away"))
                ready.exception()

        self.runtime.spawn(self._pump(process, ready)).add_done_callback(pumped)
        try:
            async with asyncio.timeout(START_SECONDS):
                await process.write(self.runner.opening)
                await asyncio.shield(ready)
        except TimeoutError as error:
            self.kill("it did not start")
            raise GuestFailed(f"the interpreter did not start within {START_SECONDS:g} s") from error
        except BaseException:
            self.kill("it is not wanted any more")
            raise

    def prepare(
        self, caller: Caller, code: SessionCode, on_disk: Callable[[], Awaitable[None]] | None = None
    ) -> SessionCall:
        """A call to `run()`; nobody may see its output before `on_disk()` returns. Raises InvalidRequest."""
        if code.memory is not None and self.language not in LIMITS_MEMORY:
            raise InvalidRequest(
                f"a call in {self.language} has no limit of memory", hint="limit the environment's"
            )
        return SessionCall(self, code.request, code.timeout, on_disk)

    async def variables(self, caller: Caller) -> list[Variable]:
        """Variables that its code has defined. Raises Busy, Conflict (it has crashed, or does not answer)."""
        call = SessionCall(self, {"op": "variables"}, LIST_SECONDS)
        result = await call.run()
        if result.outcome is not Outcome.COMPLETED:
            raise Conflict(f"the session did not list its variables: {result.message or result.outcome}")
        return call.variables

    async def look_for_packages(self) -> None:
        """Make packages importable that came after the start; a crashed interpreter finds them when it is restarted.

        It queues as calls do. Raises Busy.
        """
        if self.runner.finds_packages:
            with contextlib.suppress(Conflict):
                await SessionCall(self, SessionCode(self.runner.finds_packages).request, LIST_SECONDS).run()

    def interrupt(self) -> None:
        """Interrupt the current call, if any: KeyboardInterrupt, or the equivalent of the language."""
        if self.current is not None:
            self.current.interrupt()

    async def restart(self, caller: Caller) -> None:
        """Restart without any state. Raises SessionNotFound (it was closed) and what `start()` does."""
        async with self._changing:
            if self.closed:
                raise SessionNotFound(f"session {self.id!r} was closed", hint="open it again")
            await self._end("the session was restarted")
            await self._start()

    async def close(self, caller: Caller) -> None:
        """End it with all its children. An idle interpreter has END_SECONDS to run its exit handlers."""
        self.closed = True
        async with self._changing:
            process = self._process
            if process is not None and self.current is None:
                with contextlib.suppress(TimeoutError, SkerryError):
                    async with asyncio.timeout(END_SECONDS):
                        await process.close_stdin()
                        await process.wait()
            await self._end("the session was closed")

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.signal(number)

    def kill(self, message: str) -> None:
        """Kill the interpreter with all its children; the current call ends as crashed."""
        if self.current is not None:
            self.current.release()
        if self._process is not None and not self._killed:
            self._killed = message
            self.runtime.spawn(_kill(self._process))

    # ---- for calls ----

    def begin(self, call: SessionCall) -> GuestProcess:
        """Raises Conflict, DaemonUnavailable."""
        if self.runtime.left:
            raise stopping()
        if self._changing.locked():
            raise Conflict(f"session {self.id!r} is being restarted or closed", hint="try again in a moment")
        if self._process is None:
            raise Conflict(f"the session has crashed: {self._message}", hint="restart it")
        self.current = call
        self._calls += 1
        self._parser.renew()
        return self._process

    def end(self, call: SessionCall) -> None:
        self.current, self.interrupted = None, call.interrupted

    # ---- what happens inside ----

    async def _end(self, message: str) -> None:
        if self._process is None:
            return
        if self.current is not None:
            self.current.stop(Outcome.CANCELED, message)
        self.kill(message)
        self._process, self._message = None, message
        await self._over.wait()

    async def _pump(self, process: GuestProcess, ready: asyncio.Future[None]) -> None:
        """Pass on the interpreter's output and replies until it exits."""
        exit: Exit | None = None
        message = "the environment went away"
        try:
            async for stream, data in process.output():
                if stream == REPLIES:
                    for head, piece in self._parser.feed(data):
                        self._on_reply(head, piece, ready)
                elif self.current is not None:
                    await self.current.on_output(stream, data)
                else:  # from threads and programs that outlived their call
                    self.runtime.log.add(Chunk(time.time(), self.id, stream, data))
            exit = await process.wait()
            message = self._killed or _words(exit)
            await process.kill()  # what it started
        except ProtocolError as error:
            message = f"the interpreter broke the protocol: {error}"
            with contextlib.suppress(SkerryError):
                await process.kill()
                exit = await process.wait()
        except (GuestFailed, DaemonUnavailable) as error:
            message = f"the environment went away: {error.message}"
        finally:
            if self._process is process:
                self._process, self._message = None, message
            if self.current is not None:
                self.current.lost(exit, message)
            if not ready.done():
                ready.set_exception(self._failure(exit, message))
                ready.exception()

    def _on_reply(self, head: dict[str, Any], data: bytes, ready: asyncio.Future[None]) -> None:
        if not ready.done():
            ready.set_result(None)
        elif self.current is not None:
            self.current.on_reply(head, data)

    def _failure(self, exit: Exit | None, message: str) -> SkerryError:
        if self.runtime.left:
            return stopping()
        if exit is not None and exit.code == NOT_FOUND:
            return InvalidRequest(
                f"there is no {self.runner.argv[0]} in this environment", hint="use an image that has it"
            )
        return GuestFailed(f"the interpreter did not start: {message}")


async def _kill(process: GuestProcess) -> None:
    with contextlib.suppress(SkerryError):
        await process.kill()


def _words(exit: Exit) -> str:
    if exit.signal is None:
        return f"the interpreter ended with exit code {exit.code}"
    with contextlib.suppress(ValueError):
        return f"the interpreter was killed by {signal.Signals(exit.signal).name}"
    return f"the interpreter was killed by signal {exit.signal}"
