"""Interpreters that have started before there is a program.

An interpreter opens its program last, when all else is done. So it is started with a pipe in the program's place, and
waits there. When there is a program, it takes the pipe's place, and is written to the pipe. What runs is what would
have run otherwise: the same command, with the same variables, which reads the same program from a file of that name.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass, replace

from skerry.errors import LaunchFailed, SkerryError
from skerry.guest.channel import Channel, GuestProcess, Start

PIPE = 65536
"""Bytes that an empty pipe takes without waiting for its reader."""


@dataclass(eq=False, slots=True)
class Warm:
    """One that waits. Whoever has it lets it `run`, or closes it."""

    start: Start
    process: GuestProcess
    gate: int
    """The descriptor of the pipe's end."""

    def fits(self, start: Start) -> bool:
        """Whether it is what this would start."""
        return replace(start, stdin=True) == self.start

    async def run(self, source: bytes, *, stdin: bool) -> GuestProcess:
        """Let it go on with a program, which lies in its place already."""
        gate, self.gate = self.gate, -1
        if not stdin:
            await self.process.close_stdin()
        if len(source) <= PIPE:
            _write(gate, source)
        else:  # however long it takes: should the interpreter end, that ends, too
            asyncio.get_running_loop().run_in_executor(None, _write, gate, source)
        return self.process

    async def end(self) -> None:
        """Nobody needs it: somebody else runs in its environment."""
        self.close()
        with contextlib.suppress(SkerryError):
            await self.process.kill()

    def close(self) -> None:
        if self.gate >= 0:
            os.close(self.gate)
            self.gate = -1


async def warm_up(channel: Channel, start: Start, gate: str) -> Warm:
    """An interpreter that waits at the pipe `gate`. Raises LaunchFailed, and what a start does.

    To be cancelled by whoever does not want to wait any more.
    """
    start = replace(start, stdin=True)
    process = await channel.start(start)
    opening = asyncio.create_task(asyncio.to_thread(os.open, gate, os.O_WRONLY | os.O_CLOEXEC))
    ending = asyncio.create_task(process.wait())
    try:
        await asyncio.wait((opening, ending), return_when=asyncio.FIRST_COMPLETED)
        if ending.done():
            raise LaunchFailed(f"it ended with {ending.result().code} before there was a program")
        return Warm(start, process, opening.result())
    except BaseException:
        # The other end, so that nobody waits for it.
        os.close(os.open(gate, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        os.close(await opening)
        raise
    finally:
        ending.cancel()


def _write(gate: int, source: bytes) -> None:
    try:
        with open(gate, "wb", buffering=0) as file:
            view = memoryview(source)
            while view:
                view = view[file.write(view) :]
    except BrokenPipeError:
        pass  # it has ended
