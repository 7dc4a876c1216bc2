"""Moments at which a test can have the daemon killed, to see what the next one makes of what it left.

`SKERRY_FAILPOINT=create.recorded` kills the daemon, as `kill -9` does, when it comes to that point; with
`create.recorded:3`, when it comes there for the third time. Without the variable a point costs one comparison.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from skerry.errors import InvalidRequest

VARIABLE = "SKERRY_FAILPOINT"
POINTS = {
    # A create, in this order; the row is written beside the backend's work.
    "create.reserved": "it has an id, and nothing else",
    "create.recorded": "its row is written",
    "create.taken": "its backend has begun: a directory, with namespaces also cgroups and a process",
    "create.sent": "the helper has all its steps",
    "create.kept": "the helper was told to stay without us, and may not be done",
    "create.noted": "all that the next daemon must know of it is written down, and the helper may not be done",
    "create.started": "its guest runs",
    "create.connected": "its guest has answered",
    "create.served": "all is done, and nobody was told",
    # What is made ahead, while nobody waits.
    "blank.directory": "there is a directory",
    "blank.cgroup": "and cgroups",
    "blank.claimed": "and a claim of user ids",
    "blank.launched": "and a process",
    "blank.done": "which has its namespaces",
    "blank.saved": "and is written down",
    "volume.mounted": "a file system is made and mounted, and nobody has it yet",
    "pool.started": "an entry of a pool runs, and nobody is connected to it",
    "pool.settled": "an entry has the limits of its environment, whose row is not written",
    # An execution.
    "execute.admitted": "it is one of those that run, and nothing was done",
    "execute.intended": "the audit knows that it is to run",
    "execute.started": "its program runs",
    "execute.recorded": "it runs in the background, and its row is written",
    "execute.output": "some of its output was read",
    "execute.ended": "its program has ended",
    "execute.concluded": "its result is known, and not written down",
    "code.delivered": "a program lies in an environment of its own, and does not run yet",
    # A delete, or any other end.
    "delete.intended": "the audit knows that it is to be deleted",
    "delete.noted": "its row says that it is being deleted, and why",
    "delete.executions": "nobody is connected to its guest any more",
    "delete.killed": "its processes are dead",
    "delete.cgroups": "its cgroups are gone",
    "delete.directory": "its directory is gone",
    "delete.stopped": "nothing of it is left on the host, and its row does not say so",
    "delete.recorded": "its row says so, and nobody was told",
    "heartbeat.extended": "it will live longer, and no row says so",
    "heartbeat.recorded": "its row says so, and nobody was told",
    # A start of a daemon after another.
    "recover.swept": "what had no row is gone",
    "recover.connected": "one environment is taken over, without its executions",
    "recover.recovered": "one environment is taken over",
    "recover.ended": "one that was lost, or half deleted, is at its end",
    "recover.done": "all is taken over, but for what is slow, and nobody can connect yet",
}
"""Every point, and what is true there."""

_armed = ""
_left = 0
_ignored: ContextVar[bool] = ContextVar("_ignored", default=False)


def arm(wish: str) -> None:
    """`name` or `name:n`; nothing for "". Raises InvalidRequest for a name that is none."""
    global _armed, _left
    name, _, count = wish.partition(":")
    if name and (name not in POINTS or not (count or "1").isdecimal()):
        raise InvalidRequest(f"{VARIABLE} names no point: {wish!r}", hint=f"known: {', '.join(POINTS)}")
    _armed, _left = name, int(count or "1")


def hit(name: str) -> None:
    """The daemon has come to this point."""
    if name == _armed and not _ignored.get():
        _count()


@contextmanager
def ignored() -> Iterator[None]:
    """No point counts in what runs here: a probe passes those of a create, at a moment that nobody chooses."""
    before = _ignored.set(True)
    try:
        yield
    finally:
        _ignored.reset(before)


def _count() -> None:
    global _left
    _left -= 1
    if _left == 0:
        os.write(2, f"killed at {_armed}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)
