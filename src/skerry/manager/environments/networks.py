"""Opens the network of environments, and changes it while they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog

from skerry.egress.addresses import Ranges
from skerry.egress.presets import Preset
from skerry.errors import EnvironmentEnded, SkerryError
from skerry.guest.channel import WRITE_MAX, Channel
from skerry.manager.audit.acts import note
from skerry.manager.caller import Caller
from skerry.manager.environments.environment import Environment
from skerry.manager.environments.records import Records
from skerry.manager.executions.registry import Executions
from skerry.manager.network.network import Network
from skerry.manager.network.rules import Meaning, understand, with_network
from skerry.models import State
from skerry.policy import Limits, Policy

log = structlog.get_logger(component="network")


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

        def note_traffic() -> None:
            if environment.state is State.RUNNING:
                note(self._records.changed(environment, State.RUNNING))

        return Network(
            self._records,
            environment.tenant,
            environment.subject,
            environment.traffic,
            sockets,
            meaning.rules,
            limits,
            note_traffic=note_traffic,
        )

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
            await self._open_serving(
                environment, executions.runtime.channel, meaning, environment.policy.limits
            )
            executions.runtime.variables = environment.base_variables()
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
        async with executions.runtime.act(caller, "network.set", told):
            if not environment.serving:
                raise environment.gone()
            network = environment.network
            if network is not None:
                before = network.rules
                # First of all: nothing that the guest does may put it off.
                network.change(meaning.rules, limits)
                try:
                    await self._prepare(environment, executions.runtime.channel, meaning)
                except BaseException:
                    network.change(before, environment.policy.limits)
                    raise
            elif policy.network != "none":
                await self._open_serving(environment, executions.runtime.channel, meaning, limits)
            if not environment.serving:
                raise environment.gone()
            environment.policy = policy
            executions.runtime.variables = environment.base_variables()
            await self._records.changed(environment, State.RUNNING)

    async def _prepare(self, environment: Environment, channel: Channel, meaning: Meaning) -> None:
        """Put what presets bring along where the variables say that it is."""
        for path, content in meaning.files.items():
            for at in range(0, len(content), WRITE_MAX):
                await channel.write(path, content[at : at + WRITE_MAX], at or None)
        environment.preset_variables = meaning.variables
