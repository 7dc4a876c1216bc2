"""Which backend serves a request: isolation is the promise, the backend only the means."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from skerry import failpoints
from skerry.backends.base import Backend, Capabilities
from skerry.errors import InvalidRequest, IsolationUnavailable, SkerryError
from skerry.images.references import PREFIX, is_reference
from skerry.images.store import HOST
from skerry.policy import ISOLATIONS, preferences
from skerry.singleflight import SingleFlight

PROBE_AGAIN = 5.0
"""Seconds, at least, between two probes of a backend that does not work, or whose starts fail."""


PROBE_AFTER = 20.0
"""Seconds from the start of a daemon to the probes of what no request without a wish needs: some take a second."""


def strength(isolation: str) -> int:
    """Higher is stronger; what is not one of policy.ISOLATIONS is no isolation at all."""
    return ISOLATIONS.index(isolation) if isolation in ISOLATIONS else -1


class Registry:
    """The backends of a daemon. With `chosen`, its operator has named them, and they serve every request."""

    def __init__(self, backends: Sequence[Backend], *, chosen: bool = False) -> None:
        self.backends = tuple(sorted(backends, key=lambda backend: strength(backend.isolation)))
        self._chosen = chosen
        self._known: dict[str, Capabilities] = {}
        self._probed: dict[str, float] = {}
        self._probes: SingleFlight[str, Capabilities] = SingleFlight()
        self._background: set[asyncio.Task[None]] = set()
        self._later: list[asyncio.TimerHandle] = []

    def find(self, name: str) -> Backend | None:
        return next((backend for backend in self.backends if backend.name == name), None)

    def begin(self) -> None:
        """Probe in the background, so that no request has to wait for it: the weakest backend at once, then those
        that may be tried ahead."""
        loop = asyncio.get_running_loop()
        for number, backend in enumerate(self.backends):
            if number == 0:
                self.doubt(backend)
            elif backend.ahead:
                self._later.append(loop.call_later(PROBE_AFTER, self._unless_known, backend))

    async def close(self) -> None:
        for handle in self._later:
            handle.cancel()
        await self._probes.close()
        if self._background:
            await asyncio.wait(self._background)

    async def pick(self, isolation: str, name: str = "", image: str = HOST) -> tuple[Backend, Capabilities]:
        """The weakest available backend that gives at least `isolation`, never less, and can run the image; only the
        one of that name, if any.

        Waits only for a probe that has never been finished. Raises InvalidRequest for an unknown name, and for one
        that cannot run the image; IsolationUnavailable, which says what stands in the way.
        """
        reasons: list[str] = []
        backends = self._named(name, isolation) if name else self._enough(isolation)
        if is_reference(image):
            backends = self._with_images(backends, isolation, name, image)
        for backend in backends:
            known = self._known.get(backend.name) or await self._probe(backend)
            if known.available:
                return backend, known
            reasons.append(f"{backend.name}: {known.reason}")
            self.doubt(backend)  # it may have been repaired: for the next request
        raise IsolationUnavailable(
            f"isolation {isolation!r} is not available here: "
            + ("; ".join(reasons) or "no backend that is installed gives it"),
            hint="`skerry doctor` names what is missing and how to get it",
        )

    def known(self, isolation: str, image: str = HOST) -> Backend | None:
        """What `pick` gives without waiting for anything; None if it has to."""
        for backend in self._enough(isolation):
            if is_reference(image) and backend.images is None:
                continue
            if (known := self._known.get(backend.name)) is None:
                return None
            if known.available:
                return backend
        return None

    def doubt(self, backend: Backend) -> None:
        """Probe it again in the background, unless that has been done just now."""
        if time.monotonic() - self._probed.get(backend.name, -PROBE_AGAIN) >= PROBE_AGAIN:
            self._probed[backend.name] = time.monotonic()
            task = asyncio.create_task(self._probe_quietly(backend))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    def _unless_known(self, backend: Backend) -> None:
        if backend.name not in self._known:
            self.doubt(backend)

    def _enough(self, isolation: str) -> list[Backend]:
        """In order of preference."""
        if self._chosen:
            return list(self.backends)
        found = [
            backend
            for wanted in preferences(isolation)
            for backend in self.backends
            if strength(backend.isolation) >= strength(wanted)
        ]
        return list(dict.fromkeys(found))

    def _named(self, name: str, isolation: str) -> list[Backend]:
        """Raises InvalidRequest, IsolationUnavailable."""
        if (backend := self.find(name)) is None:
            names = ", ".join(backend.name for backend in self.backends)
            raise InvalidRequest(f"unknown backend {name!r}", hint=f"this daemon has: {names}")
        if backend not in self._enough(isolation):
            raise IsolationUnavailable(
                f"backend {name!r} gives isolation {backend.isolation!r}, not {isolation!r}",
                hint="ask for less isolation, or leave the backend out",
            )
        return [backend]

    def _with_images(
        self, backends: Sequence[Backend], isolation: str, name: str, image: str
    ) -> list[Backend]:
        """Those that have images of their own. Raises InvalidRequest, IsolationUnavailable."""
        found = [backend for backend in backends if backend.images is not None]
        if found:
            return found
        hint = (
            f"or import it: `docker save {image.removeprefix(PREFIX)} >FILE`, `skerry image import FILE NAME`"
        )
        if name:
            raise InvalidRequest(
                f"backend {name!r} cannot run {image}, which is an image of a Docker Engine",
                hint=f"ask for backend 'docker' or 'docker-runsc', or for none; {hint}",
            )
        raise IsolationUnavailable(
            f"no backend here that gives isolation {isolation!r} runs images of a Docker Engine",
            hint=f"'namespace' and 'gvisor' can, where the daemon has its backends; {hint}",
        )

    async def _probe_quietly(self, backend: Backend) -> None:
        with contextlib.suppress(SkerryError):  # the daemon stops
            await self._probe(backend)

    async def _probe(self, backend: Backend) -> Capabilities:
        return await self._probes.run(backend.name, lambda: self._look(backend))

    async def _look(self, backend: Backend) -> Capabilities:
        with failpoints.ignored():
            found = self._known[backend.name] = await backend.capabilities()
        return found
