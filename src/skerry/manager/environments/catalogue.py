"""The environments that exist, by id and name, in memory.

It changes only between awaits, so a lookup stays valid until the next await.
"""

from __future__ import annotations

from collections import Counter

from skerry.errors import EnvironmentNotFound, InvalidRequest
from skerry.ids import LENGTH
from skerry.manager.clock import Clock
from skerry.manager.environments.environment import Environment

REMEMBER_FOR = 86400.0
REMEMBER_MAX = 1000
PREFIX_MIN = 3


class Catalogue:
    """Live environments, and those that ended within the last day."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.live: dict[str, Environment] = {}
        self._names: dict[tuple[str, str], Environment] = {}
        """By tenant and name."""
        self._ended: dict[str, Environment] = {}

    def add(self, environment: Environment) -> None:
        """Add a live one. If two have the same name, the first is found by it."""
        self.live[environment.id] = environment
        if environment.name:
            self._names.setdefault((environment.tenant, environment.name), environment)

    def ended(self, environment: Environment, at: float) -> None:
        """Move it to the ended ones, as of this time of our clock."""
        environment.ended_at = at
        environment.forget_means()
        self.live.pop(environment.id, None)
        if self._names.get((environment.tenant, environment.name)) is environment:
            del self._names[environment.tenant, environment.name]
        self._ended[environment.id] = environment
        self._purge()

    def forget(self, environment: Environment) -> None:
        """Drop it from the history."""
        self._ended.pop(environment.id, None)

    def named(self, tenant: str, name: str) -> Environment | None:
        return self._names.get((tenant, name))

    def __contains__(self, environment_id: str) -> bool:
        """True for the id of any tenant's."""
        return environment_id in self.live or environment_id in self._ended

    def list(self, tenant: str, *, ended: bool = False) -> list[Environment]:
        """Live ones of a tenant, oldest first; with `ended`, those of the last day come before them."""
        self._purge()
        found = [*(self._ended.values() if ended else ()), *self.live.values()]
        return [environment for environment in found if environment.tenant == tenant]

    def find(self, tenant: str, ref: str) -> Environment:
        """An environment of the tenant, by id, name or prefix of an id; live ones first.

        Raises EnvironmentNotFound, InvalidRequest.
        """
        found = self.live.get(ref)
        if found is not None and found.tenant == tenant:
            return found
        if (named := self._names.get((tenant, ref))) is not None:
            return named
        self._purge()
        found = self._ended.get(ref)
        if found is not None and found.tenant == tenant:
            return found
        if PREFIX_MIN <= len(ref) < LENGTH:
            for table in (self.live, self._ended):
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
        raise EnvironmentNotFound(f"no environment {ref!r}", hint="`skerry ls` lists those that run")

    def _purge(self) -> None:
        old = self._clock.time() - REMEMBER_FOR
        while self._ended and (first := next(iter(self._ended.values()))).ended_at < old:
            del self._ended[first.id]
        if len(self._ended) > REMEMBER_MAX:
            # Evict from the tenant that has most, so that no tenant can evict those of others.
            [(most, _)] = Counter(environment.tenant for environment in self._ended.values()).most_common(1)
            del self._ended[next(id for id, each in self._ended.items() if each.tenant == most)]
