"""Archives unpacked into a directory that they cannot leave.

Every path is resolved by the kernel with that directory as its root (`open_in_root`), as it would be inside a
chroot, so that a layer may write through `/bin -> usr/bin` and still nothing gets out. The last component is
never followed: what is there gives way. Devices, FIFOs, setuid and setgid bits and file capabilities are left
out; owners can always read their files and enter their directories.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from skerry.errors import DiskFull, InvalidRequest, LimitReached, PathOutside, PlatformError
from skerry.host.space import LOOK_EVERY, check_space
from skerry.host.trees import Step, open_child, open_in_root, remove_in, walk
from skerry.policy import GIB, format_size
from skerry.tarstream import CHUNK, Entry, Kind, Readable, TarReader

_T = TypeVar("_T")
_ANCHOR = os.O_PATH | os.O_DIRECTORY
_WHITEOUT = b".wh."
_OPAQUE = b".wh..wh..opq"
_SYMLINKS_MAX = 40
_ID_MAX, _NOBODY = 65535, 65534
_TIME_MAX = 1 << 33
_ARCHIVE_FAULTS = {
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.EXDEV,
    errno.EMLINK,
    errno.EINVAL,
    errno.EILSEQ,
}


@dataclass(frozen=True, slots=True)
class UnpackLimits:
    """How much may come out of all archives of one image."""

    bytes: int = 20 * GIB
    entries: int = 2_000_000


class Unpacker:
    """Unpacks one or more archives over each other into `root`, an existing directory."""

    def __init__(self, root: Path, limits: UnpackLimits) -> None:
        self._limits = limits
        self._read = self._written = self._entries = 0
        self._as_root = os.geteuid() == 0
        self._unchecked = LOOK_EVERY
        self._fresh: set[tuple[int, bytes]] = set()
        self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._root)

    def unpack(self, archive: Readable, *, layer: bool = False) -> None:
        """Unpack a tar stream to its end; as a `layer`, its whiteouts remove what lower layers left.

        Raises InvalidRequest for a damaged or dishonest archive, PathOutside for a name with `..`,
        LimitReached for too much, DiskFull.
        """
        self._fresh.clear()
        counted = _Counted(archive, self._count_read)
        for entry in TarReader(counted):
            self._count_entry()
            self._written += entry.size
            self._check_bytes(self._written)
            with _faults(entry.name):
                self._place(entry, layer)
        while counted.read(CHUNK):
            pass

    def _count_read(self, amount: int) -> None:
        self._read += amount
        self._unchecked += amount
        if self._unchecked >= LOOK_EVERY:
            self._unchecked = 0
            check_space(self._root)
        self._check_bytes(self._read)

    def _check_bytes(self, amount: int) -> None:
        if amount > self._limits.bytes:
            raise LimitReached(f"the archive unpacks to more than {format_size(self._limits.bytes)}")

    def _count_entry(self) -> None:
        self._entries += 1
        if self._entries > self._limits.entries:
            raise LimitReached(f"the archive has more than {self._limits.entries} entries")

    def _place(self, entry: Entry, layer: bool) -> None:
        parent, _, name = _clean(entry.name).rpartition(b"/")
        if not name:
            return
        with self._directory(parent) as fd:
            if layer:
                if name.startswith(_WHITEOUT):
                    self._whiteout(fd, name)
                    return
                self._fresh.add((os.fstat(fd).st_ino, name))
            if entry.kind is Kind.FILE:
                self._file(fd, name, entry)
            elif entry.kind is Kind.DIRECTORY:
                self._make_directory(fd, name, entry)
            elif entry.kind is Kind.SYMLINK:
                _replace(fd, name, lambda: os.symlink(entry.link, name, dir_fd=fd))
                if self._as_root:
                    os.chown(name, _owner(entry.uid), _owner(entry.gid), dir_fd=fd, follow_symlinks=False)
            elif entry.kind is Kind.HARDLINK:
                self._hardlink(fd, name, _clean(entry.link))

    def _file(self, dir_fd: int, name: bytes, entry: Entry) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = _replace(dir_fd, name, lambda: os.open(name, flags, 0o600, dir_fd=dir_fd))
        try:
            for offset, data in entry.chunks():
                while data:
                    done = os.pwrite(fd, data, offset)
                    data, offset = data[done:], offset + done
            os.ftruncate(fd, entry.size)
            self._own(fd, entry)
            os.fchmod(fd, entry.mode & 0o777 | stat.S_IRUSR)
            # Compiled Python is valid only for the time of its source.
            if 0 <= entry.mtime < _TIME_MAX:
                os.utime(fd, ns=(round(entry.mtime * 1e9),) * 2)
        finally:
            os.close(fd)

    def _make_directory(self, dir_fd: int, name: bytes, entry: Entry) -> None:
        if not _is_directory(dir_fd, name):
            _replace(dir_fd, name, lambda: os.mkdir(name, stat.S_IRWXU, dir_fd=dir_fd))
        fd = open_child(dir_fd, name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._own(fd, entry)
            os.fchmod(fd, entry.mode & 0o1777 | stat.S_IRWXU)
        finally:
            os.close(fd)

    def _hardlink(self, dir_fd: int, name: bytes, target: bytes) -> None:
        parent, _, target_name = target.rpartition(b"/")
        source = open_in_root(self._root, parent, _ANCHOR)
        try:
            linked = os.stat(target_name, dir_fd=source, follow_symlinks=False)
            if stat.S_ISDIR(linked.st_mode):
                raise IsADirectoryError(errno.EISDIR, "a hard link to a directory")
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(name, dir_fd=dir_fd, follow_symlinks=False), linked):
                    return
            at = {"src_dir_fd": source, "dst_dir_fd": dir_fd}
            _replace(dir_fd, name, lambda: os.link(target_name, name, **at, follow_symlinks=False))
        finally:
            os.close(source)

    def _own(self, fd: int, entry: Entry) -> None:
        if self._as_root:
            os.fchown(fd, _owner(entry.uid), _owner(entry.gid))

    @contextmanager
    def _directory(self, path: bytes) -> Iterator[int]:
        """The directory of an entry, open; made with its parents where missing, as `mkdir -p` in a chroot."""
        try:
            fd = open_in_root(self._root, path, _ANCHOR)
        except FileNotFoundError:
            self._make_parents(path, 0)
            fd = open_in_root(self._root, path, _ANCHOR)
        try:
            yield fd
        finally:
            os.close(fd)

    def _make_parents(self, path: bytes, symlinks: int) -> None:
        if symlinks > _SYMLINKS_MAX:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        done = b""
        for part in path.split(b"/"):
            if not part:
                continue
            here = open_in_root(self._root, done, _ANCHOR)
            try:
                self._make_parent(here, done, part, symlinks)
            finally:
                os.close(here)
            done += b"/" + part

    def _make_parent(self, here: int, done: bytes, part: bytes, symlinks: int) -> None:
        try:
            os.close(open_in_root(self._root, done + b"/" + part, _ANCHOR))
            return
        except FileNotFoundError:
            pass
        try:
            os.mkdir(part, dir_fd=here)
        except FileExistsError:  # a symlink to what is not there yet
            target = os.readlink(part, dir_fd=here)
            self._make_parents(target if target.startswith(b"/") else done + b"/" + target, symlinks + 1)
            return
        self._count_entry()
        fd = open_child(here, part, os.O_RDONLY | os.O_DIRECTORY)
        os.fchmod(fd, 0o755)
        os.close(fd)

    def _whiteout(self, dir_fd: int, name: bytes) -> None:
        if name == _OPAQUE:
            self._clear_lower(dir_fd)
            return
        hidden = name.removeprefix(_WHITEOUT)
        if hidden in (b"", b".", b".."):
            raise PathOutside(f"the archive hides {_text(hidden)!r}, which is no name")
        if (os.fstat(dir_fd).st_ino, hidden) not in self._fresh:
            with suppress(FileNotFoundError):
                remove_in(dir_fd, hidden)
        elif _is_directory(dir_fd, hidden):
            fd = open_child(dir_fd, hidden, _ANCHOR)
            try:
                self._clear_lower(fd)
            finally:
                os.close(fd)

    def _clear_lower(self, dir_fd: int) -> None:
        """Remove what is in a directory, except what this layer put there: the order within it is free."""
        for visit in walk(dir_fd):
            if visit.step is Step.ENTER:
                continue
            if (os.fstat(visit.dir_fd).st_ino, os.fsencode(visit.name)) in self._fresh:
                continue
            if visit.step is Step.ENTRY:
                os.unlink(visit.name, dir_fd=visit.dir_fd)
            else:
                try:
                    os.rmdir(visit.name, dir_fd=visit.dir_fd)
                except OSError as error:
                    if error.errno != errno.ENOTEMPTY:  # this layer put something below
                        raise


@dataclass(frozen=True, slots=True)
class _Counted:
    stream: Readable
    count: Callable[[int], None]

    def read(self, size: int, /) -> bytes:
        data = self.stream.read(size)
        self.count(len(data))
        return data


def _replace(dir_fd: int, name: bytes, make: Callable[[], _T]) -> _T:
    try:
        return make()
    except FileExistsError:
        remove_in(dir_fd, name)
        return make()


def _clean(name: bytes) -> bytes:
    """A member's name relative to the root, without empty parts. Raises PathOutside for `..`."""
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if b".." in parts or b"\0" in name:
        raise PathOutside(
            f"the archive has a path that leaves it: {_text(name)!r}",
            hint="do not use this archive: no honest tool wrote it",
        )
    return b"/".join(parts)


def _owner(number: int) -> int:
    return number if 0 <= number <= _ID_MAX else _NOBODY


def _is_directory(dir_fd: int, name: bytes) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _text(name: bytes) -> str:
    return name[:200].decode(errors="backslashreplace")


@contextmanager
def _faults(name: bytes) -> Iterator[None]:
    """Whose fault an OSError of unpacking is."""
    try:
        yield
    except OSError as error:
        shown = f"cannot unpack {_text(name)!r}: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(shown) from error
        if error.errno in _ARCHIVE_FAULTS:
            raise InvalidRequest(shown, hint="the archive contradicts itself") from error
        raise PlatformError(shown) from error
