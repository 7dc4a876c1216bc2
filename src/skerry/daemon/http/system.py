"""Routes of the daemon itself."""

from __future__ import annotations

import os
from collections.abc import Callable

from fastapi import APIRouter, Request, Response

from skerry.daemon.http.answers import reply
from skerry.daemon.http.requests import Body, read_json
from skerry.errors import Conflict
from skerry.manager.environments import EnvironmentManager

API_VERSION = 1


class Stop(Body):
    force: bool = False


def routes(manager: EnvironmentManager, *, version: str, home: str, stop: Callable[[], None]) -> APIRouter:
    """`stop` makes the daemon end after the answer has been sent."""
    router = APIRouter()

    @router.get("/healthz")
    async def health() -> Response:
        return reply({"status": "ok"})

    @router.get("/version")
    async def about() -> Response:
        return reply(
            {
                "version": version,
                "api": API_VERSION,
                "pid": os.getpid(),
                "home": home,
                "environments": len(manager),
            }
        )

    @router.post("/stop")
    async def stop_daemon(request: Request) -> Response:
        body = await read_json(request, Stop)
        if len(manager) and not body.force:
            raise Conflict(
                f"{len(manager)} environments are alive", hint="stop with force to delete them too"
            )
        await manager.delete_all("the daemon stopped")
        stop()
        return reply({"stopping": True})

    return router
