"""Skerry: isolated environments for untrusted code.

    import skerry

    with skerry.Environment(memory="512m", cpus=1, lifetime=600) as env:
        env.execute("cd src && export A=1")
        print(env.execute("pwd; echo $A").stdout)

Names are imported on first use, so importing the package is cheap.
"""

from __future__ import annotations

from skerry._version import VERSION as __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from skerry.client.aio.client import AsyncClient
    from skerry.client.aio.environment import AsyncEnvironment
    from skerry.client.aio.files import AsyncFiles, AsyncWatch
    from skerry.client.aio.process import AsyncProcess
    from skerry.client.aio.session import AsyncSession
    from skerry.client.sync.client import Client
    from skerry.client.sync.environment import Environment
    from skerry.client.sync.files import Files, Watch
    from skerry.client.sync.process import Process
    from skerry.client.sync.session import Session
    from skerry.errors import (
        Busy,
        Conflict,
        DaemonUnavailable,
        Denied,
        DiskFull,
        EnvironmentEnded,
        EnvironmentNotFound,
        ExecutionNotFound,
        FileConflict,
        FileDenied,
        FileMissing,
        GuestFailed,
        ImageBuildFailed,
        ImageNotFound,
        InstallFailed,
        InvalidRequest,
        IsolationUnavailable,
        LanguageNotFound,
        LaunchFailed,
        LimitReached,
        MethodNotAllowed,
        NotFound,
        PathOutside,
        PlatformError,
        QuotaExceeded,
        RegistryUnavailable,
        SessionNotFound,
        SkerryError,
        StoreUnavailable,
        StoreUnusable,
        TooSlow,
        Unauthorized,
        UnsupportedMediaType,
    )
    from skerry.models import (
        CodeResult,
        Enforcement,
        EnvironmentInfo,
        ExecutionInfo,
        ExecutionResult,
        FileEvent,
        FileInfo,
        ImageInfo,
        LanguageInfo,
        LeftOut,
        Outcome,
        PoolHealth,
        PoolStats,
        Raised,
        SessionInfo,
        SessionResult,
        State,
        Usage,
        Value,
        Variable,
    )

__all__ = [
    "AsyncClient",
    "AsyncEnvironment",
    "AsyncFiles",
    "AsyncProcess",
    "AsyncSession",
    "AsyncWatch",
    "Busy",
    "Client",
    "CodeResult",
    "Conflict",
    "DaemonUnavailable",
    "Denied",
    "DiskFull",
    "Enforcement",
    "Environment",
    "EnvironmentEnded",
    "EnvironmentInfo",
    "EnvironmentNotFound",
    "ExecutionInfo",
    "ExecutionNotFound",
    "ExecutionResult",
    "FileConflict",
    "FileDenied",
    "FileEvent",
    "FileInfo",
    "FileMissing",
    "Files",
    "GuestFailed",
    "ImageBuildFailed",
    "ImageInfo",
    "ImageNotFound",
    "InstallFailed",
    "InvalidRequest",
    "IsolationUnavailable",
    "LanguageInfo",
    "LanguageNotFound",
    "LaunchFailed",
    "LeftOut",
    "LimitReached",
    "MethodNotAllowed",
    "NotFound",
    "Outcome",
    "PathOutside",
    "PlatformError",
    "PoolHealth",
    "PoolStats",
    "Process",
    "QuotaExceeded",
    "Raised",
    "RegistryUnavailable",
    "Session",
    "SessionInfo",
    "SessionNotFound",
    "SessionResult",
    "SkerryError",
    "State",
    "StoreUnavailable",
    "StoreUnusable",
    "TooSlow",
    "Unauthorized",
    "UnsupportedMediaType",
    "Usage",
    "Value",
    "Variable",
    "Watch",
    "__version__",
]

_CLIENT = {
    "Client": "client",
    "Environment": "environment",
    "Files": "files",
    "Process": "process",
    "Session": "session",
    "Watch": "files",
}
_MODELS = {
    "CodeResult",
    "Enforcement",
    "EnvironmentInfo",
    "ExecutionInfo",
    "ExecutionResult",
    "FileEvent",
    "FileInfo",
    "ImageInfo",
    "LanguageInfo",
    "LeftOut",
    "Outcome",
    "PoolHealth",
    "PoolStats",
    "Raised",
    "SessionInfo",
    "SessionResult",
    "State",
    "Usage",
    "Value",
    "Variable",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'skerry' has no attribute {name!r}")
    if name.removeprefix("Async") in _CLIENT:
        world = "aio" if name.startswith("Async") else "sync"
        module = f"skerry.client.{world}.{_CLIENT[name.removeprefix('Async')]}"
    else:
        module = "skerry.models" if name in _MODELS else "skerry.errors"
    from importlib import import_module

    value: object = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
