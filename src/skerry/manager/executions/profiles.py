"""Execution profiles: named restrictions that one command gets on top of its environment's.

They are data: the built-in ones in `profiles.toml` beside this module, the operator's in `profiles.toml` of the home.

    [build]                        # the name
    deny = ["ptrace", "kill"]      # system calls that fail with EPERM
    writable = ["/workspace/out"]  # all that can be written, beside /dev/null and its like; default: every such place
    execute_new = false            # only files on read-only file systems can be executed (default: true)
    sockets = false                # no sockets but pairs of the command's own (default: true)
"""

from __future__ import annotations

import functools
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from skerry.errors import InvalidRequest, IsolationUnavailable
from skerry.guest.start import Restrictions
from skerry.host import seccomp
from skerry.tables import Table, parse, read

if TYPE_CHECKING:
    from skerry.backends.base import Backend

FILE = "profiles.toml"
_BUILT_IN = Path(__file__).with_name("profiles.toml")
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_PLACES = ("/workspace", "/tmp", "/dev/shm")  # noqa: S108
"""What a command can write in every environment. /run is not among them: the pipes of shells are there, and whoever
writes to them runs commands without the profile."""
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_PATHS_MAX, _PATH_MAX = 32, 1024
_FILTER_MAX = 1024 * 8
"""Bytes: as native/profile.c."""

# Rights of Landlock, by bit.
_EXECUTE, _WRITE_FILE, _TRUNCATE, _IOCTL_DEV = 1 << 0, 1 << 1, 1 << 14, 1 << 15
_CHANGES = _WRITE_FILE | _TRUNCATE | _IOCTL_DEV | sum(1 << bit for bit in range(4, 14))
_OF_DEVICES = _WRITE_FILE | _TRUNCATE | _IOCTL_DEV

_NO_FILTERS = """
[[calls.seccomp]] # the guest lets the command put on this filter, and no other
then = "EINVAL"
"""
_NO_FILTERS_BY_PRCTL = """
[[calls.prctl]] # PR_SET_SECCOMP
when = [{ arg = 0, is = [22] }]
then = "EINVAL"
[[calls.prctl]]
then = "allow"
"""
_NO_SOCKETS = """
[[calls.socketpair]] # SOCK_STREAM, SOCK_SEQPACKET: a pair of another type can be connected anew
when = [{ arg = 1, mask = 0xF, is = [1, 5] }]
then = "allow"
"""
_SOCKET_CALLS = ("socket", "connect", "bind", "listen")
_NO_NEW_FILES = """
[[calls.memfd_create]] # files of no file system, to which Landlock does not apply
then = "ENOSYS"
"""


@dataclass(frozen=True)
class ExecutionProfile:
    """One of them. See the top of the module."""

    name: str
    deny: tuple[str, ...] = ()
    writable: tuple[str, ...] | None = None
    execute_new: bool = True
    sockets: bool = True

    @property
    def limits_paths(self) -> bool:
        """True if it cannot do without rules on paths."""
        return self.writable is not None or not self.execute_new

    @cached_property
    def with_paths(self) -> Restrictions:
        rules = [(_CHANGES, path) for path in (_PLACES if self.writable is None else self.writable)]
        devices = _DEVICES if self.writable is not None else (*_DEVICES, "pts")
        rules += [(_OF_DEVICES, f"/dev/{name}") for name in devices]
        if not self.execute_new:
            rules += [(_EXECUTE, "/*"), (_EXECUTE, "/run/*")]
        return Restrictions(self.filter, _CHANGES | (0 if self.execute_new else _EXECUTE), tuple(rules))

    @cached_property
    def without_paths(self) -> Restrictions:
        return Restrictions(self.filter)

    @cached_property
    def filter(self) -> bytes:
        """The compiled filter. Raises InvalidRequest if it is too long."""
        denied = {*self.deny, *(() if self.sockets else _SOCKET_CALLS)}
        text = f"deny = {sorted(denied - {'seccomp'})}\n{_NO_FILTERS}"
        if "prctl" not in denied:
            text += _NO_FILTERS_BY_PRCTL
        if not self.sockets and "socketpair" not in denied:
            text += _NO_SOCKETS
        if not self.execute_new and "memfd_create" not in denied:
            text += _NO_NEW_FILES
        program = seccomp.parse_profile(text, on_top=True).compile()
        if len(program) > _FILTER_MAX:
            raise InvalidRequest(f"its filter takes {len(program)} bytes, more than {_FILTER_MAX}")
        return program


class Profiles:
    """The execution profiles that commands can name."""

    def __init__(self, own: Mapping[str, ExecutionProfile] | None = None) -> None:
        self._profiles = {**_built_in(), **(own or {})}

    @classmethod
    def load(cls, home: str) -> Profiles:
        """With those of the operator. Raises InvalidRequest for an invalid profiles.toml."""
        document = read(f"{home}/{FILE}", InvalidRequest)
        if document is None:
            return cls()
        document.names(_NAME, "an execution profile")
        return cls({name: _own(table) for name, table in document.tables().items()})

    @property
    def names(self) -> list[str]:
        return sorted(self._profiles)

    def restrictions(self, name: str, backend: Backend) -> Restrictions:
        """What a command gets under this profile, in an environment of this backend.

        Raises InvalidRequest for an unknown name, IsolationUnavailable if it needs what the backend cannot do.
        """
        if name not in self._profiles:
            raise InvalidRequest(
                f"unknown execution profile {name!r}",
                hint=f"known: {', '.join(self.names)}; operators add theirs in {FILE} of the daemon's home",
            )
        profile = self._profiles[name]
        reason = backend.path_rules()
        if not reason:
            return profile.with_paths
        if profile.limits_paths:
            others = [each.name for each in self._profiles.values() if not each.limits_paths]
            raise IsolationUnavailable(
                f"the execution profile {name!r} limits paths, which the backend {backend.name} cannot: {reason}",
                hint=f"profiles without rules on paths work there: {', '.join(sorted(others))}",
            )
        return profile.without_paths


@functools.cache
def _built_in() -> dict[str, ExecutionProfile]:
    tables = parse(_BUILT_IN.read_text(encoding="utf-8"), str(_BUILT_IN), InvalidRequest).tables()
    return {name: _profile(table) for name, table in tables.items()}


def _profile(table: Table) -> ExecutionProfile:
    """Raises InvalidRequest."""
    table.allow(("deny", "writable", "execute_new", "sockets"))
    deny = table.texts("deny")
    if unknown := sorted(set(deny) - seccomp.call_names()):
        raise table.wrong(f"deny: unknown system call {', '.join(map(repr, unknown))}")
    if "execve" in deny:
        raise table.wrong("deny: without execve the command itself cannot start")
    return ExecutionProfile(
        name=table.name,
        deny=deny,
        writable=_paths(table) if "writable" in table.values else None,
        execute_new=table.truth("execute_new", default=True),
        sockets=table.truth("sockets", default=True),
    )


def _own(table: Table) -> ExecutionProfile:
    """An operator's. Raises InvalidRequest."""
    if table.name in _built_in():
        raise table.wrong(f"{table.name!r} is a built-in profile", "give it another name")
    profile = _profile(table)
    try:
        assert profile.filter
    except InvalidRequest as error:
        raise table.wrong(error.message, error.hint) from error
    return profile


def _paths(table: Table) -> tuple[str, ...]:
    paths = table.texts("writable")
    if len(paths) > _PATHS_MAX:
        raise table.wrong(f"writable has {len(paths)} paths, more than {_PATHS_MAX}")
    for path in paths:
        inside = any(path == place or path.startswith(f"{place}/") for place in _PLACES)
        if not inside or posixpath.normpath(path) != path or path.endswith("/*") or len(path) > _PATH_MAX:
            raise table.wrong(f"writable: {path!r} is not a path below {', '.join(_PLACES)}")
    return paths
