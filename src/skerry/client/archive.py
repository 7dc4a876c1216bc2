"""Local files to a tar stream and back.

What comes out of an environment is hostile. `unpack` walks directory descriptors, follows no symlink, makes
every file anew, and leaves out what could harm later: links that lead outside, devices, setuid bits.
"""

from __future__ import annotations

import os
import stat
import tarfile
from contextlib import suppress
from typing import IO, TYPE_CHECKING

from skerry.errors import PlatformError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from os import PathLike
    from typing import Self

BLOCK = 128 << 10
_HEADER_MAX = 1 << 20
_LONG_HEADERS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def read_file(path: str | PathLike[str]) -> Iterator[bytes]:
    """The content of a local file in blocks. Raises OSError."""
    with open(path, "rb") as file:
        while data := file.read(BLOCK):
            yield data


def pack(local: str, name: str) -> Iterator[bytes]:
    """A tar stream of a local file or directory, called `name` in it ("." for the content of a directory).

    Files, directories and symlinks; anything else is left out, as are owners. Raises OSError.
    """
    for path, inside in _walk(local, name):
        found = os.lstat(path)
        info = tarfile.TarInfo(inside)
        info.mode = stat.S_IMODE(found.st_mode)
        info.mtime = int(found.st_mtime)
        if stat.S_ISDIR(found.st_mode):
            info.type = tarfile.DIRTYPE
        elif stat.S_ISLNK(found.st_mode):
            info.type = tarfile.SYMTYPE
            info.linkname = os.readlink(path)
        elif stat.S_ISREG(found.st_mode):
            info.size = found.st_size
        else:
            continue
        yield info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
        if info.size:
            yield from _content(path, info.size)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _walk(local: str, name: str) -> Iterator[tuple[str, str]]:
    """(path here, name in the archive) of everything, directories before what is in them."""
    todo = [(local, name)]
    while todo:
        path, inside = todo.pop()
        yield path, inside
        if os.path.isdir(path) and (path == local or not os.path.islink(path)):
            todo += [
                (f"{path}/{entry}", f"{inside}/{entry}") for entry in sorted(os.listdir(path), reverse=True)
            ]


def _content(path: str, size: int) -> Iterator[bytes]:
    """Exactly `size` bytes and the padding: a file that shrinks or grows meanwhile must not break the tar."""
    left = size
    with open(path, "rb") as file:
        while left and (data := file.read(min(left, BLOCK))):
            left -= len(data)
            yield data
    left += -size % tarfile.BLOCKSIZE
    while left:
        yield bytes(min(left, BLOCK))
        left -= min(left, BLOCK)


def is_contents(path: str) -> bool:
    """Whether a path names what is in a directory (`.`, `a/.`, `/`), so that a copy cannot keep its name."""
    return path.rstrip("/").rpartition("/")[2] in ("", ".", "..")


def unpack(stream: IO[bytes], local: str, contents: bool = False) -> list[str]:
    """Unpack a tar stream so that the one component with which its names begin becomes `local`.

    `contents`: there is no such component; everything is put below `local`. Returns the names that were left
    out. Raises OSError, and PlatformError for a damaged archive.
    """
    left_out = []
    try:
        with (
            tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member, encoding="utf-8") as tar,
            _Target(os.path.realpath(local), contents) as target,
        ):
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # it would remember them all
                if not target.add(tar, member):
                    left_out.append(member.name)
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise PlatformError(f"the archive is damaged: {error}") from error
    return left_out


class _Member(tarfile.TarInfo):
    """A tar header, refused when reading on would take a hostile amount of memory or never end."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        member = super().frombuf(buf, encoding, errors)
        if member.size < 0 or (member.type in _LONG_HEADERS and member.size > _HEADER_MAX):
            raise tarfile.ReadError("a header of absurd size")
        return member


class _Target:
    """The place where things are unpacked: `path`, and everything below it."""

    def __init__(self, path: str, contents: bool) -> None:
        self._contents = contents
        self._above, self._name = os.path.split(path)
        self._files: set[tuple[str, ...]] = set()
        self._at: tuple[str, ...] = ()
        self._fd = -1

    def __enter__(self) -> Self:
        self._fd = os.open(self._above, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._fd)

    def add(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> bool:
        """Make one thing; False when it may not be made."""
        parts = self._parts(member.name)
        if parts is None or member.sparse is not None:
            return False
        if not self._enter(parts[:-1]):
            return False
        name = parts[-1]
        if member.isdir():
            return self._make_directory(name, member.mode)
        if member.issym():
            return self._link_stays_inside(parts, member.linkname) and self._make_symlink(
                name, member.linkname
            )
        if member.islnk():
            return self._make_hard_link(parts, member.linkname)
        if not member.isreg():
            return False
        self._make_file(tar, member, name)
        self._files.add(parts)
        return True

    def _enter(self, parts: tuple[str, ...]) -> bool:
        """Stand in this directory, making what is missing. False when something on the way is a symlink."""
        if parts == self._at:
            return True
        os.close(self._fd)
        self._fd, self._at = os.open(self._above, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), ()
        for part in parts:
            if not self._make_directory(part, 0o755):
                return False
            below = os.open(part, _DIRECTORY, dir_fd=self._fd)
            os.close(self._fd)
            self._fd, self._at = below, (*self._at, part)
        return True

    def _make_directory(self, name: str, mode: int) -> bool:
        try:
            os.mkdir(name, mode & 0o755 | 0o700, dir_fd=self._fd)
        except FileExistsError:
            return stat.S_ISDIR(os.lstat(name, dir_fd=self._fd).st_mode)
        return True

    def _clear(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    def _make_symlink(self, name: str, target: str) -> bool:
        self._clear(name)
        os.symlink(target, name, dir_fd=self._fd)
        return True

    def _link_stays_inside(self, parts: tuple[str, ...], target: str) -> bool:
        """Up first, and not too far, then down: only such a link cannot leave through another link."""
        steps = [step for step in target.split("/") if step not in ("", ".")]
        ups = 0
        while ups < len(steps) and steps[ups] == "..":
            ups += 1
        return not target.startswith("/") and ".." not in steps[ups:] and ups < len(parts) - 1

    def _make_hard_link(self, parts: tuple[str, ...], target: str) -> bool:
        """Only to a file of the same archive."""
        source = self._parts(target)
        if source is None or source not in self._files or not self._enter(source[:-1]):
            return False
        below = os.dup(self._fd)
        try:
            if source == parts or not self._enter(parts[:-1]):
                return False
            self._clear(parts[-1])
            os.link(source[-1], parts[-1], src_dir_fd=below, dst_dir_fd=self._fd, follow_symlinks=False)
        finally:
            os.close(below)
        return True

    def _make_file(self, tar: tarfile.TarFile, member: tarfile.TarInfo, name: str) -> None:
        self._clear(name)
        content = tar.extractfile(member)
        assert content is not None
        fd = os.open(name, _NEW_FILE, member.mode & 0o755 | 0o600, dir_fd=self._fd)
        with content, open(fd, "wb", buffering=0) as file:
            while data := content.read(BLOCK):
                file.write(data)
            with suppress(OSError, OverflowError, ValueError):  # a date that this file system cannot hold
                os.utime(fd, (member.mtime, member.mtime))

    def _parts(self, name: str) -> tuple[str, ...] | None:
        """Where a name of the archive goes; None when it could lead elsewhere."""
        parts = tuple(part for part in name.split("/") if part not in ("", "."))
        if name.startswith("/") or ".." in parts or "\0" in name:
            return None
        return (self._name, *(parts if self._contents else parts[1:]))
