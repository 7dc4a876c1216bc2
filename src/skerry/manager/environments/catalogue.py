"""Which environments there are, and how they are called.

All is in memory and changes between two awaits, so that what is found is true until the next one.
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
    """Live environments, and for a day those that have ended."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.live: dict[str, Environment] = {}
        self._names: dict[tuple[str, str], Environment] = {}
        """By tenant and name."""
        self._ended: dict[str, Environment] = {}

    def add(self, environment: Environment) -> None:
        """A live one. Of two with one name the first is found by it."""
        self.live[environment.id] = environment
        if environment.name:
            self._names.setdefault((environment.tenant, environment.name), environment)

    def ended(self, environment: Environment, at: float) -> None:
        """It lives no more, since this time of our clock."""
        environment.ended_at = at
        environment.forget_means()
        self.live.pop(environment.id, None)
        if self._names.get((environment.tenant, environment.name)) is environment:
            del self._names[environment.tenant, environment.name]
        self._ended[environment.id] = environment
        self._purge()

    def forget(self, environment: Environment) -> None:
        """There has never been such a one."""
        self._ended.pop(environment.id, None)

    def named(self, tenant: str, name: str) -> Environment | None:
        return self._names.get((tenant, name))

    def __contains__(self, environment_id: str) -> bool:
        """Whoever's it is."""
        return environment_id in self.live or environment_id in self._ended

    def list(self, tenant: str, *, ended: bool = False) -> list[Environment]:
        """All live ones of a tenant, oldest first; with `ended` those of the last day before them."""
        self._purge()
        found = [*(self._ended.values() if ended else ()), *self.live.values()]
        return [environment for environment in found if environment.tenant == tenant]

    def find(self, tenant: str, ref: str) -> Environment:
        """One of the tenant, by id, name or beginning of an id; live ones first.

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
            # Whoever has most of them loses one, so that nobody can make the others' be forgotten.
            [(most, _)] = Counter(environment.tenant for environment in self._ended.values()).most_common(1)
            del self._ended[next(id for id, each in self._ended.items() if each.tenant == most)]
