"""The processes in a cgroup's directory: listed, killed, waited for."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import time

from skerry.errors import PlatformError
from skerry.host.cgroup_places import read_text


def field(raw: bytes | None, name: bytes) -> int | None:
    """The number after `name` in a file of `name number` lines."""
    _, found, rest = (b"\n" + (raw or b"")).partition(b"\n" + name + b" ")
    return int(rest.partition(b"\n")[0]) if found else None


def pids_in(directory: str) -> set[int]:
    """The processes in a cgroup, without those invisible (0) in our PID namespace."""
    return {int(pid) for pid in read_text(f"{directory}/cgroup.procs").split()} - {0}


def io_of_processes(directory: str) -> bytes | None:
    if not os.path.isdir(directory):
        return None
    return "\n".join(["", *(read_text(f"/proc/{pid}/io") for pid in pids_in(directory))]).encode()


def kill_member(pid: int, directory: str) -> None:
    """SIGKILL a process of the cgroup; never another one that reuses its pid."""
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            if pid in pids_in(directory):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        finally:
            os.close(fd)


def remove_directory(directory: str, *, last_try: bool) -> bool:
    """Remove an empty cgroup. Returns False while something is in it. Raises PlatformError."""
    try:
        os.rmdir(directory)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno == errno.EBUSY and not last_try:
            return False
        raise PlatformError(
            f"cannot remove the cgroup {directory}: {error.strerror}",
            hint=f"processes inside: {sorted(pids_in(directory))}; kill() comes before remove()",
            detail={"step": "cgroup: remove", "path": directory, "errno": error.errno},
        ) from error
    return True


def await_change(directory: str, unified: bool, deadline: float) -> None:
    """Wait until a process leaves the cgroup; on v1 for 1 ms if no process is visible."""
    waiting = select.poll()
    with contextlib.ExitStack() as stack:
        timeout = 0.001
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if unified:
                events = stack.enter_context(open(f"{directory}/cgroup.events", "rb", buffering=0))
                waiting.register(events, select.POLLPRI)
                if field(events.read(), b"populated") == 0:
                    return
                timeout = deadline - time.monotonic()
            for pid in () if unified else pids_in(directory):
                fd = os.pidfd_open(pid)
                stack.callback(os.close, fd)
                waiting.register(fd, select.POLLIN)
                timeout = deadline - time.monotonic()
        waiting.poll(max(timeout, 0.0) * 1000)
