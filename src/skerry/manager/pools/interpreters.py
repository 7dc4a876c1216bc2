"""Interpreters that have started before there is a program.

An interpreter opens its program last, when all else is done. So it is started with a pipe in the program's place, and
waits there. When there is a program, it takes the pipe's place, and is written to the pipe. What runs is what would
have run otherwise: the same command, with the same variables, which reads the same program from a file of that name.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
from dataclasses import dataclass, replace

from skerry.errors import LaunchFailed, SkerryError
from skerry.guest.channel import Channel, GuestProcess, Start


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
        if not stdin:
            await self.process.close_stdin()
        gate, self.gate = self.gate, -1
        await _write(gate, source)
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
        # The other end, so that nobody waits for it; open until a thread that has not begun to wait need not.
        end = os.open(gate, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.close(await opening)
        os.close(end)
        raise
    finally:
        ending.cancel()


async def _write(gate: int, source: bytes) -> None:
    """Waits for no interpreter: one may read no further for as long as it runs, and nobody must be held up by that."""
    os.set_blocking(gate, False)
    with contextlib.ExitStack() as undo:
        file = undo.enter_context(io.FileIO(gate, "wb"))
        try:
            left = source[file.write(source) or 0 :]
        except BrokenPipeError:  # it has ended
            return
        if left:
            transport, _ = await asyncio.get_running_loop().connect_write_pipe(asyncio.BaseProtocol, file)
            undo.pop_all()
            transport.write(left)
            transport.close()  # when all of that is written, or the interpreter has ended
