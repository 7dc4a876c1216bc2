"""What a caller asks for when it creates an environment."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

from skerry.backends.base import Layer
from skerry.errors import InvalidRequest
from skerry.images.store import Image
from skerry.languages import Language
from skerry.manager.environments.environment import Key
from skerry.manager.executions.commands import check_environment
from skerry.policy import Policy, at_least, seconds

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


@dataclass(frozen=True, slots=True)
class CreateRequest:
    """Raises InvalidRequest if a lifetime, a variable or the name is not allowed."""

    policy: Policy
    image: str = "host"
    name: str = ""
    backend: str = ""
    """The only one that may serve it; empty: any that gives the isolation."""
    lifetime: float = 3600.0
    idle: float = 900.0
    env: dict[str, str] = field(default_factory=dict)
    key: Key | None = None
    """Repeats an earlier request: the environment that it made is the answer."""
    program: bool = False
    """For one program, whose caller waits: see InstanceSpec. It ends with this daemon."""
    survives: bool = True
    """The next daemon takes it over."""
    layers: tuple[Layer, ...] = ()
    language: Language | None = None
    """The program's, if that is known."""

    def __post_init__(self) -> None:
        for name in ("lifetime", "idle"):
            object.__setattr__(self, name, seconds(getattr(self, name), name))
        check_environment(self.env)
        if self.name and not _NAME.fullmatch(self.name):
            raise InvalidRequest(
                f"{self.name!r} is not a name for an environment",
                hint="a letter or digit, then up to 62 of A-Z a-z 0-9 _ . -",
            )

    @property
    def poolable(self) -> bool:
        """True if an entry of a pool can serve it."""
        return self.program == (self.language is not None) and not self.layers

    def with_isolation(self, least: str) -> CreateRequest:
        """This request, or one that asks for more isolation."""
        wanted = at_least(self.policy.isolation, least)
        if wanted == self.policy.isolation:
            return self
        return replace(self, policy=replace(self.policy, isolation=wanted))

    def audited(self, image: Image) -> dict[str, Any]:
        """What the audit records of it."""
        return {
            "image": image.name,
            "name": self.name or None,
            "backend": self.backend or None,
            "lifetime": self.lifetime,
            "idle": self.idle,
            "env": sorted(self.env) or None,
            **self.policy.to_dict(),
        }
