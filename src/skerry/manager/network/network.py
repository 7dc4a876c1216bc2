"""The network of an environment: what it may reach, and the proxy that takes it there."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import structlog

from skerry.egress import presets
from skerry.egress.addresses import Ranges
from skerry.egress.limits import Meter
from skerry.egress.presets import Preset
from skerry.egress.proxy import Connection, Denial, Proxy, Witness
from skerry.egress.resolver import resolve
from skerry.egress.rules import RULES_MAX, Rules
from skerry.errors import EnvironmentEnded, InvalidRequest, SkerryError
from skerry.fairness import budget
from skerry.guest.channel import WRITE_MAX
from skerry.manager.audit.acts import Act, Subject, note
from skerry.manager.caller import Caller
from skerry.models import State
from skerry.policy import Limits, Policy

if TYPE_CHECKING:
    from skerry.guest.channel import Channel
    from skerry.host.network import Sockets
    from skerry.manager.environments.environment import Environment
    from skerry.manager.environments.records import Records
    from skerry.manager.executions.registry import Executions

ACTION = "network.connect"
ONE_BY_ONE = 60
"""Connections of an environment in a window that have rows of their own in the audit."""
WINDOW = 60.0
"""Seconds."""
PLACES_MAX = 100
"""Destinations that are counted by name among the others."""

log = structlog.get_logger(component="network")


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a policy says of the network, with the presets that it names spelled out."""

    rules: Rules
    variables: dict[str, str]
    files: dict[str, bytes]


async def understand(policy: Policy, ranges: Ranges, preset: Callable[[str], Preset]) -> Meaning:
    """Raises InvalidRequest, and PlatformError for a preset of which nothing can be found out."""
    check_count(policy.allow)
    rules: list[str] = []
    variables: dict[str, str] = {}
    files: dict[str, bytes] = {}
    for text in policy.allow:
        if text not in presets.names():
            rules.append(_checked(text))
            continue
        found = await asyncio.to_thread(preset, text)
        rules += found.rules
        variables |= found.variables
        files |= dict(found.files)
    return Meaning(Rules.parse(policy.network, rules, ranges), variables, files)


def check_count(rules: Collection[str]) -> None:
    """Before anything is done with them. Raises InvalidRequest."""
    if len(rules) > RULES_MAX:
        raise InvalidRequest(f"{len(rules)} rules are too many", hint=f"at most {RULES_MAX}")


def _checked(text: str) -> str:
    """Two mistakes that are better explained than refused. Raises InvalidRequest."""
    if "://" in text:
        raise InvalidRequest(
            f"{text!r} is a URL, and not a rule", hint="write its host alone: api.example.com"
        )
    if not any(mark in text for mark in ".:/"):
        raise InvalidRequest(
            f"{text!r} is neither a preset nor the full name of a host",
            hint=f"presets: {', '.join(presets.names())}",
        )
    return text


class Network:
    """Made when an environment first gets a network; it stays until the environment ends."""

    def __init__(
        self, records: Records, environment: Environment, sockets: Sockets, rules: Rules, limits: Limits
    ) -> None:
        def note_traffic() -> None:
            if environment.state is State.RUNNING:
                note(records.changed(environment, State.RUNNING))

        caller = Caller(tenant=environment.tenant, peer="environment")
        self._witness = witness = _Audited(records, caller, environment.subject)
        meter = Meter(limits, environment.traffic, note=note_traffic)
        flow = budget().flow(environment.tenant)
        self._proxy = Proxy(rules, sockets.tcp, sockets.udp, witness, resolve, meter, flow)

    @property
    def rules(self) -> Rules:
        return self._proxy.rules

    def change(self, rules: Rules, limits: Limits) -> None:
        self._proxy.change(rules, limits)

    @property
    def told(self) -> dict[str, Any]:
        """What it does, and what it has refused."""
        return {
            "connections": len(self._proxy.connections),
            "denials": [asdict(denial) for denial in self._proxy.denials],
        }

    async def close(self) -> None:
        await self._proxy.close()
        self._witness.close()


def describe(environment: Environment) -> dict[str, Any]:
    """What it may reach and how much, what it has sent and received, and what it was refused."""
    policy, network = environment.policy, environment.network
    return {
        "network": policy.network,
        "allow": list(policy.allow),
        "limits": {"connections": policy.limits.connections, "traffic": policy.limits.traffic},
        "sent_bytes": environment.traffic.sent,
        "received_bytes": environment.traffic.received,
        **({"connections": 0, "denials": []} if network is None else network.told),
    }


def with_network(policy: Policy, network: str | None, allow: Collection[str] | None, **limits: Any) -> Policy:
    """Another kind of network, other rules, other limits; None leaves each as it is. Raises InvalidRequest."""
    kind = policy.network if network is None else network
    kept = policy.allow if allow is None and kind == "allowlist" else tuple(dict.fromkeys(allow or ()))
    return replace(policy, network=kind, allow=kept, limits=policy.limits.changed(limits))


def with_rules(policy: Policy, add: Collection[str], remove: Collection[str]) -> Policy:
    """Other rules of an allowlist, which one without a network gets. Raises InvalidRequest."""
    if policy.network == "public":
        raise InvalidRequest(
            "every public address is allowed already, and single ones cannot be taken away",
            hint="set the network to 'allowlist' first",
        )
    check_count(add)
    check_count(remove)
    unknown = [rule for rule in remove if rule not in policy.allow]
    if unknown:
        raise InvalidRequest(
            f"{unknown[0]!r} is not in the allowlist", hint=f"in it: {', '.join(policy.allow) or 'nothing'}"
        )
    kept = [rule for rule in policy.allow if rule not in remove]
    kind = "allowlist" if add else policy.network
    return replace(policy, network=kind, allow=tuple(dict.fromkeys((*kept, *add))))


class Networks:
    """Gives environments their network, and changes it."""

    def __init__(self, records: Records, ranges: Ranges, preset: Callable[[str], Preset]) -> None:
        self._records = records
        self._ranges = ranges
        self._preset = preset

    async def understand(self, policy: Policy) -> Meaning:
        """Raises InvalidRequest, PlatformError."""
        return await understand(policy, self._ranges, self._preset)

    async def open(self, environment: Environment, channel: Channel) -> None:
        """As its policy says, which is not `none`. Raises InvalidRequest, PlatformError."""
        meaning = await self.understand(environment.policy)
        environment.network = await self._open(environment, channel, meaning, environment.policy.limits)

    async def _open(
        self, environment: Environment, channel: Channel, meaning: Meaning, limits: Limits
    ) -> Network:
        await self._prepare(environment, channel, meaning)
        sockets = await environment.backend.open_network(environment.id)
        return Network(self._records, environment, sockets, meaning.rules, limits)

    async def _open_serving(
        self, environment: Environment, channel: Channel, meaning: Meaning, limits: Limits
    ) -> None:
        """As `_open`, for one that runs, and may end at every await: nobody would close the network after that.

        Raises EnvironmentEnded as well.
        """
        network = await self._open(environment, channel, meaning, limits)
        if not environment.serving:
            await network.close()
            raise environment.gone()
        environment.network = network

    async def reopen(self, environment: Environment, executions: Executions) -> None:
        """As it was before this daemon; or none, which `info` tells. Raises EnvironmentEnded."""
        if environment.policy.network == "none":
            return
        try:
            meaning = await self.understand(environment.policy)
            await self._open_serving(environment, executions.channel, meaning, environment.policy.limits)
            executions.variables = environment.base_variables()
        except EnvironmentEnded:
            raise
        except SkerryError as error:
            log.error("its network is lost", environment=environment.id, error=str(error))
            environment.policy = with_network(environment.policy, "none", ())

    async def change(
        self, caller: Caller, environment: Environment, executions: Executions, policy: Policy
    ) -> None:
        """It counts from now on, also for connections that are open. What fails leaves it as it was.

        Raises InvalidRequest, IsolationUnavailable, StoreUnavailable, EnvironmentEnded.
        """
        meaning = await self.understand(policy)
        limits = policy.limits
        told = {
            "network": policy.network,
            "allow": list(policy.allow),
            "connections": limits.connections,
            "traffic": limits.traffic,
        }
        async with executions.act(caller, "network.set", told):
            if not environment.serving:
                raise environment.gone()
            network = environment.network
            if network is not None:
                before = network.rules
                # First of all: nothing that the guest does may put it off.
                network.change(meaning.rules, limits)
                try:
                    await self._prepare(environment, executions.channel, meaning)
                except BaseException:
                    network.change(before, environment.policy.limits)
                    raise
            elif policy.network != "none":
                await self._open_serving(environment, executions.channel, meaning, limits)
            if not environment.serving:
                raise environment.gone()
            environment.policy = policy
            executions.variables = environment.base_variables()
            await self._records.changed(environment, State.RUNNING)

    async def _prepare(self, environment: Environment, channel: Channel, meaning: Meaning) -> None:
        """Put what presets bring along where the variables say that it is."""
        for path, content in meaning.files.items():
            for at in range(0, len(content), WRITE_MAX):
                await channel.write(path, content[at : at + WRITE_MAX], at or None)
        environment.preset_variables = meaning.variables


class _Rest:
    """Connections of one window that share an intent and a result: those after the first few."""

    def __init__(self, act: Act) -> None:
        self.act = act
        self.begun: asyncio.Future[None] = asyncio.ensure_future(act.begin())
        self.begun.add_done_callback(
            lambda begun: begun.cancelled() or begun.exception()
        )  # told to who awaits it
        self.timer: asyncio.TimerHandle | None = None
        self.open = 0
        self.over = False
        """Whether its window has ended: no connection is added any more."""
        self._count = self._failed = self._sent = self._received = self._others = 0
        self._places: Counter[str] = Counter()

    def add(self, connection: Connection) -> None:
        self.open += 1
        self._count += 1
        place = f"{connection.host}:{connection.port}"
        if place in self._places or len(self._places) < PLACES_MAX:
            self._places[place] += 1
        else:
            self._others += 1

    def closed(self, connection: Connection) -> None:
        self.open -= 1
        self._failed += connection.verdict != "allowed"
        self._sent += connection.sent
        self._received += connection.received
        self.end_if_done()

    def end_if_done(self) -> None:
        if self.over and not self.open:
            self.act.end(
                "completed",
                connections=self._count,
                failed=self._failed,
                places=dict(self._places),
                other_places=self._others,
                sent_bytes=self._sent,
                received_bytes=self._received,
            )


class _Audited(Witness):
    """Every connection has an intent before it is made and a result after it; what is refused is a denial.

    After the first ONE_BY_ONE of a window, those that follow in it have one intent and one result together.
    """

    def __init__(self, records: Records, caller: Caller, subject: Subject) -> None:
        self._records = records
        self._caller = caller
        self._subject = subject
        self._open: dict[Connection, Act | _Rest] = {}
        self._since = -math.inf
        self._count = 0
        self._rest: _Rest | None = None

    async def opening(self, connection: Connection) -> None:
        now = time.monotonic()
        if now - self._since >= WINDOW:
            self._since, self._count = now, 0
            self._end_window()
        self._count += 1
        if self._count <= ONE_BY_ONE:
            act = self._act(_told(connection))
            self._open[connection] = act  # before: a connection can be cut while that is being written
            await act.begin()
            return
        if self._rest is None:
            self._rest = _Rest(self._act({**_told(connection), "and_more": True}))
            self._rest.timer = asyncio.get_running_loop().call_later(WINDOW, self._end_window)
        rest = self._open[connection] = self._rest
        rest.add(connection)
        try:
            await asyncio.shield(rest.begun)
        except SkerryError:
            if rest is self._rest:  # the next connection tries again
                self._end_window()
            raise

    def _act(self, told: dict[str, Any]) -> Act:
        # An id of its own tells which result is whose, and what has none after a crash.
        caller = replace(self._caller, request_id=token_hex(8))
        return Act(self._records, caller, ACTION, self._subject, told)

    def _end_window(self) -> None:
        """Let the result of its connections be written when all of them are closed."""
        rest, self._rest = self._rest, None
        if rest is not None:
            if rest.timer is not None:
                rest.timer.cancel()
            rest.over = True
            rest.end_if_done()

    def close(self) -> None:
        """No connection follows."""
        self._end_window()

    def closed(self, connection: Connection) -> None:
        act = self._open.pop(connection, None)
        if isinstance(act, _Rest):
            act.closed(connection)
        elif act is not None:
            act.end(
                "completed" if connection.verdict == "allowed" else "failed",
                **_told(connection),
                verdict=connection.verdict,
                sent_bytes=connection.sent,
                received_bytes=connection.received,
            )

    def denied(self, denial: Denial) -> None:
        act = Act(self._records, self._caller, ACTION, self._subject, {})
        detail = {"host": denial.host, "port": denial.port, "reason": denial.reason}
        note(
            self._records.audit(self._caller.tenant, act.entry("denial", "denied", detail=detail), later=True)
        )


def _told(connection: Connection) -> dict[str, Any]:
    return {"host": connection.host, "port": connection.port, "address": str(connection.address)}
