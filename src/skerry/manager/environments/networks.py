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
    """Rules and limits of its network, traffic so far, and recent denials."""
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
    """Opens and changes the networks of environments."""

    def __init__(self, records: Records, ranges: Ranges, preset: Callable[[str], Preset]) -> None:
        self._records = records
        self._ranges = ranges
        self._preset = preset

    async def understand(self, policy: Policy) -> Meaning:
        """Raises InvalidRequest, PlatformError."""
        return await understand(policy, self._ranges, self._preset)

    async def open(self, environment: Environment, channel: Channel) -> None:
        """Open the network of its policy, which is not `none`. Raises InvalidRequest, PlatformError."""
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
        """As `_open`, for a running environment: closes the network again if the environment has ended meanwhile.

        Raises EnvironmentEnded as well.
        """
        network = await self._open(environment, channel, meaning, limits)
        if not environment.serving:
            await network.close()
            raise environment.gone()
        environment.network = network

    async def reopen(self, environment: Environment, executions: Executions) -> None:
        """Open it as before the restart; falls back to `none`, which `info` shows. Raises EnvironmentEnded."""
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
        """Takes effect at once, for open connections too. A failure leaves everything as it was.

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
                # First, so that the guest cannot delay it.
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
        """Write the files of presets to where their variables point."""
        for path, content in meaning.files.items():
            for at in range(0, len(content), WRITE_MAX):
                await channel.write(path, content[at : at + WRITE_MAX], at or None)
        environment.preset_variables = meaning.variables
