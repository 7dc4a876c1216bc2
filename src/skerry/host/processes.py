"""Host processes: telling one from a later one with the same number, and waiting for its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal


def start_time(pid: int) -> int:
    """Start time in clock ticks since boot; 0 if there is no such process, or only a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def is_running(pid: int) -> bool:
    """True if the process exists and is neither stopped nor dead."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"T", b"t", b"Z", b"X")
    except OSError:
        return False


def below_root(pid: int, *names: str) -> int:
    """An O_PATH descriptor of a file in the root of a process, by the names on the way. Follows no symlink: what is in
    that root may be a hostile program's, and a link there would lead into ours. Raises OSError."""
    place = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_CLOEXEC)
    for name in names:
        try:
            further = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place)
        finally:
            os.close(place)
        place = further
    return place


def descendants(pid: int) -> list[int]:
    """All living processes below `pid`, nearest first."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
                # One whose first thread has ended looks like a zombie, and lives by its others.
                if fields[0] not in (b"Z", b"X") or int(fields[17]) > 1:
                    parents[int(name)] = int(fields[1])
    found, layer = [], {pid}
    while layer:
        layer = {child for child, parent in parents.items() if parent in layer}
        found += sorted(layer)
    return found


class Handle:
    """A process that cannot be confused with another: a pidfd."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.fd = os.pidfd_open(pid)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.fd, signal.SIGKILL)

    def ended(self, seconds: float = 0.0) -> bool:
        """True if it has ended, or ends within `seconds`."""
        poll = select.poll()  # unlike select() it takes any descriptor
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    async def wait(self) -> None:
        """Return when it has ended; reaps it if it is our child."""
        loop = asyncio.get_running_loop()
        done = asyncio.Event()
        # Each waiter has a descriptor of its own: the loop knows one reader for each, and another waiter may close the
        # handle as soon as it has seen the end.
        fd = os.dup(self.fd)
        loop.add_reader(fd, done.set)
        try:
            await done.wait()
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOHANG)  # noqa: ASYNC222 - it has ended
        finally:
            loop.remove_reader(fd)
            os.close(fd)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
