"""Environments from their creation to their end.

    creating ──> running ──> deleting ──> ended
        └────────────────────────┘

What must outlive the daemon is written down before it is answered: see `records`. The next daemon takes over what
runs, and ends what was half made. Delete is legal from every state. However an environment ends (deleted, expired,
its guest died, the daemon stops), one task brings it down, which everybody who cares awaits; should that fail, the
reaper tries again. All decisions are taken between two awaits of one event loop, so that none can overtake another.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Container
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from socket import socket
from typing import Any

import structlog

from skerry.backends.base import Backend, Instance, InstanceSpec
from skerry.backends.registry import Registry
from skerry.egress import presets
from skerry.egress.addresses import Ranges
from skerry.egress.presets import Preset
from skerry.errors import (
    Conflict,
    DaemonUnavailable,
    EnvironmentEnded,
    EnvironmentNotFound,
    InvalidRequest,
    LaunchFailed,
    QuotaExceeded,
    SkerryError,
)
from skerry.failpoints import hit
from skerry.guest.channel import WRITE_MAX, Channel
from skerry.ids import LENGTH
from skerry.images.store import HOST, Image, ImageStore
from skerry.manager.audit import CANCELED, Act, Subject, note
from skerry.manager.caller import Caller
from skerry.manager.commands import base_variables, check_variables
from skerry.manager.executions import Executions
from skerry.manager.network import NOTHING, Meaning, Network, understand, with_network, with_rules
from skerry.manager.reaper import Clock, Lease, Reaper
from skerry.manager.records import NOT_STARTED, Key, Records, boot_id, policy_of, since_boot
from skerry.models import Enforcement, EnvironmentInfo, Outcome, State, Usage
from skerry.policy import Policy, seconds
from skerry.settings import Home
from skerry.store.environments import EnvironmentRecord

START_TIMEOUT = 60.0
RETRY_AFTER = 30.0
"""Seconds after which a removal that failed is tried again."""
REMEMBER_FOR = 86400.0
REMEMBER_MAX = 1000
GRACE = 60.0
"""Seconds that an environment has at least after a restart: nobody could send a heartbeat before."""
ORPHAN_MIN = 3600.0
"""An environment ends by itself when it is without a daemon for its lifetime, or for this long if that is longer."""
PREFIX_MIN = 3
DENIALS_A_SECOND = 10
"""Rows in the audit for each token; of those without one, all together, one."""
DENIERS_MAX = 1000
REFUSED_FOR = 10.0
"""Seconds for which a tenant without room in its quota has to wait for the store before anything is made for it."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")

log = structlog.get_logger(component="manager")


@dataclass(eq=False, slots=True)
class Environment:
    """One environment, live or remembered."""

    id: str
    tenant: str
    created_by: str
    name: str
    image: Image
    policy: Policy
    backend: Backend
    isolation: str
    idle: float
    variables: dict[str, str]
    created_at: float
    expires_at: float
    lease: Lease = field(init=False)
    state: State = State.CREATING
    reason: str = ""
    outcome: Outcome = Outcome.CANCELED
    ended_at: float = 0.0
    used: Usage = field(default_factory=Usage)
    """What it has used in all, once it has ended."""
    recorded: bool = False
    """Whether its row is in the store."""
    key: Key | None = None
    repeats: str = ""
    """The id of the environment that was meant, if the request was made before."""
    uses: int = 0
    """Calls under way that are not executions."""
    instance: Instance | None = None
    executions: Executions | None = None
    network: Network | None = None
    preset_variables: dict[str, str] = field(default_factory=dict)
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Of its network: one after the other."""
    creating: asyncio.Task[None] | None = None
    ending: asyncio.Task[None] | None = None
    watching: asyncio.Task[None] | None = None

    def busy(self) -> bool:
        return self.uses > 0 or (self.executions is not None and bool(self.executions.running))

    def base_variables(self, workspace: str) -> dict[str, str]:
        return base_variables(self.image.env, workspace, {**self.preset_variables, **self.variables})

    @property
    def subject(self) -> Subject:
        return Subject(self.id, self.backend.name, self.isolation, self.image.digest)

    @property
    def info(self) -> EnvironmentInfo:
        return EnvironmentInfo(
            environment_id=self.id,
            state=str(self.state),
            image=self.image.name,
            image_digest=self.image.digest,
            isolation=self.isolation,
            backend=self.backend.name,
            created_at=self.created_at,
            expires_at=self.expires_at,
            lifetime=self.lease.lifetime,
            idle=self.idle,
            name=self.name,
            profile=self.policy.profile,
            network=self.policy.network,
            workspace=self.policy.workspace if self.instance is None else self.instance.workspace,
            limits=asdict(self.policy.limits),
            ended_reason=self.reason if self.state is State.ENDED else "",
        )


@dataclass(slots=True)
class Use:
    """A call under way in an environment. What `told` is given, the audit tells when it ends."""

    channel: Channel
    told: dict[str, Any] = field(default_factory=dict)


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
    ) -> None:
        self._registry = registry
        self._images = images
        self._records = records
        self._clock: Clock = clock or asyncio.get_running_loop()
        self._open_channel = open_channel
        self._ranges = ranges or Ranges()
        self._preset = preset or partial(presets.preset, home=Home())
        self._reaper = Reaper(self._clock, self._expired)
        self._live: dict[str, Environment] = {}
        self._denials: dict[str, tuple[float, int]] = {}
        """By token: when its last second began, and how many there were since."""
        self._refused: dict[str, float] = {}
        """Tenants that had no room in their quota, and when."""
        self._spared: set[str] = set()
        """What nobody could make sense of, and no sweep may remove."""
        self._names: dict[tuple[str, str], Environment] = {}
        """By tenant and name."""
        self._ended: dict[str, Environment] = {}
        self._unwritten: dict[str, Environment] = {}
        """Ended ones whose rows do not say so yet."""
        self._closing = False

    def __len__(self) -> int:
        return len(self._live)

    async def recover(self) -> None:
        """Take over what an earlier daemon of this home left running, and remove what it left half made or half
        removed. Raises StoreUnavailable, PlatformError."""
        records = await self._records.live()
        await self._remove_all_but({record.id for record in records})
        hit("recover.swept")
        for record in await self._records.ended():
            its = self._registry.find(record.backend)
            if its is not None and record.ended_reason != NOT_STARTED:
                environment = self._remembered(record, its)
                environment.state, environment.reason = State.ENDED, record.ended_reason
                environment.used = Usage.from_dict(record.usage or {})
                ago = max(0.0, time.time() - (record.ended_at or 0.0))
                environment.ended_at = self._clock.time() - ago
                self._ended[environment.id] = environment
        await asyncio.gather(*map(self._recover_or_spare, records))
        hit("recover.done")

    async def reconcile(self) -> None:
        """Compare what is on the host with what should be, and remove what nobody knows of; to be called now and then.

        Raises PlatformError.
        """
        await self._remove_all_but(self._live.keys() | self._spared)
        await self._write_ends()

    async def _remove_all_but(self, known: Container[str]) -> None:
        for backend in self._registry.backends:
            for environment_id in await backend.list():
                if environment_id not in known:
                    log.warning("sweep", environment=environment_id, backend=backend.name)
                    await backend.stop(environment_id)

    async def _recover_or_spare(self, record: EnvironmentRecord) -> None:
        """One that cannot be understood keeps nobody else from being taken over, and stays as it is."""
        try:
            await self._recover(record)
        except SkerryError:
            raise
        except Exception:
            log.exception("it is left alone", environment=record.id)
            self._live.pop(record.id, None)
            self._spared.add(record.id)

    async def _recover(self, record: EnvironmentRecord) -> None:
        backend = self._registry.find(record.backend)
        if backend is None:
            log.error("its backend is not served", environment=record.id, backend=record.backend)
            self._spared.add(record.id)
            return
        environment = self._remembered(record, backend)
        self._live[environment.id] = environment
        if environment.name:
            self._names[environment.tenant, environment.name] = environment
        await self._finish_audit(environment, {each.id for each in await self._records.executions(record.id)})
        if record.state == State.DELETING:
            await self._end(environment, record.ended_reason, Outcome(record.outcome))
            hit("recover.ended")
            return
        try:
            if record.boot_id != boot_id():
                raise EnvironmentNotFound("the host was restarted")
            spec = InstanceSpec(environment.id, environment.image, environment.policy)
            environment.instance = await backend.adopt(spec)
            channel = await Channel.open(await backend.connect(environment.id))
            self._serve(environment, environment.instance, channel)
            hit("recover.connected")
            environment.lease.resume(max(record.instance["expires"] - since_boot(), GRACE))
            assert environment.executions is not None
            await self._reopen_network(environment, channel)
            lost = await environment.executions.adopt(await self._records.executions(environment.id))
        except LaunchFailed:
            await self._end(environment, NOT_STARTED, Outcome.INTERNAL)
            return
        except SkerryError as error:
            await self._end(environment, f"lost while no daemon ran: {error.message}", Outcome.INTERNAL)
            return
        self._reaper.watch(environment.id, environment.lease)
        recovered = self._by_itself(environment, "environment.recover").entry(
            "lifecycle", detail={"lost_executions": lost} if lost else {}
        )
        note(self._records.changed(environment, State.RUNNING, recovered))
        hit("recover.recovered")
        log.warning("recovered", environment=environment.id, lost_executions=lost)

    async def _reopen_network(self, environment: Environment, channel: Channel) -> None:
        """As it was; or none, which `info` tells."""
        if environment.policy.network == "none":
            return
        try:
            await self._open_network(environment, channel)
            assert environment.executions is not None
            assert environment.instance is not None
            environment.executions.variables = environment.base_variables(environment.instance.workspace_path)
        except SkerryError as error:
            log.error("its network is lost", environment=environment.id, error=str(error))
            environment.policy = with_network(environment.policy, "none", ())

    async def _finish_audit(self, environment: Environment, kept: Container[str]) -> None:
        """Give a result to what an earlier daemon has begun, but for executions that may still run."""
        for row in await self._records.unfinished(environment):
            if row.detail.get("execution_id") in kept and row.action == "execution":
                continue
            caller = Caller(environment.tenant, token=row.token, peer=row.peer, request_id=row.request_id)
            act = Act(self._records, caller, row.action, environment.subject, {}, begun=True)
            told = {name: row.detail[name] for name in ("execution_id",) if name in row.detail}
            act.end(str(Outcome.INTERNAL), **told, reason="the daemon ended before it was known")

    def _remembered(self, record: EnvironmentRecord, backend: Backend) -> Environment:
        image = Image(record.image, record.image_digest, "", None, {}, 0, 0.0, "")
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
        )
        environment.lease = Lease(self._clock, record.lifetime, record.idle, environment.busy)
        environment.recorded = True
        return environment

    def ready(self) -> str:
        """The isolation that an environment gets now. Raises DaemonUnavailable, IsolationUnavailable."""
        if self._closing:
            raise DaemonUnavailable("the daemon is stopping", hint="try again: a new one will start")
        return self._registry.pick(Policy().isolation)[1].isolation

    def act(self, caller: Caller, action: str, **detail: Any) -> Act:
        """Something that is done to no environment, for the audit."""
        return Act(self._records, caller, action, None, detail)

    def deny(self, caller: Caller, action: str, error: SkerryError, **detail: Any) -> None:
        """Write down that a caller was refused something; so often a second, so that nobody fills the disk with it."""
        most = DENIALS_A_SECOND if caller.token else 1
        since, count = self._denials.pop(caller.token, (0.0, 0))
        now = time.monotonic()
        if now - since < 1.0:
            self._denials[caller.token] = since, count + 1
            if count >= most:
                return
            untold = 0
        else:
            self._denials[caller.token] = now, 1
            untold = max(0, count - most)
        if len(self._denials) > DENIERS_MAX:
            del self._denials[next(iter(self._denials))]
        log.warning("refused", action=action, code=error.code, who=caller.who, request=caller.request_id)
        act = Act(self._records, caller, action, None, {})
        detail["not_told_before"] = untold or None
        note(self._records.audit(caller.tenant, act.entry("denial", error.code, detail=detail)))

    async def create(
        self,
        caller: Caller,
        *,
        policy: Policy,
        image: str = "host",
        name: str = "",
        lifetime: float = 3600.0,
        idle: float = 900.0,
        env: dict[str, str] | None = None,
        key: Key | None = None,
    ) -> Environment:
        """A running environment, or nothing at all. With a key that was used before: the one that it made.

        Raises InvalidRequest, Conflict (the name is taken, or the key was used for something else), ImageNotFound,
        IsolationUnavailable, LaunchFailed, GuestFailed, DiskFull, DaemonUnavailable (it is stopping),
        QuotaExceeded, StoreUnavailable.
        """
        if self._closing:
            raise DaemonUnavailable("the daemon is stopping", hint="try again: a new one will start")
        lifetime, idle = seconds(lifetime, "lifetime"), seconds(idle, "idle")
        check_variables(env or {})
        if name and not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"{name!r} is not a name for an environment",
                hint="a letter or digit, then up to 62 of A-Z a-z 0-9 _ . -",
            )
        taken = self._names.get((caller.tenant, name))
        if key is None and taken is not None:  # with a key it may be the one that is meant: the store knows
            raise Conflict(f"the name {name!r} is taken by environment {taken.id}")
        await self._understand(policy)
        found = self._images.get(image)
        backend, capabilities = self._registry.pick(policy.isolation)
        now = time.time()
        environment = Environment(
            id=backend.reserve(),
            tenant=caller.tenant,
            created_by=caller.who,
            name=name,
            image=found,
            policy=policy,
            backend=backend,
            isolation=capabilities.isolation,
            idle=idle,
            variables=dict(env or {}),
            created_at=now,
            expires_at=now + lifetime,
            key=key,
        )
        environment.lease = Lease(self._clock, lifetime, idle, environment.busy)
        self._live[environment.id] = environment
        if name:
            self._names.setdefault((caller.tenant, name), environment)
        asked = {
            "image": found.name,
            "name": name or None,
            "lifetime": lifetime,
            "idle": idle,
            "env": sorted(environment.variables) or None,
            **asdict(policy),
        }
        act = Act(self._records, caller, "environment.create", environment.subject, asked)
        hit("create.reserved")
        environment.creating = asyncio.create_task(self._start(environment, act))
        try:
            await asyncio.shield(environment.creating)
        except Exception as error:
            act.failed(error)
            if isinstance(error, QuotaExceeded):
                self._refused[caller.tenant] = time.monotonic()
                self.deny(caller, "environment.create", error, **error.detail)
            log.warning("create failed", environment=environment.id, error=str(error))
            with contextlib.suppress(SkerryError):
                await self._end(environment, NOT_STARTED, Outcome.INTERNAL)
            self._ended.pop(environment.id, None)
            raise
        if environment.repeats:
            await self._end(environment, "a repetition", Outcome.CANCELED)
            self._ended.pop(environment.id, None)
            return await self._first(caller, environment.repeats)
        if environment.state is not State.RUNNING:
            act.end(CANCELED)
            raise self._gone(environment)
        hit("create.served")
        act.end("completed")
        return environment

    async def _first(self, caller: Caller, environment_id: str) -> Environment:
        """What the first request with a key has made."""
        try:
            environment = self.find(caller, environment_id)
            if environment.creating is not None:
                await asyncio.shield(environment.creating)
        except SkerryError:
            raise Conflict(
                "the first request with this key has failed, or another daemon has served it",
                hint="try again, with a new key if this one stays refused",
            ) from None
        return environment

    def find(self, caller: Caller, ref: str) -> Environment:
        """One of the caller's tenant, by id, name or beginning of an id; live ones first.

        Raises EnvironmentNotFound, InvalidRequest.
        """
        tenant = caller.tenant
        found = self._live.get(ref)
        if found is not None and found.tenant == tenant:
            return found
        if (named := self._names.get((tenant, ref))) is not None:
            return named
        self._purge()
        found = found or self._ended.get(ref)
        if found is not None and found.tenant == tenant:
            return found
        if PREFIX_MIN <= len(ref) < LENGTH:
            for table in (self._live, self._ended):
                matches = [
                    environment
                    for id, environment in table.items()
                    if id.startswith(ref) and environment.tenant == tenant
                ]
                if len(matches) > 1:
                    raise InvalidRequest(
                        f"{ref!r} is the beginning of {len(matches)} ids", hint="write more of it"
                    )
                if matches:
                    return matches[0]
        for environment in reversed(self._ended.values()):
            if ref and environment.name == ref and environment.tenant == tenant:
                return environment
        missing = EnvironmentNotFound(f"no environment {ref!r}", hint="`skerry ls` lists those that run")
        if found is not None:
            self.deny(caller, "environment.find", missing, environment_id=ref)
        raise missing

    def running(self, caller: Caller, ref: str) -> tuple[Environment, Executions]:
        """One that can be worked with. Raises EnvironmentEnded, Conflict and what `find()` does."""
        environment = self.find(caller, ref)
        if environment.state is State.CREATING:
            raise Conflict(
                f"environment {environment.id} is still being created", hint="try again in a moment"
            )
        if environment.state is not State.RUNNING or environment.executions is None:
            raise self._gone(environment)
        return environment, environment.executions

    @contextlib.asynccontextmanager
    async def using(self, caller: Caller, ref: str, action: str, **detail: Any) -> AsyncIterator[Use]:
        """The channel of an environment, in use until the block ends, for something that the audit tells.

        Raises StoreUnavailable and what `running()` does.
        """
        environment, executions = self.running(caller, ref)
        act = executions.act(caller, action, detail)
        use = Use(executions.channel)
        environment.uses += 1
        environment.lease.touch()
        try:
            await act.begin()
            if environment.state is not State.RUNNING:
                raise self._gone(environment)
            yield use
        except BaseException as error:
            act.failed(error)
            raise
        else:
            act.end("completed", **use.told)
        finally:
            environment.uses -= 1
            environment.lease.touch()

    def environments(self, caller: Caller, *, ended: bool = False) -> list[Environment]:
        """All live ones of the caller's tenant, oldest first; with `ended` those of the last day before them."""
        self._purge()
        found = [*(self._ended.values() if ended else ()), *self._live.values()]
        return [environment for environment in found if environment.tenant == caller.tenant]

    async def heartbeat(self, caller: Caller, ref: str, lifetime: float | None = None) -> float:
        """Live for `lifetime` (or what it was created with) from now; returns the new unix time of its end.

        Raises EnvironmentEnded, StoreUnavailable, and what `find()` does.
        """
        environment, executions = self.running(caller, ref)
        lifetime = environment.lease.lifetime if lifetime is None else seconds(lifetime, "lifetime")
        environment.lease.extend(lifetime)
        environment.expires_at = time.time() + lifetime
        self._reaper.watch(environment.id, environment.lease)
        act = executions.act(caller, "environment.heartbeat", {})
        extended = act.entry("lifecycle", detail={"lifetime": lifetime})
        hit("heartbeat.extended")
        await self._records.changed(environment, State.RUNNING, extended)
        hit("heartbeat.recorded")
        return environment.expires_at

    def enforced(self, caller: Caller, ref: str) -> list[Enforcement]:
        """Every limit and protection as the kernel says it is now; nothing any more for one that has ended."""
        environment = self.find(caller, ref)
        if environment.state is not State.RUNNING:
            return []
        rows = environment.backend.enforced(environment.id)
        if environment.network is None:
            return rows
        by = "a network namespace whose only way out is our proxy"
        proxied = Enforcement("network", True, environment.policy.network, by)
        return [proxied if row.name == "network" else row for row in rows]

    async def set_network(
        self, caller: Caller, ref: str, network: str, allow: Collection[str] | None
    ) -> None:
        """Another kind of network, with these rules, or with those that it has. See `change_network`."""
        await self._change_network(caller, ref, lambda policy: with_network(policy, network, allow))

    async def change_network(
        self, caller: Caller, ref: str, *, add: Collection[str] = (), remove: Collection[str] = ()
    ) -> None:
        """Other rules of its allowlist. They count from now on, also for connections that are open.

        Raises InvalidRequest, IsolationUnavailable, StoreUnavailable, and what `running()` does.
        """
        await self._change_network(caller, ref, lambda policy: with_rules(policy, add, remove))

    async def _change_network(self, caller: Caller, ref: str, change: Callable[[Policy], Policy]) -> None:
        environment, executions = self.running(caller, ref)
        async with environment.changing:
            policy = change(environment.policy)
            meaning = await self._understand(policy)
            told = {"network": policy.network, "allow": list(policy.allow)}
            async with executions.act(caller, "network.set", told):
                before, environment.policy = environment.policy, policy
                try:
                    if environment.network is not None:
                        environment.network.change(meaning.rules)
                        await self._prepare(environment, executions.channel, meaning)
                    elif policy.network != "none":
                        await self._open_network(environment, executions.channel)
                except SkerryError:
                    environment.policy = before
                    raise
                assert environment.instance is not None
                executions.variables = environment.base_variables(environment.instance.workspace_path)
                await self._records.changed(environment, State.RUNNING)

    def network(self, caller: Caller, ref: str) -> dict[str, Any]:
        """What it may reach, what it has sent and received, and what it was refused."""
        environment = self.find(caller, ref)
        told = NOTHING if environment.network is None else environment.network.told
        return {"network": environment.policy.network, "allow": list(environment.policy.allow), **told}

    async def usage(self, caller: Caller, ref: str) -> Usage:
        """What the kernel has counted; for one that has ended, until then."""
        environment = self.find(caller, ref)
        if environment.state is not State.RUNNING:
            return environment.used
        return await environment.backend.usage(environment.id)

    async def delete(self, caller: Caller, ref: str) -> Environment:
        """End it and remove every trace; any number of callers, at any time.

        A caller that is cancelled does not stop the removal, and neither does an audit that cannot be written:
        removing is the safe direction. Raises EnvironmentNotFound, PlatformError.
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
                await self._end(environment, reason, Outcome.CANCELED)
            except BaseException as error:
                act.failed(error)
                raise
        act.end("completed")
        return environment

    async def delete_all(self, reason: str) -> None:
        """End all of them. Raises the first PlatformError after having tried each."""
        ends = [self._end(environment, reason, Outcome.CANCELED) for environment in self._live.values()]
        for result in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def close(self, *, keep: bool = False) -> None:
        """Take no more, release the backends, and end all environments, or leave them to the next daemon."""
        self._closing = True
        try:
            if keep:
                await asyncio.gather(*(self._let_go(each) for each in tuple(self._live.values())))
            else:
                await self.delete_all("the daemon stopped")
        finally:
            self._reaper.close()
            await self._write_ends()
            for backend in self._registry.backends:
                await backend.close()

    def census(self) -> list[Environment]:
        """All live ones, of every tenant."""
        return list(self._live.values())

    def prepared(self) -> dict[tuple[str], int]:
        """How many instances each backend, by its name, has made ahead of need."""
        return {(backend.name,): backend.prepared() for backend in self._registry.backends}

    def in_use(self) -> set[str]:
        """The digests of images that live environments stand on. May be called from any thread."""
        return {environment.image.digest for environment in tuple(self._live.values())}

    async def _let_go(self, environment: Environment) -> None:
        if environment.creating is not None:
            await asyncio.wait((environment.creating,))
        if environment.ending is not None:
            await asyncio.wait((environment.ending,))
        if environment.watching is not None:
            environment.watching.cancel()
        environment.state = State.DELETING  # that its channel closes is no news
        if environment.network is not None:
            await environment.network.close()
        if environment.executions is not None:
            await environment.executions.let_go()

    # ---- the way up ----

    def _by_itself(self, environment: Environment, action: str) -> Act:
        """What no caller does."""
        return Act(
            self._records, Caller(tenant=environment.tenant, peer="daemon"), action, environment.subject, {}
        )

    async def _start(self, environment: Environment, act: Act) -> None:
        orphan = max(environment.lease.lifetime, ORPHAN_MIN)
        spec = InstanceSpec(environment.id, environment.image, environment.policy, orphan)
        written = asyncio.create_task(self._write_down(environment, act))  # as soon as this one has to wait
        since = time.monotonic() - self._refused.get(environment.tenant, -REFUSED_FOR)
        if environment.key is not None or since < REFUSED_FOR:
            await written  # nothing is made for a request that was made before
            if environment.repeats:
                return
        try:
            async with asyncio.timeout(START_TIMEOUT):
                environment.instance = await environment.backend.start(spec)
                hit("create.started")
                channel = await self._open_channel(await environment.backend.connect(environment.id))
                hit("create.connected")
                if environment.policy.network != "none":
                    await self._open_network(environment, channel)
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
        self._serve(environment, environment.instance, channel)
        environment.lease.touch()
        self._reaper.watch(environment.id, environment.lease)
        log.info(
            "created",
            environment=environment.id,
            image=environment.image.name,
            isolation=environment.isolation,
        )

    async def _understand(self, policy: Policy) -> Meaning:
        """Raises InvalidRequest, PlatformError."""
        return await understand(policy, self._ranges, self._preset)

    async def _open_network(self, environment: Environment, channel: Channel) -> None:
        meaning = await self._understand(environment.policy)
        await self._prepare(environment, channel, meaning)
        sockets = await environment.backend.open_network(environment.id)
        environment.network = Network(
            self._records, environment.tenant, environment.subject, sockets, meaning.rules
        )

    async def _prepare(self, environment: Environment, channel: Channel, meaning: Meaning) -> None:
        """Put what presets bring along where the variables say that it is."""
        for path, content in meaning.files.items():
            for at in range(0, len(content), WRITE_MAX):
                await channel.write(path, content[at : at + WRITE_MAX], at or None)
        environment.preset_variables = meaning.variables

    async def _write_down(self, environment: Environment, act: Act) -> None:
        await self._write_ends()  # or one of them might still have the name
        repeats = await act.begin_with(partial(self._records.created, environment))
        environment.repeats = repeats or ""
        environment.recorded = not environment.repeats
        hit("create.recorded")

    def _serve(self, environment: Environment, instance: Instance, channel: Channel) -> None:
        environment.executions = Executions(
            environment.tenant,
            environment.subject,
            environment.backend,
            channel,
            self._records,
            environment.base_variables(instance.workspace_path),
            touch=environment.lease.touch,
            lost=lambda reason: self._died(environment, reason),
        )
        environment.state = State.RUNNING
        channel.closed.add_done_callback(
            lambda closed: self._died(environment, f"the guest: {closed.result()}")
        )
        environment.watching = asyncio.create_task(self._watch(environment))

    async def _watch(self, environment: Environment) -> None:
        await environment.backend.wait(environment.id)
        self._died(environment, "the guest died")

    # ---- the way down ----

    def _expired(self, environment_id: str, reason: str) -> None:
        self._begin_end(self._live[environment_id], reason, Outcome.CANCELED)

    def _died(self, environment: Environment, reason: str) -> None:
        if environment.state is not State.RUNNING or environment.executions is None:
            return
        if environment.executions.sample().oom_kills > environment.executions.oom_kills:
            self._begin_end(environment, "out of memory", Outcome.OOM_KILLED)
        else:
            self._begin_end(environment, reason, Outcome.INTERNAL)

    async def _end(self, environment: Environment, reason: str, outcome: Outcome) -> None:
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
            if environment.watching is not None:
                environment.watching.cancel()
            if environment.recorded:
                await self._write_deleting(environment)
            hit("delete.noted")
            try:
                if environment.executions is not None:
                    await environment.executions.end(outcome, f"the environment ended: {environment.reason}")
            finally:
                if environment.network is not None:
                    await environment.network.close()
                hit("delete.executions")
                with contextlib.suppress(SkerryError):
                    environment.used = await environment.backend.usage(environment.id)
                await environment.backend.stop(environment.id)
            hit("delete.stopped")
        except BaseException as error:
            log.error("removal failed, will be tried again", environment=environment.id, error=str(error))
            environment.ending = None
            retry = Lease(self._clock, RETRY_AFTER, RETRY_AFTER, environment.busy)
            if not self._closing:
                self._reaper.watch(environment.id, retry)
            raise
        if environment.recorded:
            await self._write_end(environment)
        hit("delete.recorded")
        environment.state = State.ENDED
        environment.ended_at = self._clock.time()
        environment.executions = None
        del self._live[environment.id]
        if self._names.get((environment.tenant, environment.name)) is environment:
            del self._names[environment.tenant, environment.name]
        self._ended[environment.id] = environment
        self._purge()
        log.info("ended", environment=environment.id, reason=environment.reason)

    async def _write_deleting(self, environment: Environment) -> None:
        """From here on there is no way back, for the next daemon neither. A store that cannot be written is no
        reason to keep it."""
        try:
            await self._records.changed(environment, State.DELETING)
        except SkerryError as error:
            log.error("not written down", environment=environment.id, error=str(error))

    async def _write_end(self, environment: Environment) -> None:
        """Nothing of it is left, whatever the store says: if that cannot take it now, its row follows later."""
        self._unwritten[environment.id] = environment
        entry = self._by_itself(environment, "environment.end").entry(
            "lifecycle", str(environment.outcome), environment.used, {"reason": environment.reason}
        )
        try:
            await self._records.changed(environment, State.ENDED, entry)
        except SkerryError as error:
            log.error("its end is not written down yet", environment=environment.id, error=str(error))
        else:
            self._unwritten.pop(environment.id, None)

    async def _write_ends(self) -> None:
        await asyncio.gather(*map(self._write_end, tuple(self._unwritten.values())))

    def _purge(self) -> None:
        old = self._clock.time() - REMEMBER_FOR
        while self._ended and (first := next(iter(self._ended.values()))).ended_at < old:
            del self._ended[first.id]
        if len(self._ended) > REMEMBER_MAX:
            # Whoever has most of them loses one, so that nobody can make the others' be forgotten.
            [(most, _)] = Counter(environment.tenant for environment in self._ended.values()).most_common(1)
            del self._ended[next(id for id, each in self._ended.items() if each.tenant == most)]

    def _gone(self, environment: Environment) -> EnvironmentEnded:
        reason = environment.reason or "deleted"
        return EnvironmentEnded(f"environment {environment.id} has ended: {reason}", hint="create a new one")


def _retrieve(task: asyncio.Future[None]) -> None:
    """Failures are logged where they happen and raised to those who await; asyncio need not repeat them."""
    if not task.cancelled():
        task.exception()
