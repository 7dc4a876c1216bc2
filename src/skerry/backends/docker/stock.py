"""What an engine has to have before it can make a container of ours: the image, and a volume with the guest."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import tarfile
import threading
from collections.abc import AsyncIterator, Callable

from skerry.backends.docker.container import BACKEND, ENVIRONMENT, HOME
from skerry.backends.docker.engine import CONFLICT, NOT_FOUND, EngineClient, EngineRefused
from skerry.errors import LaunchFailed, SkerryError
from skerry.host import injected
from skerry.singleflight import SingleFlight

IMPORT_SECONDS, FILL_SECONDS = 900.0, 60.0
IMAGE = "skerry.image"
"""Label of our images: the digest of the tree."""
_MODES = {"./run": 0o700, "./tmp": 0o1777}
"""A runtime gives a tmpfs the mode of the directory below it, whatever its options say."""
_PIECE = 1 << 20
Tar = Callable[[tarfile.TarFile], None]


class Stock:
    def __init__(self, engine: EngineClient, home: str, *, gvisor: bool) -> None:
        """`home` identifies the daemon."""
        self._engine = engine
        self._home = home
        self._gvisor = gvisor
        self._images: set[str] = set()
        self._volume = ""
        self._making: SingleFlight[str, None] = SingleFlight()

    async def image(self, digest: str, tree: str, *, as_root: bool) -> str:
        """The engine's image with this tree, imported if it is not there. `as_root`: all in it belongs to root.

        Raises LaunchFailed, IsolationUnavailable.
        """
        name = f"skerry/{digest.removeprefix('sha256:')}:latest"
        if name not in self._images:
            await self._making.run(name, lambda: self._import(name, digest, tree, as_root))
        return name

    def forget(self) -> None:
        """Look for everything again: somebody has removed something of it, or this is another engine now."""
        self._images.clear()
        self._volume = ""

    async def volume(self, image: str) -> str:
        """The volume with the guest's files. Filling it takes a container, of `image`, that is never started."""
        if not self._volume:
            await self._making.run("volume", lambda: self._fill(image))
        return self._volume

    async def close(self) -> None:
        """Remove the volume, unless an environment uses it."""
        await self._making.close()
        if self._volume:
            with contextlib.suppress(SkerryError):
                await self._engine.call("DELETE", f"volumes/{self._volume}")

    async def _import(self, name: str, digest: str, tree: str, as_root: bool) -> None:
        try:
            await self._engine.call("GET", f"images/{name}/json")
        except EngineRefused as error:
            if error.answer != NOT_FOUND:
                raise
            repository, _, tag = name.rpartition(":")
            params = {
                "fromSrc": "-",
                "repo": repository,
                "tag": tag,
                "changes": f"LABEL {IMAGE}={digest}",
            }
            body = _stream(lambda tar: tar.add(tree, arcname=".", filter=_owner(as_root)))
            await self._engine.call(
                "POST",
                "images/create",
                params=params,
                body=body,
                content="application/x-tar",
                seconds=IMPORT_SECONDS,
            )
        self._images.add(name)

    async def _fill(self, image: str) -> None:
        try:
            files = await asyncio.to_thread(injected.files, gvisor=self._gvisor)
        except OSError as error:
            raise LaunchFailed(f"the guest's files cannot be read: {error}") from error
        digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:12]
        name = f"skerry-{self._home}-{digest}"
        labels = {HOME: self._home}
        # An image has labels, too, which ours replace: the filler is no environment, whatever they say.
        replaced = {ENVIRONMENT: "", BACKEND: ""}
        await self._engine.call("POST", "volumes/create", body={"Name": name, "Labels": labels})
        mount = {"Type": "volume", "Source": name, "Target": injected.GUEST}
        config = {
            "Image": image,
            "Entrypoint": [injected.PROGRAM],
            "Labels": labels | replaced,
            "HostConfig": {
                "NetworkMode": "none",
                "Mounts": [{**mount, "VolumeOptions": {"NoCopy": True}}],
                "LogConfig": {"Type": "none"},
            },
        }
        filler = f"{name}-filler"
        await self._remove(filler)  # which an earlier daemon has left
        await self._engine.call("POST", "containers/create", params={"name": filler}, body=config)
        try:
            await self._engine.call(
                "PUT",
                f"containers/{filler}/archive",
                params={"path": injected.GUEST},
                body=_packed(files),
                content="application/x-tar",
                seconds=FILL_SECONDS,
            )
        finally:
            await self._remove(filler)
        self._volume = name

    async def _remove(self, container: str) -> None:
        try:
            await self._engine.call("DELETE", f"containers/{container}", params={"force": "1", "v": "1"})
        except EngineRefused as error:
            if error.answer not in (NOT_FOUND, CONFLICT):
                raise


def _packed(files: dict[str, tuple[bytes, int]]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, (content, mode) in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def _owner(as_root: bool) -> Callable[[tarfile.TarInfo], tarfile.TarInfo]:
    def owned(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uname = entry.gname = ""
        entry.mode = _MODES.get(entry.name, entry.mode)
        if as_root:
            entry.uid = entry.gid = 0
        return entry

    return owned


async def _stream(write: Tar) -> AsyncIterator[bytes]:
    """An archive while it is written by a thread. Raises LaunchFailed."""
    receiver, sender = os.pipe2(os.O_CLOEXEC)
    failed: list[OSError | tarfile.TarError] = []

    def work() -> None:
        try:
            with open(sender, "wb") as file, tarfile.open(fileobj=file, mode="w|", bufsize=_PIECE) as tar:
                write(tar)
        except BrokenPipeError:
            pass  # nobody reads any more
        except (OSError, tarfile.TarError) as error:
            failed.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while data := await asyncio.to_thread(os.read, receiver, _PIECE):
            yield data
    finally:
        os.close(receiver)
    if failed:
        raise LaunchFailed(f"the image cannot be read: {failed[0]}", hint="rebuild or import it again")
