"""Every exception that Skerry raises.

User code that fails is an *outcome* of an execution, never one of these. These are the caller's faults and
the platform's faults.

    SkerryError
    ├── InvalidRequest            the call itself is wrong
    │   ├── InstallFailed         packages that are none, or that cannot be installed
    │   ├── PathOutside           a path that leaves the writable places
    │   ├── MethodNotAllowed
    │   ├── UnsupportedMediaType
    │   └── TooSlow               the request did not come in time
    ├── NotFound
    │   ├── EnvironmentNotFound
    │   ├── ExecutionNotFound
    │   ├── SessionNotFound
    │   ├── ImageNotFound
    │   ├── LanguageNotFound      unknown, or the image cannot run it
    │   └── FileMissing
    ├── Conflict                  the thing is not in a state that allows this
    │   ├── EnvironmentEnded
    │   └── FileConflict          a directory where a file is needed, an existing name, ...
    ├── Denied
    │   ├── Unauthorized
    │   └── FileDenied
    ├── LimitReached              a quota, a disk, a queue: what would be needed is not there
    │   ├── Busy
    │   ├── QuotaExceeded         of a tenant
    │   └── DiskFull
    └── PlatformError             our fault, or the machine's
        ├── DaemonUnavailable
        ├── IsolationUnavailable
        ├── LaunchFailed
        ├── GuestFailed
        ├── ImageBuildFailed
        ├── RegistryUnavailable   that packages or images come from
        ├── StoreUnavailable      the database cannot be written or read now
        └── StoreUnusable         it never will be, as it is: made by a newer Skerry, damaged, no driver

Each class has a stable `code`, the statuses of HTTP and gRPC that carry it, and says whether a retry can help. The wire
form is `to_dict()`; `from_dict()` rebuilds the same class from its code.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing would cost every start of the CLI 4 ms
    from typing import Any, ClassVar


MESSAGE_MAX = 4000
HINT_MAX = 1000
DETAIL_MAX = 4000
"""Characters. Texts of errors repeat what a caller sent, which can have megabytes, and what programs wrote."""


def shortened(text: str, most: int) -> str:
    """Text of at most `most` characters: the beginning and the end of a longer one."""
    if len(text) <= most:
        return text
    half = (most - 3) // 2
    return f"{text[:half]}...{text[-half:]}"


def _bounded(detail: dict[str, Any]) -> dict[str, Any]:
    """At most DETAIL_MAX characters: of long texts both ends, of long lists the last items, of all else what fits."""
    found: dict[str, Any] = {}
    left = DETAIL_MAX
    for name, value in detail.items():
        left -= len(name)
        kept: Any = None
        if isinstance(value, str):
            kept = shortened(value, max(left, 3))
        elif isinstance(value, list):
            kept, room = [], left
            for item in reversed(value):
                room -= len(str(item)) + 2
                if room < 0:
                    break
                kept.insert(0, item)
        elif len(str(value)) <= left:
            kept = value
        if left < 0 or kept is None:
            continue
        found[name] = kept
        left -= len(str(kept))
    return found


class SkerryError(Exception):
    """The root. `message` says what is wrong, `hint` what to do next. All texts are bounded."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    grpc: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str = "", detail: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = shortened(message, MESSAGE_MAX)
        self.hint = shortened(hint, HINT_MAX)
        self.detail = _bounded(detail) if detail else {}

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    @property
    def exit_code(self) -> int:
        """What a command ends with: 2 for a mistake in the call, 125 when Skerry itself failed."""
        return 2 if self.status < 500 else 125

    def to_dict(self) -> dict[str, Any]:
        """The problem+json body that carries this error."""
        return {
            "error": True,
            "type": f"urn:skerry:error:{self.code}",
            "title": self.message,
            "status": self.status,
            "code": self.code,
            "message": self.message,
            "hint": self.hint,
            "retryable": self.retryable,
            "detail": self.detail,
        }


class InvalidRequest(SkerryError):
    code = "invalid_request"
    status = 400
    grpc = "INVALID_ARGUMENT"


class InstallFailed(InvalidRequest):
    code = "install_failed"


class PathOutside(InvalidRequest):
    code = "path_outside"


class MethodNotAllowed(InvalidRequest):
    code = "method_not_allowed"
    status = 405
    grpc = "UNIMPLEMENTED"


class UnsupportedMediaType(InvalidRequest):
    code = "unsupported_media_type"
    status = 415


class TooSlow(InvalidRequest):
    code = "too_slow"
    status = 408
    grpc = "DEADLINE_EXCEEDED"


class NotFound(SkerryError):
    code = "not_found"
    status = 404
    grpc = "NOT_FOUND"


class EnvironmentNotFound(NotFound):
    code = "environment_not_found"


class ExecutionNotFound(NotFound):
    code = "execution_not_found"


class SessionNotFound(NotFound):
    code = "session_not_found"


class ImageNotFound(NotFound):
    code = "image_not_found"


class LanguageNotFound(NotFound):
    code = "language_not_found"


class FileMissing(NotFound):
    code = "file_missing"


class Conflict(SkerryError):
    code = "conflict"
    status = 409
    grpc = "FAILED_PRECONDITION"


class EnvironmentEnded(Conflict):
    code = "environment_ended"
    status = 410


class FileConflict(Conflict):
    code = "file_conflict"


class Denied(SkerryError):
    code = "denied"
    status = 403
    grpc = "PERMISSION_DENIED"


class Unauthorized(Denied):
    code = "unauthorized"
    status = 401
    grpc = "UNAUTHENTICATED"


class FileDenied(Denied):
    code = "file_denied"


class LimitReached(SkerryError):
    code = "limit_reached"
    status = 413
    grpc = "RESOURCE_EXHAUSTED"


class Busy(LimitReached):
    code = "busy"
    status = 429
    retryable = True


class QuotaExceeded(LimitReached):
    code = "quota_exceeded"
    status = 429


class DiskFull(LimitReached):
    code = "disk_full"
    status = 507


class PlatformError(SkerryError):
    code = "internal"
    status = 500


class DaemonUnavailable(PlatformError):
    code = "daemon_unavailable"
    status = 503
    grpc = "UNAVAILABLE"
    retryable = True


class IsolationUnavailable(PlatformError):
    code = "isolation_unavailable"
    status = 501
    grpc = "UNIMPLEMENTED"


class LaunchFailed(PlatformError):
    code = "launch_failed"


class GuestFailed(PlatformError):
    code = "guest_failed"
    status = 502


class ImageBuildFailed(PlatformError):
    code = "image_build_failed"


class RegistryUnavailable(PlatformError):
    code = "registry_unavailable"
    status = 503
    grpc = "UNAVAILABLE"
    retryable = True


class StoreUnavailable(PlatformError):
    code = "store_unavailable"
    status = 503
    grpc = "UNAVAILABLE"
    retryable = True


class StoreUnusable(PlatformError):
    code = "store_unusable"


def stopping() -> DaemonUnavailable:
    """The error for calls that a stopping daemon cannot serve."""
    return DaemonUnavailable("the daemon is stopping", hint="try again: a new one will start")


def _tree(root: type[SkerryError]) -> dict[str, type[SkerryError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


BY_CODE: dict[str, type[SkerryError]] = {**_tree(SkerryError), "internal": PlatformError}


def from_dict(body: dict[str, Any]) -> SkerryError:
    """Rebuild the error that `to_dict()` described; a code that is not known becomes a PlatformError."""
    cls = BY_CODE.get(str(body.get("code", "")), PlatformError)
    detail = body.get("detail")
    return cls(
        str(body.get("message") or body.get("title") or "unknown error"),
        hint=str(body.get("hint") or ""),
        detail=detail if isinstance(detail, dict) else None,
    )
