"""Images that the engine has, or can pull: only those that the operator allows."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Any

from skerry.backends.docker.engine import NOT_FOUND, EngineClient, EngineRefused
from skerry.errors import Denied, DiskFull, ImageNotFound, RegistryUnavailable, SkerryError
from skerry.images.progress import Progress, Report
from skerry.images.references import Allowed, Reference
from skerry.images.store import DOCKER, Image

SILENCE = 120.0
"""Seconds within which an engine that pulls says something."""
_DONE = {"Pulling fs layer": 0.0, "Download complete": 0.5, "Pull complete": 1.0, "Already exists": 1.0}
_UNDER_WAY = {"Downloading": 0.0, "Extracting": 0.5}
"""By status of a layer, how much of it is done, or was done before."""
_NO_LOGIN = re.compile("no basic auth credentials|unauthorized|authentication required")
_MISSING = re.compile("manifest unknown|not found|repository does not exist|name unknown")


class EngineImages:
    def __init__(self, engine: EngineClient, allowed: Allowed) -> None:
        self._engine = engine
        self._allowed = allowed

    async def find(self, name: str) -> Image:
        reference = self._checked(name)
        try:
            found = await self._engine.call("GET", f"images/{reference.full}/json")
        except EngineRefused as error:
            if error.answer != NOT_FOUND:
                raise
            raise ImageNotFound(
                f"the Docker Engine does not have the image {reference.name}",
                hint=f"pull it: skerry image pull {reference.name}",
            ) from error
        return Image(reference.name, found["Id"], DOCKER, None, {}, found["Size"], 0.0, "")

    async def pull(self, name: str, report: Report) -> Image:
        reference = self._checked(name)
        step = f"pulling {reference.name}"
        params = {"fromImage": reference.source, "tag": reference.tag}
        layers: dict[str, float] = {}
        report(Progress(step, 0.0))
        try:
            steps = self._engine.steps("images/create", params, SILENCE)
            async with contextlib.aclosing(steps):
                async for said in steps:
                    if (done := _done(said)) is not None:
                        layers[said["id"]] = done
                        report(Progress(step, sum(layers.values()) / len(layers)))
        except EngineRefused as error:
            raise _explained(reference, error) from error
        return await self.find(name)

    def _checked(self, name: str) -> Reference:
        """Raises InvalidRequest, Denied."""
        reference = Reference.parse(name)
        self._allowed.check(reference)
        return reference


def _done(said: Mapping[str, Any]) -> float | None:
    """How much of a layer is done; None if it is about something else."""
    status, detail = said.get("status", ""), said.get("progressDetail") or {}
    if status in _UNDER_WAY and (total := detail.get("total")):
        return _UNDER_WAY[status] + 0.5 * min(1.0, float(detail.get("current", 0)) / float(total))
    return _DONE.get(status)


def _explained(reference: Reference, error: EngineRefused) -> SkerryError:
    """The error of a pull, of which engines and registries tell in words alone."""
    what = f"the image {reference.name} cannot be pulled: {error.said}"
    if "no space left on device" in error.said:
        return DiskFull(
            what, hint="make room on the engine's machine: `docker system df`, `docker image prune`"
        )
    if _NO_LOGIN.search(error.said):
        return Denied(
            what,
            hint=f"log in and pull it on the engine's machine: `docker login {reference.registry}`, "
            f"`docker pull {reference.full}`; what the engine has is not pulled",
        )
    if error.answer == NOT_FOUND or _MISSING.search(error.said):
        return ImageNotFound(
            what, hint="check name and tag; if it is private, `docker login` and `docker pull` it there"
        )
    return RegistryUnavailable(
        what, hint=f"check that the engine's machine reaches {reference.registry}, then try again"
    )
