"""Network limits of an environment: concurrent connections, and bytes over its lifetime."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass

from skerry.policy import KIB, MIB, Limits, format_size

SURPLUS_MAX = 64
"""Connections above the limit that get an error message; further ones are reset."""
HELD_MAX = 64 * MIB
"""Bytes that all connections together may buffer, approximately."""
PIECE_MIN, PIECE_MAX = 4 * KIB, 256 * KIB
FREE_BUFFERS = 16
"""Up to this many connections, the kernel sizes socket buffers freely (megabytes for fast, distant servers)."""
BUFFERS_MAX = 32 * MIB
BUFFER_MIN, BUFFER_MAX = 32 * KIB, 512 * KIB
"""Socket buffers beyond that: bytes of all connections together, approximately, and of each."""
NOTED_EVERY = 64 * MIB
"""Bytes between two writes of the used traffic to the store, or a 64th of the limit if that is less."""


@dataclass(slots=True)
class Traffic:
    """Bytes sent and received since the environment was created, also under earlier daemons."""

    sent: int = 0
    received: int = 0


class ConnectionTotal:
    """The connections of all environments together, with a fair share for each environment.

    Each takes two descriptors of this process. All together may use half of its descriptor limit; one environment may
    hold at most as many connections as are still free.
    """

    def __init__(self) -> None:
        self.count = 0

    @property
    def room(self) -> int:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return files // 4 - self.count

    @property
    def piece(self) -> int:
        """Bytes that one connection may buffer in each direction; shrinks with the number of connections."""
        return max(PIECE_MIN, min(PIECE_MAX, HELD_MAX // 2 // max(1, self.count)))

    @property
    def buffer(self) -> int:
        """Socket buffer of a new connection in each direction; shrinks with their number. 0 for no limit."""
        if self.count <= FREE_BUFFERS:
            return 0
        return max(BUFFER_MIN, min(BUFFER_MAX, BUFFERS_MAX // self.count))


all_connections = ConnectionTotal()


class Meter:
    """Enforces the network limits of one environment."""

    def __init__(
        self,
        limits: Limits,
        traffic: Traffic,
        total: ConnectionTotal = all_connections,
        note: Callable[[], None] = lambda: None,
    ) -> None:
        """`note` is called every NOTED_EVERY bytes, so that the traffic survives a crash."""
        self.limits = limits
        self.traffic = traffic
        self._total = total
        self._note = note
        self._unnoted = 0
        self._spent = False

    def change(self, limits: Limits) -> None:
        self.limits = limits
        self._spent = False

    def enter(self, count: int) -> str:
        """Admit one more than `count` connections. Returns the reason for a refusal, else ""."""
        if count >= self.limits.connections:
            return (
                f"its limit of {self.limits.connections} connections at once is reached"
                "; env.network.set(connections=...) changes it"
            )
        if count >= self._total.room:
            return "the environments here have too many connections at once"
        self._total.count += 1
        return ""

    def enter_surplus(self, count: int) -> bool:
        """Admit one more than `count` refused connections, to send the reason. Returns False for too many."""
        if count >= min(SURPLUS_MAX, self._total.room):
            return False
        self._total.count += 1
        return True

    def piece(self) -> int:
        """See ConnectionTotal."""
        return self._total.piece

    def buffer(self) -> int:
        """See ConnectionTotal."""
        return self._total.buffer

    def leave(self) -> None:
        """Release what `enter` or `enter_surplus` took."""
        self._total.count -= 1

    def spent(self) -> str:
        """The reason why the traffic limit stops all transfer, else ""."""
        used = self.traffic.sent + self.traffic.received
        if not self._spent and used < self.limits.traffic:
            return ""
        return (
            f"its limit of {format_size(self.limits.traffic)} sent and received is used up"
            "; env.network.set(traffic=...) changes it"
        )

    def count(self, sent: int, received: int) -> bool:
        """Count traffic. Returns False once the limit is exceeded, and from then on always."""
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
