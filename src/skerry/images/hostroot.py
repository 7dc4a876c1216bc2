"""The `host` image as a tree on disk: all of the view but its large parts, copied once.

Mounting two dozen files of /etc one by one would be a third of the cost of a start. What is in /etc is small and
rarely changes, so a copy of it is kept (only what everybody may read) and made anew when any part of it has changed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import threading
from pathlib import Path

from skerry.host.trees import remove_tree
from skerry.images.host import HostView, host_view

KEPT = 4
"""Older copies stay for environments that still stand on them."""
SMALL = "/etc/"
Stamp = tuple[int, int, int]
_MOUNT_POINTS = ("dev", "proc", "run", "tmp", "workspace")


Root = tuple[str, tuple[tuple[str, str], ...]]
"""A directory, and what is still to be mounted on it as (source, target)."""


class HostRoots:
    """The copies below one directory, which is this daemon's alone."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._key: tuple[HostView | None, list[Stamp]] = (None, [])
        self._current: Root = ("", ())
        self._making = threading.Lock()

    def current(self) -> Root:
        """As the host is now. Takes tenths of a second when that has changed. Raises OSError."""
        with self._making:
            view = host_view()
            key = view, _stamps(view)
            if key != self._key:
                name = hashlib.sha256(repr((view.digest, key[1])).encode()).hexdigest()[:32]
                root = self._directory / name
                if not root.exists():
                    self._make(view, root)
                large = tuple(bind for bind in view.binds if not bind[1].startswith(SMALL))
                self._key, self._current = key, (str(root), large)
            return self._current

    def known(self) -> Root | None:
        """As `current`, if there is nothing to be made."""
        view = host_view()
        return self._current if (view, _stamps(view)) == self._key else None

    def _make(self, view: HostView, root: Path) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".staging-", dir=self._directory))
        try:
            staging.chmod(0o755)
            for name in _MOUNT_POINTS:
                (staging / name).mkdir()
            for source, target in view.binds:
                place = _place(staging, target)
                if target.startswith(SMALL):
                    _copy(Path(source), place)
                elif os.path.isdir(source):
                    place.mkdir(parents=True, exist_ok=True)
                else:
                    place.touch()
            for target, link in view.symlinks:
                _place(staging, target).symlink_to(link)
            for target, content in view.files:
                _place(staging, target).write_text(content)
            staging.rename(root)
        except BaseException:
            remove_tree(staging)
            raise
        self._remove_old()

    def _remove_old(self) -> None:
        copies = sorted(self._directory.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for copy in copies[KEPT:]:
            remove_tree(copy)


def _place(root: Path, target: str) -> Path:
    place = root / target.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


def _copy(source: Path, place: Path) -> None:
    """Copy what everybody may read; symlinks stay symlinks, anything else than files and directories is left out."""
    if source.is_symlink():
        place.symlink_to(os.readlink(source))
    elif source.is_dir():
        if source.stat().st_mode & 0o005 == 0o005:
            place.mkdir()
            for child in sorted(source.iterdir()):
                _copy(child, place / child.name)
    elif source.is_file() and source.stat().st_mode & 0o004:
        shutil.copyfile(source, place)
        place.chmod(0o755 if source.stat().st_mode & 0o001 else 0o644)


def _stamps(view: HostView) -> list[Stamp]:
    """What changes when a part that is copied does."""
    found = []
    for source, target in view.binds:
        if target.startswith(SMALL):
            info = os.stat(source)
            found.append((info.st_ino, info.st_mtime_ns, info.st_size))
    return found
