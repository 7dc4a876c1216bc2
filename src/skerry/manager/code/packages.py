"""Packages for programs and sessions, installed once for each set.

An installation runs alone in an environment of the caller's tenant that can reach only the registries. Its result is
cached (see `layers`): programs of the same tenant and image mount it as a read-only layer; a session, whose environment
runs already, gets a copy in its workspace, where the installer would have put it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import tarfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import structlog

from skerry.backends.base import Layer
from skerry.backends.instances import not_made
from skerry.errors import (
    Busy,
    FileConflict,
    FileMissing,
    InstallFailed,
    InvalidRequest,
    LimitReached,
    PlatformError,
    QuotaExceeded,
    RegistryUnavailable,
    SkerryError,
)
from skerry.guest import files
from skerry.host.space import LOOK_EVERY, check_space
from skerry.images.store import Image
from skerry.languages import Language
from skerry.manager.caller import Caller
from skerry.manager.capacity import SharedCapacity
from skerry.manager.code.installers import INSTALLERS, Installer
from skerry.manager.code.layers import Layers, StoredLayer
from skerry.manager.code.toolchains import SPARE, Toolchains
from skerry.manager.environments.environment import Environment
from skerry.manager.environments.manager import EnvironmentManager
from skerry.manager.environments.request import CreateRequest
from skerry.manager.executions.commands import Command
from skerry.models import ExecutionResult, Outcome
from skerry.policy import GIB, Limits, Policy, format_size
from skerry.singleflight import SingleFlight

INSTALL_SECONDS = 300.0
LIMITS = Limits(cpus=float(os.cpu_count() or 1), memory=2 * GIB, disk=4 * GIB, pids=512, fds=4096)
"""Limits of the environment of an installation."""
WORDS_MAX = 2000
"""Characters of an installer's output in an error: the last ones, where the reason is."""
ARCHIVE_MAX = 4 * GIB
STAGED_MAX = 8 * GIB
"""Bytes of archives in transit between environments and the disk, of all tenants."""
CHUNK = 1 << 17
KIND = "packages"
NOT_FOUND = 127

log = structlog.get_logger(component="packages")


@dataclass(frozen=True, slots=True)
class InstalledPackages:
    """An installed set of packages; it is not evicted while this is held."""

    kept: StoredLayer
    installer: Installer

    @property
    def layer(self) -> Layer:
        return Layer(f"{self.installer.name}-packages", str(self.kept.tree))

    def variables(self, environment: Environment) -> dict[str, str]:
        """Variables with which a program finds the packages in the layer."""
        return self.installer.found_by(self._place(environment), environment.base_variables()["PATH"])

    def links(self, environment: Environment) -> dict[str, str]:
        """Symlinks that must be beside the program for the same."""
        return {name: f"{self._place(environment)}/{name}" for name in self.installer.beside}

    def _place(self, environment: Environment) -> str:
        assert environment.instance is not None
        return f"{environment.instance.run_path}/{self.layer.name}"


class Packages:
    """`directory` holds what was installed, and is for this object alone.

    `within_quota` is called with a function that creates an environment, and calls it when the quota allows.
    """

    def __init__(
        self,
        manager: EnvironmentManager,
        toolchains: Toolchains,
        directory: Path,
        within_quota: Callable[[Callable[[], Awaitable[Environment]]], Awaitable[Environment]],
    ) -> None:
        self._within_quota = within_quota
        self._manager = manager
        self._toolchains = toolchains
        self._layers = Layers(directory)
        self._installing = SingleFlight[str, None]()
        self._staged = SharedCapacity(STAGED_MAX)
        self._noted: dict[str, int] | None = None

    @asynccontextmanager
    async def held(
        self, caller: Caller, image: Image, language: Language, requirements: Sequence[str], isolation: str
    ) -> AsyncIterator[InstalledPackages | None]:
        """Installs the packages if needed and keeps them until the block ends; None without requirements.

        Raises InvalidRequest (the language has none), InstallFailed, RegistryUnavailable, LimitReached, Busy,
        DaemonUnavailable, and what `EnvironmentManager.create` does.
        """
        if not requirements:
            yield None
            return
        installer = installer_of(language)
        wanted = installer.normalized(requirements)
        version = await self._toolchains.version(image, language)
        of = [caller.tenant, image.digest, installer.name, version, installer.command, wanted]
        key = hashlib.sha256(json.dumps(of).encode()).hexdigest()[:32]
        while (kept := self._layers.find(key)) is None:
            install = partial(self._install, caller, image, installer, wanted, isolation, key)
            await self._installing.run(key, install)
        with self._layers.holding(kept):
            yield InstalledPackages(kept, installer)

    async def bring(self, caller: Caller, ref: str, language: Language, requirements: Sequence[str]) -> None:
        """Copy packages into the workspace of an environment, where programs that start later find them.

        They are resolved together with those that were copied before, so that versions stay consistent.
        Raises what `held` and `EnvironmentManager.running` do, and FileConflict, DiskFull.
        """
        environment, executions = await self._manager.running(caller, ref)
        sessions, isolation = environment.sessions, environment.policy.isolation
        assert sessions is not None
        installer = installer_of(language)
        async with sessions.bringing:
            there, place = sessions.brought.get(installer.name, ((), None))
            wanted = installer.merged(there, requirements)
            async with self.held(caller, environment.image, language, wanted, isolation) as found:
                if found is None or found.kept.place == place:
                    return
                assert environment.instance is not None
                folder = f"{environment.instance.workspace_path}/{installer.folder}"
                with self._archive(caller.tenant) as (archive, more):
                    more(found.kept.size)
                    await asyncio.to_thread(self._layers.archive, found.kept, archive)
                    await files.untar(executions.runtime.channel, folder, _chunks(archive))
                sessions.brought[installer.name] = wanted, found.kept.place

    async def tend(self) -> None:
        """Evict packages of tenants that are over their disk quota. To be called periodically.

        Raises StoreUnavailable.
        """
        for tenant in await self._manager.records.crowded(tuple(self._layers.sizes)):
            log.info("packages evicted", tenant=tenant)
            self._layers.evict(tenant)  # one at a time: a few seconds later the next
        await self._note_sizes()
        await asyncio.to_thread(self._layers.clean)

    async def _keep(self, made: StoredLayer) -> None:
        """Publish a layer within the tenant's quota; evicts older ones for it. Raises QuotaExceeded."""
        while True:
            sizes = Counter(self._layers.sizes)
            sizes[made.tenant] += made.size
            try:
                await self._manager.records.kept(sizes, KIND, within=made.tenant)
                break
            except QuotaExceeded:
                if not self._layers.evict(made.tenant):
                    self._layers.discard(made)
                    raise
        self._layers.add(made)
        await self._note_sizes()

    async def _note_sizes(self) -> None:
        sizes = self._layers.sizes
        if sizes != self._noted:
            await self._manager.records.kept(sizes, KIND)
            self._noted = sizes

    async def close(self) -> None:
        """Cancel installations."""
        await self._installing.close()

    async def _install(
        self,
        caller: Caller,
        image: Image,
        installer: Installer,
        wanted: tuple[str, ...],
        isolation: str,
        key: str,
    ) -> None:
        began = time.monotonic()
        async with self._environment(caller, image, installer, isolation) as environment:
            assert environment.instance is not None
            place = f"{environment.instance.workspace_path}/packages"
            command = Command(argv=installer.argv(place, wanted), timeout=INSTALL_SECONDS)
            _, executions = await self._manager.running(caller, environment.id)
            result = await executions.prepare(caller, command).run()
            if not result.ok:
                raise _fault(image, installer, result)
            with self._archive(caller.tenant) as (archive, more):
                await self._take(caller, environment, place, archive, more)
                made = await asyncio.to_thread(self._layers.make, caller.tenant, key, archive)
        try:
            await self._keep(made)
        finally:
            await asyncio.to_thread(self._layers.clean)
        log.info(
            "installed",
            tenant=caller.tenant,
            installer=installer.name,
            packages=wanted,
            seconds=round(time.monotonic() - began, 1),
        )

    @contextmanager
    def _archive(self, tenant: str) -> Iterator[tuple[BinaryIO, Callable[[int], None]]]:
        """A temporary file, and a function to call before bytes are added to it.

        Raises Busy, DiskFull, and LaunchFailed for any other OSError.
        """
        unchecked = LOOK_EVERY
        with self._staged.held(tenant) as held:

            def more(count: int) -> None:
                nonlocal unchecked
                unchecked += count
                if unchecked >= LOOK_EVERY:
                    unchecked = 0
                    check_space(str(self._layers.directory))
                if not held(count):
                    raise Busy("too many packages are on their way", hint="try again when some have arrived")

            try:
                with self._layers.file() as file:
                    yield file, more
            except OSError as error:
                raise not_made(str(self._layers.directory), error) from error

    async def _take(
        self,
        caller: Caller,
        environment: Environment,
        place: str,
        archive: BinaryIO,
        more: Callable[[int], None],
    ) -> None:
        """Fetch what was installed as a tar. Raises InstallFailed, LimitReached, Busy, GuestFailed."""
        async with self._manager.using(caller, environment.id, "file.download", {"path": place}) as use:
            try:
                async for chunk in files.tar(use.channel, place, contents=True):
                    if archive.tell() > ARCHIVE_MAX:
                        raise LimitReached(f"the packages take more than {format_size(ARCHIVE_MAX)}")
                    more(len(chunk))
                    await asyncio.to_thread(archive.write, chunk)
            except FileConflict as error:  # a file that its owner cannot read, say
                raise InstallFailed(f"what was installed cannot be kept: {error.message}") from error
            except FileMissing:  # all of them are in the image
                with tarfile.open(fileobj=archive, mode="w"):
                    pass

    @asynccontextmanager
    async def _environment(
        self, caller: Caller, image: Image, installer: Installer, isolation: str
    ) -> AsyncIterator[Environment]:
        request = CreateRequest(
            image=image.ref,
            policy=Policy(isolation=isolation, network="allowlist", allow=(installer.preset,), limits=LIMITS),
            lifetime=INSTALL_SECONDS + SPARE,
            idle=SPARE,
            survives=False,
        )
        create = partial(self._manager.create, caller, request)
        environment = await self._within_quota(create)
        try:
            yield environment
        finally:
            with suppress(SkerryError):  # the reaper tries again
                await self._manager.delete(caller, environment.id)


def installer_of(language: Language) -> Installer:
    """Raises InvalidRequest."""
    if not language.packages:
        raise InvalidRequest(
            f"there are no packages for {language.name}", hint="use an image that has what is needed"
        )
    return INSTALLERS[language.packages]


def _fault(image: Image, installer: Installer, result: ExecutionResult) -> SkerryError:
    """The error for a failed installation."""
    if result.outcome in (Outcome.INTERNAL, Outcome.CANCELED):
        return PlatformError(f"the installation was lost: {result.message}")
    words = (result.stderr.strip() or result.stdout.strip())[-WORDS_MAX:]
    if result.outcome is not Outcome.FAILED:
        return LimitReached(
            f"{installer.name} was ended: {result.message or result.outcome}\n{words}".strip()
        )
    if result.exit_code == NOT_FOUND or f"No module named {installer.name}" in words:
        return InstallFailed(
            f"the image {image.name!r} has no {installer.name}", hint="use an image that has it"
        )
    if installer.unreachable.search(words):
        return RegistryUnavailable(
            f"{installer.name} cannot reach its registry:\n{words}",
            hint="try again; `skerry audit tail` has what was refused, and docs/network.md says which registry is used",
        )
    return InstallFailed(f"{installer.name} cannot install this:\n{words}")


async def _chunks(archive: BinaryIO) -> AsyncIterator[bytes]:
    while data := await asyncio.to_thread(archive.read, CHUNK):
        yield data
