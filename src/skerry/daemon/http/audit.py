"""Operations of the audit: read it, follow it, verify it, prune it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict
from typing import Annotated, Any

from pydantic import Field
from starlette.responses import Response

from skerry.daemon.http import schemas
from skerry.daemon.http.answers import Stream, begun, line, reply
from skerry.daemon.http.operations import NDJSON, Call, Operation, Parameter
from skerry.daemon.http.requests import Body
from skerry.errors import Busy, Conflict, InvalidRequest, StoreUnavailable
from skerry.store.audit import AuditRow, Head

ROWS_AT_ONCE = 50
KINDS = ("intent", "result", "denial", "lifecycle")


class Prune(Body):
    before: Annotated[float, Field(ge=0, le=1 << 53, allow_inf_nan=False)]
    """Unix time: rows that are older go."""


async def read_audit(
    call: Call,
    after: int,
    last: int | None,
    follow: bool,
    kind: str,
    action: str,
    environment: str,
    token: str,
    request: str,
    trace: str,
    outcome: str,
    since: int | None,
    until: int | None,
) -> Response:
    if last is not None and after:
        raise InvalidRequest("after and last both say where to begin: give one")
    filters = {
        "kind": kind or None,
        "action": action or None,
        "environment_id": environment or None,
        "token": token or None,
        "request_id": request or None,
        "trace_id": trace or None,
        "outcome": outcome or None,
        "since": since,
        "until": until,
    }
    trail = call.engine.audit
    await trail.settle()
    if last is not None:
        after = await trail.place_before(call.caller.tenant, last, filters)
    rows = _rows(call, after, follow, filters)
    return Stream(rows if follow else await begun(rows), NDJSON)  # the first row may come in an hour


async def verify_audit(call: Call, seq: int | None, hash: str) -> Response:
    if (seq is None) != (not hash):
        raise InvalidRequest(
            "seq and hash belong together: both are of a row that was written down elsewhere"
        )
    remembered = None if seq is None else Head(seq, hash)
    broken, head, anchor = await call.engine.audit.verify(call.caller.tenant, remembered)
    return reply(
        {
            "intact": broken is None,
            "seq": head.seq,
            "hash": head.hash,
            "broken": None if broken is None else asdict(broken),
            "pruned": asdict(anchor) if anchor.seq else None,
        }
    )


async def prune_audit(call: Call, body: Prune) -> Response:
    if body.before > time.time():
        raise InvalidRequest("`before` is in the future", hint="give a unix time that has passed")
    return reply(await call.engine.audit.prune(call.caller, body.before))


async def _rows(call: Call, after: int, follow: bool, filters: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    async with aclosing(call.engine.audit.pages(call.caller.tenant, after, filters, follow=follow)) as pages:
        async for page in pages:
            for at in range(0, len(page), ROWS_AT_ONCE):
                yield b"".join(line(asdict(row)) for row in page[at : at + ROWS_AT_ONCE])
                await asyncio.sleep(0)


FILTERS = (
    Parameter("kind", "string", "Only rows of this kind.", default="", choices=KINDS),
    Parameter("action", "string", "Only of this action.", default="", example="execution"),
    Parameter("environment", "string", "Only of the environment with this id.", default=""),
    Parameter("token", "string", "Only of the token with this id.", default=""),
    Parameter("request", "string", "Only of the request with this id.", default=""),
    Parameter("trace", "string", "Only of the trace with this id.", default=""),
    Parameter("outcome", "string", "Only with this outcome.", default="", example="failed"),
    Parameter("since", "integer", "Unix time: nothing that is older."),
    Parameter("until", "integer", "Unix time: only what is older."),
)
ROW = {
    "at": 1767225601.5,
    "kind": "intent",
    "action": "execution",
    "request_id": "9f86d081884c7d65",
    "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736",
    "token": "t4n8q2r6w1zc",
    "peer": "192.0.2.7:50312",
    "environment_id": "k3v9x1m2p7qa",
    "backend": "namespace",
    "isolation": "namespace",
    "image_digest": "sha256:5e0c3f",
    "detail": {"execution_id": "b8t2c6w4y0hn", "command": "make test", "shell": "main", "user": "appuser"},
    "outcome": "",
    "usage": None,
    "tenant": "acme",
    "seq": 17,
    "hash": "5feceb66ffc86f38d952786c6d696c79c2dbc239dd4e91b46729d73a27fb57e9",
}

OPERATIONS = (
    Operation(
        name="read_audit",
        method="GET",
        path="/audit",
        tag="audit",
        verb="audit",
        summary="Read the audit of the tenant",
        text="One JSON object a line, the oldest first. Whatever is done has an `intent` before it and a `result` "
        "after it, with the same `request_id`; a `denial` was not done; a `lifecycle` row is one for both.",
        handler=read_audit,
        query=(
            Parameter("after", "integer", "Begin after the row with this `seq`.", default=0),
            Parameter("last", "integer", "Begin with this many rows from the end.", example=20, most=100_000),
            Parameter("follow", "boolean", "Go on with what comes.", default=False),
            *FILTERS,
        ),
        answer=AuditRow,
        media=(NDJSON,),
        answer_example=ROW,
        errors=(StoreUnavailable,),
    ),
    Operation(
        name="verify_audit",
        method="GET",
        path="/audit/verify",
        tag="audit",
        verb="audit",
        summary="Check that no row was changed, removed or moved",
        text="`seq` and `hash` of an earlier answer, written down elsewhere, prove that the rows up to there are the "
        "same; without them, an attacker with write access to the database could recompute all hashes.",
        handler=verify_audit,
        query=(
            Parameter("seq", "integer", "Of a row that was written down elsewhere.", least=1),
            Parameter("hash", "string", "Of the same row.", default=""),
        ),
        answer=schemas.Verdict,
        answer_example={"intact": True, "seq": 17, "hash": ROW["hash"], "broken": None, "pruned": None},
        errors=(Busy, StoreUnavailable),
    ),
    Operation(
        name="prune_audit",
        method="POST",
        path="/audit/prune",
        tag="audit",
        verb="admin",
        summary="Remove the oldest rows of the audit",
        text="The rest can still be verified: number and hash of the last row that was removed are kept, and a row "
        "`audit.prune` of the chain tells them. An intent that has no result stays, with all rows after it. A chain "
        "that does not hold is not pruned.",
        handler=prune_audit,
        body=Prune,
        body_example={"before": 1767225600},
        answer=schemas.Pruned,
        answer_example={"removed": 5000, "seq": 5000, "hash": ROW["hash"], "unfinished": None},
        errors=(Conflict, StoreUnavailable),
    ),
)
