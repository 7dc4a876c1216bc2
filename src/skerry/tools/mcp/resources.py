"""What an MCP client can read: the files of the workspace, and which images there are."""

from __future__ import annotations

import base64
import json
import mimetypes
import re
from urllib.parse import quote, unquote

import mcp_types as types
from mcp.shared.exceptions import MCPError

from skerry.errors import SkerryError
from skerry.tools.arguments import shown
from skerry.tools.mcp.place import Place
from skerry.tools.results import plain

FILES = "skerry://workspace/"
IMAGES = "skerry://images"
PAGE = 500
READ_MAX = 16 << 20


async def listed(place: Place, cursor: str | None) -> types.ListResourcesResult:
    """A page of all files in the workspace, and, first, the images."""
    if cursor is not None and not re.fullmatch(r"[1-9][0-9]{0,8}", cursor):
        raise MCPError(
            types.INVALID_PARAMS, f"there is no page {shown(cursor)}: a cursor is what a list has named"
        )
    begin = int(cursor or 0)
    try:
        environment, _ = await place.environment()
        entries = await environment.files.list(".", recursive=True)
    except SkerryError as error:
        raise _failure(error) from None
    files = sorted((entry for entry in entries if entry.type == "file"), key=lambda entry: entry.path)
    images = types.Resource(
        uri=IMAGES, name="images", description="The images of environments.", mime_type="application/json"
    )
    found = [] if begin else [images]
    found += [
        types.Resource(
            uri=FILES + quote(_inside(entry.path), errors="surrogateescape"),
            name=plain(_inside(entry.path)),
            size=entry.size,
            mime_type=mimetypes.guess_type(entry.path)[0],
        )
        for entry in files[begin : begin + PAGE]
    ]
    more = str(begin + PAGE) if begin + PAGE < len(files) else None
    return types.ListResourcesResult(resources=found, next_cursor=more)


def templates() -> types.ListResourceTemplatesResult:
    """How a file is named that was not listed."""
    template = types.ResourceTemplate(
        uri_template=FILES + "{+path}", name="file", description="A file in the workspace."
    )
    return types.ListResourceTemplatesResult(resource_templates=[template])


async def read(place: Place, uri: str) -> types.ReadResourceResult:
    """Text as text, anything else (a picture, say) as base64."""
    try:
        if uri == IMAGES:
            images = [image.to_dict() for image in await place.client.images()]
            text, kind = json.dumps(images, indent=2), "application/json"
            return _result(types.TextResourceContents(uri=uri, text=text, mime_type=kind))
        if not uri.startswith(FILES):
            raise MCPError(types.INVALID_PARAMS, f"there is no resource {uri[:200]!r}")
        path = unquote(uri[len(FILES) :], errors="surrogateescape")
        environment, _ = await place.environment()
        data = await environment.files.read_bytes(path, length=READ_MAX + 1)
    except SkerryError as error:
        raise _failure(error) from None
    if len(data) > READ_MAX:
        raise MCPError(types.INVALID_PARAMS, f"the file is larger than {READ_MAX} bytes")
    guess = mimetypes.guess_type(path)[0]
    try:
        return _result(
            types.TextResourceContents(uri=uri, text=data.decode(), mime_type=guess or "text/plain")
        )
    except UnicodeDecodeError:
        blob = base64.b64encode(data).decode()
        kind = guess or "application/octet-stream"
        return _result(types.BlobResourceContents(uri=uri, blob=blob, mime_type=kind))


def _result(content: types.TextResourceContents | types.BlobResourceContents) -> types.ReadResourceResult:
    return types.ReadResourceResult(contents=[content])


def _inside(path: str) -> str:
    return path.removeprefix("/workspace/").removeprefix("./")


def _failure(error: SkerryError) -> MCPError:
    code = types.INTERNAL_ERROR if error.status >= 500 else types.INVALID_PARAMS
    return MCPError(code, plain(str(error)))
