"""Operations of sessions: interpreters that keep their state from one call to the next."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Annotated

from pydantic import WithJsonSchema
from starlette.responses import Response

from skerry.daemon.auth import refusal
from skerry.daemon.http import schemas
from skerry.daemon.http.answers import Stream, Watch, begun, reply
from skerry.daemon.http.environments import OPERATIONS as OF_ENVIRONMENTS
from skerry.daemon.http.environments import Size
from skerry.daemon.http.events import COMMENT, event, next_of
from skerry.daemon.http.executions import RESULT_EXAMPLE, result_reply
from skerry.daemon.http.operations import EVENTS, IN_ENVIRONMENT, INSTALLING, Call, Operation
from skerry.daemon.http.requests import Body, Content, Encoding, Seconds, Text, Texts, TextsByName, decode
from skerry.errors import Busy, FileConflict, LanguageNotFound, LimitReached, SessionNotFound
from skerry.manager.environments.manager import Use
from skerry.manager.executions.output import STREAM_NAMES
from skerry.manager.sessions.calls import SessionCode
from skerry.manager.sessions.interpreter import Interpreter
from skerry.manager.sessions.registry import LANGUAGES
from skerry.models import Outcome, SessionResult, encode_bytes
from skerry.policy import parse_size

Language = Annotated[Text, WithJsonSchema({"enum": list(LANGUAGES)})]


class OpenSession(Body):
    language: Language
    session_id: Text | None = None
    """An id of the caller's choice: a session that has it already is the one that is meant."""
    cwd: Text | None = None
    """Relative to the workspace."""
    env: TextsByName | None = None
    secrets: TextsByName | None = None
    """Variables of which only the names are ever written down. Other code in the environment can read them."""
    packages: Texts | None = None
    """Installed in the workspace before this answers: `pandas==2.*`, `lodash@^4`. Needs the verb `create` as well."""


class RunCode(Body):
    contents = ("code", "stdin")
    code: Content
    timeout: Seconds | None = None
    """After this many seconds it is interrupted, and killed with the interpreter if that does not help."""
    stdin: Content | None = None
    """What `input()` reads."""
    stdin_encoding: Encoding = "utf-8"
    memory: Size | None = None
    """Bytes (`512m` and the like) that the interpreter may have meanwhile."""

    async def to_code(self) -> SessionCode:
        return SessionCode(
            text=str(self.code),
            stdin=None if self.stdin is None else await decode(self.stdin, self.stdin_encoding, "stdin"),
            timeout=self.timeout,
            memory=None if self.memory is None else parse_size(self.memory, "memory"),
        )


async def open_session(call: Call, environment_id: str, body: OpenSession) -> Response:
    secrets, env = body.secrets or {}, body.env or {}
    told = {
        "session_id": body.session_id,
        "language": body.language,
        "cwd": body.cwd,
        "env": sorted(env) or None,
        "secrets": sorted(secrets) or None,
        "packages": body.packages or None,
    }
    async with call.using(environment_id, "session.open", **told) as use:
        if body.packages:
            if "create" not in call.caller.verbs:  # an environment, in which they are installed
                raise refusal(call.caller, "create")
            await call.engine.code.bring(call.caller, environment_id, body.language, body.packages)
        sessions = use.sessions
        session = await sessions.open(
            call.caller,
            body.language,
            body.session_id or "",
            cwd=body.cwd,
            env=env,
            secrets=secrets,
        )
        if body.packages and isinstance(session, Interpreter):  # it may have been open before
            await session.look_for_packages()
        use.told["session_id"] = session.id
    return reply(session.info.to_dict(), 201)


async def list_sessions(call: Call, environment_id: str) -> Response:
    sessions = await call.sessions(environment_id)
    return reply({"sessions": [session.info.to_dict() for session in sessions.list()]})


async def get_session(call: Call, environment_id: str, session_id: str) -> Response:
    sessions = await call.sessions(environment_id)
    return reply(sessions.find(session_id).info.to_dict())


async def run_code(call: Call, environment_id: str, session_id: str, body: RunCode) -> Response:
    code = await body.to_code()
    async with call.using_early(environment_id, "session.run", session_id=session_id, **code.told) as use:
        session = use.sessions.find(session_id)
        running = session.prepare(call.caller, code, use.on_disk)
        with Watch(call.receive, lambda: running.stop(Outcome.CANCELED, "the client went away")):
            result = await running.run()
        _tell(use, result)
    return await result_reply(call, result)


async def stream_code(call: Call, environment_id: str, session_id: str, body: RunCode) -> Response:
    return Stream(await begun(_events(call, environment_id, session_id, await body.to_code())), EVENTS)


async def _events(
    call: Call, environment_id: str, session_id: str, code: SessionCode
) -> AsyncGenerator[bytes, None]:
    async with call.using_early(environment_id, "session.run", session_id=session_id, **code.told) as use:
        session = use.sessions.find(session_id)
        running = session.prepare(call.caller, code, use.on_disk)
        tap = running.tap()
        task = asyncio.create_task(running.run())
        try:
            yield COMMENT
            while True:
                try:
                    entry = await next_of(tap)
                except StopAsyncIteration:
                    break
                if entry is None:
                    yield COMMENT
                    continue
                data, encoding = encode_bytes(entry.data)
                shown = {"t": entry.at, "stream": STREAM_NAMES[entry.stream], "data": data}
                yield event("output", {**shown, "encoding": encoding})
            result = await task
            _tell(use, result)
            summary = result.to_dict()
            for name in ("stdout", "stderr", "stdout_encoding", "stderr_encoding"):
                del summary[name]
            yield event("ran", {"result": summary})
        finally:
            running.untap(tap)
            running.stop(Outcome.CANCELED, "the client went away")
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait((task,))


def _tell(use: Use, result: SessionResult) -> None:
    use.told.update(
        execution_id=result.execution_id,
        ended=str(result.outcome),
        exit_code=result.exit_code,
        duration_seconds=result.duration_seconds,
        stdout_size=result.stdout_size,
        stderr_size=result.stderr_size,
    )


async def interrupt_session(call: Call, environment_id: str, session_id: str) -> Response:
    async with call.using(environment_id, "session.interrupt", session_id=session_id) as use:
        use.sessions.find(session_id).interrupt()
    return reply({})


async def restart_session(call: Call, environment_id: str, session_id: str) -> Response:
    async with call.using(environment_id, "session.restart", session_id=session_id) as use:
        session = use.sessions.find(session_id)
        await session.restart(call.caller)
    return reply(session.info.to_dict())


async def list_variables(call: Call, environment_id: str, session_id: str) -> Response:
    async with call.using(environment_id, "session.variables", session_id=session_id) as use:
        session = use.sessions.find(session_id)
        found = await session.variables(call.caller)  # their descriptions are made by the user's code
    return reply({"variables": [variable.to_dict() for variable in found]})


async def close_session(call: Call, environment_id: str, session_id: str) -> Response:
    async with call.using(environment_id, "session.close", session_id=session_id) as use:
        await use.sessions.close(call.caller, session_id)
    return reply({})


_CREATING = next(each for each in OF_ENVIRONMENTS if each.name == "create_environment")
EXAMPLE = {
    "session_id": "analysis",
    "environment_id": "k3v9x1m2p7qa",
    "language": "python",
    "state": "idle",
    "started_at": 1767225601.5,
    "calls": 0,
    "message": "",
    "profile": "",
}
VALUE_EXAMPLE = {"kind": "value", "data": {"text/plain": "42"}, "truncated": []}
RAN_EXAMPLE = {
    **RESULT_EXAMPLE,
    "values": [VALUE_EXAMPLE],
    "raised": None,
    "crashed": False,
}
CODE_EXAMPLE = {"code": "x = 6 * 7\nprint('hello')\nx", "timeout": 30}
SESSION = "/environments/{environment_id}/sessions/{session_id}"
IN_SESSION = (*IN_ENVIRONMENT, SessionNotFound)
RESULTS = (
    "Code that raises, hangs or takes the interpreter down is a result (200), never an error. Calls of one session "
    "wait for each other. If the connection breaks, the code is interrupted."
)

OPERATIONS = (
    Operation(
        name="open_session",
        method="POST",
        path="/environments/{environment_id}/sessions",
        tag="sessions",
        verb="execute",
        summary="Open a session",
        text="Answers when the interpreter is ready. Returns the existing session if the id is in use.",
        handler=open_session,
        body=OpenSession,
        body_example={"language": "python", "session_id": "analysis"},
        status=201,
        answer=schemas.Session,
        answer_example=EXAMPLE,
        errors=(*_CREATING.errors, *IN_ENVIRONMENT, LanguageNotFound, FileConflict, Busy, *INSTALLING),
    ),
    Operation(
        name="list_sessions",
        method="GET",
        path="/environments/{environment_id}/sessions",
        tag="sessions",
        verb="read",
        summary="List the sessions of an environment",
        handler=list_sessions,
        answer=schemas.Sessions,
        answer_example={"sessions": [EXAMPLE]},
        errors=IN_ENVIRONMENT,
    ),
    Operation(
        name="get_session",
        method="GET",
        path=SESSION,
        tag="sessions",
        verb="read",
        summary="Inspect a session",
        handler=get_session,
        answer=schemas.Session,
        answer_example=EXAMPLE,
        errors=IN_SESSION,
    ),
    Operation(
        name="run_code",
        method="POST",
        path=f"{SESSION}/run",
        tag="sessions",
        verb="execute",
        summary="Run code in a session and wait for its result",
        text=RESULTS,
        handler=run_code,
        body=RunCode,
        body_example=CODE_EXAMPLE,
        answer=schemas.SessionResult,
        answer_example=RAN_EXAMPLE,
        errors=(*IN_SESSION, Busy),
    ),
    Operation(
        name="stream_code",
        method="POST",
        path=f"{SESSION}/stream",
        tag="sessions",
        verb="execute",
        summary="Run code in a session and follow its output",
        text="Server-sent events: `output` as it comes, at last `ran` (`result`, without the output). "
        "`run` is the same in one answer, with the first MiB of each stream. "
        f"{RESULTS} Output that is not read stops the code.",
        handler=stream_code,
        body=RunCode,
        body_example=CODE_EXAMPLE,
        answer=schemas.SessionEvent,
        media=(EVENTS,),
        answer_example={"t": 1767225601.75, "stream": "stdout", "data": "hello\n", "encoding": "utf-8"},
        errors=(*IN_SESSION, Busy),
    ),
    Operation(
        name="interrupt_session",
        method="POST",
        path=f"{SESSION}/interrupt",
        tag="sessions",
        verb="execute",
        summary="Interrupt the running code; the state stays",
        handler=interrupt_session,
        answer=schemas.Nothing,
        answer_example={},
        errors=IN_SESSION,
    ),
    Operation(
        name="restart_session",
        method="POST",
        path=f"{SESSION}/restart",
        tag="sessions",
        verb="execute",
        summary="Restart a session without its state",
        text="Also for one that has crashed. What it runs is killed. One that has ended with its daemon is opened "
        "again instead, with its id.",
        handler=restart_session,
        answer=schemas.Session,
        answer_example=EXAMPLE,
        errors=(*IN_SESSION, LimitReached),
    ),
    Operation(
        name="list_variables",
        method="GET",
        path=f"{SESSION}/variables",
        tag="sessions",
        verb="execute",
        summary="List the variables of a session",
        handler=list_variables,
        answer=schemas.Variables,
        answer_example={"variables": [{"name": "x", "type": "int", "text": "42", "size": 28}]},
        errors=(*IN_SESSION, Busy),
    ),
    Operation(
        name="close_session",
        method="DELETE",
        path=SESSION,
        tag="sessions",
        verb="execute",
        summary="Close a session and kill its processes",
        handler=close_session,
        answer=schemas.Nothing,
        answer_example={},
        errors=IN_SESSION,
    ),
)
