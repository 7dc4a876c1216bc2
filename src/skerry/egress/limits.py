"""How much of the network an environment may use: connections at once, and bytes as long as it lives."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass

from skerry.policy import KIB, MIB, Limits, format_size

SURPLUS_MAX = 64
"""Connections above the limit that are told why; all further ones are reset without a word."""
HELD_MAX = 64 * MIB
"""Bytes that all connections together should hold of what they pass on."""
PIECE_MIN, PIECE_MAX = 4 * KIB, 256 * KIB
FREE_BUFFERS = 16
"""Connections whose buffers the kernel makes as large as a fast and far server needs them: megabytes."""
BUFFERS_MAX = 32 * MIB
BUFFER_MIN, BUFFER_MAX = 32 * KIB, 512 * KIB
"""Of the others: bytes of all of them together, about, and of each."""
NOTED_EVERY = 64 * MIB
"""Bytes after which what was used is written down, or a 64th of the limit if that is less."""


@dataclass(slots=True)
class Traffic:
    """What an environment has sent and received since it was made, also by earlier daemons."""

    sent: int = 0
    received: int = 0


class Crowd:
    """The connections of all environments together.

    Each takes two descriptors of this process. They get half of those that it may have, and nobody gets more of that
    than what is left: of many that want all they can get, each gets the same, and there is as much for the next.
    """

    def __init__(self) -> None:
        self.count = 0

    @property
    def room(self) -> int:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return files // 4 - self.count

    @property
    def piece(self) -> int:
        """Bytes that one may hold, each way: less, the more there are."""
        return max(PIECE_MIN, min(PIECE_MAX, HELD_MAX // 2 // max(1, self.count)))

    @property
    def buffer(self) -> int:
        """Bytes that the kernel may hold for a connection that begins, each way: less, the more there are; 0: any."""
        if self.count <= FREE_BUFFERS:
            return 0
        return max(BUFFER_MIN, min(BUFFER_MAX, BUFFERS_MAX // self.count))


everybody = Crowd()


class Meter:
    """Holds one environment to its limits."""

    def __init__(
        self,
        limits: Limits,
        traffic: Traffic,
        crowd: Crowd = everybody,
        note: Callable[[], None] = lambda: None,
    ) -> None:
        """`note` is called now and then when there was traffic, for what shall be known after a crash."""
        self.limits = limits
        self.traffic = traffic
        self._crowd = crowd
        self._note = note
        self._unnoted = 0
        self._spent = False

    def change(self, limits: Limits) -> None:
        self.limits = limits
        self._spent = False

    def enter(self, count: int) -> str:
        """Take a place for one more than `count` connections, or say why there is none."""
        if count >= self.limits.connections:
            return (
                f"its limit of {self.limits.connections} connections at once is reached"
                "; env.network.set(connections=...) changes it"
            )
        if count >= self._crowd.room:
            return "the environments here have too many connections at once"
        self._crowd.count += 1
        return ""

    def enter_surplus(self, count: int) -> bool:
        """Take a place for one more than `count` connections that are told why they get no other, if there is one."""
        if count >= min(SURPLUS_MAX, self._crowd.room):
            return False
        self._crowd.count += 1
        return True

    def piece(self) -> int:
        """How many bytes a connection may hold at a time, each way."""
        return self._crowd.piece

    def buffer(self) -> int:
        """How many bytes the kernel may hold for a connection that begins, each way; 0: any."""
        return self._crowd.buffer

    def leave(self) -> None:
        """Give a place back."""
        self._crowd.count -= 1

    def spent(self) -> str:
        """Why nothing can be sent and received any more; "" if something can."""
        used = self.traffic.sent + self.traffic.received
        if not self._spent and used < self.limits.traffic:
            return ""
        return (
            f"its limit of {format_size(self.limits.traffic)} sent and received is used up"
            "; env.network.set(traffic=...) changes it"
        )

    def count(self, sent: int, received: int) -> bool:
        """Whether so much more is within the limit. From the first time that it is not, nothing is."""
        if self._spent:
            return False
        self._spent = self.traffic.sent + self.traffic.received + sent + received > self.limits.traffic
        if not self._spent:
            self.traffic.sent += sent
            self.traffic.received += received
        self._unnoted += sent + received
        if self._spent or self._unnoted >= min(NOTED_EVERY, self.limits.traffic // 64):
            self._unnoted = 0
            self._note()
        return not self._spent
