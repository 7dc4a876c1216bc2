"""Images from definitions, by mmdebstrap: its tar comes down a pipe and is unpacked like any other archive.

A build runs in a user namespace: mmdebstrap's own for a plain user, and for root one with a range of ids that
nothing else on the host has (`userns.py`), so that scripts of packages never run as the host's root. Nothing of the
build is left on the host: mmdebstrap works in a mount namespace, so that its mounts end with it, and in a directory of
its own.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from skerry.errors import ImageBuildFailed, InvalidRequest
from skerry.host import uids
from skerry.host.space import check_space
from skerry.host.trees import open_in_root, remove_in, remove_tree
from skerry.images import apt, preflight, userns
from skerry.images.definition import Definition
from skerry.images.host import PATH
from skerry.images.progress import Progress, Report, silent
from skerry.images.store import Image, ImageStore, check_name
from skerry.images.unpack import Unpacker, UnpackLimits

_INSTALLING = "installing remaining"
_PHASES = (
    ("running apt-get update", "reading the package lists", 0.0, 0.05),
    ("downloading packages", "downloading the base system", 0.05, 0.12),
    ("extracting archives", "extracting the base system", 0.12, 0.15),
    ("installing essential", "installing the base system", 0.15, 0.25),
    (_INSTALLING, "installing packages", 0.25, 0.7),
    ("running --customize-hook", "running the definition's commands", 0.7, 0.85),
    ("creating tarball", "unpacking the new root filesystem", 0.85, 0.95),
)
"""What mmdebstrap announces, what it means, and the part of the whole that it is."""
_PACKAGES = re.compile(r"(\d+) newly installed")
_OUTPUT_KEPT = 20
_PATIENCE = 30.0
_SETTINGS = "etc/apt/apt.conf.d/00skerry"
_OF_THE_BUILD = (
    _SETTINGS,
    "etc/apt/sources.list",
    "etc/apt/sources.list.d",
    "etc/machine-id",
    "var/cache/apt",
    "var/cache/debconf",
    "var/cache/ldconfig",
    "var/lib/apt/lists",
    "var/log",
)
"""The host's mirrors, logs and caches: neither the image's business nor the same in the next build."""
_NOT_INSTALLED = (
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/locale/*",
    "path-include=/usr/share/locale/locale.alias",
)


def build(
    definition: Definition, store: ImageStore, report: Report = silent, limits: UnpackLimits | None = None
) -> Image:
    """Build an image and store it under the definition's name. `report` is called from other threads too;
    what it raises ends the build and is raised from here.

    Raises ImageBuildFailed when something is missing, or with the end of the output in `detail["output"]`; DiskFull,
    LimitReached.
    """
    check_name(definition.name)

    def progress(step: Progress) -> None:
        check_space(str(store.root))
        report(step)

    progress(Progress("checking what a build needs", 0.0))
    program = preflight.check(definition.suite, store.root)
    with store.staging() as staging, _ids() as base:
        rootfs = staging / "rootfs"
        rootfs.mkdir()
        folder = staging / "build"
        folder.mkdir()
        seen = folder if base is None else Path(userns.TMP)
        command = [program, "--mode=unshare", *_arguments(definition, folder, seen)]
        environment = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
        environment |= {"PATH": PATH, "LC_ALL": "C.UTF-8", "HOME": "/nonexistent"}
        if base is not None:
            environment["TMPDIR"] = userns.TMP
            os.chown(folder, base, base)
        limits = limits or UnpackLimits()
        with _Run(command, environment, progress, folder, base) as run, Unpacker(rootfs, limits) as unpacker:
            try:
                unpacker.unpack(run.stdout)
            except InvalidRequest:  # most often cut short, by a build that failed
                run.stdout.close()
                run.check()
                raise
            run.check()
        _forget_the_build(rootfs)
        for path in staging.iterdir():
            if path != rootfs:
                remove_tree(path)
        progress(Progress("computing the digest", 0.95))
        image = store.commit(staging, definition.name, env=definition.env, description=definition.description)
    progress(Progress("done", 1.0))
    return image


@contextmanager
def _ids() -> Iterator[int | None]:
    """The first id of a range for root's build; None for a plain user, who has those of /etc/subuid."""
    if os.geteuid() != 0:
        yield None
        return
    base = asyncio.run(uids.claim())
    try:
        yield base
    finally:
        uids.release(base)


def _arguments(definition: Definition, folder: Path, seen: Path) -> Iterator[str]:
    """Files for the build are written into `folder`, which it sees as `seen`."""
    settings = seen / "apt.conf"
    (folder / settings.name).write_text(apt.settings())
    yield "--verbose"
    yield "--format=tar"
    yield "--variant=essential"
    if definition.packages:
        yield f"--include={','.join(definition.packages)}"
    for option in _NOT_INSTALLED:
        yield f"--dpkgopt={option}"
    yield f"--setup-hook=upload {shlex.quote(str(settings))} /{_SETTINGS}"
    variables = {"PATH": PATH, "HOME": "/root", **definition.env}
    env = ["/usr/bin/env", "-i", *(f"{name}={value}" for name, value in variables.items())]
    for argv in definition.commands:
        yield f'--customize-hook=chroot "$1" {shlex.join([*env, *argv])} >&2'
    yield definition.suite
    yield "-"
    found = apt.sources(definition.suite)
    for name, text in (("sources.list", found.lines), ("sources.sources", found.stanzas)):
        if text:
            (folder / name).write_text(text)
            yield str(seen / name)


def _forget_the_build(rootfs: Path) -> None:
    root = os.open(rootfs, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for path in _OF_THE_BUILD:
            parent, _, name = path.rpartition("/")
            with suppress(FileNotFoundError):
                fd = open_in_root(root, parent.encode(), os.O_PATH | os.O_DIRECTORY)
                try:
                    remove_in(fd, name)
                finally:
                    os.close(fd)
    finally:
        os.close(root)


def _start(
    command: list[str], environment: dict[str, str], folder: Path, base: int | None
) -> subprocess.Popen[bytes]:
    """With `base`, as root of a user namespace that has the range of ids from there on. Raises ImageBuildFailed."""
    (ready, told), (waiting, go) = os.pipe(), os.pipe()
    try:
        if base is not None:
            numbers = [str(told), str(waiting)]
            command = [sys.executable, "-I", userns.__file__, *numbers, str(folder), *command]
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            cwd="/",
            pass_fds=() if base is None else (told, waiting),
        )
        os.close(told)
        told = -1
        if base is not None:
            os.read(ready, 1)  # its end: the namespace is there, or the process is gone
            try:
                for kind in ("uid", "gid"):
                    Path(f"/proc/{process.pid}/{kind}_map").write_text(f"0 {base} {uids.SIZE}")
            except OSError as error:
                process.kill()
                words = process.communicate()[1].decode(errors="replace").strip()
                raise ImageBuildFailed(f"no user namespace for the build: {words or error}") from error
            uids.settle(base, process.pid)
            os.write(go, b"g")
        return process
    finally:
        for fd in (ready, told, waiting, go):
            if fd >= 0:
                os.close(fd)


class _Run:
    """mmdebstrap at work: its archive on `stdout`, its progress read from what it says."""

    def __init__(
        self,
        command: list[str],
        environment: dict[str, str],
        progress: Report,
        folder: Path,
        base: int | None,
    ) -> None:
        self._progress = progress
        self._output: deque[str] = deque(maxlen=_OUTPUT_KEPT)
        self._phase = _PHASES[0]
        self._packages = self._fetched = self._handled = 0
        self._refusal: BaseException | None = None
        self._process = _start(command, environment, folder, base)
        assert self._process.stdout is not None
        self.stdout = self._process.stdout
        self._reader = threading.Thread(target=self._listen, name="skerry-image-build", daemon=True)
        self._reader.start()

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self._stop()
        self._reader.join()

    def check(self) -> None:
        """Wait for the end. Raises ImageBuildFailed unless it was a good one, or what `progress` raised."""
        code = self._process.wait()
        self._reader.join()
        if self._refusal is not None:
            raise self._refusal
        if code != 0:
            raise ImageBuildFailed(
                f"mmdebstrap ended with {code}: {self._reason()}",
                hint="detail.output has the end of what it said",
                detail={"output": list(self._output)},
            )

    def _reason(self) -> str:
        errors = [line for line in self._output if line.startswith(("E:", "Err:"))]
        return (errors or [*self._output, "it said nothing"])[0]

    def _stop(self) -> None:
        """End the whole session; a TERM lets mmdebstrap remove its directory."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is not None:
                return
            self._signal(number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_PATIENCE)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _listen(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stderr:
            for raw in stderr:
                line = raw.decode(errors="replace").rstrip()
                self._output.append(line)
                if self._refusal is None:
                    try:
                        self._understand(line)
                    except BaseException as error:
                        self._refusal = error
                        self._signal(signal.SIGTERM)

    def _understand(self, line: str) -> None:
        for phase in _PHASES:
            if line.startswith(f"I: {phase[0]}"):
                self._phase = phase
                self._packages = self._fetched = self._handled = 0
                self._progress(Progress(phase[1], phase[2]))
        if match := _PACKAGES.search(line):
            self._packages = int(match[1])
        self._fetched += line.startswith("Get:")
        self._handled += line.startswith(("Unpacking ", "Setting up "))
        if (
            self._packages
            and self._phase[0] == _INSTALLING
            and line.startswith(("Get:", "Unpacking ", "Setting "))
        ):
            # Each package is fetched, unpacked and set up.
            done = min(1.0, (self._fetched + self._handled) / (3 * self._packages))
            _, step, start, end = self._phase
            self._progress(Progress(step, start + done * (end - start)))
