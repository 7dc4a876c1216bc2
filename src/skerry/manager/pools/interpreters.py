"""Interpreters that are started before their program is known.

An interpreter opens its program last. So it is started with a named pipe in the program's place, and blocks on it. The
program then replaces the pipe, and is written to the pipe as well. What runs is the same as without this: the same
command, with the same variables, reading the same program from a file of that name.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
from dataclasses import dataclass, replace

from skerry.errors import LaunchFailed, SkerryError
from skerry.guest.channel import Channel
from skerry.guest.process import GuestProcess
from skerry.guest.start import Start


@dataclass(eq=False, slots=True)
class PrestartedInterpreter:
    """An interpreter that waits for its program: `run` it, or `close` it."""

    start: Start
    process: GuestProcess
    pipe: int
    """The descriptor of the end to write to."""

    def fits(self, start: Start) -> bool:
        """True if it was started with the same command and variables."""
        return replace(start, stdin=True) == self.start

    async def run(self, source: bytes, *, stdin: bool) -> GuestProcess:
        """Run the program, which has replaced the pipe already."""
        if not stdin:
            await self.process.close_stdin()
        pipe, self.pipe = self.pipe, -1
        await _write(pipe, source)
        return self.process

    async def end(self) -> None:
        """Kill it, because something else runs in its environment."""
        self.close()
        with contextlib.suppress(SkerryError):
            await self.process.kill()

    def close(self) -> None:
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1


async def prestart(channel: Channel, start: Start, path: str) -> PrestartedInterpreter:
    """Start an interpreter that waits at the pipe `path`. Raises LaunchFailed, and what `Channel.start` does."""
    start = replace(start, stdin=True)
    process = await channel.start(start)
    opening = asyncio.create_task(asyncio.to_thread(os.open, path, os.O_WRONLY | os.O_CLOEXEC))
    ending = asyncio.create_task(process.wait())
    try:
        await asyncio.wait((opening, ending), return_when=asyncio.FIRST_COMPLETED)
        if ending.done():
            raise LaunchFailed(f"it ended with {ending.result().code} before there was a program")
        return PrestartedInterpreter(start, process, opening.result())
    except BaseException:
        # Open the other end, so that the thread above is not stuck in open(); close it when that has returned.
        end = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.close(await opening)
        os.close(end)
        raise
    finally:
        ending.cancel()


async def _write(pipe: int, source: bytes) -> None:
    """Write without waiting: an interpreter may stop reading for as long as it runs."""
    os.set_blocking(pipe, False)
    with contextlib.ExitStack() as undo:
        file = undo.enter_context(io.FileIO(pipe, "wb"))
        try:
            left = source[file.write(source) or 0 :]
        except BrokenPipeError:  # it has ended
            return
        if left:
            transport, _ = await asyncio.get_running_loop().connect_write_pipe(asyncio.BaseProtocol, file)
            undo.pop_all()
            transport.write(left)
            transport.close()  # when all of that is written, or the interpreter has ended
