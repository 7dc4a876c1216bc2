"""Where images are kept.

    <root>/<hex digest>/rootfs        the root filesystem, never changed once it is there
    <root>/<hex digest>/image.json    what else is known of it
    <root>/names/<name>               the digest that a name points to
    <root>/.staging-*                 on their way in or out; locked by whoever works on them

An image appears by one rename and goes by one, so a crash leaves staging directories only, and `sweep()`
removes those that nobody holds the lock of.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from skerry.errors import Conflict, DiskFull, ImageNotFound, InvalidRequest, PlatformError
from skerry.host.trees import remove_tree, sync
from skerry.images import definition
from skerry.images.digest import tree_digest
from skerry.images.host import host_view
from skerry.images.normalize import normalize
from skerry.models import ImageInfo

HOST, DOCKER = "host", "docker"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}(:[A-Za-z0-9_][A-Za-z0-9._-]{0,63})?")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PREFIX = re.compile(r"(sha256:)?[0-9a-f]{1,64}")
_STAGING = ".staging-"


@dataclass(frozen=True, slots=True)
class Image:
    name: str
    """Empty if no name points to the image any more."""
    digest: str
    """`sha256:...`"""
    kind: str
    """`host`, `rootfs`, or `docker`: one that an engine has."""
    rootfs: Path | None
    """None for `host`, see `host_view`, and `docker`."""
    env: dict[str, str]
    size: int
    created_at: float
    description: str

    @property
    def ref(self) -> str:
        """By which this one is found; one of our store whatever its name points to by then."""
        return self.name if self.kind in (HOST, DOCKER) else self.digest

    def info(self) -> ImageInfo:
        return ImageInfo(self.name, self.digest, self.kind, self.size, self.created_at, self.description)


def check_name(name: str) -> str:
    """The name as it is stored. Raises InvalidRequest for what cannot be an image's name."""
    if _NAME.fullmatch(name) is None or name == HOST or name.startswith(("sha256:", f"{HOST}:")):
        raise InvalidRequest(
            f"{name!r} cannot be the name of an image",
            hint="lower-case letters, digits and ._- with an optional :tag; 'host' is taken",
        )
    return name.removesuffix(":latest")


class ImageStore:
    """The images under one directory, which it makes. Safe for several threads and processes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._names = root / "names"
        self._names.mkdir(parents=True, exist_ok=True)
        root.chmod(0o700)  # whoever can open what is in there can lock it

    def list(self) -> list[Image]:
        """Every image: `host`, then by name, then those without one."""
        with self._locked():
            named = sorted((path.name, path.read_text()) for path in self._names.iterdir() if _is_name(path))
            pointed = {digest for _, digest in named}
            rest = sorted(path.name for path in self.root.iterdir() if _DIGEST.fullmatch(path.name))
            rows = [*named, *(("", digest) for digest in rest if digest not in pointed)]
            return [_host(), *(self._load(digest, name) for name, digest in rows)]

    def get(self, ref: str) -> Image:
        """The image of a name or of the beginning of a digest.

        Raises ImageNotFound, and InvalidRequest for a beginning that several digests have.
        """
        if ref == HOST:
            return _host()
        digest, name = self._resolve(ref)
        return self._load(digest, name or self._name_of(digest))

    def remove(self, ref: str, in_use: Callable[[Image], bool]) -> None:
        """Remove a name, and the image with its last one; by digest, the image and all its names.

        Raises ImageNotFound, Conflict while the image is in use, InvalidRequest for `host`.
        """
        if ref == HOST:
            raise InvalidRequest("the image 'host' is this machine itself and cannot be removed")
        with self._locked():
            digest, name = self._resolve(ref)
            names = [path for path in self._names.iterdir() if _is_name(path) and path.read_text() == digest]
            if name and len(names) > 1:
                (self._names / name).unlink()
                return
            if in_use(self._load(digest, name)):
                raise Conflict(
                    f"the image {ref!r} is in use", hint="remove its environments first: skerry ls"
                )
            fd = os.open(self.root / digest, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(fd, fcntl.LOCK_EX)
            removed = Path(tempfile.mkdtemp(prefix=_STAGING, dir=self.root))
            (self.root / digest).rename(removed)
            for path in names:
                path.unlink()
        try:
            remove_tree(removed)
        finally:
            os.close(fd)

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """A new directory to build an image in, gone at the end whatever happens. Raises OSError."""
        with self._locked():
            path = Path(tempfile.mkdtemp(prefix=_STAGING, dir=self.root))
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            yield path
        finally:
            try:
                remove_tree(path)
            finally:
                os.close(fd)

    def commit(self, staging: Path, name: str, *, env: dict[str, str], description: str) -> Image:
        """Make `staging/rootfs` an image and point `name` to it. The staging directory is used up.

        Raises InvalidRequest for a bad name, DiskFull, PlatformError.
        """
        name = check_name(name)
        try:
            normalize(staging / "rootfs")
            digest, size = tree_digest(staging / "rootfs")
            about = {"env": env, "size": size, "created_at": time.time(), "description": description}
            (staging / "image.json").write_text(json.dumps(about))
            staging.chmod(0o755)
            with open(staging / "image.json") as file:
                sync(file.fileno())
            with self._locked():
                if not (self.root / digest).exists():
                    staging.rename(self.root / digest)
                self._point(name, digest)
        except OSError as error:
            kind = DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else PlatformError
            raise kind(f"cannot store the image {name!r}: {error.strerror}") from error
        return self._load(digest, name)

    def sweep(self) -> None:
        """Remove what a crash left behind.

        What cannot go yet stays for the next time: programs that the crashed one started may still be at work.
        """
        abandoned: dict[Path, int] = {}
        with self._locked():
            for path in self.root.glob(f"{_STAGING}*"):
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    abandoned[path] = fd
                except BlockingIOError:
                    os.close(fd)
        for path, fd in abandoned.items():
            with suppress(OSError):
                remove_tree(path)
            os.close(fd)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with open(self.root / ".lock", "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _point(self, name: str, digest: str) -> None:
        new = self._names / f".{name}"
        new.write_text(digest)
        new.rename(self._names / name)

    def _resolve(self, ref: str) -> tuple[str, str]:
        """(hex digest, name or nothing)."""
        name = ref.removesuffix(":latest")
        if _NAME.fullmatch(name):
            try:
                return (self._names / name).read_text(), name
            except FileNotFoundError:
                pass
        found = []
        if _PREFIX.fullmatch(ref):
            prefix = ref.removeprefix("sha256:")
            found = [p.name for p in self.root.glob(f"{prefix}*") if _DIGEST.fullmatch(p.name)]
        if len(found) > 1:
            raise InvalidRequest(f"{len(found)} images begin with {ref!r}", hint="write more of the digest")
        if not found:
            known = name if name in definition.available() else "dev"
            raise ImageNotFound(
                f"there is no image {ref!r}",
                hint=f"build one: skerry image build {known}; list them: skerry image ls",
            )
        return found[0], ""

    def _name_of(self, digest: str) -> str:
        names = sorted(p.name for p in self._names.iterdir() if _is_name(p) and p.read_text() == digest)
        return names[0] if names else ""

    def _load(self, digest: str, name: str) -> Image:
        folder = self.root / digest
        try:
            about = json.loads((folder / "image.json").read_text())
            return Image(name, f"sha256:{digest}", "rootfs", folder / "rootfs", **about)
        except (OSError, ValueError, TypeError) as error:
            raise PlatformError(
                f"the image {name or digest} is damaged: {error}", hint="build it again"
            ) from error


def _is_name(path: Path) -> bool:
    return _NAME.fullmatch(path.name) is not None


def _host() -> Image:
    view = host_view()
    return Image(HOST, view.digest, HOST, None, view.env, 0, 0.0, "this machine's own programs, read-only")
