"""The manager's state of one environment."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from skerry.backends.base import Backend, Instance, Layer
from skerry.egress.limits import Traffic
from skerry.errors import EnvironmentEnded
from skerry.images.store import Image
from skerry.manager.audit.acts import Subject
from skerry.manager.environments.lease import Lease
from skerry.manager.executions.commands import base_variables
from skerry.manager.executions.registry import Executions
from skerry.manager.network.network import Network
from skerry.manager.pools.placement import Placement
from skerry.manager.sessions.registry import Sessions
from skerry.models import EnvironmentInfo, Outcome, State, Usage
from skerry.policy import Policy


@dataclass(frozen=True, slots=True)
class Key:
    """An idempotency key: identifies a repeated request."""

    text: str
    request: str
    """Hash of the request, to refuse a different one with the same key."""


@dataclass(eq=False, slots=True)
class Environment:
    """One environment, live or remembered."""

    id: str
    tenant: str
    created_by: str
    name: str
    image: Image
    policy: Policy
    backend: Backend
    isolation: str
    idle: float
    variables: dict[str, str]
    created_at: float
    expires_at: float
    lease: Lease = field(init=False)
    state: State = State.CREATING
    reason: str = ""
    outcome: Outcome = Outcome.CANCELED
    ended_at: float = 0.0
    used: Usage = field(default_factory=Usage)
    """Total usage, once it has ended."""
    recorded: bool = False
    """Its row is in the store."""
    key: Key | None = None
    program: bool = False
    """For one program, whose caller waits: see InstanceSpec."""
    survives: bool = True
    """The next daemon takes it over."""
    layers: tuple[Layer, ...] = ()
    repeats: str = ""
    """The id of the environment that the first request with this key has made, if any."""
    uses: int = 0
    """Calls under way that are not executions."""
    placement: Placement | None = None
    """None once it has ended."""
    instance: Instance | None = None
    executions: Executions | None = None
    sessions: Sessions | None = None
    network: Network | None = None
    traffic: Traffic = field(default_factory=Traffic)
    preset_variables: dict[str, str] = field(default_factory=dict)
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while its network is changed."""
    grace_used: bool = False
    """Its lease was prolonged after a restart of the daemon, which happens once for each lease."""
    left: bool = False
    """This daemon is stopping and leaves it to the next one."""
    final: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its end survives a crash of the daemon. The end is not reported before."""
    creating: asyncio.Task[None] | None = None
    takeover: asyncio.Task[None] | None = None
    """Set while it is taken over from an earlier daemon and cannot be used yet."""
    ending: asyncio.Task[None] | None = None
    watching: asyncio.Task[None] | None = None

    @property
    def secluded(self) -> bool:
        """True if its effects are visible only through our answers."""
        return self.network is None and self.isolation != "none"

    @property
    def serving(self) -> bool:
        """True if it can be used."""
        return self.state is State.RUNNING and not self.left and self.executions is not None

    def busy(self) -> bool:
        return self.uses > 0 or (self.executions is not None and bool(self.executions.running))

    def base_variables(self) -> dict[str, str]:
        """Variables of its programs, without those of a call. Requires an instance."""
        assert self.instance is not None
        given = {**self.preset_variables, **self.variables}
        of_image = {**self.image.env, **self.instance.variables}
        return base_variables(of_image, self.instance.workspace_path, given)

    def forget_means(self) -> None:
        """Drop everything that only a running environment needs."""
        self.variables, self.preset_variables, self.layers = {}, {}, ()
        self.policy = replace(self.policy, allow=())
        self.network = self.placement = None

    @property
    def told_state(self) -> State:
        """The state to report: `deleting` only once that is final, and `running` while it is taken over."""
        if self.takeover is not None and self.state is State.CREATING:
            return State.RUNNING
        if self.state is State.DELETING and self.executions is not None and not self.final.is_set():
            return State.RUNNING
        return self.state

    def gone(self) -> EnvironmentEnded:
        reason = self.reason or "deleted"
        return EnvironmentEnded(f"environment {self.id} has ended: {reason}", hint="create a new one")

    @property
    def subject(self) -> Subject:
        return Subject(self.id, self.backend.name, self.isolation, self.image.digest)

    @property
    def info(self) -> EnvironmentInfo:
        return EnvironmentInfo(
            environment_id=self.id,
            state=str(self.told_state),
            image=self.image.name,
            image_digest=self.image.digest,
            isolation=self.isolation,
            backend=self.backend.name,
            created_at=self.created_at,
            expires_at=self.expires_at,
            lifetime=self.lease.lifetime,
            idle=self.idle,
            name=self.name,
            profile=self.policy.profile,
            network=self.policy.network,
            workspace=self.policy.workspace if self.instance is None else self.instance.workspace,
            limits=self.policy.limits.to_dict(),
            ended_reason=self.reason if self.state is State.ENDED else "",
        )
