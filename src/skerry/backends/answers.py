"""What is heard of a guest that starts in something else than our own namespaces: its answers, and a log."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os

from skerry.errors import LaunchFailed

LOG_SIZE = 64 * 1024
LINES = 3
"""Of the log, in a message."""
PANIC = "Kernel panic"
"""The line with it says more than those behind it."""


class Answers:
    """`sender` is for the guest's answers, `log` a file that cannot grow."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._receiver, self.sender = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._receiver, False)
        self.log = os.memfd_create("skerry-log", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.log, LOG_SIZE)
        fcntl.fcntl(self.log, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        self._open = [self._receiver, self.sender, self.log]

    def keep(self, fd: int) -> int:
        """Close this descriptor with the others."""
        self._open.append(fd)
        return fd

    def close(self) -> None:
        for fd in self._open:
            os.close(fd)
        self._open.clear()

    async def ready(self, seconds: float) -> None:
        """Returns when the guest listens. Raises LaunchFailed, with what was said last."""
        os.close(self.sender)
        self._open.remove(self.sender)
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._receiver, readable.set)
        heard = b""
        try:
            async with asyncio.timeout(seconds):
                while not heard.endswith(b"\n"):
                    await readable.wait()
                    readable.clear()
                    with contextlib.suppress(BlockingIOError):
                        data = os.read(self._receiver, 1024)
                        heard += data
                        if not data or len(heard) > 1024:
                            break
        except TimeoutError as error:
            raise LaunchFailed(f"{self._who} did not start within {seconds:g} s") from error
        finally:
            loop.remove_reader(self._receiver)
            said = os.pread(self.log, LOG_SIZE, 0).rstrip(b"\0").decode(errors="replace").strip()
            self.close()
        if heard != b"R\n":
            lines = (heard.decode(errors="replace") + said).splitlines()
            lines = [line for line in lines if PANIC in line] or lines[-LINES:]
            raise LaunchFailed(
                f"{self._who} ended: {'; '.join(lines) or 'it says nothing'}",
                hint="`skerry doctor` tells whether it works here",
            )
