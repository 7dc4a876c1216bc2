"""Records of environments and executions in the store, for the next daemon.

Expiry is stored as time since boot: jumps of the wall clock do not change it, and no environment survives a boot.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from skerry.errors import StoreUnavailable
from skerry.manager.audit.acts import AuditLog
from skerry.manager.clock import boot_id, since_boot
from skerry.manager.environments.environment import Environment
from skerry.manager.executions.execution import Execution
from skerry.manager.executions.registry import ExecutionRecords
from skerry.models import Outcome, State
from skerry.policy import Limits, Policy
from skerry.store import Connection, Store, Written, audit, environments, executions, quotas
from skerry.store.audit import AuditRow, Entry
from skerry.store.environments import EnvironmentRecord
from skerry.store.executions import ExecutionRecord

T = TypeVar("T")

NOT_STARTED = "it could not be started"
REMEMBERED = 1000
PURGE_SECONDS = 3600.0
"""Minimum interval between deletions of old rows, which go along with the end of an environment."""
_LIVE = (State.CREATING, State.RUNNING, State.DELETING)


class Records(AuditLog, ExecutionRecords, Protocol):
    """Writes may raise StoreUnavailable. They take effect in the order of the calls, awaited or not."""

    def created(self, environment: Environment, intent: Entry) -> Written[str | None]:
        """Returns the id of the environment that an earlier request with the same key has made, or None.

        Raises Conflict when another one of its tenant has the name, or when that request asked for something else;
        QuotaExceeded. Then the intent is not written down either.
        """
        ...

    def changed(
        self, environment: Environment, state: State, entry: Entry | None = None
    ) -> asyncio.Future[None]:
        """Record its new state, and the row for the audit."""
        ...

    def kept(self, sizes: dict[str, int], kind: str, *, within: str | None = None) -> asyncio.Future[None]:
        """Replace the bytes of this kind that this host stores for tenants, beside workspaces.

        Raises QuotaExceeded if the tenant `within` would be above its quota: then nothing is written.
        """
        ...

    async def crowded(self, tenants: Sequence[str]) -> list[str]:
        """Those that use more disk than their quota."""
        ...

    async def least_isolation(self, tenant: str) -> str | None:
        """Of its new environments; None if its quota does not say."""
        ...

    async def live(self) -> list[EnvironmentRecord]: ...

    async def ended(self) -> list[EnvironmentRecord]:
        """Environments that ended within the last day, oldest first."""
        ...

    async def executions(self, environment_id: str) -> list[ExecutionRecord]:
        """Executions that are still running, as far as is known."""
        ...

    async def unfinished(self, environment: Environment) -> list[AuditRow]:
        """Intents of an earlier daemon in it that have no result in the audit."""
        ...


def policy_of(record: EnvironmentRecord) -> Policy:
    raw = {**record.policy, "limits": Limits(**record.policy["limits"])}
    return Policy(**{**raw, "allow": tuple(raw.get("allow", ()))})


def _instance(environment: Environment) -> dict[str, Any]:
    """State that the next daemon resumes with."""
    return {
        "expires": since_boot() + environment.lease.remaining,
        "sent": environment.traffic.sent,
        "received": environment.traffic.received,
        "survives": environment.survives,
        "grace": environment.grace_used,
    }


def _append(tx: Connection, tenant: str, entry: Entry) -> None:
    audit.append(tx, tenant, (entry,))


def _purge(tx: Connection, now: float) -> None:
    """Delete what ended more than a day ago."""
    environments.purge(tx, now=now)
    executions.purge(tx, now=now)


class WriteObserver(Protocol):
    """Is told of every write as it begins, in the event loop's thread."""

    def wrote(
        self,
        written: asyncio.Future[Any],
        tenant: str | None,
        entry: Entry | None = None,
        *,
        rows: int = 1,
        later: bool = False,
    ) -> None:
        """`written` resolves when the write is on disk; `entry` is the row of the audit in it, if any; `rows` are
        charged to the tenant. With `later` nobody waits for it.
        """
        ...


class StoredRecords:
    """Records in a store that several daemons may share; each row names its host."""

    def __init__(self, store: Store, host: str, observer: WriteObserver | None = None) -> None:
        self._store = store
        self._host = host
        self._observer = observer
        self._boot = boot_id()
        self._purge_at = time.monotonic() + PURGE_SECONDS

    def created(self, environment: Environment, intent: Entry) -> Written[str | None]:
        record = EnvironmentRecord(
            id=environment.id,
            tenant=environment.tenant,
            host=self._host,
            backend=environment.backend.name,
            name=environment.name,
            # Before it does. Should it never, nobody was told of it, and its backend knows.
            state=State.RUNNING,
            image=environment.image.name,
            image_digest=environment.image.digest,
            isolation=environment.isolation,
            policy=environment.policy.to_dict(),
            variables=environment.variables,
            cpus=environment.policy.limits.cpus,
            memory=environment.policy.limits.memory,
            disk=0 if environment.program else environment.backend.disk(environment.policy),
            lifetime=environment.lease.lifetime,
            idle=environment.idle,
            created_at=environment.created_at,
            active_at=environment.created_at,
            expires_at=environment.expires_at,
            boot_id=self._boot,
            instance=_instance(environment),
            created_by=environment.created_by,
        )
        key = environment.key

        def work(tx: Connection) -> str | None:
            if key is not None:
                first = environments.claim_key(
                    tx,
                    tenant=record.tenant,
                    key=key.text,
                    body_hash=key.request,
                    environment_id=record.id,
                    now=record.created_at,
                )
                if first is not None:
                    return first
            quotas.check(
                tx,
                record.tenant,
                cpus=record.cpus,
                memory=record.memory,
                disk=record.disk,
                isolation=record.isolation,
            )
            environments.insert(tx, record)
            audit.append(tx, record.tenant, (intent,))
            return None

        written = self._store.write_early(work)
        self._observe(written.synced, record.tenant, intent, rows=2)
        return written

    def changed(
        self, environment: Environment, state: State, entry: Entry | None = None
    ) -> asyncio.Future[None]:
        now = time.time()
        values: dict[str, Any] = {
            "lifetime": environment.lease.lifetime,
            "active_at": now,
            "expires_at": environment.expires_at,
            "policy": environment.policy.to_dict(),
            "instance": _instance(environment),
        }
        ended = state is State.ENDED
        if state is not State.RUNNING:
            values |= {"ended_reason": environment.reason, "outcome": str(environment.outcome)}
        if ended:
            values |= {
                "ended_at": now,
                "usage": environment.used.to_dict(),
                **environments.without_means(values),
            }
        id_, tenant = environment.id, environment.tenant
        failed = environment.reason == NOT_STARTED
        # Rows come with environments, so a store in which none ends does not grow either: no timer is needed.
        purge = ended and time.monotonic() >= self._purge_at
        if purge:
            self._purge_at = time.monotonic() + PURGE_SECONDS

        def work(tx: Connection) -> None:
            done = environments.change(tx, id_, host=self._host, states=_LIVE, to=str(state), **values)
            if not done:
                return  # it is further on its way than this, or has ended
            if ended:
                executions.mark_lost(tx, [id_], now=now)
            if ended and failed:
                environments.release_key(tx, id_)
            if entry is not None:
                audit.append(tx, tenant, (entry,))
            if purge:
                _purge(tx, now)

        return self._observe(self._store.write(work), tenant, entry)

    def audit(self, tenant: str, entry: Entry, *, later: bool = False) -> asyncio.Future[None]:
        written = self._store.write(lambda tx: _append(tx, tenant, entry), later=later)
        return self._observe(written, tenant, entry, later=later)

    def audit_early(self, tenant: str, entry: Entry) -> Written[None]:
        written = self._store.write_early(lambda tx: _append(tx, tenant, entry))
        self._observe(written.synced, tenant, entry)
        return written

    def started(self, environment_id: str, execution: Execution) -> asyncio.Future[None]:
        command, caller = execution.command, execution.caller
        record = ExecutionRecord(
            id=execution.id,
            environment_id=environment_id,
            command=command.label,
            process=execution.process_id,
            detail={
                "stdin": command.stdin,
                "pty": command.pty,
                "user": command.user,
                "timeout": command.timeout,
                "profile": command.profile,
                "began": since_boot(),
                "caller": {
                    "token": caller.token,
                    "peer": caller.peer,
                    "request_id": caller.request_id,
                    "traceparent": caller.traceparent,
                },
            },
            started_at=execution.started_at,
        )
        return self._observe(self._store.write(lambda tx: executions.insert(tx, record)), caller.tenant)

    def finished(self, execution_id: str, outcome: Outcome, exit_code: int | None) -> asyncio.Future[None]:
        now = time.time()

        def work(tx: Connection) -> None:
            executions.finish(tx, execution_id, outcome=str(outcome), exit_code=exit_code, ended_at=now)

        return self._observe(self._store.write(work), None)

    def kept(self, sizes: dict[str, int], kind: str, *, within: str | None = None) -> asyncio.Future[None]:
        def work(tx: Connection) -> None:
            quotas.keep(tx, self._host, kind, sizes)
            if within is not None:
                quotas.check_kept(tx, within)

        return self._store.write(work)

    async def crowded(self, tenants: Sequence[str]) -> list[str]:
        if not tenants:
            return []
        return await self._store.read(lambda tx: [each for each in tenants if quotas.crowded(tx, each)])

    async def least_isolation(self, tenant: str) -> str | None:
        return await self._store.read(lambda tx: quotas.get(tx, tenant).isolation)

    async def live(self) -> list[EnvironmentRecord]:
        return await self._store.read(lambda tx: environments.live(tx, self._host))

    async def ended(self) -> list[EnvironmentRecord]:
        now = time.time()

        def work(tx: Connection) -> None:
            _purge(tx, now)
            environments.forget_means(tx, self._host)

        # A disk that is full must not keep a daemon from starting.
        with contextlib.suppress(StoreUnavailable):
            await self._store.write(work)
        page = await self._store.read(
            lambda tx: environments.find(tx, host=self._host, ended=True, limit=REMEMBERED)
        )
        return page.items[::-1]

    async def executions(self, environment_id: str) -> list[ExecutionRecord]:
        return await self._store.read(
            lambda tx: executions.find(tx, environment_id, running=True, limit=REMEMBERED)
        )

    async def unfinished(self, environment: Environment) -> list[AuditRow]:
        return await self._store.read(lambda tx: audit.unfinished(tx, environment.tenant, environment.id))

    def _observe(
        self,
        written: asyncio.Future[T],
        tenant: str | None,
        entry: Entry | None = None,
        *,
        rows: int = 1,
        later: bool = False,
    ) -> asyncio.Future[T]:
        if self._observer is not None:
            self._observer.wrote(written, tenant, entry, rows=rows, later=later)
        return written
