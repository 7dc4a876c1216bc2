"""Connects to the daemon, and starts it when none is running.

Concurrent clients start one daemon: they take turns on a lock file, and the holder tries the socket again before it
starts anything. The daemon reports on a pipe that it is ready, or why it failed.
"""

from __future__ import annotations

import os
import socket
import struct
import time

from skerry.errors import Conflict, DaemonUnavailable, Denied, InvalidRequest, PlatformError, from_dict
from skerry.settings import SOCKET_PATH_MAX

TYPE_CHECKING = False
if TYPE_CHECKING:
    from skerry.settings import Home

START_SECONDS = 30.0
STOP_SECONDS = 60.0
MODULE = "skerry.daemon"
_LOG_TAIL = 2048
_LOST = (FileNotFoundError, NotADirectoryError, ConnectionRefusedError)

# Starts the daemon as a grandchild, so that it leaves no zombie when it ends before its client.
_DETACH = "import os, sys\nif os.fork() == 0: os.execv(sys.argv[1], sys.argv[1:])"


def connect(home: Home, *, start: bool = True) -> socket.socket:
    """A blocking connection to the daemon of this home; with `start`, starts one if none is running.

    Raises DaemonUnavailable, Denied when the socket belongs to another user, and the error that kept the daemon from
    starting.
    """
    try:
        return dial(home.socket)
    except _LOST as error:
        if not start:
            raise DaemonUnavailable(f"no daemon is running for {home.path}") from error
    _start(home)
    try:
        return dial(home.socket)
    except _LOST as error:
        raise DaemonUnavailable("the daemon ended as soon as it had started", hint=_hint(home)) from error


def open_process(home: Home) -> int:
    """A pidfd of the running daemon. Raises DaemonUnavailable, Denied."""
    with connect(home, start=False) as sock:
        pid, _ = _peer(sock)
        try:
            return os.pidfd_open(pid)
        except OSError as error:
            raise DaemonUnavailable(f"the daemon of {home.path} is gone") from error


def wait_process(pidfd: int) -> None:
    """Wait for the end of a process. Raises PlatformError when that takes too long."""
    import select

    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    if not poll.poll(STOP_SECONDS * 1000):
        raise PlatformError(f"the daemon has not ended after {STOP_SECONDS:.0f} s")


def _peer(sock: socket.socket) -> tuple[int, int]:
    """(process, user) at the other end, as the kernel knows them."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def dial(path: str) -> socket.socket:
    """A connection to the daemon of this user, or of root, at this socket.

    Raises FileNotFoundError, NotADirectoryError or ConnectionRefusedError when there is none, InvalidRequest for a path
    that is too long, DaemonUnavailable, Denied.
    """
    if (size := len(os.fsencode(path))) > SOCKET_PATH_MAX:
        raise InvalidRequest(
            f"socket path too long: {path} has {size} bytes, a unix socket takes {SOCKET_PATH_MAX}",
            hint="set SKERRY_HOME to a shorter path",
        )
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            sock.connect(path)
        except PermissionError as error:
            raise Denied(
                f"{path} belongs to another user", hint="set SKERRY_HOME to a directory that you own"
            ) from error
        except OSError as error:
            if isinstance(error, _LOST):
                raise
            raise DaemonUnavailable(
                f"cannot connect to {path}: {error.strerror or error}",
                hint="set SKERRY_HOME to a directory that you own",
            ) from error
        # In a shared directory another user could have put a socket there to receive our requests.
        _, uid = _peer(sock)
        if uid not in (os.geteuid(), 0):
            raise Denied(f"the daemon at {path} runs as uid {uid}, not as you", hint="set SKERRY_HOME")
    except BaseException:
        sock.close()
        raise
    return sock


def _start(home: Home) -> None:
    """Start the daemon, unless another client has done so. Returns when it accepts connections."""
    home.prepare()
    deadline = time.monotonic() + START_SECONDS
    try:
        lock = os.open(home.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise DaemonUnavailable(f"cannot open {home.lock}: {error.strerror}") from error
    try:
        _take(lock, deadline, home)
        if not _listens(home):
            _spawn(home, deadline)
    finally:
        os.close(lock)


def _listens(home: Home) -> bool:
    try:
        dial(home.socket).close()
    except _LOST:
        return False
    return True


def _take(lock: int, deadline: float, home: Home) -> None:
    import fcntl

    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise DaemonUnavailable(
                    f"another client has been starting the daemon for {START_SECONDS:.0f} s", hint=_hint(home)
                ) from None
            time.sleep(0.02)


def _spawn(home: Home, deadline: float) -> None:
    import subprocess
    import sys

    log = os.open(home.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    ready, tell = os.pipe()
    try:
        logged = os.fstat(log).st_size
        try:
            subprocess.run(
                [
                    sys.executable,
                    "-ISc",
                    _DETACH,
                    sys.executable,
                    "-m",
                    MODULE,
                    "--ready-fd",
                    str(tell),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(tell,),
                cwd="/",
                env=_environment(home),
                start_new_session=True,
                check=True,
            )
        except (OSError, subprocess.CalledProcessError) as error:
            raise DaemonUnavailable(f"cannot start the daemon: {error}", hint=_hint(home)) from error
        finally:
            os.close(tell)
        word = _read_line(ready, deadline)
    finally:
        os.close(ready)
        os.close(log)
    if word != b"ready\n":
        failure = _failure(home, word, logged)
        if not isinstance(failure, Conflict):  # a daemon was started by hand meanwhile
            raise failure


def _environment(home: Home) -> dict[str, str]:
    env = {**os.environ, "SKERRY_HOME": home.path}
    if path := env.get("PYTHONPATH"):  # entries may be relative, and the daemon starts in /
        env["PYTHONPATH"] = os.pathsep.join(
            os.path.abspath(entry) for entry in path.split(os.pathsep) if entry
        )
    return env


def _read_line(fd: int, deadline: float) -> bytes:
    """One line, or the part of it that came before the writer died or the deadline passed."""
    import select

    poll = select.poll()
    poll.register(fd, select.POLLIN)
    line = b""
    while not line.endswith(b"\n"):
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            break
        data = os.read(fd, 65536)
        if not data:
            break
        line += data
    return line


def _failure(home: Home, word: bytes, logged: int) -> Exception:
    """The error of a daemon that did not start: its own, or the end of its log."""
    if word.startswith(b"{"):
        import json

        try:
            return from_dict(json.loads(word))
        except ValueError:
            pass
    with open(home.log, "rb") as log:
        size = os.fstat(log.fileno()).st_size
        log.seek(max(logged, size - _LOG_TAIL))
        tail = log.read(_LOG_TAIL).decode(errors="replace").strip()
    return DaemonUnavailable(
        "the daemon did not start" + (f":\n{tail}" if tail else ""),
        hint=_hint(home),
        detail={"log": home.log},
    )


def _hint(home: Home) -> str:
    return f"run `skerry serve` to see it start, or `skerry doctor`; its log is {home.log}"
