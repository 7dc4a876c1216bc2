"""Which backends the suite runs against: a new one needs one entry here, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from skerry.backends.base import Backend
from skerry.backends.fake import FakeBackend
from skerry.backends.machine import Machine
from skerry.backends.namespace import NamespaceBackend
from skerry.backends.oci import OciBackend
from skerry.host import readback

GIVES = {
    "isolated": "a process tree and a network that are its own",
    "own_root": "a root file system of its own, with /workspace and /tmp",
    "plain_user": "work is done by a user to whom permissions mean something",
    "pids": "a limit of processes that holds",
    "counters": "the kernel's counters of what it uses",
    "users": "more than one user inside",
    "host_processes": "processes that the host sees one by one",
    "terminals": "a /dev/tty, and a raw terminal without signals",
    "nameless": "files without a name (O_TMPFILE)",
    "path_rules": "executions that are limited to paths",
}
"""What a behaviour may need beyond the contract; a test names it by `@needs("...")`."""


@dataclass(frozen=True)
class Kind:
    name: str
    make: Callable[[str], Backend]
    """From the path of a home that exists."""
    gives: frozenset[str]


_AS_ROOT = os.geteuid() == 0
_LINUX = frozenset({"host_processes", "terminals", "nameless"})
"""Of the host's own kernel."""

KINDS = (
    Kind("fake", FakeBackend, _LINUX | (set() if _AS_ROOT else {"plain_user"})),
    Kind(
        "namespace",
        lambda home: NamespaceBackend(Machine(home)),
        _LINUX
        | {"isolated", "own_root", "plain_user", "pids"}
        | ({"counters", "users"} if _AS_ROOT else set())
        | ({"path_rules"} if not readback.path_rules() else set()),
    ),
    Kind(
        "oci",
        lambda home: OciBackend(Machine(home)),
        frozenset({"isolated", "own_root", "plain_user", "counters", "users"}),
    ),
)
