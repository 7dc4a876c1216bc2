"""One piece of code or one command in a fresh environment, and what to tell a model of it."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from skerry.client.aio.environment import AsyncEnvironment
from skerry.errors import PlatformError, SkerryError
from skerry.models import Outcome
from skerry.tools.results import bounded, plain, sections

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.models import ExecutionResult

PYTHON_TIMEOUT = 30
TERMINAL_TIMEOUT = 120
REMOVAL_SECONDS = 60
"""How much longer than its command an environment lives at most, should nobody be left to remove it."""

# Debian's python3 brings no `python`, by which models call it.
_PYTHON = 'command -v python || { mkdir -p .local/bin && ln -s "$(command -v python3)" .local/bin/python; }'
_log = logging.getLogger("skerry.tools")


class AsyncSandbox:
    """Runs Python code without a network, and shell commands with one (public addresses, or what `allow` names).

    Every run has an environment of its own, which is removed afterwards, whatever happens: nothing stays for the next.
    The answers are texts for a model. Nothing raises: what cannot be run is told as `Sandbox error: ...`, which no
    output of a program can be mistaken for, as that stands below `--- STDOUT ---` or `--- STDERR ---`.
    """

    def __init__(
        self,
        image: str = "host",
        *,
        memory: str | int = "512m",
        cpus: float = 0.5,
        network: str = "public",
        allow: Sequence[str] | None = None,
        python_timeout: float = PYTHON_TIMEOUT,
        terminal_timeout: float = TERMINAL_TIMEOUT,
        url: str | None = None,
        token: str | None = None,
    ) -> None:
        self._image = image
        self._settings: dict[str, Any] = {"memory": memory, "cpus": cpus, "url": url, "token": token}
        self._network: dict[str, Any] = (
            {"network": "allowlist", "allow": allow} if allow else {"network": network}
        )
        self._python_timeout = python_timeout
        self._terminal_timeout = terminal_timeout

    async def run_python(self, code: str) -> str:
        """Run a Python program, with no network."""
        return await self._run({"network": "none"}, self._python_timeout, code=code)

    async def run_command(self, command: str) -> str:
        """Run a shell command, with a network."""
        return await self._run(self._network, self._terminal_timeout, command=command)

    async def _run(self, network: dict[str, Any], timeout: float, **work: str) -> str:
        lifetime = timeout + REMOVAL_SECONDS
        try:
            environment = AsyncEnvironment(self._image, lifetime=lifetime, **network, **self._settings)
            begun = time.monotonic()
            await environment.create()
            _log.info("sandbox %s: created in %.1f ms", environment.id, 1000 * (time.monotonic() - begun))
            try:
                return sections(await _executed(environment, timeout, **work), timeout)
            finally:
                await _remove(environment)
        except SkerryError as error:
            _log.error("sandbox: %s", error)
            return f"Sandbox error: {plain(bounded(str(error)))}"


async def _executed(
    environment: AsyncEnvironment, timeout: float, code: str | None = None, command: str = ""
) -> ExecutionResult:
    if code is not None:
        await environment.files.write("main.py", plain(code))
        result = await environment.run(["python3", "main.py"], timeout=timeout)
    else:
        await environment.execute(_PYTHON)
        result = await environment.execute(plain(command), timeout=timeout)
    if result.outcome == Outcome.INTERNAL:
        raise PlatformError(result.message or "the execution was lost")
    _log.info("sandbox %s: %s, exit code %s", environment.id, result.outcome, result.exit_code)
    return result


async def _remove(environment: AsyncEnvironment) -> None:
    """Its lease removes it later, when this cannot."""
    begun = time.monotonic()
    try:
        await environment.delete()
    except SkerryError as error:
        _log.warning("sandbox %s: failed to remove it: %s", environment.id, error)
    else:
        _log.info("sandbox %s: removed in %.1f ms", environment.id, 1000 * (time.monotonic() - begun))
