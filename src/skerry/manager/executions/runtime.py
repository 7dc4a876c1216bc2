"""The running guest of one environment, as its executions and sessions share it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

from skerry.backends.base import Backend, Sample
from skerry.errors import SkerryError, StoreUnavailable
from skerry.guest.channel import Channel
from skerry.guest.start import Restrictions
from skerry.manager.audit.acts import Act, AuditLog, Subject
from skerry.manager.caller import Caller
from skerry.manager.executions.output import Log
from skerry.manager.executions.profiles import Profiles
from skerry.manager.executions.queue import RunQueue
from skerry.models import Usage


class Runtime:
    """What a run needs of its environment: guest channel, audit, resource counters, output log and shell queues."""

    def __init__(
        self,
        tenant: str,
        subject: Subject,
        backend: Backend,
        channel: Channel,
        audit: AuditLog,
        variables: dict[str, str],
        *,
        lost: Callable[[str], None],
        secluded: Callable[[], bool],
        profiles: Profiles | None = None,
    ) -> None:
        self.tenant = tenant
        self.environment_id = subject.environment_id
        self.channel = channel
        self.variables = variables
        self.lost = lost
        """Called with a reason when the guest turns out to be broken."""
        self.log = Log(tenant=tenant)
        self.executing = 0
        """Commands under way or admitted; calls in sessions do not count."""
        self.oom_kills = 0
        """The last count that was seen."""
        self.left = False
        """True when this daemon is stopping and leaves the environment to the next one."""
        self._subject = subject
        self._backend = backend
        self._audit = audit
        self._secluded = secluded
        self._profiles = profiles or Profiles()
        self._queues: dict[str, RunQueue] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def act(self, caller: Caller, action: str, detail: dict[str, Any], *, begun: bool = False) -> Act:
        """An action in this environment, for the audit."""
        return Act(self._audit, caller, action, self._subject, detail, begun=begun)

    async def begin(self, act: Act) -> None:
        """Returns when the action may be done; only after `on_disk()` may anybody see it. Raises StoreUnavailable."""
        if self._secluded():
            await act.begin_early()
        else:
            await act.begin()

    async def on_disk(self, act: Act) -> None:
        """Raises StoreUnavailable, and the environment ends."""
        try:
            await act.on_disk()
        except StoreUnavailable:
            self.lost("the audit of what was done in it may be lost")
            raise

    def queue(self, shell: str) -> RunQueue:
        """The queue of a stateful shell."""
        return self._queues.setdefault(shell, RunQueue())

    def leave_queue(self, shell: str, queue: RunQueue) -> None:
        queue.leave()
        if queue.idle:
            self._queues.pop(shell, None)

    def restrictions(self, profile: str) -> Restrictions | None:
        """Of this execution profile; None for "". Raises InvalidRequest, IsolationUnavailable."""
        return self._profiles.restrictions(profile, self._backend) if profile else None

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run work in the background, at most as long as the environment lives."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def charge(self, seconds: float) -> None:
        """Charge the tenant for the loop time that output of the environment has cost."""
        self.channel.flow.spend(seconds)

    def reset_peak(self) -> None:
        with contextlib.suppress(SkerryError):
            self._backend.reset_peak(self.environment_id)

    def sample(self) -> Sample:
        try:
            return self._backend.sample(self.environment_id)
        except SkerryError:
            return Sample(None, 0)

    async def usage_since(self, before: Sample) -> tuple[Usage, bool]:
        """Usage since the sample, and whether the kernel killed something for lack of memory."""
        try:
            now = await self._backend.usage(self.environment_id, io=False)
        except SkerryError:
            now = Usage()
        cpu = None
        if before.cpu_seconds is not None and now.cpu_seconds is not None:
            cpu = max(0.0, now.cpu_seconds - before.cpu_seconds)
        seen = now.oom_kills or 0
        kills = max(0, seen - before.oom_kills)
        self.oom_kills = max(self.oom_kills, seen)
        usage = Usage(
            cpu_seconds=cpu,
            memory_bytes=now.memory_bytes,
            memory_peak_bytes=now.memory_peak_bytes,
            pids=now.pids,
            oom_kills=kills if now.oom_kills is not None else None,
        )
        return usage, kills > 0

    async def let_go(self, error: SkerryError) -> None:
        """Leave everything running, for the next daemon; raise the error to readers of the channel and the log."""
        self.left = True
        for task in self._tasks:
            task.cancel()
        await self.channel.close(error)
        self.log.close(error)

    async def close(self, grace: float) -> None:
        """Close the channel and the log; background work is cancelled after `grace` seconds."""
        await self.channel.close()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=grace)
            for task in late:
                task.cancel()
        self.log.close()
