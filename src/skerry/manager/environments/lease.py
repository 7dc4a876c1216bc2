"""Leases: every environment ends after its lifetime, or after its idle time without use."""

from __future__ import annotations

from collections.abc import Callable

from skerry.manager.clock import Clock, Timer


class Lease:
    """Lifetime and idle time of one environment. It is not idle while `busy()`."""

    def __init__(self, clock: Clock, lifetime: float, idle: float, busy: Callable[[], bool]) -> None:
        self._clock = clock
        self._busy = busy
        self.lifetime = lifetime
        self.idle = idle
        self.used = clock.time()
        self.expires = self.used + lifetime

    @property
    def remaining(self) -> float:
        """Remaining seconds of its lifetime."""
        return self.expires - self._clock.time()

    def touch(self) -> None:
        self.used = self._clock.time()

    def extend(self, lifetime: float) -> None:
        """Restart with `lifetime` from now, which may be shorter than before."""
        self.lifetime = lifetime
        self.touch()
        self.expires = self.used + lifetime

    def resume(self, remaining: float) -> None:
        """Resume with the remaining seconds."""
        self.touch()
        self.expires = self.used + remaining

    def over(self) -> str:
        """Why it has expired, or ""."""
        now = self._clock.time()
        if now >= self.expires:
            return f"expired: lifetime of {self.lifetime:.10g} s is over"
        if not self._busy() and now >= self.used + self.idle:
            return f"expired: idle for {self.idle:.10g} s"
        return ""

    def next_look(self) -> float:
        """The earliest time at which it can expire, as far as known now."""
        idle_from = self._clock.time() if self._busy() else self.used
        return min(self.expires, idle_from + self.idle)


class Reaper:
    """One timer for all leases.

    Use extends a lease without notice: when the timer fires, the reaper checks the lease and rearms if it is alive. So
    a call in an environment costs no timer.
    """

    def __init__(self, clock: Clock, expire: Callable[[str, str], None]) -> None:
        self._clock = clock
        self._expire = expire
        self._leases: dict[str, Lease] = {}
        self._looks: dict[str, float] = {}
        self._timer: Timer | None = None
        self._armed = float("inf")

    def watch(self, key: str, lease: Lease) -> None:
        """Call `expire(key, reason)` once when the lease expires. Call again after the lease was changed."""
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
        finally:  # a failure must not keep other leases from expiring
            if self._looks:
                self._arm(min(self._looks.values()))
