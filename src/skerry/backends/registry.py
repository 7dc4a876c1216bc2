"""Which backend serves a request: isolation is the promise, the backend only the means."""

from __future__ import annotations

from collections.abc import Sequence

from skerry.backends.base import Backend, Capabilities
from skerry.errors import IsolationUnavailable
from skerry.policy import ISOLATIONS


def strength(isolation: str) -> int:
    """Higher is stronger; what is not one of policy.ISOLATIONS is no isolation at all."""
    return ISOLATIONS.index(isolation) if isolation in ISOLATIONS else -1


class Registry:
    """The backends of a daemon. With `chosen`, its operator has named them, and they serve every request."""

    def __init__(self, backends: Sequence[Backend], *, chosen: bool = False) -> None:
        self.backends = tuple(backends)
        self._chosen = chosen
        self._available: dict[str, Capabilities] = {}

    def find(self, name: str) -> Backend | None:
        return next((backend for backend in self.backends if backend.name == name), None)

    def pick(self, isolation: str) -> tuple[Backend, Capabilities]:
        """The weakest available backend that gives at least `isolation`, never less.

        Raises IsolationUnavailable, which says what stands in the way.
        """
        reasons: list[str] = []
        fitting: list[tuple[int, Backend, Capabilities]] = []
        for backend in self.backends:
            capabilities = self._capabilities(backend)
            enough = self._chosen or strength(capabilities.isolation) >= strength(isolation)
            if enough and capabilities.available:
                fitting.append((strength(capabilities.isolation), backend, capabilities))
            elif enough:
                reasons.append(f"{backend.name}: {capabilities.reason}")
        if not fitting:
            why = "; ".join(reasons) or "no backend that is installed gives it"
            raise IsolationUnavailable(
                f"isolation {isolation!r} is not available here: {why}",
                hint="`skerry doctor` names what is missing and how to get it",
            )
        _, backend, capabilities = min(fitting, key=lambda item: item[0])
        return backend, capabilities

    def _capabilities(self, backend: Backend) -> Capabilities:
        # A backend that works goes on working; one that does not is asked again, in case it was repaired.
        known = self._available.get(backend.name)
        if known is None:
            known = backend.capabilities()
            if known.available:
                self._available[backend.name] = known
        return known
