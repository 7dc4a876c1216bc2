"""Which backends the suites run against: a new one needs one entry here, and nothing else.

The conformance suite takes all of them; those of attacks, networks and leaks take `namespace` and those that are
`attacked`, as far as they give what a test needs. Some tests of networks also take those that are `networked`.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import pytest
from _pytest.mark import ParameterSet

from skerry.backends.base import Backend, Capabilities
from skerry.backends.docker.backend import DockerBackend, DockerGvisorBackend
from skerry.backends.docker.engine import Endpoint
from skerry.backends.fake import FakeBackend
from skerry.backends.machine import Machine
from skerry.backends.microvm import MicrovmBackend
from skerry.backends.namespace import NamespaceBackend
from skerry.backends.oci import OciBackend
from skerry.failpoints import POINTS
from skerry.host import readback
from tests import dockerd, machines, support

GIVES = {
    "isolated": "a process tree and a network that are its own",
    "own_root": "a root file system of its own, with /workspace and /tmp",
    "plain_user": "work is done by a user to whom permissions mean something",
    "pids": "a limit of processes that holds",
    "counters": "the kernel's counters of what it uses",
    "users": "more than one user inside",
    "outlives": "environments that go on after their workload has used up memory or processes",
    "protected": "a process 1 that its workload cannot kill",
    "host_kernel": "the host's kernel",
    "host_processes": "processes that the host sees one by one",
    "terminals": "a /dev/tty, and a raw terminal without signals",
    "nameless": "files without a name (O_TMPFILE)",
    "path_rules": "executions that are limited to paths",
    "landlock": "Landlock",
    "network": "networks other than `none`",
    "late_network": "a network for what was created without one",
    "prepared": "instances that are made ahead of need",
    "own_limits": "limits of its own where the kernel counts for each user",
}
"""What a behaviour may need beyond the contract; a test names it by `@needs("...")`."""


@dataclass(frozen=True)
class Kind:
    name: str
    make: Callable[[str], Backend]
    """From the path of a home that exists."""
    gives: frozenset[str]
    attacked: bool = False
    """True if the suites of attacks, networks, failpoints and cycles run against it."""
    networked: bool = False
    """True if those tests do that are marked so: about how a network is made, not about its rules."""
    failpoints: frozenset[str] = frozenset(POINTS)
    """Those that its creates and deletes pass."""
    slowness: float = 1.0
    """Times that its tests may take longer."""
    always: frozenset[str] | None = None
    """The modules that `make test` runs; None for all of them."""
    alike: str = ""
    """The one that has the same guest and kernel: repeats and sweeps of an attack run on that alone."""
    engine: bool = False
    """True if its environments are containers of the tests' Docker Engine."""

    def variables(self) -> dict[str, str]:
        """The environment variables by which a daemon finds what it needs."""
        return {"DOCKER_HOST": dockerd.shared.get().host} if self.engine else {}


_AS_ROOT = os.geteuid() == 0
_LINUX = frozenset(
    {"outlives", "protected", "host_kernel", "host_processes", "terminals", "nameless", "landlock"}
)
"""Of the host's own kernel."""

KINDS = (
    Kind("fake", FakeBackend, _LINUX | (set() if _AS_ROOT else {"plain_user"})),
    Kind(
        "namespace",
        lambda home: NamespaceBackend(Machine(home)),
        _LINUX
        | {"isolated", "own_root", "plain_user", "pids", "network", "late_network", "prepared", "own_limits"}
        | ({"counters", "users"} if _AS_ROOT else set())
        | ({"path_rules"} if not readback.path_rules() else set()),
    ),
    Kind(
        "oci",
        lambda home: OciBackend(Machine(home)),
        frozenset({"isolated", "own_root", "plain_user", "counters", "users", "protected", "prepared"})
        | {"network", "own_limits"},
        attacked=True,
        always=frozenset({"test_instances", "test_users"}),
    ),
    Kind(
        "docker",
        lambda home: DockerBackend(Machine(home), Endpoint(dockerd.shared.get().host)),
        _LINUX
        | {"isolated", "own_root", "plain_user", "pids", "counters", "network", "late_network"}
        | ({"path_rules"} if not readback.path_rules() else set()),
        attacked=True,
        always=frozenset({"test_instances", "test_programs"}),
        alike="namespace",
        failpoints=frozenset(
            point for point in POINTS if point.startswith(("create.", "delete.", "recover."))
        )
        - {"delete.cgroups"},
        engine=True,
    ),
    Kind(
        "docker-runsc",
        lambda home: DockerGvisorBackend(Machine(home), Endpoint(dockerd.shared.get().host)),
        frozenset({"isolated", "own_root", "plain_user", "counters", "own_limits"}),
        attacked=True,
        failpoints=frozenset(),
        always=frozenset({"test_users"}),
        alike="oci",
        engine=True,
    ),
    Kind(
        "microvm",
        lambda home: MicrovmBackend(Machine(home), machines.kernel()),
        frozenset(
            {"isolated", "own_root", "plain_user", "pids", "users", "protected", "terminals", "nameless"}
            | {"network", "own_limits"}
        ),
        networked=True,
        slowness=6.0,
        always=frozenset({"test_users"}),
    ),
)
RUNGS = {kind.name: kind for kind in KINDS if kind.attacked}
"""The backends beside `namespace` that are attacked, by name."""
NETWORKED = {kind.name: kind for kind in KINDS if kind.attacked or kind.networked}
"""Those that tests marked `networked` run against."""


def given(mode: str) -> frozenset[str]:
    """What a rung gives; or `namespace`, of a daemon of root's (`rootful`) or another user's (`rootless`)."""
    if mode in RUNGS:
        return RUNGS[mode].gives
    return frozenset(GIVES) - ({"users"} if mode == "rootless" else set())


def parameters(each: bool, rungs: Mapping[str, Kind] = RUNGS) -> Iterator[ParameterSet]:
    """The rungs, for a test that is for `each` of them in `make test` too: all but slow ones and a second gVisor."""
    for kind in rungs.values():
        short = each and kind.slowness == 1 and ("host_kernel" in kind.gives or not kind.alike)
        yield pytest.param(kind.name, marks=() if short else pytest.mark.soak)


def skip_sweep(mode: str) -> None:
    """Skip what only repeats an attack, on a rung with the guest and the kernel of another."""
    if mode in RUNGS and (alike := RUNGS[mode].alike):
        pytest.skip(f"sweeps run on {alike}, which has the same guest and kernel")


@functools.cache
def unavailable(name: str) -> str:
    """Why a rung does not work here; empty if it does."""

    async def probe(backend: Backend) -> Capabilities:
        try:
            return await backend.capabilities()
        finally:
            await backend.close()

    with support.temporary_home() as home:
        found = asyncio.run(probe(NETWORKED[name].make(str(home))))
    return "" if found.available else found.reason


def require(name: str) -> None:
    """Skip a test if a rung does not work here; fail it in CI."""
    if reason := unavailable(name):
        support.missing(f"{name} is not available here: {reason}")


def skip_unless_given(item: pytest.Item, name: str, gives: frozenset[str]) -> None:
    """Skip a test that `needs` what is not given."""
    for marker in item.iter_markers("needs"):
        for need in marker.args:
            if need not in gives:
                pytest.skip(f"{name} does not give {GIVES[need]}")
