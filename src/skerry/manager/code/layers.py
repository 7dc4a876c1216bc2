"""A cache of package directories, each written once and read-only since.

A directory is named by the digest of its inputs. Its contents come from an environment and are untrusted: they are
unpacked without following links, without devices, pipes and setuid bits, owned by us, and the host resolves no path in
them. The cache is bounded: the least recently used directories that nobody holds are evicted.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import structlog

from skerry.host.trees import Step, open_child, remove_tree, sync, walk
from skerry.ids import new_id
from skerry.images.unpack import Unpacker, UnpackLimits
from skerry.policy import GIB

MOST = 10 * GIB
LIMITS = UnpackLimits(bytes=2 * GIB, entries=200_000)
AGE_MAX = 7 * 86400.0
"""Seconds after which a set is installed again."""
_STAGING = ".staging-"
_ABOUT, _TREE = "about.json", "tree"

log = structlog.get_logger(component="packages")


@dataclass(eq=False, slots=True)
class StoredLayer:
    """One cached set of packages."""

    tenant: str
    key: str
    place: Path
    size: int
    made: float
    used: float
    holders: int = 0

    @property
    def tree(self) -> Path:
        return self.place / _TREE


class Layers:
    """`directory` is for this object alone. Methods belong to the loop's thread unless they say otherwise."""

    def __init__(self, directory: Path, most: int = MOST) -> None:
        self.directory = directory
        self._most = most
        self._all: list[StoredLayer] = []
        self._current: dict[str, StoredLayer] = {}
        self._doomed: list[Path] = []
        with contextlib.suppress(FileNotFoundError):
            self._load()

    def find(self, key: str) -> StoredLayer | None:
        """The set with this key, unless it is too old."""
        found = self._current.get(key)
        if found is None or time.time() - found.made > AGE_MAX or not found.place.is_dir():
            return None
        return found

    @contextmanager
    def holding(self, found: StoredLayer) -> Iterator[None]:
        """Protect it from eviction during the block."""
        found.holders += 1
        found.used = time.time()
        with contextlib.suppress(OSError):
            os.utime(found.place)
        try:
            yield
        finally:
            found.holders -= 1
            if self._current.get(found.key) is not found:
                self._tidy(None)

    def make(self, tenant: str, key: str, archive: BinaryIO) -> StoredLayer:
        """Unpack an archive from an environment, atomically. To be called in a thread.

        Raises InvalidRequest for a dishonest archive, LimitReached, DiskFull, OSError.
        """
        self.directory.mkdir(mode=0o700, exist_ok=True)
        name = f"{key}-{new_id()}"
        staging = self.directory / f"{_STAGING}{name}"
        try:
            tree = staging / _TREE
            staging.mkdir()
            tree.mkdir()
            archive.seek(0)
            with Unpacker(tree, LIMITS) as unpacker:
                unpacker.unpack(archive)
            size, now = _own(tree), time.time()
            (staging / _ABOUT).write_text(
                json.dumps({"tenant": tenant, "key": key, "size": size, "made": now})
            )
            sync(archive.fileno())
            staging.rename(self.directory / name)
        except BaseException:
            remove_tree(staging)
            raise
        return StoredLayer(tenant, key, self.directory / name, size, now, now)

    def add(self, made: StoredLayer) -> None:
        """Publish it, then evict down to the size limit."""
        self._all.append(made)
        self._current[made.key] = made
        self._tidy(made)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes by tenant."""
        return dict(sum((Counter({one.tenant: one.size}) for one in self._all), Counter[str]()))

    def evict(self, tenant: str, spared: StoredLayer | None = None) -> bool:
        """Evict the tenant's least recently used set that nobody holds; False if there is none."""
        own = [one for one in self._all if one.tenant == tenant and not one.holders and one is not spared]
        if not own:
            return False
        self._remove(min(own, key=lambda one: one.used))
        return True

    def discard(self, made: StoredLayer) -> None:
        """Remove the result of `make` without publishing it."""
        self._doomed.append(made.place)

    def file(self) -> BinaryIO:
        """An unnamed file for an archive. Raises OSError."""
        self.directory.mkdir(mode=0o700, exist_ok=True)
        return tempfile.TemporaryFile(dir=self.directory)

    def archive(self, found: StoredLayer, file: BinaryIO) -> None:
        """Write a tar of it to a file, and rewind that. To be called in a thread. Raises OSError."""
        names: dict[int, str] = {}
        with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
            for path, dir_fd, name, status in _entries(found.tree):
                _add(tar, path, dir_fd, name, status, names.setdefault(status.st_ino, path))
        file.seek(0)

    def clean(self) -> None:
        """Delete evicted directories. To be called in a thread; failures are left to the next daemon."""
        while self._doomed:
            place = self._doomed.pop()
            try:
                remove_tree(place)
            except OSError as error:
                log.warning("not removed", place=str(place), error=str(error))

    def _load(self) -> None:
        """Load the sets of an earlier daemon, and remove unfinished ones."""
        for place in self.directory.iterdir():
            try:
                if place.name.startswith("."):
                    raise ValueError("half made, or half removed")
                about = json.loads((place / _ABOUT).read_text())
                made, used = about["made"], place.stat().st_mtime
                # Sets of earlier versions do not record the tenant.
                found = StoredLayer(about.get("tenant", ""), about["key"], place, about["size"], made, used)
            except (OSError, ValueError, KeyError, TypeError):
                self._doomed.append(place)
                continue
            self._all.append(found)
        for found in sorted(self._all, key=lambda one: one.made):
            self._current[found.key] = found
        self._tidy(None)
        self.clean()

    def _tidy(self, spared: StoredLayer | None) -> None:
        """Remove replaced sets, then evict down to the size limit; never what is held."""
        free = [one for one in self._all if not one.holders and one is not spared]
        replaced = [one for one in free if self._current.get(one.key) is not one]
        for one in replaced:
            self._remove(one)
        for one in sorted((one for one in free if one not in replaced), key=lambda one: one.used):
            if sum(each.size for each in self._all) <= self._most:
                return
            self._remove(one)

    def _remove(self, one: StoredLayer) -> None:
        self._all.remove(one)
        if self._current.get(one.key) is one:
            del self._current[one.key]
        with contextlib.suppress(FileNotFoundError):  # removed by somebody else
            self._doomed.append(one.place.rename(self.directory / f"{_STAGING}{one.place.name}"))


def _entries(tree: Path) -> Iterator[tuple[str, int, str, os.stat_result]]:
    """All entries as (path, open directory, name in it, status); a directory before its contents."""
    top = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    above: list[str] = []
    try:
        for visit in walk(top):
            if visit.step is Step.LEAVE:
                above.pop()
                continue
            status = os.stat(visit.name, dir_fd=visit.dir_fd, follow_symlinks=False)
            yield "/".join((*above, visit.name)), visit.dir_fd, visit.name, status
            if visit.step is Step.ENTER:
                above.append(visit.name)
    finally:
        os.close(top)


def _own(tree: Path) -> int:
    """Make everything ours and world-readable; returns an upper bound of its bytes on disk."""
    seen: set[int] = set()
    size = 0
    for _, dir_fd, name, status in _entries(tree):
        os.chown(name, os.geteuid(), os.getegid(), dir_fd=dir_fd, follow_symlinks=False)
        if not stat.S_ISLNK(status.st_mode):
            runs = stat.S_ISDIR(status.st_mode) or status.st_mode & stat.S_IXUSR
            os.chmod(name, 0o755 if runs else 0o644, dir_fd=dir_fd)
        if status.st_ino not in seen:
            size += max(status.st_size, status.st_blocks * 512)  # a tar has holes in full
        seen.add(status.st_ino)
    tree.chmod(0o755)
    return size


def _add(tar: tarfile.TarFile, path: str, dir_fd: int, name: str, status: os.stat_result, first: str) -> None:
    """`first` is the first path of the same inode."""
    entry = tarfile.TarInfo(path)
    entry.mode, entry.mtime = stat.S_IMODE(status.st_mode), int(status.st_mtime)
    if stat.S_ISDIR(status.st_mode):
        entry.type = tarfile.DIRTYPE
        tar.addfile(entry)
    elif stat.S_ISLNK(status.st_mode):
        entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(name, dir_fd=dir_fd)
        tar.addfile(entry)
    elif first != path:  # a hard link, so that names of one file are not stored as many files
        entry.type, entry.linkname = tarfile.LNKTYPE, first
        tar.addfile(entry)
    else:
        entry.size = status.st_size
        with open(open_child(dir_fd, name, os.O_RDONLY), "rb") as content:
            tar.addfile(entry, content)
