"""Routes of environments: create, find, keep alive, delete."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from skerry.daemon.http.answers import reply
from skerry.daemon.http.requests import Body, Text, flag, query, read_json
from skerry.manager.environments import EnvironmentManager
from skerry.policy import Limits, Policy


class Create(Body):
    image: Text | None = None
    name: Text | None = None
    isolation: Text | None = None
    profile: Text | None = None
    network: Text | None = None
    workspace: Text | None = None
    memory: Any = None
    cpus: Any = None
    pids: Any = None
    fds: Any = None
    disk: Any = None
    inodes: Any = None
    lifetime: float | None = None
    idle: float | None = None
    env: dict[Text, Text] | None = None

    def policy(self) -> Policy:
        wanted = self._given("isolation", "profile", "network", "workspace")
        limits = self._given("memory", "cpus", "pids", "fds", "disk", "inodes")
        return Policy(**wanted, limits=Limits.parse(limits))

    def rest(self) -> dict[str, Any]:
        return self._given("image", "name", "lifetime", "idle", "env")

    def _given(self, *names: str) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class Heartbeat(Body):
    lifetime: float | None = None


def routes(manager: EnvironmentManager) -> APIRouter:
    router = APIRouter(prefix="/environments")

    @router.post("")
    async def create(request: Request) -> Response:
        body = await read_json(request, Create)
        environment = await manager.create(policy=body.policy(), **body.rest())
        return reply(environment.info.to_dict(), 201)

    @router.get("")
    async def list_environments(request: Request) -> Response:
        found = manager.environments(ended=flag(query(request, "all"), "all"))
        return reply({"environments": [environment.info.to_dict() for environment in found]})

    @router.get("/{ref}")
    async def inspect(ref: str) -> Response:
        info = manager.find(ref).info.to_dict()
        info["enforced"] = [row.to_dict() for row in manager.enforced(ref)]
        return reply({**info, "usage": (await manager.usage(ref)).to_dict()})

    @router.delete("/{ref}")
    async def delete(ref: str) -> Response:
        environment = await manager.delete(ref)
        return reply({"environment_id": environment.id, "deleted": True})

    @router.post("/{ref}/heartbeat")
    async def heartbeat(ref: str, request: Request) -> Response:
        body = await read_json(request, Heartbeat)
        return reply({"expires_at": manager.heartbeat(ref, body.lifetime)})

    @router.get("/{ref}/usage")
    async def usage(ref: str) -> Response:
        return reply((await manager.usage(ref)).to_dict())

    return router
