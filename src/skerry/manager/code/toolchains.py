"""The languages of images: versions, probed once in a fresh environment, and compiler caches.

A language may have a cache of what its tools would compile again and again (Go: the standard library). It is built here
by the image's own tools, stored in a directory of the daemon, and mounted read-only into environments of programs. No
program ever writes to it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import structlog

from skerry.backends.base import Layer
from skerry.errors import LanguageNotFound, PlatformError, SkerryError
from skerry.guest import files
from skerry.host.trees import remove_tree, sync
from skerry.images.store import HOST, Image
from skerry.images.unpack import Unpacker, UnpackLimits
from skerry.languages import Cache, Language, version_in
from skerry.manager.caller import OWN_TENANT, Caller
from skerry.manager.environments.environment import Environment
from skerry.manager.environments.manager import EnvironmentManager
from skerry.manager.environments.request import CreateRequest
from skerry.manager.executions.commands import Command, writable
from skerry.models import ExecutionResult, Outcome
from skerry.policy import GIB, Limits, Policy
from skerry.singleflight import SingleFlight

FRESH, FRESH_FAILURE = 300.0, 10.0
"""Seconds that a result is cached: programs of the host change."""
VERSION_SECONDS = 30.0
CACHE_SECONDS = 300.0
LIMITS = Limits(cpus=float(os.cpu_count() or 1), memory=2 * GIB, pids=1024, fds=4096)
"""Limits of the probing environment; compiling a standard library takes more than using it."""
CACHE_LIMITS = UnpackLimits(bytes=2 * GIB, entries=100_000)
ARCHIVE_MAX = CACHE_LIMITS.bytes + 2048 * CACHE_LIMITS.entries
"""Bytes of a cache's archive: its files and tar headers."""
CACHES_KEPT = 8
SPARE = 60.0
"""Extra seconds of an environment's lifetime, should it not be removed."""
ITSELF = Caller(tenant=OWN_TENANT, peer="daemon")
"""A separate tenant, so that probing uses no tenant's quota."""
_STAGING = ".staging-"

log = structlog.get_logger(component="code")


_Key = tuple[str, str, Language]


class Toolchains:
    """`directory` holds caches, and is for this object alone."""

    def __init__(self, manager: EnvironmentManager, directory: Path) -> None:
        self._manager = manager
        self._directory = directory
        self._known: dict[_Key, tuple[float, Any]] = {}
        """Results, with the time until which they are fresh."""
        self._looking = SingleFlight[_Key, Any]()
        with suppress(FileNotFoundError):
            _tidy(directory)

    async def version(self, image: Image, language: Language) -> str:
        """The version of the language in this image. The first probe takes a fresh environment.

        Raises LanguageNotFound when the image cannot run it, DaemonUnavailable when the daemon is stopping, and what
        `EnvironmentManager.create` does.
        """
        key = "version", image.digest, language
        found: str | LanguageNotFound = await self._once(key, partial(self._find_version, image, language))
        if isinstance(found, LanguageNotFound):
            raise LanguageNotFound(found.message, hint=found.hint)
        return found

    async def cache(self, image: Image, language: Language) -> Layer | None:
        """The cache of the language in this image; None if it has none, or building it fails.

        The first call builds it. Raises what `version` does.
        """
        if language.cache is None:
            return None
        of = [image.digest, language.name, await self.version(image, language), language.cache.command]
        place = self._directory / hashlib.sha256(json.dumps(of).encode()).hexdigest()[:32]
        key = f"cache {place.name}", image.digest, language
        find = partial(self._find_cache, image, language, place)
        found: Layer | None = await self._once(key, find)
        if found is not None and not place.is_dir():  # removed to free disk
            self._known.pop(key, None)
            found = await self._once(key, find)
        return found

    async def close(self) -> None:
        """Cancel probes."""
        await self._looking.close()

    async def _once(self, key: _Key, find: Callable[[], Awaitable[Any]]) -> Any:
        """The cached result of `find` while it is fresh, else that of a call of it, shared by all who want it."""
        until, found = self._known.get(key, (0.0, None))
        if time.monotonic() < until:
            return found
        return await self._looking.run(key, partial(self._look, key, find))

    async def _look(self, key: _Key, find: Callable[[], Awaitable[Any]]) -> Any:
        found = await find()
        now = time.monotonic()
        fresh = FRESH_FAILURE if isinstance(found, LanguageNotFound) else FRESH
        self._known = {each: known for each, known in self._known.items() if known[0] > now}
        self._known[key] = now + fresh, found
        return found

    async def _find_version(self, image: Image, language: Language) -> str | LanguageNotFound:
        async with self._environment(image) as environment:
            said = await self._run(environment, language.version, VERSION_SECONDS)
        if said.outcome in (Outcome.INTERNAL, Outcome.CANCELED):
            raise PlatformError(f"the version of {language.name} cannot be found out: {said.message}")
        return version_in(said.stdout or said.stderr) if said.ok else _missing(image, language, said)

    async def _find_cache(self, image: Image, language: Language, place: Path) -> Layer | None:
        assert language.cache is not None
        try:
            if not await asyncio.to_thread(place.exists):
                began = time.monotonic()
                async with self._environment(image) as environment:
                    await self._fill(environment, language.cache, place)
                log.info("cache made", language=language.name, seconds=round(time.monotonic() - began, 1))
            await asyncio.to_thread(_use, place, language.cache)
        except (SkerryError, OSError) as error:  # best effort: programs run without it, slower
            log.warning("no cache", language=language.name, error=str(error))
            return None
        return Layer(f"{language.name}-cache", str(place))

    async def _fill(self, environment: Environment, cache: Cache, place: Path) -> None:
        """Raises PlatformError, OSError, and errors of the archive."""
        assert environment.instance is not None
        inside = f"{environment.instance.tmp_path}/cache"
        made = await self._run(environment, cache.command, CACHE_SECONDS, {cache.variable: inside})
        if not made.ok:
            raise PlatformError(f"its command: {made.outcome}: {made.message or made.stderr[-500:]}")
        self._directory.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=_STAGING, dir=self._directory) as staging:
            with tempfile.TemporaryFile(dir=staging) as archive:
                async with self._manager.using(
                    ITSELF, environment.id, "file.download", {"path": inside}
                ) as use:
                    size = 0
                    async for chunk in files.tar(use.channel, inside, contents=True):
                        size += len(chunk)
                        if size > ARCHIVE_MAX:
                            raise PlatformError(f"its archive has more than {ARCHIVE_MAX} bytes")
                        await asyncio.to_thread(archive.write, chunk)
                await asyncio.to_thread(_unpack, archive, Path(staging, "cache"), place)

    @asynccontextmanager
    async def _environment(self, image: Image) -> AsyncIterator[Environment]:
        environment = await self._manager.create(
            ITSELF,
            CreateRequest(
                image=image.ref,
                policy=Policy(limits=LIMITS),
                lifetime=VERSION_SECONDS + CACHE_SECONDS + SPARE,
                idle=SPARE,
                program=True,
            ),
        )
        try:
            yield environment
        finally:
            with suppress(SkerryError):  # the reaper tries again
                await self._manager.delete(ITSELF, environment.id)

    async def _run(
        self,
        environment: Environment,
        argv: Sequence[str],
        timeout: float,
        variables: dict[str, str] | None = None,
    ) -> ExecutionResult:
        _, executions = await self._manager.running(ITSELF, environment.id)
        assert environment.instance is not None
        env = {**writable(environment.instance), **(variables or {})}
        command = Command(argv=[*argv], env=env, timeout=timeout)
        return await executions.prepare(ITSELF, command).run()


def _unpack(archive: BinaryIO, staging: Path, place: Path) -> None:
    """Unpack atomically, world-readable and owned by us."""
    archive.seek(0)
    staging.mkdir()
    with Unpacker(staging, CACHE_LIMITS) as unpacker:
        unpacker.unpack(archive)
    for folder, _, names in os.walk(staging):
        os.chown(folder, os.geteuid(), os.getegid())
        Path(folder).chmod(0o755)
        for path in (Path(folder, name) for name in names):
            os.lchown(path, os.geteuid(), os.getegid())
            if not path.is_symlink():
                path.chmod(0o644)
    sync(archive.fileno())
    staging.rename(place)


def _use(place: Path, cache: Cache) -> None:
    """Set its modification time, and the clock in it, to now."""
    if cache.clock:
        new = place.parent / f".{place.name}"
        new.write_text(f"{int(time.time())}\n")
        new.chmod(0o644)
        new.rename(place / cache.clock)
    os.utime(place)


def _tidy(directory: Path) -> None:
    """Remove leftovers of a crash, and the least recently used caches."""
    found = sorted(directory.iterdir(), key=lambda path: path.lstat().st_mtime, reverse=True)
    caches = [path for path in found if not path.name.startswith(".")]
    for path in (*caches[CACHES_KEPT:], *(path for path in found if path.name.startswith("."))):
        if path.is_dir():
            remove_tree(path)
        else:
            path.unlink()


def _missing(image: Image, language: Language, said: ExecutionResult) -> LanguageNotFound:
    program = language.version[0]
    words = (
        said.message or said.stderr.strip().partition("\n")[0] or f"`{program}` ended with {said.exit_code}"
    )
    reason = f"it has no {program}" if said.exit_code == 127 else words[:200]
    wanted = language.install or program
    if image.name == HOST:
        hint = f"install {wanted} on the daemon's machine, or name an image that has it"
    else:
        hint = f"name an image that has {wanted}"
    return LanguageNotFound(f"the image {image.name!r} cannot run {language.name}: {reason}", hint=hint)
