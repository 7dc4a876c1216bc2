"""The containers of a daemon's environments, as its engine has them: started, found again, and removed."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skerry.backends.docker import container
from skerry.backends.docker.container import Container, container_name
from skerry.backends.docker.engine import CONFLICT, NOT_FOUND, STDOUT, EngineClient, EngineRefused
from skerry.backends.instances import Running
from skerry.errors import EnvironmentNotFound, IsolationUnavailable, LaunchFailed, PlatformError, SkerryError
from skerry.failpoints import hit
from skerry.host.cgroups import Cgroup
from skerry.host.launcher import explained
from skerry.policy import Policy

START_SECONDS, LIST_SECONDS, REMOVE_SECONDS = 60.0, 10.0, 60.0
LOOK_AGAIN = 1.0
"""Seconds between two questions to an engine that does not answer."""


@dataclass(slots=True)
class LiveContainer:
    container: str
    """The engine's id."""
    running: Running | None
    """The first process, if it is on this machine."""
    cgroup: Cgroup | None
    config: dict[str, Any]
    """HostConfig as the engine has it."""
    policy: Policy
    workspace: str
    shared: list[str]
    variables: dict[str, str]
    """Of the image."""
    watch: asyncio.Task[None] | None = None
    """Ends with an instance whose process is not on this machine."""

    def close(self) -> None:
        if self.watch is not None:
            self.watch.cancel()
        if self.cgroup is not None:
            self.cgroup.close()
        if self.running is not None:
            self.running.handle.close()


class Containers:
    def __init__(self, engine: EngineClient, home: str) -> None:
        """`home` identifies the daemon."""
        self._engine = engine
        self._home = home

    async def create(self, wanted: Container) -> str:
        """Returns the engine's id. Raises EngineRefused, IsolationUnavailable."""
        params = {"name": wanted.name}
        made = await self._engine.call("POST", "containers/create", params=params, body=wanted.body())
        return str(made["Id"])

    async def run(self, id_: str) -> None:
        """Returns when the guest listens. Raises LaunchFailed, IsolationUnavailable."""
        async with self._engine.attached(id_) as answers:
            await self._engine.call("POST", f"containers/{id_}/start")
            hit("create.kept")
            said = {STDOUT: b"", STDOUT + 1: b""}
            async with asyncio.timeout(START_SECONDS):
                while not said[STDOUT].endswith(b"\n") and sum(map(len, said.values())) < 4096:
                    heard = await self._engine.heard(answers, START_SECONDS)
                    if heard is None:
                        break
                    said[heard[0]] += heard[1]
        answer = said[STDOUT].decode(errors="replace").strip()
        if answer.startswith("E\t"):
            raise explained(answer)
        if answer != "R":
            errors = said[STDOUT + 1].decode(errors="replace").strip()
            raise LaunchFailed(f"the container ended at its start: {errors or answer or 'it says nothing'}")

    async def look(self, environment_id: str, policy: Policy) -> LiveContainer:
        """What there is of a running container. Raises EnvironmentNotFound, IsolationUnavailable, LaunchFailed."""
        try:
            found = await self._engine.call("GET", f"containers/{container_name(environment_id)}/json")
        except EngineRefused as error:
            if error.answer == NOT_FOUND:
                raise EnvironmentNotFound("its container is gone") from error
            raise
        labels, state = found["Config"]["Labels"], found["State"]
        if labels.get(container.HOME) != self._home:
            raise EnvironmentNotFound("a container of that name belongs to another daemon")
        if state["Status"] == "created":
            raise LaunchFailed(f"the start of environment {environment_id} was not finished")
        if not state["Running"]:
            why = "it was out of memory" if state.get("OOMKilled") else f"exit code {state.get('ExitCode')}"
            raise EnvironmentNotFound(f"its container has ended: {why}")
        running = self._process(state["Pid"], found["Id"])
        cgroup = None
        if running is not None:
            cgroup = Cgroup.of_container(environment_id, running.handle.pid, found["Id"])
        live = LiveContainer(
            found["Id"],
            running,
            cgroup,
            found["HostConfig"],
            policy,
            labels[container.WORKSPACE],
            json.loads(labels[container.SHARED]),
            dict(each.split("=", 1) for each in found["Config"].get("Env") or () if "=" in each),
        )
        if running is None:
            live.watch = asyncio.create_task(self.await_end(found["Id"]))
        return live

    async def await_end(self, id_: str) -> None:
        while True:
            try:
                await self._engine.call("POST", f"containers/{id_}/wait", seconds=None)
                return
            except EngineRefused:  # there is no such container
                return
            except IsolationUnavailable:
                await asyncio.sleep(LOOK_AGAIN)

    async def remove(self, environment_id: str) -> None:
        """Raises IsolationUnavailable, PlatformError."""
        name = container_name(environment_id)
        deadline = asyncio.get_running_loop().time() + REMOVE_SECONDS
        while True:
            try:
                await self._engine.call("DELETE", f"containers/{name}", params={"force": "1", "v": "1"})
                return
            except EngineRefused as error:
                if error.answer == NOT_FOUND:
                    return
                # Somebody removes it already, or what it consists of is still in use for a moment.
                if error.answer != CONFLICT or asyncio.get_running_loop().time() > deadline:
                    raise PlatformError(
                        f"container {name} cannot be removed: {error.message}", hint=error.hint
                    ) from error
            with contextlib.suppress(EngineRefused):
                await self._engine.call("POST", f"containers/{name}/wait", params={"condition": "removed"})

    async def list(self, backend: str) -> list[str]:
        """The environments of a backend; none if the engine does not answer."""
        if self._engine.endpoint.trouble():
            return []
        labels = [f"{container.HOME}={self._home}", f"{container.BACKEND}={backend}"]
        params = {"all": "1", "filters": json.dumps({"label": labels})}
        try:
            found = await self._engine.call("GET", "containers/json", params=params, seconds=LIST_SECONDS)
        except SkerryError:
            return []
        return [id_ for each in found if (id_ := each["Labels"].get(container.ENVIRONMENT))]

    def _process(self, pid: int, id_: str) -> Running | None:
        """The first process of a container, if it is one of this machine."""
        if self._engine.endpoint.socket is None or not pid:
            return None
        try:
            running = Running(pid)
        except (ProcessLookupError, ValueError):
            return None
        with contextlib.suppress(OSError):
            # Of a runtime that is not in the container's cgroups, the arguments name the container.
            named = Path(f"/proc/{pid}/cgroup").read_text() + Path(f"/proc/{pid}/cmdline").read_text()
            if id_ in named:
                return running
        running.handle.close()
        return None
