"""What the tests of backends are written with: an instance, and a way to run things in it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from skerry.backends.base import Backend, Instance, InstanceSpec
from skerry.errors import ExecutionNotFound, FileMissing
from skerry.guest.channel import Channel, GuestProcessInfo
from skerry.guest.process import Exit, GuestProcess
from skerry.guest.start import Start
from skerry.images.store import ImageStore
from skerry.policy import MIB, Limits, Policy
from tests.conformance.kinds import Kind

LIMITS = Limits(cpus=4, memory=512 * MIB, disk=256 * MIB, pids=1024)
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENV = {"PATH": PATH, "LANG": "C.UTF-8"}
BIG = 5 * MIB
"""Many times more than any buffer on the way holds."""
PATIENCE = 20.0
"""Seconds for what the kernel tells nobody about; on an idle machine it takes milliseconds."""
slowness: ContextVar[float] = ContextVar("slowness", default=1.0)
"""Of the backend that the running test is for."""

needs = pytest.mark.needs


class Result(NamedTuple):
    exit: Exit
    stdout: bytes
    stderr: bytes

    @property
    def code(self) -> int:
        return self.exit.code


class Box:
    """One instance and a channel to its guest."""

    def __init__(self, backend: Backend, instance: Instance, channel: Channel) -> None:
        self.backend = backend
        self.instance = instance
        self.channel = channel

    @property
    def id(self) -> str:
        return self.instance.environment_id

    def path(self, name: str) -> str:
        """Where a name of the workspace is, for commands inside."""
        return f"{self.instance.workspace_path}/{name}"

    async def start(self, *argv: str, **options: Any) -> GuestProcess:
        options.setdefault("env", ENV)
        return await self.channel.start(Start(argv=list(argv), **options))

    async def run(self, *argv: str, stdin: bytes | None = None, **options: Any) -> Result:
        """Run a program to its end, with `stdin` fed to it and closed."""
        return await finish(await self.start(*argv, stdin=stdin is not None, **options), stdin)

    async def sh(self, script: str, *arguments: str, stdin: bytes | None = None, **options: Any) -> Result:
        return await self.run("sh", "-c", script, "sh", *arguments, stdin=stdin, **options)

    async def start_shell(self, command: str, name: str = "main", **options: Any) -> GuestProcess:
        options.setdefault("env", ENV)
        return await self.channel.start(Start(command=command, shell=name, **options))

    async def shell(
        self, command: str, name: str = "main", stdin: bytes | None = None, **options: Any
    ) -> Result:
        """Run a command of the stateful shell `name` to its end."""
        return await finish(await self.start_shell(command, name, stdin=stdin is not None, **options), stdin)

    async def said(self, command: str, name: str = "main") -> str:
        """What a command of the shell writes, which must be all right."""
        result = await self.shell(command, name)
        assert (result.code, result.stderr) == (0, b"")
        return result.stdout.decode().removesuffix("\n")

    async def reconnect(self) -> Channel:
        """A further channel to the same guest."""
        return await Channel.open(await self.backend.connect(self.id))

    async def alive(self, marker: str) -> list[int]:
        """Pids, as they are inside, of the living processes with `marker` among their arguments."""
        listing = await self.sh("grep -za . /proc/[0-9]*/cmdline 2>/dev/null; true")
        entries = [entry.partition(":") for entry in listing.stdout.decode(errors="replace").split("\0")]
        return sorted({int(path.split("/")[2]) for path, _, argument in entries if argument == marker})

    async def there(self, marker: str) -> None:
        """Returns when something with `marker` lives."""

        async def some() -> bool:
            return bool(await self.alive(marker))

        await eventually(some)

    async def gone(self, marker: str) -> None:
        """Returns when nothing with `marker` lives."""

        async def none() -> bool:
            return not await self.alive(marker)

        await eventually(none)

    async def exists(self, *pids: int) -> list[int]:
        """Which of these are processes inside, zombies included."""
        found = await self.sh('for p; do [ ! -e "/proc/$p" ] || echo "$p"; done', *map(str, pids))
        return [int(pid) for pid in found.stdout.split()]

    async def content(self, path: str) -> bytes:
        """The whole file, read through the channel."""
        data = b""
        while piece := await self.channel.read(path, len(data)):
            data += piece
        return data

    async def written(self, path: str) -> bytes:
        """The beginning of a file, once there is one."""
        data = b""

        async def something() -> bool:
            nonlocal data
            with contextlib.suppress(FileMissing):
                data = await self.channel.read(path)
            return bool(data)

        await eventually(something)
        return data

    async def idle(self) -> None:
        """Returns when the guest knows of no execution any more."""
        listed: list[GuestProcessInfo] = []

        async def none() -> bool:
            nonlocal listed
            listed = await self.channel.processes()
            return not listed

        try:
            await eventually(none)
        except TimeoutError as error:
            raise AssertionError(f"still listed: {listed}") from error

    async def calm(self) -> None:
        """End what a test left running."""
        if self.channel.closed.done():
            self.channel = await self.reconnect()
        for info in await self.channel.processes():
            with contextlib.suppress(ExecutionNotFound):
                process = await self.channel.attach(info.id)
                await process.kill()
                process.forget()


@dataclass
class Site:
    """One backend with its home."""

    kind: Kind
    home: Path
    backend: Backend

    def spec(
        self, environment_id: str | None = None, limits: Limits = LIMITS, orphan: float = 3600.0
    ) -> InstanceSpec:
        image = ImageStore(self.home / "images").get("host")
        return InstanceSpec(environment_id or self.backend.reserve(), image, Policy(limits=limits), orphan)

    async def open(self, limits: Limits = LIMITS) -> Box:
        spec = self.spec(limits=limits)
        instance = await self.backend.start(spec)
        return Box(
            self.backend, instance, await Channel.open(await self.backend.connect(spec.environment_id))
        )

    @contextlib.asynccontextmanager
    async def box(self, limits: Limits = LIMITS) -> AsyncIterator[Box]:
        """A fresh instance, stopped at the end."""
        box = await self.open(limits)
        try:
            yield box
        finally:
            await box.channel.close()
            await self.backend.stop(box.id)


async def finish(process: GuestProcess, stdin: bytes | None = None) -> Result:
    """Feed a process and take its output until its end."""
    feeding = asyncio.ensure_future(feed(process, stdin)) if stdin is not None else None
    streams = {1: bytearray(), 2: bytearray()}
    async for stream, data in process.output():
        streams[stream] += data
    exit = await process.wait()
    if feeding is not None:
        await feeding
    return Result(exit, bytes(streams[1]), bytes(streams[2]))


async def feed(process: GuestProcess, data: bytes) -> None:
    await process.write(data)
    await process.close_stdin()


async def expect(process: GuestProcess, text: bytes, stream: int = 1) -> bytes:
    """Take output until `text` was among it; returns all of that stream so far."""
    seen = b""
    async for number, data in process.output():
        if number == stream:
            seen += data
        if text in seen:
            return seen
    raise AssertionError(f"it ended without {text!r}: {seen!r}")


async def eventually(happened: Callable[[], Awaitable[bool]], seconds: float = PATIENCE) -> None:
    """For what gives no event: ask again and again."""
    async with asyncio.timeout(seconds * slowness.get()):
        while not await happened():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
