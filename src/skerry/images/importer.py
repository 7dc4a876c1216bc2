"""Images from archives: a root filesystem's tar, an OCI layout, or what `docker save` writes."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from skerry.errors import InvalidRequest
from skerry.host.trees import remove_tree
from skerry.images import oci
from skerry.images.compression import ArchiveStream
from skerry.images.progress import Progress, Report, silent
from skerry.images.store import Image, ImageStore, check_name
from skerry.images.unpack import Unpacker, UnpackLimits
from skerry.tarstream import Readable


def import_archive(
    path: Path, name: str, store: ImageStore, progress: Report = silent, limits: UnpackLimits | None = None
) -> Image:
    """Store the image in a file (or in a directory, for an OCI layout) under `name`.

    Raises InvalidRequest for a bad name and for anything that is not a sound archive, PathOutside for one
    that tries to write elsewhere, LimitReached for one that unpacks to more than `limits`, DiskFull.
    """
    check_name(name)
    limits = limits or UnpackLimits()
    with store.staging() as staging:
        rootfs, archive = staging / "rootfs", staging / "archive"
        if path.is_dir():
            archive = path
        else:
            archive.mkdir()
            _unpack_file(path, archive, limits, _span(progress, "unpacking the archive", 0.0, 0.5))
        with _opened(archive) as root:
            packed = oci.read_packed(root)
            if packed is not None:
                rootfs.mkdir()
                _flatten(root, packed, rootfs, limits, _span(progress, "unpacking layers", 0.5, 0.9))
        if packed is None and archive == path:
            raise InvalidRequest(f"{path} is neither an OCI layout nor what `docker save` writes")
        if packed is None:
            archive.rename(rootfs)
        elif archive != path:
            remove_tree(archive)
        if not any(rootfs.iterdir()):
            raise InvalidRequest(f"{path} holds no files")
        progress(Progress("computing the digest", 0.9))
        env = packed.env if packed else {}
        description = "imported from layers" if packed else "imported from a root filesystem's archive"
        image = store.commit(staging, name, env=env, description=description)
    progress(Progress("done", 1.0))
    return image


def _span(report: Report, step: str, start: float, end: float) -> Callable[[float], None]:
    report(Progress(step, start))
    return _scaled(lambda fraction: report(Progress(step, fraction)), start, end - start)


def _unpack_file(path: Path, into: Path, limits: UnpackLimits, advance: Callable[[float], None]) -> None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidRequest(f"cannot open {path}: {error.strerror}") from error
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise InvalidRequest(f"{path} is not a file")
        with ArchiveStream(file, advance) as stream, Unpacker(into, limits) as unpacker:
            unpacker.unpack(stream)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _flatten(
    root: int, packed: oci.Packed, rootfs: Path, limits: UnpackLimits, advance: Callable[[float], None]
) -> None:
    """Apply the layers of a packed image, each checked against its digest, to an empty directory."""
    share = 1 / max(1, len(packed.layers))
    with Unpacker(rootfs, limits) as unpacker:
        for number, (path, digest) in enumerate(packed.layers):
            with oci.open_file(root, path) as file:
                advance_layer = _scaled(advance, number * share, share)
                with ArchiveStream(file, advance_layer) as stream:
                    hashed = _Hashed(stream)
                    unpacker.unpack(hashed, layer=True)
            if f"sha256:{hashed.hash.hexdigest()}" != digest:
                raise InvalidRequest(f"the image is damaged: a layer is not {digest}")


def _scaled(advance: Callable[[float], None], start: float, share: float) -> Callable[[float], None]:
    return lambda fraction: advance(start + fraction * share)


class _Hashed:
    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self.hash = hashlib.sha256()

    def read(self, size: int, /) -> bytes:
        data = self._stream.read(size)
        self.hash.update(data)
        return data
