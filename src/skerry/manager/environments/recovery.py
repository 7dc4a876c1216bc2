"""Recovery: a new daemon takes over running environments, and removes what is half made or half removed.

Rows of the store are compared with the host at the start, and periodically after.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Container
from dataclasses import replace

import structlog

from skerry.backends.base import Backend, InstanceSpec
from skerry.backends.registry import Registry
from skerry.egress.limits import Traffic
from skerry.errors import EnvironmentNotFound, LaunchFailed, SkerryError, StoreUnavailable
from skerry.failpoints import hit
from skerry.guest.channel import Channel
from skerry.images.references import is_reference
from skerry.images.store import DOCKER, HOST, Image, ImageStore
from skerry.manager.audit.acts import Act, note
from skerry.manager.caller import Caller
from skerry.manager.clock import Clock, boot_id, since_boot
from skerry.manager.environments.catalogue import Catalogue
from skerry.manager.environments.environment import Environment
from skerry.manager.environments.lease import Lease
from skerry.manager.environments.lifecycle import Lifecycle, orphan
from skerry.manager.environments.networks import Networks
from skerry.manager.environments.records import NOT_STARTED, Records, policy_of
from skerry.manager.pools.pools import Pools
from skerry.models import Outcome, State, Usage
from skerry.store.environments import EnvironmentRecord

GRACE = 60.0
"""Minimum seconds of a lease after its first takeover: no heartbeat could be sent before."""

TAKEOVER_SECONDS = 30.0
"""Time limit of one takeover. A guest that takes longer is given up."""
PROGRESS_SECONDS, DOORS_SECONDS = 0.5, 5.0
"""The daemon serves once no takeover has completed for the first, or after the second in all."""

log = structlog.get_logger(component="manager")


class Recovery:
    """Takes over environments, and sweeps orphans."""

    def __init__(
        self,
        registry: Registry,
        images: ImageStore,
        records: Records,
        catalogue: Catalogue,
        lifecycle: Lifecycle,
        networks: Networks,
        pools: Pools,
        clock: Clock,
    ) -> None:
        self._registry = registry
        self._images = images
        self._records = records
        self._catalogue = catalogue
        self._lifecycle = lifecycle
        self._networks = networks
        self._pools = pools
        self._clock = clock
        self._spared: set[str] = set()
        """Environments that could not be understood: no sweep removes them."""
        self._slow: set[asyncio.Task[None]] = set()
        """Takeovers that go on while the daemon serves."""

    async def recover(self) -> None:
        """Take over the environments of an earlier daemon of this home, and remove what it left half made or half
        removed. Each environment is taken over independently: slow ones continue in the background after the return,
        and until then calls in them are refused with a retryable error. Raises StoreUnavailable, PlatformError."""
        records = await self._records.live()
        known = {record.id for record in records}
        await self._remove_all_but(lambda id_: id_ in known)
        hit("recover.swept")
        for record in await self._records.ended():
            its = self._registry.find(record.backend)
            if its is not None and record.ended_reason != NOT_STARTED:
                environment = self._remembered(record, its)
                environment.state, environment.reason = State.ENDED, record.ended_reason
                environment.used = Usage.from_dict(record.usage or {})
                ago = max(0.0, time.time() - (record.ended_at or 0.0))
                self._catalogue.ended(environment, self._clock.time() - ago)
        takeovers = {asyncio.create_task(self._recover_or_spare(record)) for record in records}
        deadline = time.monotonic() + DOORS_SECONDS
        while takeovers and (left := deadline - time.monotonic()) > 0:
            done, takeovers = await asyncio.wait(
                takeovers, timeout=min(left, PROGRESS_SECONDS), return_when=asyncio.FIRST_COMPLETED
            )
            for takeover in done:
                if not takeover.cancelled():
                    takeover.result()
            if not done:
                break
        if takeovers:
            log.warning("served before all are taken over", environments=len(takeovers))
        self._slow = takeovers
        for takeover in takeovers:
            takeover.add_done_callback(self._finished)
        hit("recover.done")

    async def reconcile(self) -> None:
        """Remove orphans from the host, and record pending ends. To be called periodically. Raises PlatformError."""
        await self._remove_all_but(self._known)
        await self._lifecycle.write_ends()

    def _known(self, id_: str) -> bool:
        return id_ in self._catalogue.live or id_ in self._spared or id_ in self._pools

    async def _remove_all_but(self, known: Callable[[str], bool]) -> None:
        for backend in self._registry.backends:
            for environment_id in await backend.list():
                if not known(environment_id):
                    log.warning("sweep", environment=environment_id, backend=backend.name)
                    await backend.stop(environment_id)

    def _finished(self, takeover: asyncio.Task[None]) -> None:
        self._slow.discard(takeover)
        if not takeover.cancelled() and (error := takeover.exception()) is not None:
            log.error("takeover failed", error=str(error))

    async def _recover_or_spare(self, record: EnvironmentRecord) -> None:
        """Take one over; an unexpected failure leaves it as it is, and does not stop the others."""
        try:
            await self._recover(record)
        except SkerryError:
            raise
        except Exception:
            log.exception("it is left alone", environment=record.id)
            environment = self._catalogue.live.pop(record.id, None)
            if environment is not None and environment.placement is not None:
                environment.placement.ended()
            self._spared.add(record.id)

    async def _recover(self, record: EnvironmentRecord) -> None:
        backend = self._registry.find(record.backend)
        if backend is None:
            log.error("its backend is not served", environment=record.id, backend=record.backend)
            self._spared.add(record.id)
            return
        environment = self._remembered(record, backend)
        environment.takeover = asyncio.current_task()
        self._catalogue.add(environment)
        try:
            await self._take_over(environment, record)
        finally:
            environment.takeover = None

    async def _take_over(self, environment: Environment, record: EnvironmentRecord) -> None:
        backend = environment.backend
        await self._finish_audit(environment, {each.id for each in await self._records.executions(record.id)})
        if record.state == State.DELETING:
            await self._end(environment, record.ended_reason, Outcome(record.outcome))
            hit("recover.ended")
            return
        if not record.instance.get("survives", True):
            await self._end(environment, "its caller went away with the daemon", Outcome.CANCELED)
            return
        # Before it can end, which releases it.
        environment.placement = self._pools.adopt(
            environment.id, environment.image, environment.policy, backend
        )
        try:
            if record.boot_id != boot_id():
                raise EnvironmentNotFound("the host was restarted")
            async with asyncio.timeout(TAKEOVER_SECONDS):
                spec = InstanceSpec(environment.id, environment.image, environment.policy)
                environment.instance = await backend.adopt(spec)
                channel = await Channel.open(await backend.connect(environment.id))
                channel.stay(orphan(environment))
                executions = self._lifecycle.serve(environment, channel)
                hit("recover.connected")
                await self._resume(environment, record)
                await self._networks.reopen(environment, executions)
                assert environment.sessions is not None
                environment.sessions.ended_with_daemon = True
                lost = await executions.adopt(await self._records.executions(environment.id))
                await self._lifecycle.serving(environment)  # its guest may have died since
        except LaunchFailed:
            await self._end(environment, NOT_STARTED, Outcome.INTERNAL)
            return
        except (SkerryError, TimeoutError) as error:
            why = error.message if isinstance(error, SkerryError) else "its guest did not answer in time"
            await self._end(environment, f"lost while no daemon ran: {why}", Outcome.INTERNAL)
            return
        self._lifecycle.watch(environment)
        recovered = self._lifecycle.by_itself(environment, "environment.recover").entry(
            "lifecycle", detail={"lost_executions": lost} if lost else {}
        )
        note(self._records.changed(environment, State.RUNNING, recovered))
        hit("recover.recovered")
        log.warning("recovered", environment=environment.id, lost_executions=lost)

    async def _end(self, environment: Environment, reason: str, outcome: Outcome) -> None:
        environment.takeover = None  # what ends an environment cancels its takeover, which is this task
        await self._lifecycle.end(environment, reason, outcome)

    async def _resume(self, environment: Environment, record: EnvironmentRecord) -> None:
        """Resume its lease with the remaining time; at least GRACE, once for each lease."""
        remaining = record.instance["expires"] - since_boot()
        prolonged = remaining < GRACE and not environment.grace_used
        environment.lease.resume(GRACE if prolonged else remaining)
        if prolonged:
            environment.grace_used = True
            environment.expires_at = time.time() + GRACE
            try:
                # Awaited: a daemon that is killed before it is written down would grant it again.
                await self._records.changed(environment, State.RUNNING)
            except StoreUnavailable as error:
                log.error("not written down", environment=environment.id, error=str(error))

    async def _finish_audit(self, environment: Environment, kept: Container[str]) -> None:
        """Write results for intents of an earlier daemon, except for executions that may still run."""
        for row in await self._records.unfinished(environment):
            if row.detail.get("execution_id") in kept and row.action == "execution":
                continue
            caller = Caller(environment.tenant, token=row.token, peer=row.peer, request_id=row.request_id)
            act = Act(self._records, caller, row.action, environment.subject, {}, begun=True)
            told = {name: row.detail[name] for name in ("execution_id",) if name in row.detail}
            act.end(str(Outcome.INTERNAL), **told, reason="the daemon ended before it was known")

    def _remembered(self, record: EnvironmentRecord, backend: Backend) -> Environment:
        kind = DOCKER if is_reference(record.image) else ""
        image = Image(record.image, record.image_digest, kind, None, {}, 0, 0.0, "")
        with contextlib.suppress(SkerryError):
            image = self._images.get(record.image_digest)
        if record.image == HOST:
            image = replace(self._images.get(HOST), digest=record.image_digest)
        environment = Environment(
            id=record.id,
            tenant=record.tenant,
            created_by=record.created_by,
            name=record.name,
            image=image,
            policy=policy_of(record),
            backend=backend,
            isolation=record.isolation,
            idle=record.idle,
            variables=record.variables,
            created_at=record.created_at,
            expires_at=record.expires_at,
            traffic=Traffic(record.instance.get("sent", 0), record.instance.get("received", 0)),
            grace_used=record.instance.get("grace", False),
        )
        environment.lease = Lease(self._clock, record.lifetime, record.idle, environment.busy)
        environment.recorded = True
        return environment
