"""The protocol's side: which tools and resources there are, and what a call does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import mcp_types as types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError

from skerry import __version__
from skerry.errors import InvalidRequest, SkerryError
from skerry.tools import table
from skerry.tools.aio.dispatch import AsyncDispatcher
from skerry.tools.aio.execute_code import AsyncExecuteCode
from skerry.tools.arguments import check, shown
from skerry.tools.mcp import resources
from skerry.tools.mcp.place import Place
from skerry.tools.mcp.sessions import current_place
from skerry.tools.results import ToolResult, bounded, plain

PROGRESS_SECONDS = 1.0
INSTRUCTIONS = (
    "Tools that work in one isolated Linux environment. Its files (below /workspace), working directory and variables"
    " stay from call to call."
)
_Context = ServerRequestContext[Any, Any]


def make_server(shared: Place) -> Server[Any]:
    """A server whose tools work in `shared`, or in the environment that an HTTP session has of its own."""

    def the_place() -> Place:
        return current_place() or shared

    async def list_tools(
        context: _Context, params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[_described(tool) for tool in table.TOOLS])

    async def call_tool(context: _Context, params: types.CallToolRequestParams) -> types.CallToolResult:
        tool = table.find(params.name)
        if tool is None:
            known = ", ".join(tool.name for tool in table.TOOLS)
            raise MCPError(types.INVALID_PARAMS, f"There is no tool {shown(params.name)}. Tools: {known}")
        place = the_place()
        if tool is table.EXECUTE_CODE:
            async with _progress(context):
                return _result(await AsyncExecuteCode(client=place.client).execute(params.arguments))
        try:
            check(tool.parameters, params.arguments)  # before an environment is made for it
        except InvalidRequest as error:
            return _result(ToolResult(f"Invalid parameters: {error}", is_error=True))
        try:
            environment, news = await place.environment()
        except SkerryError as error:
            return _result(ToolResult(bounded(f"Sandbox error: {error}"), is_error=True))
        async with _progress(context):
            return _result(await AsyncDispatcher(environment).call(params.name, params.arguments), news)

    async def list_resources(
        context: _Context, params: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        return await resources.listed(the_place(), params.cursor if params else None)

    async def list_templates(
        context: _Context, params: types.PaginatedRequestParams | None
    ) -> types.ListResourceTemplatesResult:
        return resources.templates()

    async def read_resource(
        context: _Context, params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        return await resources.read(the_place(), str(params.uri))

    return Server(
        "skerry",
        version=__version__,
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_list_resources=list_resources,
        on_list_resource_templates=list_templates,
        on_read_resource=read_resource,
    )


def _described(tool: table.Tool) -> types.Tool:
    hints = types.ToolAnnotations(
        title=tool.title,
        read_only_hint=not tool.writes,
        destructive_hint=tool.destroys,
        idempotent_hint=tool.repeatable,
        open_world_hint=tool.runs_code,
    )
    return types.Tool(
        name=tool.name,
        title=tool.title,
        description=tool.description,
        input_schema=tool.parameters,
        output_schema=tool.result,
        annotations=hints,
    )


def _result(result: ToolResult, news: str = "") -> types.CallToolResult:
    texts = [news, result.content] if news else [result.content]
    content: list[types.ContentBlock] = [types.TextContent(text=plain(text)) for text in texts]
    content += [types.ImageContent(data=data, mime_type=kind) for kind, data in result.images]
    if result.structured is None:
        return types.CallToolResult(content=content, is_error=result.is_error)
    return types.CallToolResult(
        content=content, is_error=result.is_error, structured_content=result.structured
    )


@asynccontextmanager
async def _progress(context: _Context) -> AsyncIterator[None]:
    """While it lasts, clients that asked for it are told every second that the call still runs."""

    async def tell() -> None:
        begun = time.monotonic()
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            seconds = time.monotonic() - begun
            await context.session.report_progress(seconds, message=f"running for {seconds:.0f} s")

    telling = asyncio.create_task(tell())
    try:
        yield
    finally:
        telling.cancel()
        # A client that cannot be told is none of the call's business.
        with suppress(asyncio.CancelledError, Exception):
            await telling
