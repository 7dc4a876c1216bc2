"""Operations of the daemon itself."""

from __future__ import annotations

import asyncio
import json
import os
import sys

from starlette.responses import Response

from skerry._version import VERSION
from skerry.daemon.http.answers import reply
from skerry.daemon.http.operations import Call, Operation
from skerry.daemon.http.requests import Body
from skerry.daemon.http.schemas import Doctor, Health, Readiness, Stopping, Version
from skerry.daemon.peers import peer_of
from skerry.errors import Conflict, DaemonUnavailable, PlatformError, StoreUnavailable

API_VERSION = 1
DOCTOR_SECONDS = 120.0

_one_doctor = asyncio.Lock()


class Stop(Body):
    force: bool = False
    """Also when environments are alive: they are deleted."""


async def health(call: Call) -> Response:
    return reply({"status": "ok"})


async def ready(call: Call) -> Response:
    try:
        return reply({"status": "ready", "isolation": await call.engine.readiness.check()})
    except DaemonUnavailable:
        if peer_of(call.scope).trusted:
            raise
        # Paths, and what is wrong with the database, are the operator's business.
        raise DaemonUnavailable("not ready", hint="`skerry doctor` on its machine tells why") from None


async def version(call: Call) -> Response:
    return reply(
        {
            "version": VERSION,
            "api": API_VERSION,
            "pid": os.getpid(),
            "home": call.engine.home.path,
            "environments": len(call.manager.environments(call.caller)),
        }
    )


async def doctor(call: Call) -> Response:
    # A process of its own: it starts namespaces and mounts things, which must not hold up the daemon. One at a
    # time: what it makes on the host has fixed names.
    async with _one_doctor:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "skerry.daemon.doctor", "--json"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "SKERRY_HOME": call.engine.home.path},
        )
        try:
            async with asyncio.timeout(DOCTOR_SECONDS):
                report, _ = await process.communicate()
        except TimeoutError as error:
            process.kill()
            await process.wait()
            raise PlatformError(f"the doctor did not finish within {DOCTOR_SECONDS:g} s") from error
    try:
        return reply(json.loads(report))
    except ValueError as error:
        raise PlatformError("the doctor failed", hint="see the daemon's log") from error


async def stop(call: Call, body: Stop) -> Response:
    await call.engine.code.settle()
    async with call.manager.act(call.caller.itself, "daemon.stop", force=body.force):
        if len(call.manager) and not body.force:
            raise Conflict(
                f"{len(call.manager)} environments are alive", hint="stop with force to delete them too"
            )
        call.manager.refuse()  # before anything is awaited: nothing that is created now would live
        try:
            await call.manager.delete_all("the daemon stopped")
        finally:
            call.engine.stop()
    return reply({"stopping": True})


OPERATIONS = (
    Operation(
        name="health",
        method="GET",
        path="/healthz",
        tag="daemon",
        verb="",
        summary="Liveness check",
        handler=health,
        answer=Health,
        answer_example={"status": "ok"},
    ),
    Operation(
        name="ready",
        method="GET",
        path="/readyz",
        tag="daemon",
        verb="",
        summary="Readiness check: can environments be started?",
        text="Cheap enough to poll every second. `/doctor` checks more.",
        handler=ready,
        answer=Readiness,
        answer_example={"status": "ready", "isolation": "namespace"},
        errors=(DaemonUnavailable,),
    ),
    Operation(
        name="version",
        method="GET",
        path="/version",
        tag="daemon",
        verb="read",
        summary="Show the version of the daemon",
        handler=version,
        answer=Version,
        answer_example={
            "version": VERSION,
            "api": API_VERSION,
            "pid": 4711,
            "home": "/var/lib/skerry",
            "environments": 2,
        },
    ),
    Operation(
        name="doctor",
        method="GET",
        path="/doctor",
        tag="daemon",
        verb="admin",
        summary="Check this machine (doctor)",
        text="Tries everything that environments need, and finally starts one. Takes about a second.",
        handler=doctor,
        answer=Doctor,
        answer_example={
            "version": VERSION,
            "isolation": "namespace",
            "checks": [
                {"name": "landlock", "status": "ok", "found": "ABI 7", "fix": ""},
                {
                    "name": "image building",
                    "status": "warning",
                    "found": "an image cannot be built here: mmdebstrap is not installed",
                    "fix": "apt install mmdebstrap",
                },
            ],
        },
    ),
    Operation(
        name="stop",
        method="POST",
        path="/stop",
        tag="daemon",
        verb="admin",
        summary="Stop the daemon",
        handler=stop,
        body=Stop,
        body_example={"force": True},
        answer=Stopping,
        answer_example={"stopping": True},
        errors=(Conflict, StoreUnavailable),
    ),
)
