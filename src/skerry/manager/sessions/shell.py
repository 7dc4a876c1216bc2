"""Sessions in bash: a stateful shell of the environment with a private name."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import fields, replace

from skerry.errors import Conflict, InvalidRequest, SessionNotFound
from skerry.ids import new_id
from skerry.manager.caller import Caller
from skerry.manager.executions.commands import OUTPUT_LIMIT, Command
from skerry.manager.executions.execution import Execution
from skerry.manager.executions.output import Tap
from skerry.manager.executions.registry import Executions
from skerry.manager.sessions.calls import LIST_SECONDS, VARIABLES_MAX, SessionCode
from skerry.models import ExecutionResult, Outcome, SessionInfo, SessionResult, Variable

# Prints name, attributes, beginning of the value and size of each variable.
_LIST = r"""
(compgen -v | while IFS= read -r __name; do
    declare -n __ref=$__name
    __value="${__ref[*]}"
    printf '%s\0%s\0%s\0%s\0' "$__name" "${__ref@a}" "${__value:0:200}" "${#__value}"
    unset -n __ref
done)
"""
# The parent is the shell that waits for this command. The command must not return, or it would become the shell.
_END = 'read -r _ _ _ __parent _ <"/proc/$BASHPID/stat"; kill -9 "$__parent" "$BASHPID"'
END_SECONDS = 5.0
"""Time limit of the above. A shell in which `read` or `kill` is redefined stays until the environment ends."""
_TYPES = {"a": "array", "A": "map", "i": "integer"}


class ShellCall:
    """One command in a bash session."""

    def __init__(self, session: ShellSession, execution: Execution, stdin: bytes | bytearray | None) -> None:
        self._session = session
        self._execution = execution
        self._stdin = stdin

    async def run(self) -> SessionResult:
        """Raises Busy, GuestFailed, StoreUnavailable."""
        self._session.began(self._execution)
        try:
            return _result(await self._execution.run(self._stdin))
        finally:
            self._session.ended(self._execution)

    def stop(self, outcome: Outcome, message: str) -> None:
        self._execution.stop(outcome, message)

    def tap(self) -> Tap:
        return self._execution.tap()

    def untap(self, tap: Tap) -> None:
        self._execution.untap(tap)


class ShellSession:
    """One session in bash. A command that is killed leaves the state from before it."""

    language = "bash"

    def __init__(self, executions: Executions, id: str, command: Command) -> None:
        self.id = id
        self._executions = executions
        self.started_at = time.time()
        self._wanted = command
        self._shell = ""
        self._calls = 0
        self._running: list[Execution] = []
        self._given: set[str] = set()
        """Names of the variables of a fresh shell."""
        self._changing = asyncio.Lock()
        """Held while its shell is started or ended."""
        self.closed = False

    @property
    def info(self) -> SessionInfo:
        return SessionInfo(
            session_id=self.id,
            environment_id=self._executions.runtime.environment_id,
            language=self.language,
            state="busy" if self._running else "idle",
            started_at=self.started_at,
            calls=self._calls,
        )

    async def start(self, caller: Caller) -> None:
        """Raises InvalidRequest (no bash in this image, a directory that is not there), Busy, GuestFailed."""
        async with self._changing:
            await self._start(caller)

    async def _start(self, caller: Caller) -> None:
        self._shell, self._calls, self.started_at = f"session-{new_id()}", 0, time.time()
        first = replace(self._wanted, argv=None, text='test -n "$BASH_VERSION"', shell=self._shell)
        try:
            result = await self._run(caller, first)
            if result.ok:
                self._given = {variable.name for variable in await self._list(caller)}
        except BaseException:
            self._executions.runtime.spawn(self._end(caller))  # or nothing would end the shell
            raise
        if not result.ok:
            await self._end(caller)
            if result.stderr:
                raise InvalidRequest(f"the session cannot begin: {result.stderr.strip()}")
            raise InvalidRequest("there is no bash in this environment", hint="use an image that has it")

    def prepare(
        self, caller: Caller, code: SessionCode, on_disk: Callable[[], Awaitable[None]] | None = None
    ) -> ShellCall:
        """A call to `run()`, with an intent of its own after the session's. Raises Busy, InvalidRequest, Conflict."""
        if self._changing.locked() or self.closed:  # nothing may run in the old shell
            raise Conflict(f"session {self.id!r} is being restarted or closed", hint="try again in a moment")
        if code.memory is not None:
            raise InvalidRequest("a call in bash has no limit of memory", hint="limit the environment's")
        command = Command(
            text=code.text,
            shell=self._shell,
            stdin=code.stdin is not None,
            timeout=code.timeout,
            output_limit=OUTPUT_LIMIT,
        )
        self._calls += 1
        return ShellCall(self, self._executions.prepare(caller, command), code.stdin)

    async def variables(self, caller: Caller) -> list[Variable]:
        """Variables that its commands have defined. Raises Busy, Conflict (it does not answer)."""
        found = [each for each in await self._list(caller) if each.name not in self._given]
        return found[:VARIABLES_MAX]

    def interrupt(self) -> None:
        if self._running:
            self._running[0].signal(signal.SIGINT)

    async def restart(self, caller: Caller) -> None:
        """Raises SessionNotFound (it was closed) and what `start()` does."""
        async with self._changing:
            if self.closed:
                raise SessionNotFound(f"session {self.id!r} was closed", hint="open it again")
            await self._end(caller)
            await self._start(caller)

    async def close(self, caller: Caller) -> None:
        """End its shell. Background processes go on, as those of every shell do."""
        self.closed = True
        async with self._changing:
            await self._end(caller)

    async def _end(self, caller: Caller) -> None:
        for execution in tuple(self._running):
            execution.stop(Outcome.CANCELED, "the session was closed")
        await asyncio.gather(*(execution.over() for execution in tuple(self._running)))
        await self._run(caller, Command(text=_END, shell=self._shell, timeout=END_SECONDS))

    def began(self, execution: Execution) -> None:
        self._running.append(execution)

    def ended(self, execution: Execution) -> None:
        self._running.remove(execution)

    async def _run(self, caller: Caller, command: Command) -> ExecutionResult:
        return await self._executions.prepare(caller, command).run()

    async def _list(self, caller: Caller) -> list[Variable]:
        result = await self._run(caller, Command(text=_LIST, shell=self._shell, timeout=LIST_SECONDS))
        if not result.ok:
            raise Conflict(f"the session did not list its variables: {result.message or result.stderr}")
        words = result.stdout.split("\0")
        rows = zip(words[0::4], words[1::4], words[2::4], words[3::4], strict=False)
        return [
            Variable(
                name, next((_TYPES[each] for each in kind if each in _TYPES), "string"), text, _number(size)
            )
            for name, kind, text, size in rows
            if not name.startswith("_")
        ]


def _result(result: ExecutionResult) -> SessionResult:
    return SessionResult(**{field.name: getattr(result, field.name) for field in fields(result)})


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 18 else 0
