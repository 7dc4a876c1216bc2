"""Leases: every environment has a lifetime and an idle time, and nothing outlives both."""

from __future__ import annotations

from collections.abc import Callable

from skerry.manager.clock import Clock, Timer


class Lease:
    """How long one environment may live, and how long unused. While `busy()` it is in use."""

    def __init__(self, clock: Clock, lifetime: float, idle: float, busy: Callable[[], bool]) -> None:
        self._clock = clock
        self._busy = busy
        self.lifetime = lifetime
        self.idle = idle
        self.used = clock.time()
        self.expires = self.used + lifetime

    @property
    def remaining(self) -> float:
        """Seconds of its lifetime that are left."""
        return self.expires - self._clock.time()

    def touch(self) -> None:
        self.used = self._clock.time()

    def extend(self, lifetime: float) -> None:
        """Live for `lifetime` from now on; that may also be shorter than before."""
        self.lifetime = lifetime
        self.touch()
        self.expires = self.used + lifetime

    def resume(self, remaining: float) -> None:
        """Go on with what was left of it."""
        self.touch()
        self.expires = self.used + remaining

    def over(self) -> str:
        """Why it has run out, or ""."""
        now = self._clock.time()
        if now >= self.expires:
            return f"expired: lifetime of {self.lifetime:.10g} s is over"
        if not self._busy() and now >= self.used + self.idle:
            return f"expired: idle for {self.idle:.10g} s"
        return ""

    def next_look(self) -> float:
        """The earliest moment at which it can have run out, as far as can be known now."""
        idle_from = self._clock.time() if self._busy() else self.used
        return min(self.expires, idle_from + self.idle)


class Reaper:
    """One timer for all leases.

    Use moves a deadline later without telling: the reaper looks at the moment it knew of, finds the lease
    alive and asks for the next one. So a call in an environment costs no timer at all.
    """

    def __init__(self, clock: Clock, expire: Callable[[str, str], None]) -> None:
        self._clock = clock
        self._expire = expire
        self._leases: dict[str, Lease] = {}
        self._looks: dict[str, float] = {}
        self._timer: Timer | None = None
        self._armed = float("inf")

    def watch(self, key: str, lease: Lease) -> None:
        """Call `expire(key, reason)` once when the lease has run out. Call again when it was changed."""
        self._leases[key] = lease
        self._looks[key] = lease.next_look()
        self._arm(self._looks[key])

    def forget(self, key: str) -> None:
        self._leases.pop(key, None)
        self._looks.pop(key, None)

    def close(self) -> None:
        self._leases.clear()
        self._looks.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, when: float) -> None:
        if when < self._armed:
            if self._timer is not None:
                self._timer.cancel()
            self._armed = when
            self._timer = self._clock.call_at(when, self._look)

    def _look(self) -> None:
        self._timer, self._armed = None, float("inf")
        now = self._clock.time()
        try:
            for key in [key for key, when in self._looks.items() if when <= now]:
                lease = self._leases[key]
                reason = lease.over()
                if reason:
                    self.forget(key)
                    self._expire(key, reason)
                else:
                    self._looks[key] = lease.next_look()
        finally:  # one that cannot be ended keeps no other from its end
            if self._looks:
                self._arm(min(self._looks.values()))
