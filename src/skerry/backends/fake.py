"""No isolation at all: the guest as an ordinary process in a temporary directory, for users' own tests.

Commands, files, streams and shells behave as everywhere else, because the guest is the real one. Nothing is
confined or limited, so the daemon offers this backend only when it was started with `--backend fake`, and every
environment reports its isolation as `none`.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import signal
import socket
from collections.abc import Mapping

from skerry.backends.base import Capabilities, ImageSource, Instance, InstanceSpec, Sample
from skerry.backends.instances import InstanceDirectory, Record, Running, helpers_in, list_directories
from skerry.errors import EnvironmentNotFound, IsolationUnavailable, LaunchFailed
from skerry.failpoints import hit
from skerry.host import plan
from skerry.host.launcher import Helper, Launch
from skerry.host.network import Sockets
from skerry.host.processes import descendants, start_time
from skerry.ids import new_id
from skerry.models import Enforcement, Usage
from skerry.policy import Policy


class FakeBackend:
    name = "fake"
    isolation = "none"
    gates = True
    images: ImageSource | None = None
    ahead = True

    def __init__(self, home: str) -> None:
        """Raises IsolationUnavailable when the native helper was not built."""
        self._instances = f"{home}/instances"
        self._helper = Helper()
        self._live: dict[str, Running] = {}
        os.makedirs(self._instances, mode=0o700, exist_ok=True)

    async def capabilities(self) -> Capabilities:
        return Capabilities(available=True, rootless=os.geteuid() != 0)

    def path_rules(self) -> str:
        return "it has no root of its own"

    def reserve(self) -> str:
        return new_id()

    async def start(self, spec: InstanceSpec) -> Instance:
        directory = InstanceDirectory(self._instances, spec.environment_id)
        directory.make()
        hit("create.taken")
        try:
            workspace, tmp, run = (directory.place(name, 0o700) for name in ("workspace", "tmp", "run"))
            for layer in spec.layers:
                os.symlink(layer.source, f"{run}/{layer.name}")
            steps = plan.bare_steps(workspace, tmp, run, spec.policy.limits, spec.orphan)
            with directory.listen() as listener:
                launch = Launch(self._helper, listener.fileno())
            try:
                launch.send(steps)
                hit("create.sent")
                await launch.done()
                running = Running(launch.pid)
                directory.save(Record(launch.pid, start_time(launch.pid), None))
                launch.keep()
                hit("create.kept")
                launch.close()
            except BaseException:
                launch.end()
                raise
        except BaseException:
            directory.remove()
            raise
        self._live[spec.environment_id] = running
        return Instance(spec.environment_id, "program" if spec.program else "disk", workspace, tmp, run)

    def disk(self, policy: Policy) -> int:
        return 0 if policy.workspace == "memory" else policy.limits.disk

    def fixed(self, policy: Policy) -> tuple[object, ...]:
        return (policy.limits.fds,)

    def settle(self, environment_id: str, policy: Policy) -> None:
        self._get(environment_id)

    async def adopt(self, spec: InstanceSpec) -> Instance:
        directory = InstanceDirectory(self._instances, spec.environment_id)
        record = directory.load()
        if record is None:
            raise LaunchFailed(f"the start of environment {spec.environment_id} was not finished")
        if (running := Running.from_record(record)) is None:
            raise EnvironmentNotFound("its processes are gone")
        self._live[spec.environment_id] = running
        workspace, tmp, run = (f"{directory.path}/{name}" for name in ("workspace", "tmp", "run"))
        return Instance(spec.environment_id, "disk", workspace, tmp, run)

    async def connect(self, environment_id: str) -> socket.socket:
        return InstanceDirectory(self._instances, environment_id).connect()

    async def open_network(self, environment_id: str) -> Sockets:
        raise IsolationUnavailable(
            "this backend has no network of its own", hint="ask for isolation 'namespace'"
        )

    def gate(self, environment_id: str, name: str) -> str:
        return InstanceDirectory(self._instances, environment_id).gate(name)

    async def deliver(
        self, environment_id: str, files: Mapping[str, bytes], links: Mapping[str, str]
    ) -> None:
        InstanceDirectory(self._instances, environment_id).deliver(files, links)

    async def stop(self, environment_id: str) -> None:
        directory = InstanceDirectory(self._instances, environment_id)
        record = directory.load()
        running = self._live.pop(environment_id, None) or (record and Running.from_record(record))
        if running:
            running.kill_descendants()
            await running.kill()
            running.handle.close()
        # A guest that ended by itself, or was killed, has left its supervisors with all that they started.
        while left := helpers_in(directory.path):
            for pid in left:
                for each in (*descendants(pid), pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(each, signal.SIGKILL)
        hit("delete.killed")
        directory.remove()
        hit("delete.directory")

    def alive(self, environment_id: str) -> bool:
        running = self._live.get(environment_id)
        return running is not None and not running.handle.ended()

    async def wait(self, environment_id: str) -> None:
        await self._get(environment_id).handle.wait()

    async def list(self) -> list[str]:
        return list_directories(self._instances)

    def enforced(self, environment_id: str) -> builtins.list[Enforcement]:
        self._get(environment_id)
        return [
            Enforcement(name, False, "", "the fake backend confines nothing")
            for name in ("isolation", "cpu", "memory", "pids", "disk", "inodes", "network", "seccomp")
        ]

    async def usage(self, environment_id: str, *, io: bool = True) -> Usage:
        self._get(environment_id)
        return Usage()

    def sample(self, environment_id: str) -> Sample:
        return Sample(None, 0)

    def share(self, environment_id: str, group: str) -> None:
        pass

    def reset_peak(self, environment_id: str) -> None:
        pass

    def prepared(self) -> int:
        return 0

    async def close(self) -> None:
        self._helper.close()

    def _get(self, environment_id: str) -> Running:
        if environment_id not in self._live:
            raise EnvironmentNotFound(f"no environment {environment_id} runs here")
        return self._live[environment_id]
