"""The output of one execution as server-sent events, which can be resumed where a connection broke."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import Response

from skerry.daemon.http import schemas
from skerry.daemon.http.answers import Stream, line
from skerry.daemon.http.attach import summary
from skerry.daemon.http.operations import EVENTS, IN_EXECUTION, Call, Operation, Parameter
from skerry.errors import InvalidRequest
from skerry.manager.executions.execution import Execution
from skerry.manager.executions.output import DROPPED, STREAM_NAMES, Chunk, Tap
from skerry.models import encode_bytes

HEARTBEAT = 15.0
"""Seconds of silence after which a comment is sent, so that whatever is in between keeps the connection."""
COMMENT = b":\n\n"
DAEMON = secrets.token_hex(4)
"""In every id: bytes are counted from where this daemon began to read, which after a restart is somewhere else."""
END = "end"
"""The id of the last event: whoever asks for what comes after it gets 204, which ends an EventSource."""

_ID = re.compile(r"([0-9a-f]{8})-([0-9]{1,18})", re.ASCII)


async def events(call: Call, environment_id: str, execution_id: str) -> Response:
    execution = (await call.executions(environment_id)).find(execution_id)
    last = call.header(b"last-event-id")
    if last == END:
        return Response(status_code=204)
    if not last:
        return Stream(stream(execution, 0), EVENTS)
    found = _ID.fullmatch(last)
    if found is None:
        raise InvalidRequest("Last-Event-ID is not the id of an event from here")
    return Stream(stream(execution, int(found[2]) if found[1] == DAEMON else None), EVENTS)


async def stream(execution: Execution, after: int | None) -> AsyncGenerator[bytes, None]:
    """The output from its byte number `after` on, as far as it is kept, and then what comes.

    An event's id has the number of bytes up to its end, of both streams together. None: a number that another
    daemon counted.
    """
    at = execution.kept_from
    tap = execution.tap()
    try:
        if after is None:
            yield event(
                "dropped", {"message": "the daemon was restarted: some may be missing, or come again"}, at
            )
            after = at
        elif after < at:
            yield event("dropped", {"message": f"{at - after} bytes are not kept any more"}, at)
        counted = True
        while True:
            try:
                entry = await next_of(tap)
            except StopAsyncIteration:
                break
            if entry is None:
                yield COMMENT
                continue
            if entry.stream == DROPPED:
                # What follows has ids no more: a reader that comes back begins before the gap.
                counted = False
                yield event("dropped", {"message": entry.data.decode()})
                continue
            unread = entry.data[max(0, after - at) :]
            at += len(entry.data)
            if unread:
                data, encoding = encode_bytes(unread)
                body = {
                    "t": entry.at,
                    "stream": STREAM_NAMES[entry.stream],
                    "data": data,
                    "encoding": encoding,
                }
                yield event("output", body, at if counted else None)
        await execution.over()
        result = execution.result
        yield event("ended", {"result": None if result is None else summary(result)}, END)
    finally:
        execution.untap(tap)


async def next_of(tap: Tap) -> Chunk | None:
    """What comes next, or None after so long a silence that a comment is due. Raises StopAsyncIteration at the end."""
    try:
        async with asyncio.timeout(HEARTBEAT):
            return await anext(tap)
    except TimeoutError:
        return None


def event(kind: str, body: dict[str, Any], id: int | str | None = None) -> bytes:
    if isinstance(id, int):
        id = f"{DAEMON}-{id}"
    head = f"event: {kind}\n" if id is None else f"id: {id}\nevent: {kind}\n"
    return head.encode() + b"data: " + line(body) + b"\n"


OPERATIONS = (
    Operation(
        name="execution_events",
        method="GET",
        path="/environments/{environment_id}/executions/{execution_id}/events",
        tag="executions",
        verb="read",
        summary="Stream output as server-sent events",
        text="First what is kept, then what comes: `output` (`t`, `stream`, `data`, `encoding`), `dropped` "
        "(`message`: some is missing here), and at last `ended` (`result`, without the output). With "
        "`Last-Event-ID` it goes on where a connection broke. Output that is not read stops the program.",
        handler=events,
        headers=(
            Parameter(
                "Last-Event-ID", "string", "The id of the last event that was seen.", example="5f0c2a91-6"
            ),
        ),
        answer=schemas.Event,
        media=(EVENTS,),
        answer_example={"t": 1767225601.75, "stream": "stdout", "data": "hello\n", "encoding": "utf-8"},
        also={204: f"Nothing comes after the event `{END}`."},
        errors=IN_EXECUTION,
    ),
)
