"""The service `sandbox_manager` with a daemon that notes what it is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from skerry.errors import InstallFailed, RegistryUnavailable
from skerry.models import ExecutionResult, Outcome, Usage
from skerry.tools.infrastructure import SandboxManager


class Noted:
    """A door and its client in one."""

    def __init__(self, version: str = "3.11.2", install: Exception | None = None) -> None:
        self.told = version
        self.install = install
        self.asked: list[Any] = []

    def client(self, traceparent: str) -> Noted:
        return self

    async def find(self, name: str) -> bool:
        return False

    async def create(self, name: str, image: str, limits: Mapping[str, Any]) -> None:
        self.asked.append(("create", image))

    async def version(self, language: str, image: str) -> str:
        self.asked.append(("version", image))
        return self.told

    async def run(
        self, name: str, session: str, code: str, timeout: float, packages: list[str]
    ) -> ExecutionResult:
        self.asked.append(("run", packages))
        if packages and self.install is not None:
            raise self.install
        return result("ran")

    def close(self) -> None:
        self.asked.append("closed")


def result(stdout: str) -> ExecutionResult:
    data = stdout.encode()
    return ExecutionResult("x", Outcome.COMPLETED, 0, data, b"", len(data), 0, 0.1, Usage())


def request(**more: Any) -> dict[str, Any]:
    return {"sessionId": "s", "runtime": "python:3.10", "code": "1", **more}


@pytest.mark.requirement("R8")
def test_packages_are_for_the_session_that_runs_the_code() -> None:
    noted = Noted()
    asyncio.run(SandboxManager(noted).runCode(request(packages=["one", "two==2"])))
    assert [step for step in noted.asked if step[0] == "run"] == [
        ("run", ["one", "two==2"]),
    ]


@pytest.mark.requirement("R8")
def test_packages_that_cannot_be_installed_are_a_result() -> None:
    noted = Noted(install=InstallFailed("pip cannot install this:\nno such thing"))
    answer = asyncio.run(SandboxManager(noted).runCode(request(packages=["one"])))
    assert (answer["exitCode"], answer["stdout"]) == (1, "")
    assert "no such thing" in answer["stderr"]


def test_a_registry_that_is_down_is_the_infrastructures_fault() -> None:
    noted = Noted(install=RegistryUnavailable("gone"))
    with pytest.raises(RegistryUnavailable, match="gone"):
        asyncio.run(SandboxManager(noted).runCode(request(packages=["one"])))
    assert noted.asked[-1] == "closed"


@pytest.mark.parametrize("told", ["", "3", "3.11.2\n", "x" * 100_000, "3.11.2; rm"])
@pytest.mark.requirement("R7")
def test_a_session_that_lies_about_its_version_is_unknown(told: str) -> None:
    answer = asyncio.run(SandboxManager(Noted(told)).runCode(request()))
    assert answer["runtime"] == "python:unknown"


@pytest.mark.requirement("R7")
def test_the_version_of_an_image_is_asked_for_once() -> None:
    async def main() -> None:
        noted = Noted()
        manager = SandboxManager(noted)
        for _ in range(3):
            assert (await manager.runCode(request()))["runtime"] == "python:3.11.2"
        assert [step for step in noted.asked if step[0] == "version"] == [("version", "host")]

    asyncio.run(main())


@pytest.mark.requirement("R7")
def test_runtimes_are_mapped_by_a_table() -> None:
    async def main() -> None:
        noted = Noted()
        manager = SandboxManager(noted, runtimes={"python": "host", "python:3.10": "old"})
        await manager.runCode(request())
        await manager.runCode(request(runtime="python:3.12"))
        assert [step[1] for step in noted.asked if step[0] == "create"] == ["old", "host"]

    asyncio.run(main())
