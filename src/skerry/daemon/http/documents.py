"""Operations that describe all operations: OpenAPI, and a page for people. Made when somebody asks."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

from starlette.responses import Response

from skerry.daemon.http.operations import JSON, Call, Operation

HTML = "text/html"


@cache
def _documents() -> tuple[bytes, bytes]:
    # Here, not above: none of it is needed to serve anything else, and the table lists this module's operations.
    import json

    from skerry.daemon.http import openapi, page, table

    document = openapi.document(table.OPERATIONS)
    return json.dumps(document).encode(), page.render(document).encode()


async def describe(call: Call) -> Response:
    text, _ = await asyncio.to_thread(_documents)
    return Response(text, media_type=JSON)


async def show(call: Call) -> Response:
    from skerry.daemon.http.page import CONTENT_SECURITY_POLICY

    _, html = await asyncio.to_thread(_documents)
    headers = {"content-security-policy": CONTENT_SECURITY_POLICY, "x-content-type-options": "nosniff"}
    return Response(html, headers=headers, media_type=HTML)


OPERATIONS = (
    Operation(
        name="openapi",
        method="GET",
        path="/openapi.json",
        tag="documentation",
        verb="",
        summary="OpenAPI document",
        handler=describe,
        answer=dict[str, Any],
    ),
    Operation(
        name="docs",
        method="GET",
        path="/docs",
        tag="documentation",
        verb="",
        summary="API documentation page",
        handler=show,
        media=(HTML,),
    ),
)
