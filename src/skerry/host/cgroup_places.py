"""Where this process may make cgroups: the mounted hierarchies, and the place in each that is ours.

The place is `<base>/<parent>`. On v1 `<base>` is the topmost cgroup, between the mount and us, that we may
write; on v2 the nearest one that systemd marked as delegated goes before that. For root this is the top of
the mount; for a user of systemd it is `user@UID.service`, which stays the same from login to login, so that
the next daemon finds the same place; in a container it is the container's own root. v2 has two rules that
shape the rest:

- A cgroup that hands controllers to its children has no processes of its own (except the real root). If we
  are in `<base>` ourselves, this process moves to the leaf `<base>/skerry-daemon`. Nobody else is moved.
- Who is not root moves or clones a process from A to B only with write permission on `cgroup.procs` of their
  common ancestor. `<base>` is above us and above B, so that a `<base>` whose `cgroup.procs` is ours suffices.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

LIMITING = ("cpu", "memory", "pids")
"""The controllers that limits need. Beside them: io on v2, blkio on v1, and cpuacct on v1, which only counts."""

WEIGHT_PERCENT = 25
"""What all environments together weigh where CPU is short, against 100 for one program or service of the host."""

FIX = (
    "run the daemon as root, or give it a cgroup of its own: "
    "systemd-run --user --scope -p Delegate=yes skerry serve"
)

_LEAF = "skerry-daemon"


@dataclass(slots=True)
class Places:
    controllers: dict[str, str] = field(default_factory=dict)
    """The parent cgroup of each usable controller."""
    unified: str | None = None
    """The parent cgroup in the v2 hierarchy, with or without controllers."""
    missing: dict[str, str] = field(default_factory=dict)
    """Of each of LIMITING that is not usable: why not, and what to do."""

    def refuse(self, why: str, controllers: Iterable[str] = LIMITING) -> None:
        self.missing |= dict.fromkeys(controllers, why)

    def reason(self) -> str:
        """What is missing, why, and what to do, for people; empty if nothing is."""
        by_why: dict[str, list[str]] = {}
        for controller, why in self.missing.items():
            by_why.setdefault(why, []).append(controller)
        return "; ".join(
            why if len(names) == len(LIMITING) else f"{', '.join(names)}: {why}"
            for why, names in by_why.items()
        )


def find_places(parent: str, proc: str) -> Places:
    """Make the cgroup `parent` where it is needed and allowed. Raises nothing for what the machine lacks."""
    places = Places()
    hierarchies = sorted(_hierarchies(proc), key=lambda hierarchy: not hierarchy.unified)
    if not hierarchies:
        places.refuse("no cgroup filesystem is mounted: mount cgroup2 on /sys/fs/cgroup")
    for hierarchy in hierarchies:
        if hierarchy.unified:
            _prepare_v2(hierarchy, parent, places)
        else:
            _prepare_v1(hierarchy, parent, places)
    if "cpu" in places.controllers:
        _yield_to_others(places.controllers["cpu"])
    absent = "no mounted cgroup hierarchy has the controller"
    unusable = [controller for controller in LIMITING if controller not in places.controllers]
    places.missing = {controller: places.missing.get(controller, absent) for controller in unusable}
    return places


def places_of(pid: int, name: str) -> Places:
    """The cgroups of a process, with `name` in their paths, that we see. Raises nothing."""
    places = Places()
    for hierarchy in _hierarchies("/proc/self", f"/proc/{pid}"):
        if name not in hierarchy.own:
            continue
        found = hierarchy.controllers
        if hierarchy.unified:
            places.unified = hierarchy.own
            available = read_text(f"{hierarchy.own}/cgroup.controllers").split()
            found = frozenset({*LIMITING, "io"}.intersection(available))
        places.controllers |= dict.fromkeys(found - places.controllers.keys(), hierarchy.own)
    unlimited = [controller for controller in LIMITING if controller not in places.controllers]
    places.refuse("the container has no cgroup with this controller", unlimited)
    return places


def _yield_to_others(cpu: str) -> None:
    """Let the daemon and the rest of the host go first where environments want the same CPU."""
    for name, share in (("cpu.weight", WEIGHT_PERCENT), ("cpu.shares", 1024 * WEIGHT_PERCENT // 100)):
        if os.path.exists(f"{cpu}/{name}"):
            with contextlib.suppress(OSError):
                write(f"{cpu}/{name}", str(share))


@dataclass(frozen=True, slots=True)
class _Hierarchy:
    unified: bool
    controllers: frozenset[str]
    """Those of a v1 hierarchy that matter here."""
    top: str
    """The mount point."""
    own: str
    """Where this process is; the top if that is not visible."""

    def line(self) -> list[str]:
        """The cgroups from the top down to our own."""
        below = self.own.removeprefix(self.top).split("/")[1:]
        return [self.top, *("/".join([self.top, *below[: i + 1]]) for i in range(len(below)))]

    def no_delegation(self) -> str:
        if os.statvfs(self.top).f_flag & os.ST_RDONLY:
            return "no delegation: cgroups are mounted read-only; mount them writable in this container"
        if self.unified:
            return f"no delegation: uid {os.geteuid()} may not write {self.own}; {FIX}"
        return f"no delegation: uid {os.geteuid()} may not write cgroup v1; run the daemon as root, or use v2"


def _hierarchies(proc: str, of: str = "") -> Iterator[_Hierarchy]:
    """The mounted hierarchies that we (or process `of`) are in, each once.

    Those of v1 may be co-mounted, and be anywhere.
    """
    paths: dict[str, str] = {}
    for line in read_text(f"{of or proc}/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        paths |= dict.fromkeys(names.split(","), path)
    seen: set[str] = set()
    for line in read_text(f"{proc}/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2":
            mounted = {""}
        elif kind == "cgroup":
            mounted = {*LIMITING, "cpuacct", "blkio"} & {*options.split(",")}
        else:
            continue
        fresh = (mounted & paths.keys()) - seen
        if fresh:
            seen |= fresh
            root, top = (_unescape(text) for text in before.split(" ")[3:5])
            own = _below(top, root, paths[min(fresh)])
            yield _Hierarchy(kind == "cgroup2", frozenset(fresh - {""}), top, own)


def _below(top: str, root: str, path: str) -> str:
    """Where `path` of a hierarchy is, if `root` of it is mounted on `top`; `top` if it is not visible there."""
    if ".." in (*root.split("/"), *path.split("/")):  # further out than our cgroup namespace
        return top
    below = os.path.relpath(path, root)
    return top if below == "." or below.startswith("../") else f"{top}/{below}"


def _unescape(text: str) -> str:
    """A mountinfo field: space, tab, newline and backslash are written as octal."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _prepare_v1(hierarchy: _Hierarchy, parent: str, places: Places) -> None:
    elsewhere = {"cpuacct"} if places.unified else set()
    if "io" in places.controllers:
        elsewhere.add("blkio")
    wanted = hierarchy.controllers - places.controllers.keys() - elsewhere
    if not wanted:
        return
    base = next((path for path in hierarchy.line() if os.access(path, os.W_OK)), None)
    try:
        if base is None:
            raise PermissionError
        os.makedirs(f"{base}/{parent}", 0o755, exist_ok=True)
    except OSError:
        places.refuse(hierarchy.no_delegation(), wanted)
    else:
        places.controllers |= dict.fromkeys(wanted, f"{base}/{parent}")


def _prepare_v2(hierarchy: _Hierarchy, parent: str, places: Places) -> None:
    ours = [path for path in hierarchy.line() if _writable(path)]
    if not ours:
        return places.refuse(hierarchy.no_delegation())
    base = next(filter(_marked_as_delegated, reversed(ours)), ours[0])
    directory = f"{base}/{parent}"
    try:
        os.makedirs(directory, 0o755, exist_ok=True)
    except OSError as error:
        return places.refuse(f"cannot make the cgroup {directory}: {error.strerror}")
    places.unified = directory
    places.refuse(
        f"the controller is not delegated to {base}; with systemd: set Delegate=yes on the unit that the "
        "daemon runs in (for users: on user@.service)"
    )
    available = {*LIMITING, "io"}.intersection(read_text(f"{base}/cgroup.controllers").split())
    aside = not available <= _handed_down(base) and _step_aside(base, hierarchy.own)
    for controller in available:
        try:
            write(f"{base}/cgroup.subtree_control", f"+{controller}")
            write(f"{directory}/cgroup.subtree_control", f"+{controller}")
            places.controllers[controller] = directory
        except OSError as error:
            why = f"{base} cannot hand down the controller: {error.strerror}"
            if error.errno == errno.EBUSY:
                others = ", ".join(read_text(f"{base}/cgroup.procs").split())
                why = f"{base} has other processes in it ({others}): move them to a child, or {FIX}"
            places.missing[controller] = why
    if aside and not _handed_down(base):
        _step_back(base)
    return None


def _writable(directory: str) -> bool:
    names = ("", "cgroup.procs", "cgroup.subtree_control")
    return all(os.access(f"{directory}/{name}", os.W_OK) for name in names)


def _marked_as_delegated(directory: str) -> bool:
    """True if systemd delegated this subtree (Delegate=)."""
    for name in ("trusted.delegate", "user.delegate"):
        with contextlib.suppress(OSError):
            if os.getxattr(directory, name) == b"1":
                return True
    return False


def _handed_down(directory: str) -> set[str]:
    return {*read_text(f"{directory}/cgroup.subtree_control").split()}


def _step_aside(base: str, own: str) -> bool:
    """Move this process, with all its threads, to a leaf below `base` if it is in there itself."""
    is_real_root = not os.path.exists(f"{base}/cgroup.type")
    if base == own and not is_real_root:
        with contextlib.suppress(OSError):
            os.makedirs(f"{base}/{_LEAF}", 0o755, exist_ok=True)
            write(f"{base}/{_LEAF}/cgroup.procs", "0")
            return True
    return False


def _step_back(base: str) -> None:
    with contextlib.suppress(OSError):
        write(f"{base}/cgroup.procs", "0")
        os.rmdir(f"{base}/{_LEAF}")


def read_text(path: str) -> str:
    """A small file's text, stripped; empty if it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return os.fsdecode(file.read()).strip()
    except OSError:
        return ""


def write(path: str, value: str) -> None:
    """One write to a control file. Raises OSError with the kernel's answer."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)
