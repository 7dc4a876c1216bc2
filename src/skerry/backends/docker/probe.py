"""What an engine must be and have before it can run environments."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from skerry.backends.docker.engine import EngineClient
from skerry.errors import IsolationUnavailable

API_VERSION = (1, 41)


async def look_at(engine: EngineClient, runtime: str, *, gvisor: bool) -> Mapping[str, Any]:
    """What the engine says of itself. `runtime` is one of its runtimes, or empty.

    Raises IsolationUnavailable if it cannot serve, EngineRefused.
    """
    info: dict[str, Any] = await engine.call("GET", "info")
    version = await engine.call("GET", "version")
    if info["OSType"] != "linux":
        raise IsolationUnavailable(f"the Docker Engine runs containers of {info['OSType']}, not Linux")
    if tuple(map(int, version["ApiVersion"].split("."))) < API_VERSION:
        raise IsolationUnavailable(
            f"the Docker Engine speaks API {version['ApiVersion']}",
            hint="1.41 is needed: Docker 20.10 or newer",
        )
    if runtime and runtime not in info["Runtimes"]:
        raise IsolationUnavailable(
            f"the Docker Engine has no runtime {runtime}",
            hint="install runsc, run `runsc install` and restart the engine: "
            "gvisor.dev/docs/user_guide/quick_start/docker",
        )
    path = info["Runtimes"].get(runtime, {}).get("path", "")
    if gvisor and "runsc" not in os.path.basename(path):
        raise IsolationUnavailable(
            f"the Docker Engine's runtime {runtime} is {path}, not gVisor's",
            hint="name gVisor's program `runsc`",
        )
    return info
