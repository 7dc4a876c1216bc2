"""Spawning the native helper with a list of steps, and saying in words what went wrong in one of them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import select
import signal
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from skerry.errors import IsolationUnavailable, LaunchFailed

Step = tuple[str, ...]

HELPER = Path(__file__).parent.parent / "_native" / "skerry-guest"
FIRST_EXTRA_FD = 5
SECONDS = 30.0

_NO_USER_NAMESPACES = (
    "user namespaces are not available to this user; on Ubuntu 23.10 and later: "
    "sysctl kernel.apparmor_restrict_unprivileged_userns=0 (or an AppArmor profile with `userns`), elsewhere: "
    "sysctl user.max_user_namespaces=15000 and kernel.unprivileged_userns_clone=1"
)
_HINTS: dict[tuple[str, int], str] = {
    ("namespaces", errno.EPERM): _NO_USER_NAMESPACES,
    ("namespaces", errno.EACCES): _NO_USER_NAMESPACES,
    ("namespaces", errno.ENOSPC): "the limit of namespaces is reached: sysctl user.max_user_namespaces",
    ("namespaces", errno.EUSERS): "user namespaces are nested too deeply on this machine",
    ("namespaces", errno.EAGAIN): "the limit of processes of this user is reached: ulimit -u, or pids.max",
    ("namespaces", errno.ENOSYS): "this kernel has no clone3: Linux 5.12 or newer is needed",
    ("map", errno.EPERM): _NO_USER_NAMESPACES,
    (
        "proc",
        errno.EPERM,
    ): "/proc of this machine is partly covered (a container?): it needs an unmasked /proc",
    ("private-mounts", errno.EPERM): _NO_USER_NAMESPACES,
    ("private-mounts", errno.EACCES): _NO_USER_NAMESPACES,
    ("fsopen", errno.ENOSYS): "this kernel lacks the mount API: Linux 5.12 or newer is needed",
    ("tree", errno.ENOENT): "a part of the image is missing on disk: rebuild or import it again",
    ("seccomp", errno.EINVAL): "this kernel has no seccomp filters",
    ("join", errno.ENOSPC): "the cgroup cannot take more processes",
}


class Helper:
    """The native helper, copied into a sealed memfd: what runs as PID 1 inside leads to nothing writable."""

    def __init__(self, path: Path = HELPER) -> None:
        """Raises IsolationUnavailable when it was not built."""
        try:
            self._program = path.read_bytes()
        except OSError as error:
            raise IsolationUnavailable(
                f"the native helper is missing: {error.strerror}",
                hint="install a built package, or run `make native` in a checkout",
            ) from error
        self._shared = self._copy() if os.geteuid() == 0 else -1

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """A descriptor of it to execute.

        Root's copy is one for all. Any other user's belongs to the very user that the environment runs as, who
        could change its mode: there each launch has one of its own.
        """
        fd = self._copy() if self._shared < 0 else self._shared
        try:
            yield fd
        finally:
            if fd != self._shared:
                os.close(fd)

    def close(self) -> None:
        if self._shared >= 0:
            os.close(self._shared)

    def _copy(self) -> int:
        low = os.memfd_create("skerry-guest", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fd = _raised(low)
        os.close(low)
        os.write(fd, self._program)
        os.fchmod(fd, 0o555)
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return fd


def _raised(fd: int) -> int:
    """A copy that is out of the way of the numbers that descriptors get in the helper."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64)


def encode_steps(steps: Iterable[Step]) -> bytes:
    """The wire form: u16 number of arguments, then each with a NUL behind it."""
    parts = []
    for step in steps:
        parts.append(struct.pack("<H", len(step)))
        parts += [argument.encode("utf-8", "surrogateescape") + b"\0" for argument in step]
    return b"".join(parts)


async def launch(
    helper: Helper, steps: bytes, listener: socket.socket, seccomp_fd: int, extra_fds: Sequence[int] = ()
) -> int:
    """Run the encoded steps; returns the host's pid of the guest once it serves its socket.

    `extra_fds` are known to the steps as FIRST_EXTRA_FD and up. The guest is a child of this process.
    Raises LaunchFailed, with the step that failed and what to do; nothing of it runs then.
    """
    launcher, status = _spawn(helper, steps, [listener.fileno(), seccomp_fd, *extra_fds])
    said: list[str] = []
    try:
        async with asyncio.timeout(SECONDS):
            await _read_status(status, said)
        pid = _started(said)
    except BaseException as error:
        _end(launcher, said)
        if isinstance(error, TimeoutError):
            raise LaunchFailed(f"the environment did not start within {SECONDS:g} s") from error
        raise
    finally:
        os.close(status)
    if pid != launcher:
        _reap(launcher)
    return pid


def attempt(helper: Helper, steps: bytes) -> None:
    """Run the steps to see whether they work, and end what they made. Blocks for milliseconds. Raises LaunchFailed."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        launcher, status = _spawn(helper, steps, [null, null])
    finally:
        os.close(null)
    said: list[str] = []
    try:
        while (not said or said[-1][0] not in "RE") and select.select([status], [], [], SECONDS)[0]:
            data = os.read(status, 4096)
            if not data:
                break
            said += data.decode(errors="replace").split("\n")[:-1]
        _started(said)
    finally:
        os.close(status)
        _end(launcher, said)


def _spawn(helper: Helper, steps: bytes, fds: Sequence[int]) -> tuple[int, int]:
    """(pid of the launching process, where it says how it goes). `fds` are its descriptors from 3 on."""
    spec = os.memfd_create("skerry-steps", os.MFD_CLOEXEC)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    status_read, status_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    raised: list[int] = []
    try:
        os.write(spec, steps)
        os.lseek(spec, 0, os.SEEK_SET)
        raised = [_raised(fd) for fd in (spec, status_write, null, *fds)]
        with helper.opened() as program:
            launcher = os.posix_spawn(
                f"/proc/self/fd/{program}",
                ["skerry-init", "launch"],
                {},
                file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(raised)],
                setsigmask=[],
                setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD],
            )
    except OSError as error:
        os.close(status_read)
        raise LaunchFailed(f"the native helper cannot be started: {error.strerror}") from error
    finally:
        for fd in (spec, null, status_write, *raised):
            os.close(fd)
    return launcher, status_read


def _end(launcher: int, said: list[str]) -> None:
    """Kill what a launch has made. The guest is named in what was said so far; without it there is none."""
    for started in {launcher, _pid(said)} - {0}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(started, signal.SIGKILL)
        _reap(started)


async def _read_status(fd: int, said: list[str]) -> None:
    """Collect lines until the launch is over, one way or the other."""
    loop = asyncio.get_running_loop()
    rest = ""
    while not said or said[-1][0] not in "RE":
        ready = loop.create_future()
        loop.add_reader(fd, ready.set_result, None)
        try:
            await ready
        finally:
            loop.remove_reader(fd)
        data = os.read(fd, 4096)
        if not data:
            return
        *lines, rest = (rest + data.decode(errors="replace")).split("\n")
        said += [line for line in lines if line]


def _pid(said: list[str]) -> int:
    return next((int(line[1:]) for line in said if line[0] == "P"), 0)


def _started(said: list[str]) -> int:
    """The guest's pid. Raises LaunchFailed with what the helper complained about."""
    if "R" in said and _pid(said):
        return _pid(said)
    for line in said:
        if line.startswith("E\t"):
            _, step, number, detail = line.split("\t", 3)
            code = int(number)
            raise LaunchFailed(
                f"step {step} failed: {os.strerror(code)}{f' ({detail})' if detail else ''}",
                hint=_HINTS.get((step, code), "`skerry doctor` checks what this machine can do"),
                detail={"step": step, "errno": errno.errorcode.get(code, str(code)), "what": detail},
            )
    raise LaunchFailed(
        "the native helper died while it built the environment", hint="look at the kernel's log"
    )


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
