"""What the backends that start the native helper have in common: one directory for each instance of a home.

<home>/instances/<id>/process      a symlink to "pid start-time user-id-range": who it is
<home>/instances/<id>/facts        a symlink to JSON: what its backend must know of it after a restart
<home>/instances/<id>/guest.sock   where its guest listens
<home>/instances/<id>/...          what the backend keeps there (a workspace without root, say)
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skerry.errors import DiskFull, GuestFailed, InvalidRequest, LaunchFailed, PlatformError
from skerry.host.processes import Handle, below_root, descendants, is_running, start_time
from skerry.host.trees import remove_tree

BACKLOG = 16
HELPER_NAME = "memfd:skerry-guest"
PASS_RIGHTS = 83
"""SO_PASSRIGHTS, which Python does not know yet."""


@dataclass(frozen=True, slots=True)
class Record:
    pid: int
    started: int
    uid_base: int | None


class InstanceDirectory:
    """The files of one instance."""

    def __init__(self, root: str, environment_id: str) -> None:
        self.path = f"{root}/{environment_id}"

    @property
    def socket_path(self) -> str:
        return f"{self.path}/guest.sock"

    def make(self) -> None:
        """Raises DiskFull, LaunchFailed."""
        try:
            os.makedirs(self.path, mode=0o700)
        except OSError as error:
            raise not_made(self.path, error) from error

    def place(self, name: str, mode: int) -> str:
        """The path of a new directory in it. Raises DiskFull, LaunchFailed."""
        path = f"{self.path}/{name}"
        try:
            os.mkdir(path, mode)
        except OSError as error:
            raise not_made(path, error) from error
        return path

    def gate(self, name: str) -> str:
        """See Backend."""
        path = f"{self.path}/workspace/{name}"
        try:
            os.mkfifo(path, 0o644)
        except OSError as error:
            raise not_made(path, error) from error
        return path

    def deliver(self, files: Mapping[str, bytes], links: Mapping[str, str]) -> None:
        """See Backend. Nobody but us has ever been able to write there, so that no name leads elsewhere."""
        for name, content in files.items():
            path = os.fsencode(f"{self.path}/workspace/{name}")
            with self._written():
                os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)  # its gate; the waiting reader has it open
                with open(os.open(path, flags, 0o644), "wb") as file:
                    file.write(content)
        for name, target in links.items():  # last: a file must not be written through one
            with self._written(), contextlib.suppress(FileExistsError):
                os.symlink(target, f"{self.path}/workspace/{name}")

    @contextlib.contextmanager
    def _written(self) -> Iterator[None]:
        """Raises InvalidRequest, DiskFull, PlatformError."""
        try:
            yield
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise InvalidRequest("the name of a file is too long", hint="at most 255 bytes") from error
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise not_made(self.path, error) from error
            raise PlatformError(f"cannot write to {self.path}: {error.strerror}") from error

    def listen(self) -> socket.socket:
        """Raises DiskFull, LaunchFailed."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(self.socket_path)
            os.chmod(self.socket_path, 0o600)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise not_made(self.socket_path, error) from error
        return listener

    def connect(self, *, descriptors: bool = False) -> socket.socket:
        """A stream to the guest. `descriptors` lets the guest send descriptors. Raises GuestFailed."""
        return _stream_to(self.socket_path, descriptors=descriptors)

    def save(self, record: Record) -> None:
        # A symlink appears whole or not at all, and takes no block of the disk.
        try:
            os.symlink(f"{record.pid} {record.started} {record.uid_base or 0}", f"{self.path}/process")
        except OSError as error:
            raise not_made(self.path, error) from error

    def load(self) -> Record | None:
        try:
            pid, started, uid_base = map(int, os.readlink(f"{self.path}/process").split())
        except (OSError, ValueError):
            return None
        return Record(pid, started, uid_base or None)

    def note(self, facts: dict[str, Any]) -> None:
        """Keep what the backend must know to take the instance over. Raises DiskFull, LaunchFailed."""
        name = f"{self.path}/facts"
        try:
            try:
                os.symlink(json.dumps(facts), name)
            except FileExistsError:
                os.symlink(json.dumps(facts), f"{name}.new")
                os.rename(f"{name}.new", name)
        except OSError as error:
            raise not_made(self.path, error) from error

    def noted(self) -> dict[str, Any] | None:
        """The facts; None if the start was not finished."""
        try:
            found = json.loads(os.readlink(f"{self.path}/facts"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def remove(self) -> None:
        """Raises PlatformError."""
        try:
            remove_tree(Path(self.path))
        except FileNotFoundError:
            pass
        except OSError as error:
            raise PlatformError(f"cannot remove {self.path}: {error.strerror}") from error


def _stream_to(path: str, *, descriptors: bool = False) -> socket.socket:
    """See InstanceDirectory.connect. Raises GuestFailed."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if not descriptors:
        # A descriptor that is not received is closed by the reader, and closing a socket can take long.
        with contextlib.suppress(OSError):  # Linux before 6.16 cannot refuse them
            sock.setsockopt(socket.SOL_SOCKET, PASS_RIGHTS, 0)
    try:
        sock.setblocking(False)
        sock.connect(path)
    except OSError as error:
        sock.close()
        raise GuestFailed(f"the guest cannot be reached: {error.strerror}") from error
    return sock


def connect_inside(pid: int, path: str) -> socket.socket:
    """A stream to the guest's socket at `path` below the root of a process. Raises GuestFailed.

    Root inside can replace the socket; a program that has broken out of a runtime can replace the directories on the
    way.
    """
    try:
        place = below_root(pid, *path.strip("/").split("/"))
    except OSError as error:
        raise GuestFailed(f"the guest cannot be reached: {error.strerror}") from error
    try:
        if not stat.S_ISSOCK(os.fstat(place).st_mode):
            raise GuestFailed("the guest cannot be reached: its socket is gone")
        return _stream_to(f"/proc/self/fd/{place}")
    finally:
        os.close(place)


def not_made(path: str, error: OSError) -> DiskFull | LaunchFailed:
    """What to raise when something that an instance needs cannot be made at `path`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(
            f"no room to make {path}: {error.strerror}", hint="make room on the disk of the daemon's home"
        )
    return LaunchFailed(f"cannot make {path}: {error.strerror}")


class Running:
    """One live process 1, ours or a crashed daemon's."""

    def __init__(self, pid: int) -> None:
        self.handle = Handle(pid)

    @classmethod
    def from_record(cls, record: Record) -> Running | None:
        """The process of a record, if it is still that very process."""
        if start_time(record.pid) != record.started:
            return None
        try:
            running = cls(record.pid)
        except ProcessLookupError:
            return None
        # The number may have been given away between the two looks.
        if start_time(record.pid) != record.started:
            running.handle.close()
            return None
        return running

    def kill_descendants(self) -> None:
        """For a guest without a process namespace of its own: end what it started, while it cannot start more."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle.fd, signal.SIGSTOP)
        deadline = time.monotonic() + 1.0
        while is_running(self.handle.pid) and time.monotonic() < deadline:
            time.sleep(0.0001)  # until it has taken the signal, it may be about to fork
        while found := descendants(self.handle.pid):
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    async def kill(self, seconds: float = 20.0) -> None:
        """Raises PlatformError when it does not die: a process stuck in the kernel."""
        self.handle.kill()
        try:
            async with asyncio.timeout(seconds):
                await self.handle.wait()
        except TimeoutError as error:
            raise PlatformError(f"process {self.handle.pid} does not die") from error


def helpers_in(directory: str) -> list[int]:
    """Processes of the native helper that work in a directory: the supervisors of a guest without namespaces."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if HELPER_NAME in os.readlink(f"/proc/{name}/exe"):
                    where = os.readlink(f"/proc/{name}/cwd")
                    if where.startswith(f"{directory}/"):
                        found.append(int(name))
    return found


def list_directories(root: str) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return sorted(os.listdir(root))
    return []
