# Generated from aio/sandbox.py by scripts/generate_sync.py. Change that file, not this one.
"""One piece of code or one command in a fresh environment, and what to tell a model of it."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from skerry.client.sync.environment import Environment
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


class Sandbox:
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

    def run_python(self, code: str) -> str:
        """Run a Python program, with no network."""
        return self._run({"network": "none"}, self._python_timeout, code=code)

    def run_command(self, command: str) -> str:
        """Run a shell command, with a network."""
        return self._run(self._network, self._terminal_timeout, command=command)

    def _run(self, network: dict[str, Any], timeout: float, **work: str) -> str:
        lifetime = timeout + REMOVAL_SECONDS
        try:
            environment = Environment(self._image, lifetime=lifetime, **network, **self._settings)
            begun = time.monotonic()
            environment.create()
            _log.info("sandbox %s: created in %.1f ms", environment.id, 1000 * (time.monotonic() - begun))
            try:
                return sections(_executed(environment, timeout, **work), timeout)
            finally:
                _remove(environment)
        except SkerryError as error:
            _log.error("sandbox: %s", error)
            return f"Sandbox error: {plain(bounded(str(error)))}"


def _executed(
    environment: Environment, timeout: float, code: str | None = None, command: str = ""
) -> ExecutionResult:
    if code is not None:
        environment.files.write("main.py", plain(code))
        result = environment.run(["python3", "main.py"], timeout=timeout)
    else:
        environment.execute(_PYTHON)
        result = environment.execute(plain(command), timeout=timeout)
    if result.outcome == Outcome.INTERNAL:
        raise PlatformError(result.message or "the execution was lost")
    _log.info("sandbox %s: %s, exit code %s", environment.id, result.outcome, result.exit_code)
    return result


def _remove(environment: Environment) -> None:
    """Its lease removes it later, when this cannot."""
    begun = time.monotonic()
    try:
        environment.delete()
    except SkerryError as error:
        _log.warning("sandbox %s: failed to remove it: %s", environment.id, error)
    else:
        _log.info("sandbox %s: removed in %.1f ms", environment.id, 1000 * (time.monotonic() - begun))
