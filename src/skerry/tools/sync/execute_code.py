# Generated from aio/execute_code.py by scripts/generate_sync.py. Change that file, not this one.
"""The tool `execute_code`: a program in one of four languages, run once, with its output as text for a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skerry.client.sync.client import Client
from skerry.errors import InvalidRequest, SkerryError
from skerry.models import Outcome
from skerry.tools.arguments import check
from skerry.tools.results import FIELD_MAX, ToolResult, bounded, plain
from skerry.tools.table import EXECUTE_CODE

if TYPE_CHECKING:
    from typing import Self

    from skerry.models import CodeResult

TIMEOUT = 30
TIMEOUT_MAX = 300
"""Seconds; a model that asks for more gets this."""
LANGUAGES: list[str] = EXECUTE_CODE.parameters["properties"]["language"]["enum"]
# That a language is none of these is told in words of its own.
_PROPERTIES = {**EXECUTE_CODE.parameters["properties"], "language": {"type": "string"}}
_PARAMETERS = {**EXECUTE_CODE.parameters, "properties": _PROPERTIES}


class ExecuteCode:
    """The tool. The daemon is that of `client`, or the one that `Client(url=url, token=token)` finds.

    `backend` is the isolation that programs get at least (`namespace`, `gvisor`, `microvm`); `default_timeout` is in
    seconds, for calls that give none; `network_enabled` lets programs reach public addresses. `limit` is how many
    characters of each stream the model is shown.

    `pool_size` interpreters of a language wait for programs, of at most `max_pool_size` that wait or run. Both are set
    when the language is first used, for the pool of the daemon, which all its clients share: that takes the verb
    `admin`. A language whose interpreter cannot wait has no pool, and none is asked for.

    Raises InvalidRequest for options that contradict each other.
    """

    name = EXECUTE_CODE.name
    description = EXECUTE_CODE.description
    schema: dict[str, Any] = EXECUTE_CODE.parameters
    """The JSON Schema of the arguments."""

    def __init__(
        self,
        *,
        backend: str | None = None,
        pool_size: int | None = None,
        max_pool_size: int | None = None,
        default_timeout: float = TIMEOUT,
        network_enabled: bool = False,
        limit: int = FIELD_MAX,
        client: Client | None = None,
        url: str | None = None,
        token: str | None = None,
    ) -> None:
        if client is not None and (url or token):
            raise InvalidRequest("url and token cannot be combined with client")
        if pool_size is not None and max_pool_size is not None and pool_size > max_pool_size:
            raise InvalidRequest(f"pool_size {pool_size} is more than max_pool_size {max_pool_size}")
        self._backend = backend
        self._pool_size = pool_size
        self._max_pool_size = max_pool_size
        self._with_pool: set[str] = set()
        """Languages whose pool is as it was asked for."""
        self._default_timeout = default_timeout
        self._network = "public" if network_enabled else "none"
        self._limit = limit
        self._client = client or Client(url=url, token=token)
        self._owns_client = client is None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; once or several times."""
        self._closed = True
        if self._owns_client:
            self._client.close()

    def execute(self, arguments: object) -> ToolResult:
        """Run a program, whatever the arguments (an object or its JSON) are: no exception, no endless text.

        A number that is 0 stands for its default.
        """
        try:
            given = check(_PARAMETERS, arguments)
        except InvalidRequest as error:
            return self._failed(f"Invalid parameters: {error}")
        if given["language"] not in LANGUAGES:
            supported = ", ".join(LANGUAGES)
            return self._failed(f"Unsupported language: {given['language']}. Supported: {supported}")
        if self._closed:
            return self._failed("Execution failed: the tool is closed")
        given = {name: value for name, value in given.items() if value != 0}
        given["timeout"] = min(given.get("timeout", self._default_timeout), TIMEOUT_MAX)
        try:
            self._prepare(given["language"])
        except SkerryError as error:
            return self._failed(f"Execution failed: no pool: {error}")
        try:
            result = self._client.execute_code(**given, network=self._network, isolation=self._backend)
        except SkerryError as error:
            what = "Invalid parameters" if error.status == 400 else "Execution failed"
            return self._failed(f"{what}: {error}")
        if result.outcome is Outcome.INTERNAL:
            return self._failed(f"Execution failed: {result.message}")
        return ToolResult(plain(self._text(result)), is_error=not result.ok)

    def _prepare(self, language: str) -> None:
        """Before the first program in a language: its pool. Raises what `warm_up_pool` does."""
        if (self._pool_size is None and self._max_pool_size is None) or language in self._with_pool:
            return
        if language in {stats.pool for stats in self._client.pools()}:
            self._client.warm_up_pool(language, self._pool_size or 0, self._max_pool_size)
        self._with_pool.add(language)

    def _text(self, result: CodeResult) -> str:
        lines = []
        if result.outcome is Outcome.TIMED_OUT:
            lines.append("Execution timed out")
        elif result.message:
            lines.append(result.message.capitalize())
        streams = (
            ("STDOUT", result.stdout, result.stdout_size - len(result.stdout_bytes)),
            ("STDERR", result.stderr, result.stderr_size - len(result.stderr_bytes)),
        )
        for name, text, lost in streams:
            if text:
                lines += [f"{name}:", bounded(text, self._limit).removesuffix("\n")]
            if lost:
                lines.append(f"[... {lost} more bytes were cut ...]")
        return "\n".join([*lines, f"Exit code: {result.exit_code}"])

    def _failed(self, text: str) -> ToolResult:
        return ToolResult(plain(bounded(text, self._limit)), is_error=True)
