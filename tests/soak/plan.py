"""What actors and faults do: a pure function of the seed.

The same seed gives every actor the same actions, in the same order, with the same parameters and the same moments at
which it gives up. Not determined by it: how the actors' calls interleave, how far a call has come when its caller gives
up or the daemon is killed, and ids that the daemon makes. An action about a slot that is empty becomes a create.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

PATHS = ("a", "b", "c")
LARGE = 200_000
"""Characters of some files: enough for more than one frame."""

WEIGHTS = {
    "count": 10,
    "run": 6,
    "append": 6,
    "write": 8,
    "read": 6,
    "rename": 3,
    "remove": 3,
    "two_writes": 2,
    "time_out": 8,
    "background": 3,
    "kill": 2,
    "attach": 2,
    "session": 6,
    "interrupt": 2,
    "restart_sessions": 1,
    "network": 2,
    "heartbeat": 3,
    "look": 4,
    "verify": 4,
    "list": 2,
    "delete": 2,
    "delete_and_run": 1,
    "delete_and_network": 1,
}
"""Of an owner's actions."""


@dataclass(frozen=True)
class Action:
    kind: str
    slot: int
    """Which of the actor's environments."""
    number: int
    """Of the action: makes words unique."""
    path: str
    other: str
    """Another path."""
    large: bool
    gives_up: float | None
    """Seconds after which the caller disconnects."""
    chance: float
    """Between 0 and 1, for what else is to be decided."""


@dataclass(frozen=True)
class Fault:
    after: float
    """Seconds."""
    kind: str
    """`kill` or `stop`."""


def actions(seed: int, actor: str) -> Iterator[Action]:
    """The actions of one actor, without end."""
    chance = random.Random(f"{seed}/{actor}")
    kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
    number = 0
    while True:
        number += 1
        path, other = chance.sample(PATHS, 2)
        yield Action(
            kind=chance.choices(kinds, weights)[0],
            slot=chance.randrange(2),
            number=number,
            path=path,
            other=other,
            large=chance.random() < 0.2,
            gives_up=chance.expovariate(1 / 0.03) if chance.random() < 0.15 else None,
            chance=chance.random(),
        )


def faults(seed: int) -> Iterator[Fault]:
    """When the daemon is killed or stopped, without end."""
    chance = random.Random(f"{seed}/faults")
    while True:
        yield Fault(chance.uniform(1.5, 5.0), "kill" if chance.random() < 0.6 else "stop")
