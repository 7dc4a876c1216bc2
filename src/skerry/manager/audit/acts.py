"""What the audit keeps: an intent before each thing that is done, a result after it, and what happens by itself.

The rows of one request have its id in common. No value of a variable, no input and no output is in them, but
their names, sizes and hashes.
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
"""Characters of one text; of a longer one, its beginning, its size and its hash are kept."""
CANCELED = "canceled"
DENIALS_A_SECOND = 10
"""Rows in the audit for each token; of those without one, all together, one."""
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
    """The environment that something is done in."""

    environment_id: str
    backend: str
    isolation: str
    image_digest: str


class Digest:
    """The size and the hash of bytes that went by: what is told of them."""

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
    """One thing that a caller does: `begin()`, do it, `end()`; or all in an `async with`.

    Where nobody outside can see what is done until we tell, it need not wait for the disk: `begin_early()`, do it,
    `on_disk()`, tell. What a power cut takes from the audit then was not seen by anybody, and the environment that it
    was done in is gone as well.
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
        """Write the intent down, to disk. Raises StoreUnavailable: then nothing may be done."""
        with self._beginning():
            await self._log.audit(self.caller.tenant, self._intent())

    async def begin_early(self) -> None:
        """The same, but without waiting for the disk: nobody may see what is done before `on_disk()` returns."""
        await self.begin_with(partial(self._log.audit_early, self.caller.tenant))

    async def begin_with(self, write: Callable[[Entry], Written[T]]) -> T:
        """As `begin_early()`, together with something else that must be written down."""
        with self._beginning():
            written = write(self._intent())
            self._synced = written.synced
            return await written.committed

    async def on_disk(self) -> None:
        """Returns when what was begun may be seen. Raises StoreUnavailable: then nobody ever may."""
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
        log.error("refused: not written down", action=self._action, error=str(error))
        if not isinstance(error, SkerryError):
            return StoreUnavailable(what)
        # What is wrong with the database is the operator's business.
        reason, hint = ("", "try again") if self.caller.token else (f": {error.message}", error.hint)
        return StoreUnavailable(f"{what}{reason}", hint=hint, detail=error.detail)

    def end(self, outcome: str, usage: Usage | None = None, **detail: Any) -> None:
        """Write the result down, unless there is no intent. Nobody waits for it."""
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
    """What callers were refused."""

    def __init__(self, log: AuditLog) -> None:
        self._log = log
        self._told: dict[str, tuple[float, int]] = {}
        """By token: when its last second began, and how many there were since."""

    def tell(self, caller: Caller, action: str, error: SkerryError, **detail: Any) -> None:
        """Write down that a caller was refused something; so often a second, so that nobody fills the disk with it."""
        most = DENIALS_A_SECOND if caller.token else 1
        since, count = self._told.pop(caller.token, (0.0, 0))
        now = time.monotonic()
        if now - since < 1.0:
            self._told[caller.token] = since, count + 1
            if count >= most:
                return
            untold = 0
        else:
            self._told[caller.token] = now, 1
            untold = max(0, count - most)
        if len(self._told) > DENIERS_MAX:
            del self._told[next(iter(self._told))]
        log.warning("refused", action=action, code=error.code, who=caller.who, request=caller.request_id)
        detail["not_told_before"] = untold or None
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
    """What nobody waits for may fail, and is told to the log then."""
    written.add_done_callback(_log_failure)


def _log_failure(written: asyncio.Future[Any]) -> None:
    if not written.cancelled() and (error := written.exception()) is not None:
        log.error("not written down", error=str(error))
