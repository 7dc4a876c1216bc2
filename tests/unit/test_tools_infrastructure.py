"""The service `sandbox_manager` with a daemon that notes what it is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from skerry.models import ExecutionResult, Outcome, Usage
from skerry.tools.infrastructure import SandboxManager
from skerry.tools.python import INSTALL


class Noted:
    """A door and its calls in one; an installation gives every other task a turn."""

    def __init__(self, version: str = "3.11.2", install: Exception | None = None) -> None:
        self.version = version
        self.install = install
        self.asked: list[Any] = []

    def calls(self, traceparent: str) -> Noted:
        return self

    async def find(self, name: str) -> bool:
        return False

    async def create(self, name: str, image: str, limits: Mapping[str, Any]) -> None:
        self.asked.append(("create", image))

    async def execute(self, name: str, argv: tuple[str, ...], timeout: float) -> ExecutionResult:
        self.asked.append(argv[len(INSTALL) :])
        await asyncio.sleep(0)
        if self.install is not None:
            raise self.install
        return result("")

    async def set_network(self, name: str, network: str, allow: tuple[str, ...]) -> None:
        self.asked.append((network, allow))

    async def run(self, name: str, session: str, code: str, timeout: float) -> ExecutionResult:
        return result(self.version)

    def close(self) -> None:
        self.asked.append("closed")


def result(stdout: str) -> ExecutionResult:
    data = stdout.encode()
    return ExecutionResult("x", Outcome.COMPLETED, 0, data, b"", len(data), 0, 0.1, Usage())


def request(**more: Any) -> dict[str, Any]:
    return {"sessionId": "s", "runtime": "python:3.10", "code": "1", **more}


@pytest.mark.requirement("R8")
def test_installations_of_one_session_do_not_close_each_others_way() -> None:
    async def main() -> None:
        noted = Noted()
        manager = SandboxManager(noted)
        await asyncio.gather(*(manager.runCode(request(packages=[name])) for name in ("one", "two", "three")))
        opened = ("allowlist", ("python-packages",))
        steps = [step for step in noted.asked if step != "closed" and step[0] != "create"]
        assert [step for step in steps if step[0] in ("allowlist", "none")] == [opened, ("none", ())] * 3

    asyncio.run(main())


def test_an_installation_that_breaks_off_closes_its_way() -> None:
    async def main() -> None:
        noted = Noted(install=OSError("gone"))
        with pytest.raises(OSError, match="gone"):
            await SandboxManager(noted).runCode(request(packages=["one"]))
        assert noted.asked[-2:] == [("none", ()), "closed"]

    asyncio.run(main())


@pytest.mark.parametrize("told", ["", "3", "3.11.2\n", "x" * 100_000, "3.11.2; rm"])
@pytest.mark.requirement("R7")
def test_a_session_that_lies_about_its_version_is_unknown(told: str) -> None:
    answer = asyncio.run(SandboxManager(Noted(told)).runCode(request()))
    assert answer["runtime"] == "python:unknown"


@pytest.mark.requirement("R7")
def test_runtimes_are_mapped_by_a_table() -> None:
    async def main() -> None:
        noted = Noted()
        manager = SandboxManager(noted, runtimes={"python": "host", "python:3.10": "old"})
        await manager.runCode(request())
        await manager.runCode(request(runtime="python:3.12"))
        assert [step[1] for step in noted.asked if step[0] == "create"] == ["old", "host"]

    asyncio.run(main())
