"""Programs that run once, each in a fresh environment that is removed afterwards.

The environment is like any other (limits, policy, audit, quota, tenant), but its workspace, with the program and its
files, is read-only; the program writes to /tmp, which is in memory. The caller gets the answer before the environment
is removed; at most REMOVING_MAX removals are pending.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from skerry.backends.base import Layer
from skerry.errors import QuotaExceeded, SkerryError, stopping
from skerry.failpoints import hit
from skerry.guest.channel import Channel
from skerry.guest.process import GuestProcess
from skerry.guest.start import Start
from skerry.images.store import Image, ImageStore
from skerry.languages import Language, Languages
from skerry.manager.caller import Caller
from skerry.manager.code.packages import InstalledPackages, Packages
from skerry.manager.code.program import Program
from skerry.manager.code.toolchains import SPARE, Toolchains
from skerry.manager.environments.environment import Environment
from skerry.manager.environments.manager import EnvironmentManager
from skerry.manager.environments.request import CreateRequest
from skerry.manager.executions.commands import Command, program_command
from skerry.manager.executions.execution import Execution
from skerry.models import LanguageInfo, Outcome

REMOVING_MAX = 32
"""Pending removals before new programs wait for them."""

log = structlog.get_logger(component="code")


@dataclass(frozen=True, slots=True)
class PreparedProgram:
    """A program that is ready for `execution.run(stdin)`."""

    execution: Execution
    language: str
    version: str


class Programs:
    """Runs programs, and knows their languages and packages."""

    def __init__(self, manager: EnvironmentManager, images: ImageStore, home: str) -> None:
        self._manager = manager
        self._images = images
        self._languages = Languages(home)
        self._toolchains = Toolchains(manager, Path(home, "caches"))
        self._packages = Packages(manager, self._toolchains, Path(home, "packages"), self._within_quota)
        self._running: set[Execution] = set()
        self._under_way: set[asyncio.Future[None]] = set()
        """One for each program; done when the removal of its environment has begun."""
        self._removing: set[asyncio.Task[None]] = set()
        self._closing = False

    @asynccontextmanager
    async def ready(self, caller: Caller, program: Program) -> AsyncIterator[PreparedProgram]:
        """A program in a fresh environment, which is removed in the background after the block.

        Raises InvalidRequest, PathOutside, LanguageNotFound, Busy, and what `Packages.held` and
        `EnvironmentManager.create` do.
        """
        language = self._languages.get(program.language)
        tree = program.tree(language)
        named = program.image or language.image
        image, _ = await self._manager.image(caller, named, program.policy.isolation)
        self._check_open()
        left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._under_way.add(left)
        try:
            version = await self._toolchains.version(image, language)
            cache = await self._toolchains.cache(image, language)
            packages = self._packages.held(caller, image, language, program.packages, program.isolation)
            async with packages as found:
                wanted = cache, None if found is None else found.layer
                layers = tuple(layer for layer in wanted if layer is not None)
                environment = await self._environment(caller, program, language, image, layers)
                try:
                    links = {} if found is None else found.links(environment)
                    await environment.backend.deliver(environment.id, tree, links)
                    hit("code.delivered")
                    self._check_open()
                    command = _command(program, language, environment, cache, found)
                    _, executions = await self._manager.running(caller, environment.id)
                    launch = _Launch(environment, language, tree[language.file])
                    execution = executions.prepare(caller, command, launch)
                    self._running.add(execution)
                    try:
                        yield PreparedProgram(execution, language.name, version)
                    finally:
                        self._running.discard(execution)
                finally:
                    self._remove(caller, environment)
        finally:
            self._under_way.discard(left)
            left.set_result(None)

    async def bring(self, caller: Caller, ref: str, language: str, requirements: Sequence[str]) -> None:
        """See `Packages.bring`. Raises LanguageNotFound as well."""
        await self._packages.bring(caller, ref, self._languages.get(language), requirements)

    async def languages(self) -> list[LanguageInfo]:
        """Every language, with its version and whether its image can run it."""
        return [await self._describe(language) for language in self._languages.list()]

    async def settle(self) -> None:
        """Wait for pending removals."""
        if self._removing:
            await asyncio.wait(self._removing)

    async def tend(self) -> None:
        """See `Packages.tend`."""
        await self._packages.tend()

    async def close(self) -> None:
        """Stop all programs, and wait until nothing is left of them."""
        self._closing = True
        await self._toolchains.close()
        await self._packages.close()
        for execution in self._running:
            execution.stop(Outcome.CANCELED, "the daemon is stopping")
        while self._under_way or self._removing:
            await asyncio.wait((*self._under_way, *self._removing))

    async def _environment(
        self, caller: Caller, program: Program, language: Language, image: Image, layers: tuple[Layer, ...]
    ) -> Environment:
        """A fresh environment for a program, from a pool if there is one."""
        while len(self._removing) >= REMOVING_MAX:
            await asyncio.wait(self._removing, return_when=asyncio.FIRST_COMPLETED)

        async def create() -> Environment:
            return await self._manager.create(
                caller,
                CreateRequest(
                    policy=program.policy,
                    image=image.ref,
                    lifetime=program.timeout + SPARE,
                    idle=SPARE,
                    program=True,
                    layers=layers,
                    language=language,
                ),
            )

        return await self._within_quota(create)

    async def _within_quota(self, create: Callable[[], Awaitable[Environment]]) -> Environment:
        """The result of `create`; retries once after pending removals if the quota is exhausted."""
        # They may finish while `create` runs, after it has seen the quota.
        before = tuple(self._removing)
        try:
            return await create()
        except QuotaExceeded:
            if not before and not self._removing:
                raise
        await self.settle()
        return await create()

    def _remove(self, caller: Caller, environment: Environment) -> None:
        removing = asyncio.create_task(self._delete(caller, environment))
        self._removing.add(removing)
        removing.add_done_callback(self._removing.discard)

    async def _delete(self, caller: Caller, environment: Environment) -> None:
        try:
            await self._manager.delete(caller, environment.id)
        except SkerryError as error:  # the reaper tries again
            log.warning("not removed yet", environment=environment.id, error=str(error))

    async def _describe(self, language: Language) -> LanguageInfo:
        version, reason = "", ""
        try:
            version = await self._toolchains.version(self._images.get(language.image), language)
        except SkerryError as error:
            if error.status >= 500:
                raise
            reason = str(error)
        return LanguageInfo(
            name=language.name,
            version=version,
            available=not reason,
            reason=reason,
            aliases=list(language.aliases),
            file=language.file,
            image=language.image,
        )

    def _check_open(self) -> None:
        if self._closing:
            raise stopping()


def _command(
    program: Program,
    language: Language,
    environment: Environment,
    cache: Layer | None,
    packages: InstalledPackages | None,
) -> Command:
    assert environment.instance is not None
    command = program_command(language, environment.instance, program.policy.limits.cpus)
    variables = command.env
    if language.cache is not None and cache is not None:
        place = f"{environment.instance.run_path}/{cache.name}"
        variables = {**variables, language.cache.variable: place}
    if packages is not None:
        variables = {**variables, **packages.variables(environment)}
    return replace(
        command,
        env=variables,
        timeout=program.timeout,
        output_limit=program.output_limit,
        stdin=program.stdin is not None,
    )


class _Launch:
    """Starts a program in its pre-started interpreter, or else in a new one."""

    def __init__(self, environment: Environment, language: Language, source: bytes) -> None:
        self._interpreter = None if environment.placement is None else environment.placement.interpreter
        self._source = source
        self._possible = not language.needs_file(source)

    async def __call__(self, channel: Channel, start: Start) -> GuestProcess:
        interpreter = self._interpreter
        if interpreter is not None and self._possible and interpreter.fits(start):
            return await interpreter.run(self._source, stdin=start.stdin)
        if interpreter is not None:
            await interpreter.end()
        return await channel.start(start)
