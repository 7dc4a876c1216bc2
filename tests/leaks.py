"""What Skerry could leave on a host: mounts, cgroups, loop devices, processes, open files.

A namespace is not looked for by itself: it lives by a process, a mount or an open file, and those are.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


def mounts() -> list[str]:
    """`mount point (type, source)` of every mount that this process sees."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        fields, _, rest = line.partition(" - ")
        kind, source, *_ = rest.split(" ")
        found.append(f"{fields.split(' ')[4]} ({kind}, {source})")
    return found


def cgroups() -> list[str]:
    """Every cgroup with skerry in its path, in every hierarchy."""
    roots = [mount.split(" (")[0] for mount in mounts() if "(cgroup" in mount]
    return [
        folder
        for root in roots
        for folder, _, _ in os.walk(root)
        if "skerry" in folder[len(root) :] and folder != root
    ]


def loops() -> list[str]:
    """`device (file)` of every loop device that is bound to a file with skerry in its path."""
    found = []
    for name in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            file = name.read_text().strip()
        except OSError:  # unbound meanwhile
            continue
        if "skerry" in file:
            found.append(f"/dev/{name.parts[3]} ({file})")
    return found


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    started: int
    """In ticks since boot: with the pid, an identity."""
    argv: list[str]
    home: str
    """Its SKERRY_HOME, when it has one and we may look."""
    ours: bool
    """Whether it is one of Skerry's programs, or runs in a cgroup of Skerry's."""

    def __str__(self) -> str:
        return f"process {self.pid}: {' '.join(self.argv)}"


def processes() -> Iterator[Process]:
    """All that live; zombies are their parents' business."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        folder = Path("/proc", name)
        try:
            stat = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            argv = _fields(folder / "cmdline")
            environ = _fields(folder / "environ")
            exe = os.readlink(folder / "exe")
            cgroup = (folder / "cgroup").read_text()
        except OSError:  # gone, a kernel thread, or somebody else's
            continue
        if stat[0] in "ZX":
            continue
        home = next((v.removeprefix("SKERRY_HOME=") for v in environ if v.startswith("SKERRY_HOME=")), "")
        ours = "skerry-guest" in os.path.basename(exe) or "skerry.daemon" in argv or "skerry" in cgroup
        yield Process(int(name), int(stat[1]), int(stat[19]), argv, home, ours)


def _fields(path: Path) -> list[str]:
    return path.read_bytes().decode(errors="replace").rstrip("\0").split("\0")


def open_files() -> dict[int, str]:
    """The open files of this process, by descriptor."""
    gc.collect()
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the one that the listing itself used
            continue
    return found


def of_home(home: Path) -> list[str]:
    """All that is left on the host of a home whose daemon has been stopped."""
    path = str(home)
    left = [f"mount {mount}" for mount in mounts() if mount.startswith(f"{path}/") or f", {path}/" in mount]
    left += [f"loop device {loop}" for loop in loops() if f"({path}/" in loop]
    left += [str(process) for process in processes() if process.home == path]
    instances = home / "instances"
    left += [f"directory {entry}" for entry in (instances.iterdir() if instances.is_dir() else ())]
    return left


@dataclass(frozen=True)
class Snapshot:
    """The host at one moment."""

    mounts: list[str]
    cgroups: list[str]
    loops: list[str]
    processes: set[tuple[int, int]]
    open_files: dict[int, str]

    @classmethod
    def take(cls) -> Snapshot:
        return cls(mounts(), cgroups(), loops(), {(p.pid, p.started) for p in processes()}, open_files())


def on_host(before: Snapshot) -> list[str]:
    """What is new on the host since `before`, whoever made it."""
    left = [f"mount {mount}" for mount in Counter(mounts()) - Counter(before.mounts)]
    left += [f"cgroup {cgroup}" for cgroup in Counter(cgroups()) - Counter(before.cgroups)]
    left += [f"loop device {loop}" for loop in Counter(loops()) - Counter(before.loops)]
    left += [
        str(process)
        for process in processes()
        if process.ours and (process.pid, process.started) not in before.processes
    ]
    return left


def of_this_process(before: Snapshot) -> list[str]:
    """Children and open files of this process that were not there before."""
    left = [str(process) for process in processes() if process.parent == os.getpid()]
    left += [
        f"open file {fd} -> {target}"
        for fd, target in open_files().items()
        if before.open_files.get(fd) != target
    ]
    return left
