"""The contract of every backend.

A backend starts, stops and inspects *instances* and hands back one byte stream to the guest inside. It knows
nothing of executions, leases or HTTP: all of that is above it and the same for every backend. Names of host
resources derive from the environment id alone, so that what a crashed daemon left can be found and removed.
"""

from __future__ import annotations

import builtins
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from skerry.host.network import Sockets
from skerry.images.progress import Report
from skerry.images.store import Image
from skerry.models import Enforcement, Usage
from skerry.policy import Policy


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend gives on this machine. `available` is the result of trying, not of reading versions."""

    available: bool
    reason: str = ""
    """Why it is not available, and what to do about it."""
    detail: str = ""
    """What gives it where it is available: versions, and what is second best."""
    rootless: bool = False


@dataclass(frozen=True, slots=True)
class Layer:
    """A directory of the daemon that an instance sees, and can only read."""

    name: str
    """Where it is: below `Instance.run_path`."""
    source: str


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """Everything that a backend needs to start one instance."""

    environment_id: str
    image: Image
    policy: Policy
    orphan: float = 3600.0
    """Seconds after which it ends by itself when no daemon is connected to its guest any more."""
    program: bool = False
    """True for a read-only workspace whose program `deliver` brings."""
    layers: tuple[Layer, ...] = ()


@dataclass(frozen=True, slots=True)
class Instance:
    """One started instance, as far as the layers above need to know."""

    environment_id: str
    workspace: str
    """`disk`, `memory` or `program`."""
    workspace_path: str
    """Where the workspace is in the instance's own view; `/workspace` wherever there is a root of its own."""
    tmp_path: str = "/tmp"  # noqa: S108
    run_path: str = "/run"
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of its image, where only the backend knows them."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Kernel counters at one instant, cheap enough to take around every execution."""

    cpu_seconds: float | None
    oom_kills: int


class ImageSource(Protocol):
    """Images that a backend has itself, beside those of our store; by the names of `images.references`."""

    async def find(self, name: str) -> Image:
        """Raises ImageNotFound, Denied, InvalidRequest, IsolationUnavailable."""
        ...

    async def pull(self, name: str, report: Report) -> Image:
        """Fetch an image that is missing.

        Raises DiskFull, RegistryUnavailable, and what `find` does.
        """
        ...


class Backend(Protocol):
    name: str
    isolation: str
    """What it gives where it is available: `none`, or one of policy.ISOLATIONS."""
    gates: bool
    """True if it has `gate`."""
    images: ImageSource | None
    """None if it runs images of our store only."""
    ahead: bool
    """True if it may be tried before anybody asks for it: nothing but this home is changed by that."""

    async def capabilities(self) -> Capabilities:
        """Find out by trying. Takes as long as that takes, up to a deadline of its own."""
        ...

    def reserve(self) -> str:
        """The id for the next `start`, for which something may have been made ready. Any other id will do, too.

        Whoever does not start it calls `stop`.
        """
        ...

    async def start(self, spec: InstanceSpec) -> Instance:
        """Start an instance; when this returns the guest accepts connections.

        Raises LaunchFailed (with the failing step), IsolationUnavailable, DiskFull. Leaves nothing on failure.
        """
        ...

    def disk(self, policy: Policy) -> int:
        """Bytes of the host's disk that the workspace of such an instance may fill. Raises InvalidRequest."""
        ...

    def fixed(self, policy: Policy) -> tuple[object, ...]:
        """What of a policy an instance has for good. Raises InvalidRequest.

        What is not in it, `settle` changes.
        """
        ...

    def settle(self, environment_id: str, policy: Policy) -> None:
        """Apply the limits of a policy with the same `fixed` part to an unused instance.

        Raises EnvironmentNotFound, LaunchFailed.
        """
        ...

    def share(self, environment_id: str, group: str) -> None:
        """Assign an instance to a group. Under contention a group gets the CPU share of one instance."""
        ...

    async def adopt(self, spec: InstanceSpec) -> Instance:
        """Take over an instance that an earlier daemon of this home started; like `start`, for one that runs.

        Raises EnvironmentNotFound when it is gone, LaunchFailed when its start was never finished: what is left of it
        is for `stop`.
        """
        ...

    async def connect(self, environment_id: str) -> socket.socket:
        """A fresh non-blocking stream to the guest; it replaces an earlier one. Raises GuestFailed."""
        ...

    async def open_network(self, environment_id: str) -> Sockets:
        """New sockets that intercept all its traffic; earlier ones stop working.

        Raises EnvironmentNotFound, IsolationUnavailable.
        """
        ...

    def path_rules(self) -> str:
        """Why no execution in its instances can be limited to paths; empty if one can.

        It can where the kernel inside has Landlock, and the paths inside are those of an image.
        """
        ...

    def gate(self, environment_id: str, name: str) -> str:
        """A pipe in the place of a file that `deliver` will bring: its path for us. Only with `gates`.

        Raises DiskFull, LaunchFailed.
        """
        ...

    async def deliver(
        self, environment_id: str, files: Mapping[str, bytes], links: Mapping[str, str]
    ) -> None:
        """Put files into the workspace of an instance that was started for a `program`; once, before anything runs.

        Paths are relative, without `.` and `..`, and none is below another. `links` are symlinks beside them, by their
        names, to places inside; a file or directory of the same name is there instead. Raises InvalidRequest for a path
        that is too long, DiskFull, PlatformError.
        """
        ...

    async def stop(self, environment_id: str) -> None:
        """Kill everything in it and remove every trace. Idempotent; unknown ids are fine. Raises PlatformError."""
        ...

    def alive(self, environment_id: str) -> bool:
        """True while an instance started here runs."""
        ...

    async def wait(self, environment_id: str) -> None:
        """Return when the instance has died, for whatever reason."""
        ...

    async def list(self) -> list[str]:
        """Ids of all instances (and leftovers of instances) of this home on this host."""
        ...

    def enforced(self, environment_id: str) -> builtins.list[Enforcement]:
        """Every limit and protection, read back from the kernel where possible. Raises EnvironmentNotFound."""
        ...

    async def usage(self, environment_id: str, *, io: bool = True) -> Usage:
        """Kernel counters; without `io` only what is cheap to read. Raises EnvironmentNotFound."""
        ...

    def sample(self, environment_id: str) -> Sample: ...

    def reset_peak(self, environment_id: str) -> None:
        """Begin a new peak-memory measurement, where the kernel can."""
        ...

    def prepared(self) -> int:
        """How many instances it has made ahead of need."""
        ...

    async def close(self) -> None:
        """Release what the backend prepared ahead. Instances are left as they are."""
        ...
