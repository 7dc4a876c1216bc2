"""The shapes of answers, for the documentation: what `skerry.models` has not got, and where it is more exact.

Nothing is validated with these on the way out; tests hold every answer against them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import TypedDict

from skerry.egress.proxy import Denial
from skerry.models import (
    Enforcement,
    EnvironmentInfo,
    ExecutionInfo,
    FileInfo,
    ImageInfo,
    LanguageInfo,
    Outcome,
    PoolStats,
    Raised,
    SessionInfo,
    State,
    Usage,
    Value,
    Variable,
)
from skerry.policy import Limits
from skerry.store.audit import Broken
from skerry.store.tokens import Token

# Dataclasses only so that they can inherit from those of the SDK; nobody makes one.
shape = dataclass(init=False, repr=False, eq=False, frozen=True)


class Problem(TypedDict):
    """What went wrong (RFC 9457), with the same `code`s everywhere."""

    error: Literal[True]
    type: str
    title: str
    status: int
    code: str
    """Stable: what programs look at."""
    message: str
    hint: str
    """What to do about it, if anything is known."""
    retryable: bool
    """Whether the same request can succeed later."""
    detail: dict[str, Any]


class Nothing(TypedDict):
    """It is done, and there is nothing to say about it."""


class Health(TypedDict):
    status: Literal["ok"]


class Readiness(TypedDict):
    status: Literal["ready"]
    isolation: str
    """What a new environment gets when it asks for nothing else."""


class Version(TypedDict):
    version: str
    api: int
    pid: int
    home: str
    environments: int
    """How many are alive."""


class Stopping(TypedDict):
    stopping: Literal[True]


class Check(TypedDict):
    name: str
    status: Literal["ok", "warning", "failure"]
    found: str
    fix: str


class Doctor(TypedDict):
    version: str
    isolation: str
    """The strongest that works here, or `none`."""
    checks: list[Check]


@shape
class Environment(EnvironmentInfo):
    state: State
    limits: Limits  # type: ignore[assignment]
    enforced: list[Enforcement]  # type: ignore[assignment]
    """Each limit and protection as the kernel really has it now; only when it is inspected, else empty."""


@shape
class EnvironmentDetails(Environment):
    usage: Usage


class Environments(TypedDict):
    environments: list[Environment]
    next: str | None
    """The `after` of the next page; null on the last."""


class Deleted(TypedDict):
    environment_id: str
    deleted: Literal[True]


class Lease(TypedDict):
    expires_at: float
    """Unix time at which the environment ends."""


class ResultSummary(TypedDict):
    """How an execution ended, without what it wrote."""

    error: bool
    """True exactly when `exit_code` is not 0."""
    exit_code: int
    """As a shell reports it: 128+n after signal n, 124 after a timeout, 137 after an OOM kill."""
    execution_id: str
    outcome: Outcome
    stdout_size: int
    """Bytes that were written, before any cut."""
    stderr_size: int
    stdout_truncated: bool
    stderr_truncated: bool
    duration_seconds: float
    usage: Usage
    message: str
    """For an outcome that needs words ("killed after 30 s")."""
    profile: str
    """The execution profile that was in force; empty for none."""


class Result(ResultSummary):
    """One finished execution. Code that fails is a result, not an error."""

    stdout: str
    stderr: str
    stdout_encoding: Literal["utf-8", "base64"]
    """`base64` where the bytes are no UTF-8."""
    stderr_encoding: Literal["utf-8", "base64"]


class CodeResult(Result):
    language: str
    version: str
    """Of the language, as it ran."""


class LanguageList(TypedDict):
    languages: list[LanguageInfo]


@shape
class Execution(ExecutionInfo):
    state: Literal["running", "ended"]
    outcome: Outcome | Literal[""]


@shape
class ExecutionDetails(Execution):
    result: Result | None
    """Null while it runs."""


class Executions(TypedDict):
    executions: list[Execution]


@shape
class Session(SessionInfo):
    state: Literal["idle", "busy", "crashed"]


class Sessions(TypedDict):
    sessions: list[Session]


class SessionSummary(ResultSummary):
    """How a call in a session ended, without what it wrote."""

    values: list[Value]
    """What it has shown, in order: the value of its last expression, what `display()` was given, figures."""
    raised: Raised | None
    """The exception that ended it."""
    crashed: bool
    """The interpreter is gone, with all state: the session must be restarted."""


class SessionResult(SessionSummary):
    """One finished call in a session."""

    stdout: str
    stderr: str
    stdout_encoding: Literal["utf-8", "base64"]
    """`base64` where the bytes are no UTF-8."""
    stderr_encoding: Literal["utf-8", "base64"]


class Variables(TypedDict):
    variables: list[Variable]


class LogLine(TypedDict):
    t: float
    """Unix time."""
    execution_id: str
    stream: Literal["stdout", "stderr", "dropped"]
    """`dropped`: this reader was too slow, and `data` says how much it has missed."""
    data: str
    encoding: Literal["utf-8", "base64"]


class Output(TypedDict):
    t: float
    """Unix time."""
    stream: Literal["stdout", "stderr"]
    data: str
    encoding: Literal["utf-8", "base64"]


class Dropped(TypedDict):
    message: str


class Ended(TypedDict):
    result: ResultSummary | None
    """Null if the daemon lost it."""


Event = Output | Dropped | Ended
"""The `data` of an event."""


class Ran(TypedDict):
    result: SessionSummary


SessionEvent = Output | Ran
"""The `data` of an event."""


class Content(TypedDict):
    error: Literal[False]
    content: str
    encoding: Literal["utf-8", "base64"]
    """`base64` where the bytes are no UTF-8."""
    size: int
    """Bytes in this answer."""


class Saved(TypedDict):
    error: Literal[False]
    message: Literal["File saved successfully."]
    size: int
    """Bytes that were written."""


class Unpacked(TypedDict):
    message: str


class Entries(TypedDict):
    entries: list[FileInfo]


class Images(TypedDict):
    images: list[ImageInfo]
    definitions: list[str]
    """What can be built."""


@shape
class ImageDetails(ImageInfo):
    env: dict[str, str]
    """Variables of everything that runs in it."""
    environments: list[str]
    """Ids of the environments that use it."""


class Step(TypedDict):
    step: str
    fraction: float


class Made(TypedDict):
    image: ImageInfo


class Failed(TypedDict):
    error: Problem


Progress = Step | Made | Failed
"""Steps, and in the last line the image or the error."""


class Tokens(TypedDict):
    tokens: list[Token]


@shape
class CreatedToken(Token):
    token: str
    """The secret: whoever has it has what it allows."""


class Amounts(TypedDict):
    environments: int
    cpus: float
    memory: int
    disk: int
    """Of workspaces, as large as they may get, and of installed packages."""


class QuotaDetails(TypedDict):
    tenant: str
    environments: int | None
    cpus: float | None
    memory: int | None
    disk: int | None
    isolation: str | None
    """The least that new environments have."""
    used: Amounts
    """What its environments that have not ended may use together."""
    caused: Caused
    """What it has made this daemon do, since that was started."""


class Caused(TypedDict):
    requests: int
    loop_seconds: float
    """Time of the event loop, which all tenants share, for its requests and streams."""
    received_bytes: int
    """Bodies of its requests."""
    sent_bytes: int
    """Bodies of the answers."""
    rows: int
    """Written to the store."""
    connections: int
    """Made by its environments, and ended; with those bytes of the network."""
    network_sent_bytes: int
    network_received_bytes: int


class Verdict(TypedDict):
    intact: bool
    seq: int
    """Of the last row."""
    hash: str
    """Of the last row: write both down elsewhere, to give them to a later check."""
    broken: Broken | None
    """The first place at which the chain does not hold."""
    pruned: Anchor | None
    """The last row that was pruned, if any was: the rows up to it cannot be verified any more."""


class Anchor(TypedDict):
    seq: int
    hash: str


class Pruned(TypedDict):
    removed: int
    """Rows that were removed now."""
    seq: int
    """Of the last row that was ever removed, 0 if none was."""
    hash: str
    """Of the same row."""
    unfinished: int | None
    """An old row that stays, with all after it: an intent without a result."""


class Pools(TypedDict):
    pools: list[PoolStats]


class NetworkLimits(TypedDict):
    connections: int
    """At once."""
    traffic: int
    """Bytes that are sent and received as long as it lives."""


class NetworkDetails(TypedDict):
    network: Literal["none", "allowlist", "public"]
    allow: list[str]
    limits: NetworkLimits
    connections: int
    """That are open now."""
    sent_bytes: int
    received_bytes: int
    denials: list[Denial]
    """The last kinds of things that it was refused."""
