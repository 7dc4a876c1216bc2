"""The sessions of one environment, by id."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path

from skerry.errors import Conflict, InvalidRequest, LimitReached, SessionNotFound, stopping
from skerry.ids import new_id
from skerry.manager.caller import Caller
from skerry.manager.executions.commands import Command
from skerry.manager.executions.registry import Executions
from skerry.manager.sessions.interpreter import Interpreter
from skerry.manager.sessions.shell import ShellSession
from skerry.runners import RUNNERS

SESSIONS_MAX = 16
BASH = ShellSession.language
LANGUAGES = (*RUNNERS, BASH)
_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")

Session = Interpreter | ShellSession


class Sessions:
    """All sessions of one environment, by id."""

    def __init__(self, executions: Executions) -> None:
        self._executions = executions
        self._runtime = executions.runtime
        self._all: dict[str, Session] = {}
        self._starting = asyncio.Lock()
        self.ended_with_daemon = False
        """The environment is older than this daemon: sessions of the earlier daemon are gone."""
        self.bringing = asyncio.Lock()
        self.brought: dict[str, tuple[tuple[str, ...], Path]] = {}
        """By installer: the packages in the workspace and their layer. Guarded by `bringing`."""

    async def open(
        self,
        caller: Caller,
        language: str,
        session_id: str = "",
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
    ) -> Session:
        """A new session, or the existing one with this id, unchanged.

        Raises InvalidRequest, Conflict (the id is taken by another language), LimitReached, GuestFailed.
        """
        if language not in LANGUAGES:
            raise InvalidRequest(
                f"there are no sessions in {language!r}", hint=f"known: {', '.join(LANGUAGES)}"
            )
        if session_id and not _ID.fullmatch(session_id):
            raise InvalidRequest(
                f"{session_id!r} is not an id for a session", hint="up to 64 of A-Z a-z 0-9 _ . -"
            )
        command = Command(argv=["interpreter"], cwd=cwd, env=dict(env or {}), secrets=dict(secrets or {}))
        async with self._starting:
            if (found := self._all.get(session_id)) is not None and found.closed:
                await self.close(caller, session_id)  # returns when nothing of it runs
                found = None
            if found is not None:
                if found.language != language:
                    raise Conflict(f"session {session_id!r} already exists, with language {found.language}")
                return found
            if len(self._all) >= SESSIONS_MAX:
                raise LimitReached(
                    f"{SESSIONS_MAX} sessions are open in this environment",
                    hint="close one that is not needed",
                )
            id = session_id or new_id()
            session: Session
            if language == BASH:
                session = ShellSession(self._executions, id, command)
            else:
                session = Interpreter(self._runtime, id, language, command)
            await session.start(caller)
            self._all[session.id] = session
            return session

    def find(self, session_id: str) -> Session:
        """Raises SessionNotFound."""
        found = self._all.get(session_id)
        if found is None and self.ended_with_daemon:
            raise SessionNotFound(
                f"no session {session_id!r} in environment {self._runtime.environment_id}: "
                "the daemon was restarted, and sessions end with it",
                hint="open it again: its id can be the same, its state is gone",
            )
        if found is None:
            raise SessionNotFound(
                f"no session {session_id!r} in environment {self._runtime.environment_id}",
                hint="sessions end when they are closed, and with the daemon that started them",
            )
        return found

    def let_go(self) -> None:
        """Fail current calls: the daemon is stopping."""
        for session in self._all.values():
            if isinstance(session, Interpreter) and session.current is not None:
                session.current.fail(stopping())

    def list(self) -> list[Session]:
        return list(self._all.values())

    async def close(self, caller: Caller, session_id: str) -> None:
        """Raises SessionNotFound."""
        session = self.find(session_id)
        await session.close(caller)
        if self._all.get(session_id) is session:  # not a new one, opened meanwhile
            del self._all[session_id]
