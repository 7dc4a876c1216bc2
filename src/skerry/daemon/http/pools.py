"""Operations of pools: environments that are ready before anybody asks."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from starlette.responses import Response

from skerry.daemon.http import schemas
from skerry.daemon.http.answers import reply
from skerry.daemon.http.operations import Call, Operation
from skerry.daemon.http.requests import Body
from skerry.daemon.pools import MOST
from skerry.errors import (
    DiskFull,
    GuestFailed,
    ImageNotFound,
    IsolationUnavailable,
    LaunchFailed,
    LimitReached,
    NotFound,
    SkerryError,
    StoreUnavailable,
)
from skerry.models import PoolHealth, PoolStats


class Count(Body):
    count: Annotated[int, Field(ge=0, le=MOST)]
    """How many are ready, afterwards."""


class WarmUp(Count):
    maximum: Annotated[int, Field(ge=0, le=MOST)] | None = None
    """No more than so many are ready, being made, or in use, from now on; null: as before."""


async def list_pools(call: Call) -> Response:
    return reply({"pools": [stats.to_dict() for stats in call.manager.pools.stats]})


async def warm_up_pool(call: Call, pool: str, body: WarmUp) -> Response:
    found = call.manager.pools.find(pool)
    async with call.manager.act(
        call.caller.itself, "pool.warmup", pool=pool, count=body.count, maximum=body.maximum
    ):
        await found.warmup(body.count, body.maximum)
    return reply(found.stats.to_dict())


async def shrink_pool(call: Call, pool: str, body: Count) -> Response:
    found = call.manager.pools.find(pool)
    async with call.manager.act(call.caller.itself, "pool.shrink", pool=pool, count=body.count):
        await found.shrink(body.count)
    return reply(found.stats.to_dict())


async def check_pool(call: Call, pool: str) -> Response:
    found = call.manager.pools.find(pool)
    async with call.manager.act(call.caller.itself, "pool.health", pool=pool):
        try:
            health = PoolHealth(healthy=True, seconds=await found.health())
        except SkerryError as error:
            health = PoolHealth(healthy=False, error=str(error))
    return reply(health.to_dict())


EXAMPLE = PoolStats(
    pool="default",
    image="host",
    minimum=4,
    maximum=100,
    available=3,
    creating=1,
    active=12,
    hits=980,
    misses=4,
    failures=0,
    error="",
    wait_p50_seconds=0.0011,
    wait_p95_seconds=0.0019,
    wait_max_seconds=0.0071,
).to_dict()
STARTING = (
    ImageNotFound,
    IsolationUnavailable,
    LaunchFailed,
    GuestFailed,
    DiskFull,
    LimitReached,
    StoreUnavailable,
)

OPERATIONS = (
    Operation(
        name="list_pools",
        method="GET",
        path="/pools",
        tag="pools",
        verb="admin",
        summary="List pools with their statistics",
        handler=list_pools,
        answer=schemas.Pools,
        answer_example={"pools": [EXAMPLE]},
    ),
    Operation(
        name="warm_up_pool",
        method="POST",
        path="/pools/{pool}/warmup",
        tag="pools",
        verb="admin",
        summary="Warm a pool up to a number of environments",
        text="Answers when they are ready. The pool keeps that many ready until it is shrunk or the daemon ends.",
        handler=warm_up_pool,
        body=WarmUp,
        body_example={"count": 8, "maximum": 50},
        answer=PoolStats,
        answer_example=EXAMPLE,
        errors=(NotFound, *STARTING),
    ),
    Operation(
        name="shrink_pool",
        method="POST",
        path="/pools/{pool}/shrink",
        tag="pools",
        verb="admin",
        summary="Shrink a pool to a number of ready environments",
        text="Ready environments beyond that number are removed; those in use are not affected.",
        handler=shrink_pool,
        body=Count,
        body_example={"count": 0},
        answer=PoolStats,
        answer_example=EXAMPLE,
        errors=(NotFound, StoreUnavailable),
    ),
    Operation(
        name="check_pool",
        method="POST",
        path="/pools/{pool}/health",
        tag="pools",
        verb="admin",
        summary="Check a pool by starting an environment",
        handler=check_pool,
        answer=PoolHealth,
        answer_example=PoolHealth(healthy=True, seconds=0.0083).to_dict(),
        errors=(NotFound, StoreUnavailable),
    ),
)
