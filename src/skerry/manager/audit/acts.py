"""Rows of the audit: an intent before each action, a result after it, denials, and lifecycle events.

The rows of one request share its id. They hold names, sizes and hashes, never values of variables, input or output.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import structlog

from skerry.errors import SkerryError, StoreUnavailable, StoreUnusable
from skerry.manager.caller import Caller
from skerry.store.audit import Entry

if TYPE_CHECKING:
    from skerry.models import Usage
    from skerry.store import Written

TEXT_MAX = 8192
"""Characters of one text; a longer one is replaced by its beginning, size and hash."""
CANCELED = "canceled"
DENIALS_A_SECOND = 10
"""Rows for each token; one for all callers without a token together."""
DENIERS_MAX = 1000
T = TypeVar("T")

log = structlog.get_logger(component="audit")


class AuditLog(Protocol):
    """Where rows of the audit are appended. Both may raise StoreUnavailable."""

    def audit(self, tenant: str, entry: Entry, *, later: bool = False) -> asyncio.Future[None]:
        """`later`: nobody waits for it."""
        ...

    def audit_early(self, tenant: str, entry: Entry) -> Written[None]: ...


@dataclass(frozen=True, slots=True)
class Subject:
    """The environment of an action."""

    environment_id: str
    backend: str
    isolation: str
    image_digest: str


class Digest:
    """Size and hash of a stream of bytes, for the audit."""

    __slots__ = ("_hash", "size")

    def __init__(self) -> None:
        self.size = 0
        self._hash = hashlib.sha256()

    def update(self, data: bytes | bytearray) -> None:
        self.size += len(data)
        self._hash.update(data)

    def told(self) -> dict[str, Any]:
        return {"size": self.size, "sha256": self._hash.hexdigest()}


class Act:
    """One action of a caller: `begin()`, do it, `end()`; or `async with`.

    If nobody can see the effect before we answer, the action need not wait for the disk: `begin_early()`, do it,
    `on_disk()`, answer. A power cut may lose such an intent, but then nobody saw the effect, and the environment is
    gone as well.
    """

    __slots__ = ("_action", "_begun", "_detail", "_log", "_subject", "_synced", "caller")

    def __init__(
        self,
        log: AuditLog,
        caller: Caller,
        action: str,
        subject: Subject | None,
        detail: dict[str, Any],
        *,
        begun: bool = False,
    ) -> None:
        self.caller = caller
        self._log = log
        self._action = action
        self._subject = subject
        self._detail = detail
        self._begun = begun
        self._synced: asyncio.Future[None] | None = None

    async def begin(self) -> None:
        """Returns when the intent is on disk. Raises StoreUnavailable: the action must not be done."""
        with self._beginning():
            await self._log.audit(self.caller.tenant, self._intent())

    async def begin_early(self) -> None:
        """Returns when the intent is committed; nobody may see the effect before `on_disk()` returns."""
        await self.begin_with(partial(self._log.audit_early, self.caller.tenant))

    async def begin_with(self, write: Callable[[Entry], Written[T]]) -> T:
        """As `begin_early()`, in one transaction with something else."""
        with self._beginning():
            written = write(self._intent())
            self._synced = written.synced
            return await written.committed

    async def on_disk(self) -> None:
        """Returns when the intent is on disk. Raises StoreUnavailable: nobody may ever see the effect."""
        if self._synced is not None and not self._synced.done():
            await asyncio.wait((self._synced,))
        if self._synced is not None and (error := self._synced.exception()) is not None:
            raise self._unwritten(error, "what was done is thrown away, because the audit of it may be lost")

    @contextlib.contextmanager
    def _beginning(self) -> Iterator[None]:
        try:
            yield
        except (StoreUnavailable, StoreUnusable) as error:
            raise self._unwritten(error, "nothing was done, because the audit cannot be written") from error
        except asyncio.CancelledError:
            self._begun = True  # it is written all the same
            raise
        self._begun = True

    def _intent(self) -> Entry:
        return self.entry("intent", detail=self._detail)

    def _unwritten(self, error: BaseException, what: str) -> StoreUnavailable:
        log.error("refused: the audit cannot be written", action=self._action, error=str(error))
        if not isinstance(error, SkerryError):
            return StoreUnavailable(what)
        # Details of the database are for the operator alone.
        reason, hint = ("", "try again") if self.caller.token else (f": {error.message}", error.hint)
        return StoreUnavailable(f"{what}{reason}", hint=hint, detail=error.detail)

    def end(self, outcome: str, usage: Usage | None = None, **detail: Any) -> None:
        """Write the result, if there is an intent. Returns at once."""
        if self._begun:
            self._begun = False
            row = self.entry("result", outcome, usage, detail)
            note(self._log.audit(self.caller.tenant, row, later=True))

    def failed(self, error: BaseException) -> None:
        self.end(error.code if isinstance(error, SkerryError) else CANCELED)

    async def __aenter__(self) -> Self:
        try:
            await self.begin()
        except asyncio.CancelledError as error:
            self.failed(error)
            raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.end("completed")
        else:
            self.failed(error)

    def entry(
        self,
        kind: str,
        outcome: str = "",
        usage: Usage | None = None,
        detail: dict[str, Any] | None = None,
    ) -> Entry:
        return entry(self.caller, self._action, kind, outcome, usage, detail, self._subject)


def entry(
    caller: Caller,
    action: str,
    kind: str,
    outcome: str = "",
    usage: Usage | None = None,
    detail: dict[str, Any] | None = None,
    subject: Subject | None = None,
) -> Entry:
    """One row of the audit, as of now."""
    subject = subject or Subject("", "", "", "")
    return Entry(
        at=time.time(),
        kind=kind,
        action=action,
        request_id=caller.request_id,
        trace_id=caller.trace_id,
        token=caller.token,
        peer=caller.peer,
        environment_id=subject.environment_id,
        backend=subject.backend,
        isolation=subject.isolation,
        image_digest=subject.image_digest,
        detail={} if detail is None else bounded(detail),
        outcome=outcome,
        usage=None if usage is None else usage.to_dict(),
    )


def operator_entry(caller: Caller, action: str, detail: dict[str, Any]) -> tuple[str, tuple[Entry]]:
    """The tenant and the row of an operator's action, to be appended in the transaction that does it."""
    caller = caller.itself
    return caller.tenant, (entry(caller, action, "lifecycle", "completed", detail=detail),)


class Denials:
    """Rate-limited rows for requests that were refused."""

    def __init__(self, log: AuditLog) -> None:
        self._log = log
        self._counts: dict[str, tuple[float, int]] = {}
        """By token: when its current second began, and how many denials since."""

    def add(self, caller: Caller, action: str, error: SkerryError, **detail: Any) -> None:
        """Record a denial. Rate-limited, so that denials cannot fill the disk."""
        most = DENIALS_A_SECOND if caller.token else 1
        since, count = self._counts.pop(caller.token, (0.0, 0))
        now = time.monotonic()
        if now - since < 1.0:
            self._counts[caller.token] = since, count + 1
            if count >= most:
                return
            dropped = 0
        else:
            self._counts[caller.token] = now, 1
            dropped = max(0, count - most)
        if len(self._counts) > DENIERS_MAX:
            del self._counts[next(iter(self._counts))]
        log.warning("refused", action=action, code=error.code, who=caller.who, request=caller.request_id)
        detail["not_told_before"] = dropped or None
        note(self._log.audit(caller.tenant, entry(caller, action, "denial", error.code, detail=detail)))


def bounded(detail: dict[str, Any]) -> dict[str, Any]:
    return {name: _bounded(value) for name, value in detail.items() if value is not None}


def _bounded(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= TEXT_MAX else _cut(value)
    if isinstance(value, list):
        # An argv is one text as far as its size is concerned.
        if sum(map(len, value)) + len(value) <= TEXT_MAX:
            return value
        return _cut("\0".join(value))
    return value


def _cut(text: str) -> dict[str, Any]:
    data = text.encode("utf-8", "surrogatepass")
    return {"begins": text[:TEXT_MAX], "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def note(written: asyncio.Future[Any]) -> None:
    """Log the failure of a write that nobody waits for."""
    written.add_done_callback(_log_failure)


def _log_failure(written: asyncio.Future[Any]) -> None:
    if not written.cancelled() and (error := written.exception()) is not None:
        log.error("not written down", error=str(error))
