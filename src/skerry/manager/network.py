"""The network of an environment: what it may reach, and the proxy that takes it there."""

from __future__ import annotations

import asyncio
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
from skerry.egress.rules import Rules
from skerry.errors import InvalidRequest, SkerryError
from skerry.guest.channel import WRITE_MAX
from skerry.manager.audit import Act, Subject, note
from skerry.manager.caller import Caller
from skerry.models import State
from skerry.policy import Limits, Policy

if TYPE_CHECKING:
    from skerry.guest.channel import Channel
    from skerry.host.network import Sockets
    from skerry.manager.environment import Environment
    from skerry.manager.executions import Executions
    from skerry.manager.records import Records

ACTION = "network.connect"

log = structlog.get_logger(component="network")


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a policy says of the network, with the presets that it names spelled out."""

    rules: Rules
    variables: dict[str, str]
    files: dict[str, bytes]


async def understand(policy: Policy, ranges: Ranges, preset: Callable[[str], Preset]) -> Meaning:
    """Raises InvalidRequest, and PlatformError for a preset of which nothing can be found out."""
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
        witness = _Audited(records, caller, environment.subject)
        meter = Meter(limits, environment.traffic, note=note_traffic)
        self._proxy = Proxy(rules, sockets.tcp, sockets.udp, witness, resolve, meter)

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
        await self._open(
            environment, channel, await self.understand(environment.policy), environment.policy.limits
        )

    async def _open(
        self, environment: Environment, channel: Channel, meaning: Meaning, limits: Limits
    ) -> None:
        await self._prepare(environment, channel, meaning)
        sockets = await environment.backend.open_network(environment.id)
        environment.network = Network(self._records, environment, sockets, meaning.rules, limits)

    async def reopen(self, environment: Environment, executions: Executions) -> None:
        """As it was before this daemon; or none, which `info` tells."""
        if environment.policy.network == "none":
            return
        try:
            await self.open(environment, executions.channel)
            executions.variables = environment.base_variables()
        except SkerryError as error:
            log.error("its network is lost", environment=environment.id, error=str(error))
            environment.policy = with_network(environment.policy, "none", ())

    async def change(
        self, caller: Caller, environment: Environment, executions: Executions, policy: Policy
    ) -> None:
        """It counts from now on, also for connections that are open. What fails leaves it as it was.

        Raises InvalidRequest, IsolationUnavailable, StoreUnavailable.
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
                await self._open(environment, executions.channel, meaning, limits)
            environment.policy = policy
            executions.variables = environment.base_variables()
            await self._records.changed(environment, State.RUNNING)

    async def _prepare(self, environment: Environment, channel: Channel, meaning: Meaning) -> None:
        """Put what presets bring along where the variables say that it is."""
        for path, content in meaning.files.items():
            for at in range(0, len(content), WRITE_MAX):
                await channel.write(path, content[at : at + WRITE_MAX], at or None)
        environment.preset_variables = meaning.variables


class _Audited(Witness):
    """Every connection has an intent before it is made and a result after it; what is refused is a denial."""

    def __init__(self, records: Records, caller: Caller, subject: Subject) -> None:
        self._records = records
        self._caller = caller
        self._subject = subject
        self._open: dict[Connection, Act] = {}

    async def opening(self, connection: Connection) -> None:
        # An id of its own tells which result is whose, and what has none after a crash.
        caller = replace(self._caller, request_id=token_hex(8))
        act = Act(self._records, caller, ACTION, self._subject, _told(connection))
        self._open[connection] = act  # before: a connection can be cut while that is being written
        await act.begin()

    def closed(self, connection: Connection) -> None:
        act = self._open.pop(connection, None)
        if act is not None:
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
