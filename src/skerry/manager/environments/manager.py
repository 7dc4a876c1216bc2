"""Operations on environments: create, find, use, change and delete.

Deleting is legal in every state. Start and end are in `lifecycle`; what a new daemon does with the environments of an
earlier one is in `recovery`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from socket import socket
from typing import Any

import structlog

from skerry.backends.base import Backend
from skerry.backends.registry import Registry
from skerry.egress import presets
from skerry.egress.addresses import Ranges
from skerry.egress.presets import Preset
from skerry.errors import (
    Busy,
    Conflict,
    DaemonUnavailable,
    Denied,
    EnvironmentEnded,
    EnvironmentNotFound,
    GuestFailed,
    ImageNotFound,
    InvalidRequest,
    IsolationUnavailable,
    LaunchFailed,
    QuotaExceeded,
    SkerryError,
    stopping,
)
from skerry.failpoints import hit
from skerry.guest.channel import Channel
from skerry.images.progress import Report
from skerry.images.references import PREFIX, is_reference
from skerry.images.store import Image, ImageStore
from skerry.manager.audit.acts import CANCELED, Act, Denials
from skerry.manager.caller import Caller
from skerry.manager.clock import Clock
from skerry.manager.environments.catalogue import Catalogue
from skerry.manager.environments.environment import Environment
from skerry.manager.environments.isolation import LeastIsolation
from skerry.manager.environments.lease import Lease
from skerry.manager.environments.lifecycle import Lifecycle
from skerry.manager.environments.networks import Networks, describe
from skerry.manager.environments.records import NOT_STARTED, Records
from skerry.manager.environments.recovery import Recovery
from skerry.manager.environments.request import CreateRequest
from skerry.manager.executions.profiles import Profiles
from skerry.manager.executions.registry import Executions
from skerry.manager.images import find_image
from skerry.manager.network.rules import with_network, with_rules
from skerry.manager.pools.pool import START_TIMEOUT, PoolSettings
from skerry.manager.pools.pools import Pools
from skerry.manager.sessions.registry import Sessions
from skerry.models import Enforcement, Outcome, State, Usage
from skerry.policy import ISOLATIONS, Policy, seconds
from skerry.settings import Home

log = structlog.get_logger(component="manager")


@dataclass(slots=True)
class Use:
    """A call under way in an environment. Its result in the audit gets what is put in `told`."""

    executions: Executions
    sessions: Sessions
    on_disk: Callable[[], Awaitable[None]]
    """Returns when the caller may see the effect. Raises StoreUnavailable."""
    told: dict[str, Any] = field(default_factory=dict)

    @property
    def channel(self) -> Channel:
        return self.executions.runtime.channel


class EnvironmentManager:
    """Creates, finds, watches and ends environments."""

    def __init__(
        self,
        registry: Registry,
        images: ImageStore,
        records: Records,
        *,
        clock: Clock | None = None,
        open_channel: Callable[[socket], Awaitable[Channel]] = Channel.begin,
        ranges: Ranges | None = None,
        preset: Callable[[str], Preset] | None = None,
        pools: Iterable[PoolSettings] = (),
        profiles: Profiles | None = None,
    ) -> None:
        self._registry = registry
        self._images = images
        self._records = records
        self._clock: Clock = clock or asyncio.get_running_loop()
        networks = Networks(records, ranges or Ranges(), preset or partial(presets.preset, home=Home()))
        self._networks = networks
        self._catalogue = Catalogue(self._clock)
        self._lifecycle = Lifecycle(records, self._catalogue, networks, self._clock, profiles or Profiles())
        self.pools = Pools(pools, registry, images, open_channel, self._clock)
        self._recovery = Recovery(
            registry, images, records, self._catalogue, self._lifecycle, networks, self.pools, self._clock
        )
        self._denials = Denials(records)
        self.isolation = LeastIsolation(records, self._clock)
        self._settling: set[asyncio.Task[None]] = set()
        """Creates whose callers were cancelled."""

    @property
    def records(self) -> Records:
        return self._records

    def __len__(self) -> int:
        return len(self._catalogue.live)

    async def recover(self) -> None:
        """Take over the environments of an earlier daemon of this home, and remove what it left half made or half
        removed. Raises StoreUnavailable, PlatformError."""
        self._registry.begin()
        await self.pools.prepare()
        await self._recovery.recover()
        self.pools.begin()

    async def reconcile(self) -> None:
        """Remove orphans from the host, and tend the pools. To be called periodically. Raises PlatformError."""
        self.pools.tend()
        await self._recovery.reconcile()

    async def ready(self) -> str:
        """The isolation that a new environment gets. Raises DaemonUnavailable, IsolationUnavailable."""
        if self._lifecycle.closing:
            raise stopping()
        backend, _ = await self._registry.pick(Policy().isolation)
        return backend.isolation

    def act(self, caller: Caller, action: str, **detail: Any) -> Act:
        """An action on no environment, for the audit."""
        return Act(self._records, caller, action, None, detail)

    def deny(self, caller: Caller, action: str, error: SkerryError, **detail: Any) -> None:
        """Record a denial in the audit, rate-limited."""
        self._denials.add(caller, action, error, **detail)

    async def create(self, caller: Caller, request: CreateRequest) -> Environment:
        """Returns a running environment; on failure nothing is left of it. A repeated key returns the first one.

        Raises InvalidRequest, Conflict (the name is taken, or the key was used for something else), ImageNotFound,
        IsolationUnavailable, LaunchFailed, GuestFailed, DiskFull, DaemonUnavailable (it is stopping),
        QuotaExceeded, Busy (all of its pool's maximum are in use), StoreUnavailable; for an image of an engine Denied
        and RegistryUnavailable.
        """
        if self._lifecycle.closing:
            raise stopping()
        began = time.monotonic()
        await self._networks.understand(request.policy)
        least = await self.isolation.of(caller.tenant)
        request = request.with_isolation(least)
        image, backend = await self.image(caller, request.image, request.policy.isolation, request.backend)
        await self._check_name(caller, request)
        environment = await self._reserve(caller, request, image, backend)
        act = Act(
            self._records,
            caller,
            "environment.create",
            environment.subject,
            request.audited(environment.image),
        )
        hit("create.reserved")
        environment.creating = asyncio.create_task(self._lifecycle.start(environment, act))
        try:
            return await self._made(caller, environment, act, began)
        except asyncio.CancelledError:
            settling = asyncio.create_task(self._settle(caller, environment, act, began))
            self._settling.add(settling)
            settling.add_done_callback(self._settling.discard)
            raise

    async def image(
        self, caller: Caller, name: str, isolation: str, backend: str = ""
    ) -> tuple[Image, Backend]:
        """The image of this name, and the backend that will run it. See `find_image`."""
        found, _ = await self._registry.pick(isolation, backend, name)
        try:
            return await find_image(self._images, found, name), found
        except Denied as error:
            self.deny(caller, "image.find", error, image=name)
            raise

    async def pull(self, name: str, report: Report) -> Image:
        """The image of an engine, pulled if it is missing. See `ImageSource.pull`."""
        if not is_reference(name):
            raise InvalidRequest(
                f"{name!r} is not an image of a Docker Engine", hint=f"those begin with {PREFIX}"
            )
        backend, _ = await self._registry.pick(ISOLATIONS[0], image=name)
        assert backend.images is not None
        try:
            return await backend.images.find(name)
        except ImageNotFound:
            return await backend.images.pull(name, report)

    async def _check_name(self, caller: Caller, request: CreateRequest) -> None:
        taken = self._catalogue.named(caller.tenant, request.name)
        if taken is not None and taken.ending is not None:  # its name is about to be free
            await asyncio.wait((taken.ending,))
            taken = self._catalogue.named(caller.tenant, request.name)
        if (
            request.key is None and taken is not None
        ):  # with a key it may be the one that is meant: the store knows
            raise Conflict(f"the name {request.name!r} is taken by environment {taken.id}")

    async def _reserve(
        self, caller: Caller, request: CreateRequest, image: Image, backend: Backend
    ) -> Environment:
        """Find a place for a new environment and add it to the catalogue; nothing of it runs for the caller yet."""
        placement = await self.pools.place(
            image,
            request.policy,
            backend,
            request.language,
            poolable=request.poolable,
            # A tenant whose quota is exhausted does not drain a pool.
            use_ready=not self._lifecycle.refused(caller.tenant),
        )
        if self._lifecycle.closing:  # since an await
            await placement.give_back()
            raise stopping()
        now = time.time()
        environment = Environment(
            id=placement.id,
            tenant=caller.tenant,
            created_by=caller.who,
            name=request.name,
            image=image,
            policy=request.policy,
            backend=backend,
            isolation=backend.isolation,
            idle=request.idle,
            variables=dict(request.env),
            created_at=now,
            expires_at=now + request.lifetime,
            key=request.key,
            placement=placement,
            program=request.program,
            survives=request.survives and not request.program,
            layers=request.layers,
        )
        environment.lease = Lease(self._clock, request.lifetime, request.idle, environment.busy)
        self._catalogue.add(environment)
        return environment

    async def _made(self, caller: Caller, environment: Environment, act: Act, began: float) -> Environment:
        """Wait for the start of an environment. May be called again after it was cancelled."""
        assert environment.creating is not None
        try:
            await asyncio.shield(environment.creating)
        except Exception as error:
            act.failed(error)
            if isinstance(error, QuotaExceeded):
                self.deny(caller, "environment.create", error, **error.detail)
            log.warning("create failed", environment=environment.id, error=str(error))
            if isinstance(error, LaunchFailed):
                self._registry.doubt(environment.backend)
            if isinstance(error, IsolationUnavailable):
                self.isolation.forget(caller.tenant)
            with contextlib.suppress(SkerryError):
                await self._lifecycle.end(environment, NOT_STARTED, Outcome.INTERNAL)
            self._catalogue.forget(environment)
            raise
        if environment.repeats:
            await self._lifecycle.end(environment, "a repetition", Outcome.CANCELED)
            self._catalogue.forget(environment)
            return await self._first(caller, environment.repeats)
        if not environment.serving:
            act.end(CANCELED)
            if self._lifecycle.closing:
                raise stopping()
            raise await self._lifecycle.gone(environment)
        if environment.placement is not None:
            environment.placement.served(time.monotonic() - began)
        hit("create.served")
        act.end("completed")
        return environment

    async def _settle(self, caller: Caller, environment: Environment, act: Act, began: float) -> None:
        """Finish a create whose caller was cancelled."""
        with contextlib.suppress(SkerryError):
            await self._made(caller, environment, act, began)
            if not environment.repeats and not environment.name and environment.key is None:
                await self.abandon(environment)

    async def abandon(self, environment: Environment) -> None:
        """End an environment that nobody can find: no name, no key, and its caller has gone. Raises PlatformError."""
        await self._lifecycle.end(environment, "its caller went away before it was told", Outcome.CANCELED)

    async def _first(self, caller: Caller, environment_id: str) -> Environment:
        """The environment that the first request with a key has made."""
        try:
            environment = self.find(caller, environment_id)
            if environment.creating is not None:
                await asyncio.shield(environment.creating)
        except SkerryError:
            raise Conflict(
                "the first request with this key has failed, or another daemon has served it",
                hint="try again, with a new key if this one stays refused",
            ) from None
        try:
            await self._lifecycle.serving(environment)
        except EnvironmentEnded as ended:
            if environment.reason == NOT_STARTED:  # which has released the key
                raise Busy(
                    "the first request with this key broke off with its daemon", hint="try again"
                ) from None
            raise Conflict(
                f"this idempotency key is used up: {ended.message}",
                hint="take a new key for a new environment",
            ) from None
        return environment

    def find(self, caller: Caller, ref: str) -> Environment:
        """An environment of the caller's tenant, by id, name or prefix of an id; live ones first.

        Raises EnvironmentNotFound, InvalidRequest.
        """
        try:
            return self._catalogue.find(caller.tenant, ref)
        except EnvironmentNotFound as missing:
            if ref in self._catalogue:  # another tenant's
                self.deny(caller, "environment.find", missing, environment_id=ref)
            raise

    def environments(self, caller: Caller, *, ended: bool = False) -> list[Environment]:
        """Live ones of the caller's tenant, oldest first; with `ended`, those of the last day come before them."""
        return self._catalogue.list(caller.tenant, ended=ended)

    async def running(self, caller: Caller, ref: str) -> tuple[Environment, Executions]:
        """An environment that can be used; waits for one that is being created.

        Raises EnvironmentEnded, DaemonUnavailable (it is stopping, or has not taken it over yet), Conflict (its
        creation takes too long), and what `find()` does.
        """
        environment = self.find(caller, ref)
        if environment.takeover is not None and environment.ending is None:
            raise DaemonUnavailable(
                f"environment {environment.id} is being taken over from an earlier daemon",
                hint="try again in a moment; it ends if its guest does not answer",
            )
        if environment.state is State.CREATING and environment.creating is not None:
            done, _ = await asyncio.wait((environment.creating,), timeout=START_TIMEOUT)
            if not done:
                raise Conflict(
                    f"environment {environment.id} is still being created", hint="try again in a moment"
                )
        return environment, await self._lifecycle.serving(environment)

    @contextlib.asynccontextmanager
    async def using(
        self, caller: Caller, ref: str, action: str, detail: dict[str, Any], *, early: bool = False
    ) -> AsyncIterator[Use]:
        """Use an environment for an audited action until the block ends.

        With `early` the block begins before the intent is on disk; it must show nobody its effect before `on_disk()`
        returns, and its end waits for that. Raises StoreUnavailable and what `running()` does.
        """
        environment, executions = await self.running(caller, ref)
        runtime, sessions = executions.runtime, environment.sessions
        assert sessions is not None
        act = runtime.act(caller, action, detail)
        use = Use(executions, sessions, partial(runtime.on_disk, act))
        environment.uses += 1
        environment.lease.touch()
        try:
            await (runtime.begin(act) if early else act.begin())
            await self._lifecycle.serving(environment)
            yield use
            await use.on_disk()
        except GuestFailed as error:
            act.failed(error)
            if environment.ending is None or environment.outcome is Outcome.INTERNAL:
                raise
            raise await self._lifecycle.gone(environment) from error  # it was deleted, or expired, meanwhile
        except BaseException as error:
            act.failed(error)
            raise
        else:
            act.end("completed", **use.told)
        finally:
            environment.uses -= 1
            environment.lease.touch()

    async def heartbeat(self, caller: Caller, ref: str, lifetime: float | None = None) -> float:
        """Restart the lease with `lifetime`, or the one it was created with; returns the unix time of its end.

        Raises EnvironmentEnded, StoreUnavailable, and what `find()` does.
        """
        environment, executions = await self.running(caller, ref)
        lifetime = environment.lease.lifetime if lifetime is None else seconds(lifetime, "lifetime")
        environment.lease.extend(lifetime)
        environment.expires_at = time.time() + lifetime
        environment.grace_used = False
        self._lifecycle.watch(environment)
        act = executions.runtime.act(caller, "environment.heartbeat", {})
        extended = act.entry("lifecycle", detail={"lifetime": lifetime})
        hit("heartbeat.extended")
        expires_at = environment.expires_at
        await self._records.changed(environment, State.RUNNING, extended)
        await self._lifecycle.serving(environment)
        hit("heartbeat.recorded")
        return expires_at

    def enforced(self, caller: Caller, ref: str) -> list[Enforcement]:
        """Every limit and protection as the kernel reports it now; empty after the end."""
        environment = self.find(caller, ref)
        if environment.state is not State.RUNNING:
            return []
        rows = environment.backend.enforced(environment.id)
        if environment.network is None:
            return rows
        by = "a network namespace whose only way out is our proxy"
        limits = environment.policy.limits
        return [
            *(row for row in rows if row.name != "network"),
            Enforcement("network", True, environment.policy.network, by),
            Enforcement("connections", True, str(limits.connections), "our proxy"),
            Enforcement("traffic", True, str(limits.traffic), "our proxy"),
        ]

    async def set_network(
        self,
        caller: Caller,
        ref: str,
        *,
        network: str | None = None,
        allow: Collection[str] | None = None,
        connections: int | None = None,
        traffic: int | str | None = None,
    ) -> None:
        """Replace kind, rules or limits of the network; None leaves each as it is. See `change_network`."""
        environment, executions = await self.running(caller, ref)
        async with environment.changing:
            policy = with_network(
                environment.policy, network, allow, connections=connections, traffic=traffic
            )
            await self._change_network(caller, environment, executions, policy)

    async def change_network(
        self, caller: Caller, ref: str, *, add: Collection[str] = (), remove: Collection[str] = ()
    ) -> None:
        """Change rules of the allowlist. Takes effect at once, for open connections too.

        Raises InvalidRequest, IsolationUnavailable, StoreUnavailable, and what `running()` does.
        """
        environment, executions = await self.running(caller, ref)
        async with environment.changing:
            policy = with_rules(environment.policy, add, remove)
            await self._change_network(caller, environment, executions, policy)

    async def _change_network(
        self, caller: Caller, environment: Environment, executions: Executions, policy: Policy
    ) -> None:
        try:
            await self._networks.change(caller, environment, executions, policy)
        except SkerryError:
            await self._lifecycle.serving(environment)  # if it has ended, that is why the change failed
            raise
        await self._lifecycle.serving(environment)

    def network(self, caller: Caller, ref: str) -> dict[str, Any]:
        """Rules and limits of the network, traffic so far, and recent denials."""
        return describe(self.find(caller, ref))

    async def usage(self, caller: Caller, ref: str) -> Usage:
        """The kernel's counters now, or at its end."""
        environment = self.find(caller, ref)
        if environment.state is not State.RUNNING:
            return environment.used
        return await environment.backend.usage(environment.id)

    async def delete(self, caller: Caller, ref: str) -> Environment:
        """End it and remove every trace. Idempotent, and safe to call concurrently.

        Neither a cancelled caller nor an audit that cannot be written stops the removal, which is the safe direction.
        Raises EnvironmentNotFound, PlatformError.
        """
        environment = self.find(caller, ref)
        act = Act(self._records, caller, "environment.delete", environment.subject, {})
        try:
            await act.begin()
        except SkerryError as error:
            log.error("not written down", environment=environment.id, error=str(error))
        hit("delete.intended")
        if environment.state is not State.ENDED:
            reason = f"deleted by token {caller.token}" if caller.token else "deleted"
            try:
                await self._lifecycle.end(environment, reason, Outcome.CANCELED)
            except BaseException as error:
                act.failed(error)
                raise
        act.end("completed")
        return environment

    async def delete_all(self, reason: str) -> None:
        """End all environments. Raises the first PlatformError after having tried each."""
        ends = [
            self._lifecycle.end(environment, reason, Outcome.CANCELED)
            for environment in self._catalogue.live.values()
        ]
        for result in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    def refuse(self) -> None:
        """Refuse new environments: the daemon is about to stop."""
        self._lifecycle.closing = True

    @property
    def closing(self) -> bool:
        return self._lifecycle.closing

    async def close(self, *, keep: bool = False) -> None:
        """End all environments, or with `keep` leave them to the next daemon, and release the backends."""
        self.refuse()
        try:
            await self.pools.close()
            if self._settling:
                await asyncio.wait(self._settling)
            if keep:
                await asyncio.gather(
                    *(self._lifecycle.let_go(each) for each in tuple(self._catalogue.live.values()))
                )
            else:
                await self.delete_all("the daemon stopped")
        finally:
            await self._lifecycle.close()
            await self._registry.close()
            for backend in self._registry.backends:
                await backend.close()

    def census(self) -> list[Environment]:
        """Live environments of all tenants."""
        return list(self._catalogue.live.values())

    def prepared(self) -> dict[tuple[str], int]:
        """How many instances each backend, by name, has prepared."""
        return {(backend.name,): backend.prepared() for backend in self._registry.backends}

    def in_use(self) -> set[str]:
        """Digests of the images of live environments and of pool entries.

        May be called from any thread.
        """
        live = tuple(self._catalogue.live.values())
        return {environment.image.digest for environment in live} | self.pools.images
