"""Blanks: environments prepared ahead of a create, with namespaces, cgroups and an id, but no image, limits or guest.

Half the cost of a start does not depend on what is started. So a few of these are kept ready, each complete in itself
(a process waiting for the rest of its steps, a directory, cgroups, a range of user ids) and good for one use. Whether
an environment came from one that was ready or had to make its own, the steps are the same. One that is not used ends
with the daemon, whatever way that ends: its process goes when its socket does, and its names are leftovers then.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass

from skerry.backends.instances import InstanceDirectory, Record
from skerry.backends.machine import Machine
from skerry.errors import SkerryError
from skerry.failpoints import hit
from skerry.host import uids
from skerry.host.cgroups import Cgroup
from skerry.host.launcher import Launch
from skerry.host.network import network_of
from skerry.host.processes import start_time
from skerry.ids import new_id

READY = 4
REFILL_AFTER = 0.02
"""Seconds from a use to the making of new ones, so that they do not hold up the first command."""


@dataclass(eq=False, slots=True)
class Blank:
    """One prepared environment. Its owner must `end` it, or keep its guest and `close` it."""

    id: str
    directory: InstanceDirectory
    cgroup: Cgroup
    uid_base: int | None
    launch: Launch
    user_namespace: int
    """A descriptor; -1 without root."""
    network: int | None
    """Without root, a descriptor: later only the guest can open it."""

    def end(self) -> None:
        """Remove every trace."""
        self.launch.end()
        self.close()
        if self.network is not None:
            os.close(self.network)
        self.cgroup.kill()
        self.cgroup.remove()
        if self.uid_base is not None:
            uids.release(self.uid_base)
        self.directory.remove()

    def close(self) -> None:
        """Let go of what only a start needs."""
        self.launch.close()
        if self.user_namespace >= 0:
            os.close(self.user_namespace)
            self.user_namespace = -1


class Blanks:
    """Makes them, and keeps some ready."""

    def __init__(self, machine: Machine, steps: Callable[[int | None, Cgroup], bytes]) -> None:
        """`steps` makes a blank of its range of user ids and its cgroups."""
        self._machine = machine
        self._steps = steps
        self._ready: dict[str, Blank] = {}
        self._reserved: dict[str, Blank | None] = {}
        """By the ids that `reserve` gave; None if none was ready."""
        self._refilling: asyncio.Task[None] | None = None
        self._closed = False

    def __len__(self) -> int:
        """How many are ready."""
        return len(self._ready)

    def reserve(self) -> str:
        """An id for `take`: that of one which is ready, if any is."""
        while self._ready:
            id_, blank = self._ready.popitem()
            self._machine.unused.discard(id_)
            if not blank.launch.ended():
                self._reserved[id_] = blank
                return id_
            blank.end()
        id_ = new_id()
        self._reserved[id_] = None
        return id_

    async def take(self, id_: str) -> Blank:
        """The reserved blank, or a new one. Raises LaunchFailed, LimitReached, DiskFull.

        New ones are prepared only after a reserved one was taken: a probe prepares none for a backend that nobody
        uses.
        """
        wanted = id_ in self._reserved
        blank = self._reserved.pop(id_, None) or await self._make(id_)
        if wanted and self._refilling is None and not self._closed:
            self._refilling = asyncio.create_task(self._refill())
        return blank

    def forget(self, id_: str) -> None:
        """Remove a reserved blank; unknown ids are fine."""
        if (blank := self._reserved.pop(id_, None)) is not None:
            blank.end()

    async def close(self) -> None:
        self._closed = True
        if self._refilling is not None:
            self._refilling.cancel()
            await asyncio.wait((self._refilling,))
        for blank in (*self._ready.values(), *self._reserved.values()):
            if blank is not None:
                blank.end()
        self._machine.unused.difference_update(self._ready)
        self._ready.clear()
        self._reserved.clear()

    async def _refill(self) -> None:
        try:
            await asyncio.sleep(REFILL_AFTER)
            while len(self._ready) < READY:
                id_ = new_id()
                self._machine.unused.add(id_)
                try:
                    self._ready[id_] = await self._make(id_)
                except BaseException:
                    self._machine.unused.discard(id_)
                    raise
        except SkerryError:
            pass  # the next start will meet the same, and say it to its caller
        finally:
            self._refilling = None

    async def _make(self, id_: str) -> Blank:
        directory = InstanceDirectory(self._machine.instances, id_)
        with contextlib.ExitStack() as undo:
            directory.make()
            undo.callback(directory.remove)
            hit("blank.directory")
            cgroup = self._machine.cgroups.create(id_)
            undo.callback(cgroup.remove)
            hit("blank.cgroup")
            uid_base = await uids.claim() if self._machine.rootful else None
            if uid_base is not None:
                undo.callback(uids.release, uid_base)
            hit("blank.claimed")
            with directory.listen() as listener:
                launch = Launch(self._machine.helper, listener.fileno())
            undo.callback(launch.end)
            hit("blank.launched")
            launch.send(self._steps(uid_base, cgroup))
            await launch.done()
            hit("blank.done")
            directory.save(Record(launch.pid, start_time(launch.pid), uid_base))
            hit("blank.saved")
            user_namespace = -1
            if uid_base is not None:
                uids.settle(uid_base, launch.pid)
                user_namespace = os.open(f"/proc/{launch.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
            network = network_of(launch.pid) if uid_base is None else None
            undo.pop_all()
        return Blank(id_, directory, cgroup, uid_base, launch, user_namespace, network)
