"""The native helper on its way to becoming a guest, and in words what went wrong in one of its steps."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import signal
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from skerry.errors import IsolationUnavailable, LaunchFailed
from skerry.host.processes import Handle

Step = tuple[str, ...]

HELPER = Path(__file__).parent.parent / "_native" / "skerry-guest"
SECONDS = 30.0
_MESSAGE_MAX = 1024

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
    ("own-mounts", errno.EPERM): _NO_USER_NAMESPACES,
    ("own-mounts", errno.EACCES): _NO_USER_NAMESPACES,
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


class Launch:
    """One helper, from its start until it is a guest that has been told to stay.

    Nothing of it outlives this process before `keep`: its socket closes, and it ends by itself.
    """

    def __init__(self, helper: Helper, listener: int) -> None:
        """Start it; `listener` will be the guest's socket. Raises LaunchFailed."""
        self.pid = 0
        """The host's number of the guest, a child of this process; 0 while it is not known."""
        self.weaker: list[tuple[str, str]] = []
        """(step, reason) for each step that did less than requested."""
        self._expected = 0
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            with other:
                self._launcher = spawn(helper, "launch", [other.fileno(), null, null, listener])
        except OSError as error:
            self._control.close()
            raise LaunchFailed(f"the native helper cannot be started: {error.strerror}") from error
        finally:
            os.close(null)

    def send(self, steps: bytes, fds: Sequence[int] = ()) -> None:
        """One list of encoded steps, to which `fds` are known as slots from 0 on.

        Several may be under way. What goes wrong is told by `done`.
        """
        self._expected += 1
        with contextlib.suppress(OSError):
            socket.send_fds(self._control, [steps], list(fds))

    def keep(self) -> None:
        """Let the guest, when it is ready, live on without this process. Its record must have been written."""
        with contextlib.suppress(OSError):
            self._control.send(b"K")

    async def done(self) -> None:
        """Return when all steps are done. Raises LaunchFailed with the failed step."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(SECONDS):
                while self._expected:
                    try:
                        self._hear(await loop.sock_recv(self._control, _MESSAGE_MAX))
                    except ConnectionResetError:
                        continue  # it ended with something unread: what it had said comes next
        except TimeoutError as error:
            raise LaunchFailed(f"the environment did not start within {SECONDS:g} s") from error

    def attempt(self) -> None:
        """As `done`, while everything else waits: for milliseconds."""
        self._control.settimeout(SECONDS)
        try:
            while self._expected:
                try:
                    self._hear(self._control.recv(_MESSAGE_MAX))
                except ConnectionResetError:
                    continue
        except TimeoutError as error:
            raise LaunchFailed(f"nothing started within {SECONDS:g} s") from error

    def close(self) -> None:
        """It is a guest now, and has nothing more to say here."""
        self._control.close()

    def ended(self) -> bool:
        """True if the helper ended by itself."""
        child = Handle(self.pid)
        try:
            return child.ended()
        finally:
            child.close()

    def end(self) -> None:
        """Kill whatever was started, and wait for it."""
        if self._launcher:
            # Without more to read the launching process ends by itself; all it had to say is there then.
            self._control.shutdown(socket.SHUT_WR)
            _reap(self._launcher, patience=1.0)
            self._control.setblocking(False)
            with contextlib.suppress(OSError, LaunchFailed):
                while not self.pid:
                    self._hear(self._control.recv(_MESSAGE_MAX))
        if self.pid not in (0, self._launcher):
            _reap(self.pid)
        self._control.close()

    def _hear(self, message: bytes) -> None:
        """Take in one answer."""
        text = message.decode(errors="replace")
        if text.startswith("P"):
            self.pid = int(text[1:])
        elif text.startswith("W\t"):
            _, step, number, detail = text.split("\t", 3)
            self.weaker.append((step, f"{detail}: {os.strerror(int(number))}"))
        elif text in ("B", "R"):
            self._expected -= 1
            if self._launcher not in (0, self.pid):
                _reap(self._launcher, patience=1.0)
            self._launcher = 0
        else:
            raise explained(text)


def try_steps(helper: Helper, steps: bytes) -> None:
    """Dry run of the steps: what they made is removed. Raises LaunchFailed."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        launch = Launch(helper, null)
    finally:
        os.close(null)
    try:
        launch.send(steps)
        launch.attempt()
    finally:
        launch.end()


def step_failed(step: str, code: int, detail: str) -> LaunchFailed:
    return LaunchFailed(
        f"step {step} failed: {os.strerror(code)}{f' ({detail})' if detail else ''}",
        hint=_HINTS.get((step, code), "`skerry doctor` checks what this machine can do"),
        detail={"step": step, "errno": errno.errorcode.get(code, str(code)), "what": detail},
    )


def explained(answer: str) -> LaunchFailed:
    """The failure in the helper's last answer; an empty answer means that it died."""
    if answer.startswith("E\t"):
        _, step, number, detail = answer.split("\t", 3)
        return step_failed(step, int(number), detail)
    return LaunchFailed(
        "the native helper died while it built the environment", hint="look at the kernel's log"
    )


def spawn(helper: Helper, role: str, fds: Sequence[int]) -> int:
    """Start the helper in a role, with these descriptors as 0, 1, ... and no others; its pid. Raises OSError."""
    raised: list[int] = []
    try:
        for fd in fds:
            raised.append(_raised(fd))
        with helper.opened() as program:
            return os.posix_spawn(
                f"/proc/self/fd/{program}",
                ["skerry-init", role],
                {},
                file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(raised)],
                setsigmask=[],
                setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD],
            )
    finally:
        for fd in raised:
            os.close(fd)


def _reap(pid: int, patience: float = 0.0) -> None:
    """Wait for a child, which is killed when it has not ended after `patience` seconds."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        child = Handle(pid)
        try:
            if not child.ended(patience):
                child.kill()
            os.waitpid(pid, 0)
        finally:
            child.close()
