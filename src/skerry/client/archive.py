"""Local files to a tar stream and back.

What comes out of an environment is hostile. `unpack` walks directory descriptors, follows no symlink, makes
every file anew, and leaves out what could harm later: links that lead outside, devices, setuid bits. Holes of files
stay holes in both directions.
"""

from __future__ import annotations

import errno
import os
import stat
import tarfile
from contextlib import suppress
from typing import IO, TYPE_CHECKING

from skerry.errors import InvalidRequest, LimitReached, PlatformError
from skerry.models import LeftOut
from skerry.tarstream import SEGMENTS_MAX, Entry, Kind, TarReader

if TYPE_CHECKING:
    from collections.abc import Iterator
    from os import PathLike
    from typing import Self

BLOCK = 128 << 10
DOWNLOAD_MAX = 64 << 30
"""Bytes of one download, without holes."""
ENTRIES_MAX = 2_000_000
"""Names of one download."""
LEVELS_MAX = 10_000
"""Directories above one name."""
LEFT_OUT_MAX = 10_000
"""Names in a list of what was left out."""
_OPEN_LEVELS = 64
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOR_ALL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors that every other name would meet, too."""
_SPECIAL = "not a file, directory or link"
_OUTSIDE = "leads outside"


def read_file(path: str | PathLike[str]) -> Iterator[bytes]:
    """The content of a local file in blocks. Raises OSError."""
    with open(path, "rb") as file:
        while data := file.read(BLOCK):
            yield data


def is_contents(path: str) -> bool:
    """Whether a path names what is in a directory (`.`, `a/.`, `/`), so that a copy cannot keep its name."""
    return path.rstrip("/").rpartition("/")[2] in ("", ".", "..")


class Notes(list[LeftOut]):
    """What was left out, and why: at most LEFT_OUT_MAX names, then how many more there are."""

    def __init__(self) -> None:
        super().__init__()
        self._more = 0

    def add(self, path: str, reason: str) -> None:
        if len(self) < LEFT_OUT_MAX:
            self.append(LeftOut(path, reason))
        else:
            self._more += 1

    def add_skipped(self, tar: TarReader) -> None:
        """What the guest has left out, by its own word."""
        for name, number in tar.skipped:
            self.add(os.fsdecode(name), _SPECIAL if number == errno.ENOTSUP else os.strerror(number))
        self._more += tar.skipped_more

    def finished(self) -> list[LeftOut]:
        return [*self, LeftOut("", f"{self._more} more")] if self._more else list(self)


class _Directories:
    """Directories below one that is open, entered by descriptors: no path is resolved as a whole.

    The nearest _OPEN_LEVELS stay open, so that a walk through a tree takes time in proportion to its names.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._names: list[str] = []
        self._fds: list[int] = []

    @property
    def fd(self) -> int:
        """Of the directory that was entered last."""
        return self._fds[-1] if self._fds else self._root

    def enter(self, parts: tuple[str, ...], make: bool) -> bool:
        """Enter this directory; `make` creates missing parts. False if a part is not a directory or is a symlink."""
        common = min(len(parts), len(self._names))
        if list(parts[:common]) != self._names[:common]:
            common = next(at for at in range(common) if parts[at] != self._names[at])
        while len(self._names) > common:
            self._leave()
        if self._names and not self._fds:
            self._names.clear()
        for part in parts[len(self._names) :]:
            try:
                below = self._open(part, make)
            except (NotADirectoryError, FileNotFoundError):
                return False
            except OSError as error:
                if error.errno == errno.ELOOP:
                    return False
                raise
            self._names.append(part)
            self._fds.append(below)
            if len(self._fds) > _OPEN_LEVELS:
                os.close(self._fds.pop(0))
        return True

    def _open(self, name: str, make: bool) -> int:
        try:
            return os.open(name, _DIRECTORY, dir_fd=self.fd)
        except FileNotFoundError:
            if not make:
                raise
        os.mkdir(name, 0o755, dir_fd=self.fd)
        return os.open(name, _DIRECTORY, dir_fd=self.fd)

    def _leave(self) -> None:
        self._names.pop()
        if self._fds:
            os.close(self._fds.pop())

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())
        os.close(self._root)


def too_large(path: str) -> LimitReached:
    return LimitReached(
        f"{path} is larger than this download may be",
        hint="raise max_bytes (--max-size), or copy parts of it",
    )


# From here into an environment.


def pack(local: str, name: str, left_out: Notes) -> Iterator[bytes]:
    """A tar stream of a local file or directory, called `name` in it ("." for the content of a directory).

    Files, directories and symlinks; anything else, and what cannot be read, goes into `left_out`. Owners are not
    taken over. Raises OSError for `local` itself.
    """
    at = os.path.realpath(local) if os.path.isdir(local) else local
    above, base = os.path.split(at.rstrip("/") or "/")
    root = os.open(above or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    tree = _Directories(root)
    try:
        todo: list[tuple[str, ...]] = [(base or ".",)]
        while todo:
            parts = todo.pop()
            inside = "/".join((name, *parts[1:]))
            begun = False
            try:
                if not tree.enter(parts[:-1], make=False):
                    left_out.add(inside, "was removed meanwhile")
                    continue
                for data in _pack_one(tree.fd, parts[-1], inside, left_out):
                    begun = True
                    yield data
            except OSError as error:
                if begun or len(parts) == 1:
                    raise
                left_out.add(inside, error.strerror or str(error))
                continue
            try:
                todo += [(*parts, entry) for entry in _entries(tree.fd, parts[-1])]
            except OSError as error:
                if len(parts) == 1:
                    raise
                left_out.add(inside, error.strerror or str(error))
    finally:
        tree.close()
    yield bytes(2 * tarfile.BLOCKSIZE)


def _entries(above: int, name: str) -> list[str]:
    """The names in a directory, last first; none for anything else."""
    if not stat.S_ISDIR(os.lstat(name, dir_fd=above).st_mode):
        return []
    fd = os.open(name, _DIRECTORY, dir_fd=above)
    try:
        return sorted(os.listdir(fd), reverse=True)
    finally:
        os.close(fd)


def _pack_one(above: int, name: str, inside: str, left_out: Notes) -> Iterator[bytes]:
    found = os.lstat(name, dir_fd=above)
    info = tarfile.TarInfo(inside)
    info.mode = stat.S_IMODE(found.st_mode)
    info.mtime = int(found.st_mtime)
    if stat.S_ISREG(found.st_mode):
        fd = os.open(name, _READ, dir_fd=above)
        try:
            yield from _pack_file(fd, info)
        finally:
            os.close(fd)
        return
    if stat.S_ISDIR(found.st_mode):
        info.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(found.st_mode):
        info.type = tarfile.SYMTYPE
        info.linkname = os.readlink(name, dir_fd=above)
    else:
        left_out.add(inside, _SPECIAL)
        return
    yield info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def _pack_file(fd: int, info: tarfile.TarInfo) -> Iterator[bytes]:
    size = os.fstat(fd).st_size
    pieces = _pieces(fd, size)
    if pieces is None:
        info.size = size
        yield info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
        yield from _content(fd, 0, size)
    else:
        # GNU's sparse format 1.0: a map, padded to a block, then what is not a hole.
        numbers = "".join(f"{offset}\n{length}\n" for offset, length in pieces)
        table = f"{len(pieces)}\n{numbers}".encode()
        table += bytes(-len(table) % tarfile.BLOCKSIZE)
        info.pax_headers = {
            "GNU.sparse.major": "1",
            "GNU.sparse.minor": "0",
            "GNU.sparse.name": info.name,
            "GNU.sparse.realsize": str(size),
        }
        info.name = "GNUSparseFile.0/" + info.name.rpartition("/")[2][-40:]
        info.size = len(table) + sum(length for _, length in pieces)
        yield info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
        yield table
        for offset, length in pieces:
            yield from _content(fd, offset, length)
    yield bytes(-info.size % tarfile.BLOCKSIZE)


def _pieces(fd: int, size: int) -> list[tuple[int, int]] | None:
    """(offset, length) of what is not a hole; None for a file without holes, or with very many."""
    if os.fstat(fd).st_blocks * 512 >= size:
        return None
    pieces: list[tuple[int, int]] = []
    end = 0
    while end < size:
        try:
            begin = os.lseek(fd, end, os.SEEK_DATA)
            end = min(os.lseek(fd, begin, os.SEEK_HOLE), size)
        except OSError as error:
            if error.errno != errno.ENXIO:
                return None
            break
        if begin >= end:
            break
        pieces.append((begin, end - begin))
        if len(pieces) >= SEGMENTS_MAX:
            return None
    if pieces == [(0, size)]:
        return None
    return pieces if end == size else [*pieces, (size, 0)]


def _content(fd: int, offset: int, size: int) -> Iterator[bytes]:
    """Exactly `size` bytes: a file that shrinks or grows meanwhile must not break the tar."""
    left = size
    while left and (data := os.pread(fd, min(left, BLOCK), offset + size - left)):
        left -= len(data)
        yield data
    while left:
        yield bytes(min(left, BLOCK))
        left -= min(left, BLOCK)


# Out of an environment.


def unpack(stream: IO[bytes], local: str, contents: bool = False) -> list[LeftOut]:
    """Unpack a tar stream so that the one component with which its names begin becomes `local`.

    `contents`: there is no such component; everything is put below `local`. Returns what was left out, and why.
    Raises OSError where it cannot write at all, LimitReached for more than ENTRIES_MAX names, and PlatformError for a
    damaged archive.
    """
    left_out = Notes()
    tar = TarReader(stream)
    try:
        with _Target(os.path.realpath(local), contents) as target:
            for count, entry in enumerate(tar, 1):
                if count > ENTRIES_MAX:
                    raise LimitReached(
                        f"the tree has more than {ENTRIES_MAX} names", hint="download parts of it"
                    )
                if reason := target.add(entry):
                    left_out.add(os.fsdecode(entry.name).rstrip("/"), reason)
    except InvalidRequest as error:
        raise PlatformError(f"the archive is damaged: {error.message}") from error
    left_out.add_skipped(tar)
    return left_out.finished()


class _Target:
    """The place where things are unpacked: `path`, and everything below it."""

    def __init__(self, path: str, contents: bool) -> None:
        self._contents = contents
        above, self._name = os.path.split(path)
        self._tree = _Directories(os.open(above, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        self._made: set[tuple[int, int]] = set()
        """Device and inode of each file that was made, to which hard links may lead."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._tree.close()

    def add(self, entry: Entry) -> str:
        """Make one thing; returns why it was not made, if so."""
        parts = self._parts(entry.name)
        if parts is None:
            return _OUTSIDE
        if len(parts) > LEVELS_MAX:
            return f"more than {LEVELS_MAX} levels"
        try:
            return self._make(entry, parts)
        except OSError as error:
            if error.errno in _FOR_ALL or len(parts) == 1:
                raise
            return f"cannot be written here: {error.strerror}"
        except OverflowError:
            return "cannot be written here: too large"

    def _make(self, entry: Entry, parts: tuple[str, ...]) -> str:
        if entry.kind is Kind.HARDLINK:
            return "" if self._make_hard_link(parts, entry.link) else "a link to something else"
        if not self._tree.enter(parts[:-1], make=True):
            return "behind a link"
        name = parts[-1]
        if entry.kind is Kind.DIRECTORY:
            return "" if self._make_directory(name, entry.mode) else "something else is there"
        if entry.kind is Kind.SYMLINK:
            target = os.fsdecode(entry.link)
            if not self._link_stays_inside(parts, target):
                return _OUTSIDE
            self._clear(name)
            os.symlink(target, name, dir_fd=self._tree.fd)
            return ""
        if entry.kind is not Kind.FILE:
            return _SPECIAL
        self._make_file(entry, name)
        return ""

    def _make_directory(self, name: str, mode: int) -> bool:
        try:
            os.mkdir(name, mode & 0o755 | 0o700, dir_fd=self._tree.fd)
        except FileExistsError:
            return stat.S_ISDIR(os.lstat(name, dir_fd=self._tree.fd).st_mode)
        return True

    def _clear(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._tree.fd)

    def _link_stays_inside(self, parts: tuple[str, ...], target: str) -> bool:
        """Up first, and not too far, then down: only such a link cannot leave through another link."""
        steps = [step for step in target.split("/") if step not in ("", ".")]
        ups = 0
        while ups < len(steps) and steps[ups] == "..":
            ups += 1
        return not target.startswith("/") and ".." not in steps[ups:] and ups < len(parts) - 1

    def _make_hard_link(self, parts: tuple[str, ...], target: bytes) -> bool:
        """Only to a file of the same archive."""
        source = self._parts(target)
        if source is None or source == parts or not self._tree.enter(source[:-1], make=False):
            return False
        above = os.dup(self._tree.fd)
        try:
            found = os.lstat(source[-1], dir_fd=above)
            if (found.st_dev, found.st_ino) not in self._made or not self._tree.enter(parts[:-1], make=True):
                return False
            self._clear(parts[-1])
            os.link(source[-1], parts[-1], src_dir_fd=above, dst_dir_fd=self._tree.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        finally:
            os.close(above)
        return True

    def _make_file(self, entry: Entry, name: str) -> None:
        self._clear(name)
        fd = os.open(name, _NEW_FILE, entry.mode & 0o755 | 0o600, dir_fd=self._tree.fd)
        try:
            end = 0
            for offset, data in entry.chunks():
                _write(fd, data, offset)
                end = offset + len(data)
            if end < entry.size:
                os.ftruncate(fd, entry.size)
            with suppress(OSError, OverflowError, ValueError):  # a date that this file system cannot hold
                os.utime(fd, (entry.mtime, entry.mtime))
            made = os.fstat(fd)
        except (OSError, OverflowError):
            self._clear(name)
            raise
        finally:
            os.close(fd)
        self._made.add((made.st_dev, made.st_ino))

    def _parts(self, name: bytes) -> tuple[str, ...] | None:
        """Where a name of the archive goes; None when it could lead elsewhere."""
        text = os.fsdecode(name)
        parts = tuple([part for part in text.split("/") if part and part != "."])
        if text.startswith("/") or ".." in parts or "\0" in text:
            return None
        return (self._name, *(parts if self._contents else parts[1:]))


def _write(fd: int, data: bytes, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, memoryview(data)[done:], offset + done)
