"""Carries out what a model asks for."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from skerry.errors import PlatformError, SkerryError
from skerry.tools import table
from skerry.tools.aio.environment import AsyncEnvironmentTools
from skerry.tools.aio.execute_code import AsyncExecuteCode
from skerry.tools.aio.python import AsyncPython
from skerry.tools.arguments import check, shown
from skerry.tools.results import FIELD_MAX, ToolResult, bounded, plain

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.client.aio.environment import AsyncEnvironment

_log = logging.getLogger("skerry.tools")


class AsyncDispatcher:
    """Tool calls of a model, in one environment, which has been created and is not deleted here.

    `execute_code` runs beside it, in an environment of its own each time, by the same daemon and without a network.
    `limit` is how many characters of a text (a stream, a file) the model is sent, counted with their JSON escapes.
    """

    def __init__(self, environment: AsyncEnvironment, limit: int = FIELD_MAX) -> None:
        self._limit = limit
        self._code = AsyncExecuteCode(client=environment.client, limit=limit)
        self._python = AsyncPython(environment, limit)
        inside = AsyncEnvironmentTools(environment, limit)
        self._acts: dict[str, Callable[..., Any]] = {
            table.EXECUTE_COMMAND.name: inside.execute_command,
            table.WRITE_FILE.name: inside.write_file,
            table.READ_FILE.name: inside.read_file,
        }

    async def call(self, name: object, arguments: object) -> ToolResult:
        """The result of a tool call, whatever the name and the arguments are: no exception, no endless text.

        `name` in either spelling (`environment.read_file`, `environment_read_file`), `arguments` an object or its JSON.
        """
        tool = table.find(name)
        if tool is None:
            known = ", ".join(tool.name for tool in table.TOOLS)
            return ToolResult(f"There is no tool {shown(name)}. Tools: {known}", is_error=True)
        try:
            if tool is table.EXECUTE_CODE:
                return await self._code.execute(arguments)
            given = check(tool.parameters, arguments)
            images: tuple[tuple[str, str], ...] = ()
            answer: dict[str, Any]
            if tool is table.PYTHON_EXECUTE:
                answer, images = await self._python.execute(**given)
            else:
                answer = await self._acts[tool.name](**given)
        except PlatformError as error:
            return self._failed(f"Sandbox error: {error}")
        except SkerryError as error:
            return self._failed(f"Invalid parameters: {error}" if error.status == 400 else f"Error: {error}")
        except Exception:
            _log.exception("tool %s", tool.name)
            return self._failed("Sandbox error: the tool itself failed; its log says why")
        text = plain(json.dumps(answer, ensure_ascii=False))
        return ToolResult(
            text, is_error=bool(answer.get("error")), images=images, structured=json.loads(text)
        )

    def _failed(self, text: str) -> ToolResult:
        return ToolResult(plain(bounded(text, self._limit)), is_error=True)
