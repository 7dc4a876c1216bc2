"""Start and end of environments.

    creating ──> running ──> deleting ──> ended
        └────────────────────────┘

What must outlive the daemon is recorded before the answer: see `records`. However an environment ends (deleted,
expired, its guest died, the daemon stops), one task removes it, which all callers await; if that fails, the reaper
retries. State changes happen between two awaits of one event loop, so they cannot interleave.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial

import structlog

from skerry.backends.base import InstanceSpec
from skerry.errors import LaunchFailed, QuotaExceeded, SkerryError, stopping
from skerry.failpoints import hit
from skerry.guest.channel import Channel
from skerry.manager.audit.acts import Act
from skerry.manager.caller import Caller
from skerry.manager.clock import Clock
from skerry.manager.environments.catalogue import Catalogue
from skerry.manager.environments.environment import Environment
from skerry.manager.environments.lease import Lease, Reaper
from skerry.manager.environments.networks import Networks
from skerry.manager.environments.records import Records
from skerry.manager.executions.profiles import Profiles
from skerry.manager.executions.registry import Executions
from skerry.manager.executions.runtime import Runtime
from skerry.manager.pools.pool import START_TIMEOUT
from skerry.manager.sessions.registry import Sessions
from skerry.models import Outcome, State

RETRY_AFTER = 30.0
"""Seconds until a failed removal is retried."""
ORPHAN_MIN = 3600.0
"""An environment without a daemon ends by itself after its lifetime, and not before this many seconds."""
REFUSED_FOR = 10.0
"""Seconds after a quota refusal during which the tenant's quota is checked before anything is started."""

log = structlog.get_logger(component="manager")


def orphan(environment: Environment) -> float:
    """Seconds that it outlives its daemon."""
    return max(environment.lease.lifetime, ORPHAN_MIN)


class Lifecycle:
    """Starts, watches and ends the environments of the catalogue."""

    def __init__(
        self,
        records: Records,
        catalogue: Catalogue,
        networks: Networks,
        clock: Clock,
        profiles: Profiles,
    ) -> None:
        self._records = records
        self._profiles = profiles
        self._catalogue = catalogue
        self._networks = networks
        self._clock = clock
        self._reaper = Reaper(clock, self._expired)
        self._refused: dict[str, float] = {}
        """Tenants whose quota was exhausted, and when."""
        self._unwritten: dict[str, Environment] = {}
        """Ended environments whose end is not recorded yet."""
        self.closing = False

    async def close(self) -> None:
        """Stop watching, and record pending ends if the store allows."""
        self._reaper.close()
        await self.write_ends()

    def watch(self, environment: Environment) -> None:
        """End it when its lease expires."""
        self._reaper.watch(environment.id, environment.lease)

    async def serving(self, environment: Environment) -> Executions:
        """Its executions; check again after every await. Raises EnvironmentEnded, DaemonUnavailable."""
        if not environment.serving or environment.executions is None:
            raise await self.gone(environment)
        return environment.executions

    async def gone(self, environment: Environment) -> SkerryError:
        """The error for a use after its end. Waits until no restart of the daemon can undo that end."""
        if environment.left:
            return stopping()
        if environment.state is not State.ENDED:
            await environment.final.wait()
        return environment.gone()

    # ---- start ----

    async def start(self, environment: Environment, act: Act) -> None:
        """Start an environment of the catalogue. Nothing was started if `repeats` is set afterwards.

        Raises LaunchFailed, GuestFailed, DiskFull, IsolationUnavailable, Conflict, QuotaExceeded, StoreUnavailable.
        """
        spec = InstanceSpec(
            environment.id,
            environment.image,
            environment.policy,
            orphan(environment),
            environment.program,
            environment.layers,
        )
        # Before its row can be there: the next daemon takes over what has a row.
        placement = environment.placement
        assert placement is not None
        placed = await placement.take_ready(spec)
        written = asyncio.create_task(
            self._record_created(environment, act)
        )  # as soon as this one has to wait
        if environment.key is not None or self.refused(environment.tenant):
            await written  # nothing is made for a request that was made before
            if environment.repeats:
                return
        try:
            async with asyncio.timeout(START_TIMEOUT):
                if placed is None:
                    placed = await placement.start(spec)
                environment.instance, channel = placed.instance, placed.channel
                if environment.policy.network != "none":
                    await self._networks.open(environment, channel)
        except TimeoutError as error:
            raise LaunchFailed(f"the environment did not start within {START_TIMEOUT:g} s") from error
        finally:
            await asyncio.wait((written,))
            _retrieve(written)
        try:
            written.result()
        except SkerryError:
            await channel.close()
            raise
        if environment.state is not State.CREATING:
            await channel.close()
            return  # deleted meanwhile; whoever did it waits for this task and removes everything
        self.serve(environment, channel)
        environment.lease.touch()
        self.watch(environment)
        log.info(
            "created",
            environment=environment.id,
            image=environment.image.name,
            isolation=environment.isolation,
        )

    def refused(self, tenant: str) -> bool:
        """True if its quota was exhausted at the last check."""
        return time.monotonic() - self._refused.get(tenant, -REFUSED_FOR) < REFUSED_FOR

    async def _record_created(self, environment: Environment, act: Act) -> None:
        await self.write_ends()  # or one of them might still have the name
        try:
            repeats = await act.begin_with(partial(self._records.created, environment))
        except QuotaExceeded:
            self._refused[environment.tenant] = time.monotonic()
            raise
        environment.repeats = repeats or ""
        environment.recorded = not environment.repeats
        hit("create.recorded")

    def serve(self, environment: Environment, channel: Channel) -> Executions:
        """Make it usable, and watch its guest."""
        channel.flow.group = environment.tenant
        environment.backend.share(environment.id, environment.tenant)
        runtime = Runtime(
            environment.tenant,
            environment.subject,
            environment.backend,
            channel,
            self._records,
            environment.base_variables(),
            lost=lambda reason: self._died(environment, reason),
            secluded=lambda: environment.secluded,
            profiles=self._profiles,
        )
        executions = Executions(runtime, self._records, touch=environment.lease.touch)
        environment.executions = executions
        environment.sessions = Sessions(executions)
        environment.state = State.RUNNING
        channel.closed.add_done_callback(
            lambda closed: self._died(environment, f"the guest: {closed.result()}")
        )
        environment.watching = asyncio.create_task(self._await_death(environment))
        return executions

    async def _await_death(self, environment: Environment) -> None:
        await environment.backend.wait(environment.id)
        self._died(environment, "the guest died")

    # ---- end ----

    def _expired(self, environment_id: str, reason: str) -> None:
        environment = self._catalogue.live.get(environment_id)
        if environment is not None and not environment.left:
            self._begin_end(environment, reason, Outcome.CANCELED)

    def _died(self, environment: Environment, reason: str) -> None:
        if not environment.serving or environment.executions is None:
            return
        runtime = environment.executions.runtime
        if runtime.sample().oom_kills > runtime.oom_kills:
            self._begin_end(environment, "out of memory", Outcome.OOM_KILLED)
        else:
            self._begin_end(environment, reason, Outcome.INTERNAL)

    async def end(self, environment: Environment, reason: str, outcome: Outcome) -> None:
        """End it in any state. Cancelling the caller does not stop it. Raises PlatformError, DaemonUnavailable."""
        if environment.left:
            raise stopping()
        await asyncio.shield(self._begin_end(environment, reason, outcome))

    def _begin_end(self, environment: Environment, reason: str, outcome: Outcome) -> asyncio.Task[None]:
        if environment.ending is None:
            environment.state = State.DELETING
            environment.reason = environment.reason or reason
            environment.outcome = outcome
            self._reaper.forget(environment.id)
            environment.ending = asyncio.create_task(self._bring_down(environment, outcome))
            environment.ending.add_done_callback(_retrieve)
        return environment.ending

    async def _bring_down(self, environment: Environment, outcome: Outcome) -> None:
        try:
            if environment.creating is not None:
                await asyncio.wait((environment.creating,))
            await _stop_takeover(environment)
            if environment.watching is not None:
                environment.watching.cancel()
            if (
                not environment.recorded
                or not environment.survives
                or await self._record_deleting(environment)
            ):
                environment.final.set()  # the next daemon would remove it, too
            hit("delete.noted")
            try:
                if environment.executions is not None:
                    await environment.executions.end(outcome, f"the environment ended: {environment.reason}")
            finally:
                if environment.network is not None:
                    await environment.network.close()
                if environment.placement is not None:
                    environment.placement.ending()
                hit("delete.executions")
                with contextlib.suppress(SkerryError):
                    environment.used = await environment.backend.usage(environment.id)
                await environment.backend.stop(environment.id)
            hit("delete.stopped")
            environment.final.set()
        except BaseException as error:
            log.error("removal failed, will be tried again", environment=environment.id, error=str(error))
            environment.ending = None
            retry = Lease(self._clock, RETRY_AFTER, RETRY_AFTER, environment.busy)
            if not self.closing:
                self._reaper.watch(environment.id, retry)
            environment.final.set()  # neither store nor host obeys: nobody should wait for either
            raise
        if environment.recorded:
            await self._write_end(environment)
        hit("delete.recorded")
        environment.state = State.ENDED
        environment.executions = environment.sessions = None
        placement = environment.placement
        self._catalogue.ended(environment, self._clock.time())
        if placement is not None:
            placement.ended()
        log.info("ended", environment=environment.id, reason=environment.reason)

    async def _record_deleting(self, environment: Environment) -> bool:
        """Record that it is being deleted. False if the store fails, which does not stop the removal."""
        try:
            await self._records.changed(environment, State.DELETING)
        except SkerryError as error:
            log.error("not written down", environment=environment.id, error=str(error))
            return False
        return True

    async def _write_end(self, environment: Environment) -> None:
        """Record its end; if the store fails, `write_ends` retries."""
        self._unwritten[environment.id] = environment
        entry = self.by_itself(environment, "environment.end").entry(
            "lifecycle", str(environment.outcome), environment.used, {"reason": environment.reason}
        )
        try:
            await self._records.changed(environment, State.ENDED, entry)
        except SkerryError as error:
            log.error("its end is not written down yet", environment=environment.id, error=str(error))
        else:
            self._unwritten.pop(environment.id, None)

    async def write_ends(self) -> None:
        await asyncio.gather(*map(self._write_end, tuple(self._unwritten.values())))

    async def let_go(self, environment: Environment) -> None:
        """Leave it to the next daemon."""
        if environment.creating is not None:
            await asyncio.wait((environment.creating,))
        await _stop_takeover(environment)
        if environment.ending is not None:
            await asyncio.wait((environment.ending,))
        if environment.state in (State.DELETING, State.ENDED):
            return  # what is half deleted the next daemon finishes
        environment.left = True
        if environment.watching is not None:
            environment.watching.cancel()
        if environment.sessions is not None:
            environment.sessions.let_go()
        if environment.executions is not None:
            await environment.executions.let_go()
        async with environment.changing:  # a change that came before opens no network after this
            if environment.network is not None:
                await environment.network.close()
                with contextlib.suppress(SkerryError):
                    # With what its connections have sent until now.
                    await self._records.changed(environment, State.RUNNING)

    def by_itself(self, environment: Environment, action: str) -> Act:
        """An action of the daemon itself, for the audit."""
        return Act(
            self._records, Caller(tenant=environment.tenant, peer="daemon"), action, environment.subject, {}
        )


async def _stop_takeover(environment: Environment) -> None:
    if environment.takeover is not None:
        environment.takeover.cancel()
        await asyncio.wait((environment.takeover,))


def _retrieve(task: asyncio.Future[None]) -> None:
    """Keep asyncio from logging a failure that was logged where it happened."""
    if not task.cancelled():
        task.exception()
