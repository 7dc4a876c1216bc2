"""What the root of an environment is made of: an image of the engine, and directories of this machine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass

from skerry.backends.base import Layer
from skerry.backends.docker.container import Bind, binds_of
from skerry.backends.docker.engine import EngineClient
from skerry.backends.docker.stock import Stock
from skerry.backends.instances import not_made
from skerry.backends.machine import Machine
from skerry.host import plan
from skerry.images.store import DOCKER, Image


@dataclass(frozen=True, slots=True)
class ContainerRoot:
    image: str
    """As the engine names it."""
    binds: Sequence[Bind] = ()
    shared: Sequence[str] = ()
    """Directories of the host whose locks and watches environments share."""
    volumes: Sequence[str] = ()
    """See Container."""


class Roots:
    def __init__(
        self, machine: Machine, engine: EngineClient, stock: Stock, folder: str, *, gvisor: bool
    ) -> None:
        """`folder` is the daemon's, for what it makes."""
        self._machine = machine
        self._engine = engine
        self._stock = stock
        self._folder = folder
        self._gvisor = gvisor

    async def of(self, image: Image) -> ContainerRoot:
        """Raises EngineRefused, LaunchFailed, IsolationUnavailable."""
        if image.rootfs is not None:
            name = await self._stock.image(image.digest, str(image.rootfs), as_root=not self._machine.rootful)
            return ContainerRoot(name)
        if image.kind == DOCKER:
            found = await self._engine.call("GET", f"images/{image.digest}/json")
            return ContainerRoot(image.digest, volumes=[*((found["Config"] or {}).get("Volumes") or ())])
        try:
            tree, parts = await asyncio.to_thread(self._machine.host_roots.current)
        except OSError as error:
            raise not_made("a copy of the host's /etc", error) from error
        binds = [bind for part in parts for bind in binds_of(*part, self._empty())]
        name = await self._stock.image(os.path.basename(tree), tree, as_root=True)
        return ContainerRoot(
            name, binds, [bind.source for bind in binds if not bind.beside and not self._gvisor]
        )

    def layers(self, layers: Sequence[Layer]) -> list[Bind]:
        """Raises LaunchFailed."""
        return [
            bind
            for layer in layers
            for bind in binds_of(layer.source, f"{plan.RUN}/{layer.name}", self._empty())
        ]

    def base(self) -> str:
        """The smallest tree that a container can have. Raises LaunchFailed."""
        for name in ("dev", "etc", "proc", "run", "sys", "tmp", "workspace"):
            self._directory(f"base/{name}")
        return f"{self._folder}/base"

    def _empty(self) -> str:
        """An empty directory for overlays. Raises LaunchFailed."""
        return self._directory("empty")

    def _directory(self, name: str) -> str:
        path = f"{self._folder}/{name}"
        try:
            os.makedirs(path, mode=0o755, exist_ok=True)
        except OSError as error:
            raise not_made(path, error) from error
        return path
