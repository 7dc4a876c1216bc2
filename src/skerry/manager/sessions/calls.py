"""One call in a session's interpreter, from its place in the queue to its result."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from skerry.errors import InvalidRequest, SkerryError, StoreUnavailable
from skerry.guest.process import Exit, GuestProcess
from skerry.manager.executions.commands import OUTPUT_LIMIT
from skerry.manager.executions.output import STDERR, STDOUT, FirstOutput
from skerry.manager.executions.queue import RunQueue
from skerry.manager.executions.run import EXIT_INTERNAL, EXIT_KILLED, EXIT_TIMED_OUT, Run
from skerry.manager.executions.runtime import Runtime
from skerry.models import Outcome, Raised, SessionResult, Usage, Value, Variable
from skerry.policy import seconds
from skerry.runners import Runner

CODE_MAX = 1 << 20
INTERRUPT_GRACE = 1.0
"""Seconds that code has to end after an interrupt; then its interpreter is killed."""
AGAIN_SECONDS = 0.2
LIST_SECONDS = 10.0
VALUES_MAX, FORMS_MAX = 32, 16
VARIABLES_MAX = 500
TEXT_MAX = 20_000
"""Characters of each text about an exception or a variable."""
SMALL = 16 << 10
"""Bytes of a request that is written at once, because the pipe to an interpreter holds it."""
USUAL_MAX = 256 << 10
HELD_MAX = 128 << 20
"""Bytes of values: of each call; and, beyond those, of all calls of the daemon together."""
_MEDIA = re.compile(r"[a-z]{1,20}/[a-z0-9.+-]{1,60}")
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class SessionCode:
    """Code to run in a session. Raises InvalidRequest."""

    text: str
    stdin: bytes | bytearray | None = None
    timeout: float | None = None
    memory: int | None = None
    """Bytes that the interpreter may use while this runs."""

    def __post_init__(self) -> None:
        if len(self.text) > CODE_MAX:
            raise InvalidRequest(
                f"the code has more than {CODE_MAX} characters", hint="write it to a file and import that"
            )
        if not self.text.isascii():
            try:
                self.text.encode()
            except UnicodeEncodeError:
                raise InvalidRequest("the code is not valid text") from None
        if self.timeout is not None:
            seconds(self.timeout, "timeout")

    @property
    def request(self) -> dict[str, Any]:
        stdin = None if self.stdin is None else base64.b64encode(self.stdin).decode()
        return {"op": "run", "code": self.text, "stdin": stdin, "memory": self.memory}

    @property
    def told(self) -> dict[str, Any]:
        """What the audit records of it."""
        return {"code": self.text, "timeout": self.timeout, "memory": self.memory}


class CallTarget(Protocol):
    """What a call uses of its interpreter."""

    queue: RunQueue
    runtime: Runtime
    runner: Runner
    current: SessionCall | None
    interrupted: bool

    def begin(self, call: SessionCall) -> GuestProcess: ...

    def end(self, call: SessionCall) -> None: ...

    def signal(self, number: signal.Signals) -> None: ...

    def kill(self, message: str) -> None: ...


class SessionCall(Run):
    """One run of code: `run()` once; `stop()` at any time, from anywhere."""

    _held = 0
    """Bytes that all sessions hold: see HELD_MAX."""

    def __init__(
        self,
        session: CallTarget,
        request: dict[str, Any],
        timeout: float | None = None,
        on_disk: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(session.runtime, FirstOutput(OUTPUT_LIMIT))
        # Its id is random, and so the token that replies to it must have.
        self._session = session
        self._request = request
        self._timeout = timeout
        self._on_disk = on_disk
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._values: dict[int, Value] = {}
        self._size = 0
        self._raised: Raised | None = None
        self._begun, self._wanted = True, False
        """True if an interrupt would hit this call; and if one is pending until then."""
        self.interrupted = False
        self._again: asyncio.TimerHandle | None = None
        self._crash: tuple[Exit | None, str] | None = None
        self.variables: list[Variable] = []

    async def run(self) -> SessionResult:
        """Wait in the session's queue, run, and return the result.

        Raises Busy, Conflict (it has crashed), and what `on_disk` does: nobody may see the effect then.
        """
        session = self._session
        try:
            if not await self._wait_turn(session.queue):
                return await self._conclude()
            try:
                if self._cause is not None:  # it was stopped while its turn came
                    return await self._conclude()
                process = session.begin(self)
                self._start_clock(alone=not self._runtime.executing)
                self._begun = not session.interrupted
                asked = {**self._request, "token": self.id, "interrupted": session.interrupted}
                line = json.dumps(asked).encode() + b"\n"
                if self._timeout is not None:
                    self._limit(self._timeout, f"interrupted after {self._timeout:.10g} s")
                asking = asyncio.create_task(process.write(line)) if len(line) > SMALL else None
                try:
                    if asking is None:
                        await process.write(line)
                    await self._done
                except asyncio.CancelledError:
                    session.kill("its caller is gone")
                    raise
                finally:
                    if asking is not None and not asking.done():
                        # After half a request, the interpreter could not understand the next one.
                        asking.cancel()
                        session.kill("it did not read what it was asked")
                    session.end(self)
            finally:
                session.queue.leave()
            if self._on_disk is not None:
                await self._on_disk()
            return await self._conclude()
        finally:
            self._leave()

    def stop(self, outcome: Outcome, message: str) -> None:
        """Interrupt it, and kill the interpreter if it does not end; the first reason given is the one reported."""
        if self._done.done() or self._cause is not None:
            return
        self._cause = (outcome, message)
        if self._place is not None and not self._place.done():
            self._give_up_place()
        elif self._session.current is self:
            self.interrupt()
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(INTERRUPT_GRACE, self._kill)

    def interrupt(self) -> None:
        """Interrupt at once; after an interrupted call, as soon as the interpreter has begun with this one."""
        self._wanted = not self._begun
        if self._begun:
            self.interrupted = True
            self._session.signal(signal.SIGINT)
            if self._session.runner.forgets_interrupts:
                self._again = asyncio.get_running_loop().call_later(AGAIN_SECONDS, self.interrupt)

    # ---- called by the session ----

    async def on_output(self, stream: int, data: bytes) -> None:
        if self._on_disk is not None:
            try:
                await self._on_disk()
            except StoreUnavailable:  # raised by `run()`
                return
        await self._emit(stream, data)

    def on_reply(self, head: dict[str, Any], data: bytes) -> None:
        """Handle a reply. Ignores one without our token, or that is malformed."""
        if head.get("token") != self.id or self._done.done():
            return
        if "begun" in head:
            self._begun = True
            if self._wanted:
                self.interrupt()
        elif "end" in head:
            self._raised = _raised(head["end"])
            self._done.set_result(None)
        elif "variable" in head and len(self.variables) < VARIABLES_MAX:
            if (variable := _variable(head["variable"])) is not None:
                self.variables.append(variable)
        elif "value" in head:
            self._on_value(head, data)

    def fail(self, error: SkerryError) -> None:
        """Make `run()` raise this error."""
        if not self._done.done():
            self._done.set_exception(error)
            self._done.exception()  # its caller may be gone

    def lost(self, exit: Exit | None, message: str) -> None:
        """The interpreter has exited."""
        if not self._done.done():
            self._crash = (exit, message)
            self._done.set_result(None)

    # ---- what happens inside ----

    def _kill(self) -> None:
        self._session.kill("it did not end when it was interrupted")

    def _on_value(self, head: dict[str, Any], data: bytes) -> None:
        number, kind, media = head["value"], head.get("kind"), head.get("type")
        if type(number) is not int or not 1 <= number <= VALUES_MAX or kind not in ("value", "display"):
            return
        if not isinstance(media, str) or not _MEDIA.fullmatch(media):
            return
        value = self._values.setdefault(number, Value(kind, {}, []))
        if len(value.data) + len(value.truncated) >= FORMS_MAX:
            return
        more = max(0, self._size + len(data) - USUAL_MAX) - max(0, self._size - USUAL_MAX)
        fits = SessionCall._held + more <= HELD_MAX
        if head.get("cut") or not fits:
            value.truncated.append(media)
        if data and media not in value.data and fits:
            self._size += len(data)
            SessionCall._held += more
            binary = media.startswith("image/") and media != "image/svg+xml"
            value.data[media] = base64.b64encode(data).decode() if binary else data.decode(errors="replace")

    async def _conclude(self) -> SessionResult:
        exit, lost = self._crash or (None, "")
        duration = time.monotonic() - self._began if self._began else 0.0
        usage, oom = await self._runtime.usage_since(self._before) if self._began else (Usage(), False)
        crashed, message = self._crash is not None, ""
        if self._cause is not None:
            outcome, message = self._cause
            timed_out = outcome is Outcome.TIMED_OUT
            code = EXIT_TIMED_OUT if timed_out else EXIT_KILLED if crashed else EXIT_INTERRUPTED
        elif crashed and exit is None:
            outcome, code, message = Outcome.INTERNAL, EXIT_INTERNAL, lost
        elif crashed and oom:
            outcome, code = Outcome.OOM_KILLED, EXIT_KILLED
            message = "the interpreter was killed: the environment's memory is used up"
        elif exit is not None:
            outcome = Outcome.FAILED if exit.signal is None else Outcome.SIGNALED
            code, message = exit.code, lost
        elif self._raised is not None:
            outcome, code = Outcome.FAILED, _exit_code(self._raised)
        else:
            outcome, code = Outcome.COMPLETED, 0
        return SessionResult(
            execution_id=self.id,
            outcome=outcome,
            exit_code=code,
            stdout_bytes=self.kept.joined(STDOUT),
            stderr_bytes=self.kept.joined(STDERR),
            stdout_size=self._seen[STDOUT].size,
            stderr_size=self._seen[STDERR].size,
            duration_seconds=duration,
            usage=usage,
            message=message,
            values=tuple(value for _, value in sorted(self._values.items())),
            raised=self._raised,
            crashed=crashed,
        )

    def _leave(self) -> None:
        SessionCall._held -= max(0, self._size - USUAL_MAX)
        self._size = 0
        if self._again is not None:
            self._again.cancel()
        super()._leave()


def _texts(found: Any, *names: str) -> list[str] | None:
    """The values of these names, if all are strings."""
    if not isinstance(found, dict) or not all(isinstance(found.get(name), str) for name in names):
        return None
    return [found[name][:TEXT_MAX] for name in names]


def _raised(found: Any) -> Raised | None:
    texts = _texts(found, "name", "value", "traceback")
    return None if texts is None else Raised(*texts)


def _variable(found: Any) -> Variable | None:
    texts = _texts(found, "name", "type", "text")
    if texts is None or type(found.get("size")) is not int or not 0 <= found["size"] < 1 << 62:
        return None
    name, type_, text = texts
    return Variable(name, type_, text, found["size"])


def _exit_code(raised: Raised) -> int:
    """1, or the code of a SystemExit."""
    code = 1
    if raised.name == "SystemExit" and raised.value.isdecimal() and len(raised.value) < 4:
        with contextlib.suppress(ValueError):
            code = int(raised.value) & 255 or 1
    return code
