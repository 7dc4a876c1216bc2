"""The things that Skerry speaks of, as the SDK returns them and the API carries them."""

from __future__ import annotations

import base64
import codecs
import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Sequence


class Outcome(StrEnum):
    """How an execution ended."""

    COMPLETED = "completed"
    """Exit code 0."""
    FAILED = "failed"
    """Another exit code."""
    SIGNALED = "signaled"
    TIMED_OUT = "timed_out"
    OOM_KILLED = "oom_killed"
    CANCELED = "canceled"
    INTERNAL = "internal"
    """The platform's fault: the environment went away under the execution, say."""


class State(StrEnum):
    """Where an environment is in its life."""

    CREATING = "creating"
    RUNNING = "running"
    DELETING = "deleting"
    ENDED = "ended"


class _Wire:
    """A dataclass that travels as JSON. Unknown keys are ignored, so that old clients read new daemons."""

    __slots__ = ()
    __match_args__: tuple[str, ...] = ()
    """The names of its fields: every dataclass has them at hand."""

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Self:
        return cls(**{name: raw[name] for name in cls.__match_args__ if name in raw})

    def to_dict(self) -> dict[str, Any]:
        # Not asdict(): none of them holds another, and its deep copies cost more than everything around them.
        return {name: getattr(self, name) for name in self.__match_args__}


@dataclass(frozen=True, slots=True)
class Usage(_Wire):
    """What the kernel counted. None: this machine cannot tell."""

    cpu_seconds: float | None = None
    memory_bytes: int | None = None
    memory_peak_bytes: int | None = None
    pids: int | None = None
    io_read_bytes: int | None = None
    io_write_bytes: int | None = None
    oom_kills: int | None = None


@dataclass(frozen=True, slots=True)
class Enforcement(_Wire):
    """One limit or protection as it actually is, read back from the kernel."""

    name: str
    enforced: bool
    value: str = ""
    by: str = ""
    """What enforces it, or why nothing does."""


@dataclass(frozen=True, slots=True)
class EnvironmentInfo(_Wire):
    environment_id: str
    state: str
    image: str
    image_digest: str
    isolation: str
    backend: str
    created_at: float
    expires_at: float
    """Unix time at which `lifetime` runs out."""
    lifetime: float
    idle: float
    name: str = ""
    profile: str = "default"
    network: str = "none"
    workspace: str = "disk"
    limits: dict[str, Any] = field(default_factory=dict)
    enforced: list[dict[str, Any]] = field(default_factory=list)
    """Enforcement rows."""
    ended_reason: str = ""


@dataclass(frozen=True, slots=True)
class ExecutionInfo(_Wire):
    execution_id: str
    environment_id: str
    command: str
    """As text for people; an argv is quoted."""
    state: str
    """`running` or `ended`."""
    started_at: float
    pid: int = 0
    """Inside the environment."""
    pty: bool = False
    outcome: str = ""
    exit_code: int | None = None
    profile: str = ""
    """The execution profile in force; empty for none."""


@dataclass(frozen=True, slots=True)
class ExecutionResult(_Wire):
    """One finished execution. Failing user code is data, not an exception."""

    execution_id: str
    outcome: Outcome
    exit_code: int
    """As a shell reports it: 128+n after signal n, 124 after a timeout, 137 after an OOM kill."""
    stdout_bytes: bytes
    stderr_bytes: bytes
    stdout_size: int
    """How much was written, before any cut."""
    stderr_size: int
    duration_seconds: float
    usage: Usage
    message: str = ""
    """For an outcome that needs words ("killed after 30 s")."""
    profile: str = ""
    """The execution profile that was in force; empty for none."""

    @property
    def stdout(self) -> str:
        return self.stdout_bytes.decode(errors="replace")

    @property
    def stderr(self) -> str:
        return self.stderr_bytes.decode(errors="replace")

    @property
    def stdout_truncated(self) -> bool:
        return self.stdout_size > len(self.stdout_bytes)

    @property
    def stderr_truncated(self) -> bool:
        return self.stderr_size > len(self.stderr_bytes)

    @property
    def ok(self) -> bool:
        return self.outcome == Outcome.COMPLETED

    def to_dict(self) -> dict[str, Any]:
        """The wire form: text where the bytes are UTF-8, base64 with `*_encoding` where they are not."""
        stdout, stdout_encoding = encode_bytes(self.stdout_bytes)
        stderr, stderr_encoding = encode_bytes(self.stderr_bytes)
        return {
            "error": self.exit_code != 0,
            "stdout": stdout,
            "stderr": stderr,
            "exit_code": self.exit_code,
            "execution_id": self.execution_id,
            "outcome": str(self.outcome),
            "stdout_encoding": stdout_encoding,
            "stderr_encoding": stderr_encoding,
            "stdout_size": self.stdout_size,
            "stderr_size": self.stderr_size,
            "stdout_truncated": self.stdout_truncated,
            "stderr_truncated": self.stderr_truncated,
            "duration_seconds": self.duration_seconds,
            "usage": self.usage.to_dict(),
            "message": self.message,
            "profile": self.profile,
        }

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Self:
        return cls(**_finished(raw))


@dataclass(frozen=True, slots=True)
class CodeResult(ExecutionResult):
    """One program that has run once."""

    language: str = ""
    version: str = ""
    """Of the language, as it ran."""

    def to_dict(self) -> dict[str, Any]:
        # Not super(): slots make another class of this one, which it does not know.
        return {**ExecutionResult.to_dict(self), "language": self.language, "version": self.version}

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Self:
        return cls(**_finished(raw), language=raw["language"], version=raw["version"])


@dataclass(frozen=True, slots=True)
class LanguageInfo(_Wire):
    """One that programs can be written in."""

    name: str
    version: str
    """Empty where it is not available."""
    available: bool
    reason: str = ""
    """Why it is not available, and what to do about it."""
    aliases: list[str] = field(default_factory=list)
    file: str = ""
    """What the program is called."""
    image: str = "host"
    """That it runs in, if no other is named."""


@dataclass(frozen=True, slots=True)
class SessionInfo(_Wire):
    session_id: str
    environment_id: str
    language: str
    state: str
    """`idle`, `busy`, or `crashed`: its interpreter is gone, and with it the state, until it is restarted."""
    started_at: float
    calls: int = 0
    """How many have been made since it was started, or started again."""
    message: str = ""
    """How it crashed."""


@dataclass(frozen=True, slots=True)
class Value(_Wire):
    """Something that a call in a session has shown, in all forms that it has."""

    kind: str
    """`value`: that of the last expression; `display`: shown by `display()`, or a figure."""
    data: dict[str, str]
    """By media type: `text/plain` is always there, images other than SVG are base64, JSON is text as well."""
    truncated: list[str] = field(default_factory=list)
    """Media types of which a part is missing, or all of it: it was too large."""

    @property
    def text(self) -> str:
        return self.data.get("text/plain", "")

    @property
    def png(self) -> bytes | None:
        return base64.b64decode(self.data["image/png"]) if "image/png" in self.data else None

    @property
    def json(self) -> Any:
        """What a form in JSON says; of a DataFrame, its records."""
        return json.loads(self.data["application/json"]) if "application/json" in self.data else None


@dataclass(frozen=True, slots=True)
class Raised(_Wire):
    """An exception that ended a call."""

    name: str
    """Of its class."""
    value: str
    traceback: str
    """As the language shows it; its lines are those of the code that was given."""


@dataclass(frozen=True, slots=True)
class Variable(_Wire):
    name: str
    type: str
    text: str
    """The beginning of its repr."""
    size: int = 0
    """Bytes, without what it refers to."""


@dataclass(frozen=True, slots=True)
class SessionResult(ExecutionResult):
    """One finished call in a session."""

    values: tuple[Value, ...] = ()
    """What it has shown, in order; the last may be the value of its last expression."""
    raised: Raised | None = None
    crashed: bool = False
    """The interpreter is gone, with all state: the session must be restarted."""

    @property
    def value(self) -> str | None:
        """The text of the last expression's value, if it had one."""
        return next((value.text for value in self.values if value.kind == "value"), None)

    def to_dict(self) -> dict[str, Any]:
        return {
            **ExecutionResult.to_dict(self),
            "values": [value.to_dict() for value in self.values],
            "raised": None if self.raised is None else self.raised.to_dict(),
            "crashed": self.crashed,
        }

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Self:
        return cls(
            **_finished(raw),
            values=tuple(Value.from_dict(value) for value in raw.get("values") or ()),
            raised=None if raw.get("raised") is None else Raised.from_dict(raw["raised"]),
            crashed=raw.get("crashed", False),
        )


@dataclass(frozen=True, slots=True)
class FileInfo(_Wire):
    """One name in an environment. `name` and `path` keep bytes that are not UTF-8 as surrogate escapes."""

    path: str
    type: str
    """`file`, `directory`, `symlink`, `fifo`, `socket`, `device`."""
    size: int
    mode: int
    """Permission bits."""
    modified_at: float
    uid: int = 0
    gid: int = 0
    target: str = ""
    """Where a symlink points."""

    @property
    def name(self) -> str:
        return self.path.rsplit("/", 1)[-1]


@dataclass(frozen=True, slots=True)
class LeftOut(_Wire):
    """Something that was not copied with its tree."""

    path: str
    """Its name in the tree; empty for the last of a long list, whose reason says how many more there are."""
    reason: str


@dataclass(frozen=True, slots=True)
class FileEvent(_Wire):
    """One change that a watch saw."""

    kind: str
    """`created`, `modified`, `deleted`, `moved_from`, `moved_to`, `attributes`; `overflow`: some were lost."""
    path: str
    cookie: int = 0
    """The same for the two ends of one move."""


@dataclass(frozen=True, slots=True)
class PoolStats(_Wire):
    """How one pool is doing."""

    pool: str
    image: str
    minimum: int
    """So many are kept ready."""
    maximum: int
    """No more than so many are ready, being made, or in use."""
    available: int
    creating: int
    active: int
    hits: int
    """Environments that came from it."""
    misses: int
    """Environments that could have, had one been ready."""
    failures: int
    """Entries that could not be made, or died before anybody wanted them."""
    error: str
    """Of the last one, if it failed."""
    wait_p50_seconds: float
    """From a request to a running environment, of the last 1,000 hits and misses."""
    wait_p95_seconds: float
    wait_max_seconds: float


@dataclass(frozen=True, slots=True)
class PoolHealth(_Wire):
    """Whether an entry of a pool can be started and used, and how long that took."""

    healthy: bool
    seconds: float = 0.0
    error: str = ""
    """Why not."""


@dataclass(frozen=True, slots=True)
class ImageInfo(_Wire):
    name: str
    digest: str
    kind: str
    """`host` or `rootfs`."""
    size: int = 0
    created_at: float = 0.0
    description: str = ""


def _finished(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields that every result of an execution has, out of its wire form."""
    return {
        "execution_id": raw["execution_id"],
        "outcome": Outcome(raw["outcome"]),
        "exit_code": raw["exit_code"],
        "stdout_bytes": decode_bytes(raw["stdout"], raw.get("stdout_encoding", "utf-8")),
        "stderr_bytes": decode_bytes(raw["stderr"], raw.get("stderr_encoding", "utf-8")),
        "stdout_size": raw["stdout_size"],
        "stderr_size": raw["stderr_size"],
        "duration_seconds": raw["duration_seconds"],
        "usage": Usage.from_dict(raw.get("usage") or {}),
        "message": raw.get("message", ""),
        "profile": raw.get("profile", ""),
    }


_CONTROL = bytes({*range(32), 127} - set(b"\t\n\r"))
ENCODING_STEP = 64 << 10
"""Bytes that are looked at together: as one text, much output would be a copy four times as large."""


def comma_separated(preferences: str | Sequence[str] | None) -> str | None:
    """The text on the wire for one preference or several."""
    return preferences if preferences is None or isinstance(preferences, str) else ",".join(preferences)


def encode_bytes(data: bytes) -> tuple[str, str]:
    """(text, encoding) for JSON."""
    if encoding_of(data) == "utf-8":
        return data.decode(), "utf-8"
    return base64.b64encode(data).decode(), "base64"


def encoding_of(data: bytes | bytearray) -> str:
    """How bytes are sent in JSON: UTF-8 text as itself, anything else as base64.

    What is mostly control characters is no text either: JSON would make six bytes of each.
    """
    decode = codecs.getincrementaldecoder("utf-8")().decode
    text = 0
    for at in range(0, len(data), ENCODING_STEP):
        piece = data[at : at + ENCODING_STEP]
        text += len(piece.translate(None, _CONTROL))
        try:
            decode(piece, at + len(piece) == len(data))
        except UnicodeDecodeError:
            return "base64"
    return "utf-8" if len(data) < 1024 or text * 8 > len(data) * 7 else "base64"


def decode_bytes(text: str, encoding: str) -> bytes:
    return base64.b64decode(text) if encoding == "base64" else text.encode()
