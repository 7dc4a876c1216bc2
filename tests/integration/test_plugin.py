"""The plugin `python:execute`, and the service behind it, across processes: by a unix socket, and by gRPC over TCP."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

import skerry
from skerry.errors import DaemonUnavailable, InvalidRequest
from skerry.tools import plugin
from skerry.tools.grpc import GrpcDoor
from skerry.tools.infrastructure import (
    AgentContext,
    HttpDoor,
    Infrastructure,
    PluginContext,
    SandboxManager,
    traceparent,
)
from skerry.tools.plugin import PythonInterpreterTool
from skerry.tools.results import FIELD_MAX
from tests import support
from tests.integration.daemon import Daemon, started
from tests.integration.internet import through_a_socket
from tests.integration.shelves import Shelves
from tests.integration.shelves import World as Registries
from tests.integration.test_installs import need
from tests.unit.scripted_server import every_request, serving

DOORS = ("unix", "grpc")
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
VERBS = ["create", "execute", "read"]  # all that the service needs
AGENT = AgentContext("agent 1/ä", TRACE)


class World:
    """A daemon with both doors."""

    def __init__(self, daemon: Daemon, address: str) -> None:
        self.daemon = daemon
        self.address = address
        body = {"name": "test", "verbs": VERBS}
        self.token = daemon.call("POST", "/tokens", body, expect=201)["token"]

    @asynccontextmanager
    async def manager(self, door: str, **settings: Any) -> AsyncIterator[SandboxManager]:
        if door == "unix":
            yield SandboxManager(HttpDoor(url=f"unix://{self.daemon.socket}"), **settings)
            return
        async with grpc.aio.insecure_channel(self.address) as channel:
            yield SandboxManager(GrpcDoor(channel, self.token), **settings)

    def run(self, door: str, body: Callable[[SandboxManager], Awaitable[None]], **settings: Any) -> None:
        async def main() -> None:
            async with self.manager(door, **settings) as manager, asyncio.timeout(100):
                await body(manager)

        try:
            asyncio.run(main())
        finally:
            for info in self.daemon.call("GET", "/environments")["environments"]:
                self.daemon.call("DELETE", f"/environments/{info['environment_id']}")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    address = f"127.0.0.1:{support.free_port()}"
    with support.temporary_home() as home, started(home, "--grpc", address) as daemon:
        yield World(daemon, address)


async def tool_for(manager: Any) -> PythonInterpreterTool:
    tool = PythonInterpreterTool()
    await tool.init(PluginContext(Infrastructure({"sandbox_manager": manager})))
    return tool


def request(code: str, **more: Any) -> dict[str, Any]:
    wanted = {"sessionId": "s1", "traceId": TRACE, "runtime": "python:3.10", "code": code, "packages": []}
    return {**wanted, **more}


@pytest.mark.requirement("R1", "R2")
def test_what_it_says_of_itself() -> None:
    tool = PythonInterpreterTool()
    assert (tool.id, tool.name) == ("python-interpreter", "python:execute")
    assert tool.description == "Executes Python code in a secure sandbox."
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "code": {"type": "string", "description": "The Python code to execute"},
            "requirements": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["code"],
    }


@pytest.mark.requirement("R6", "R20")
def test_it_is_small_and_knows_of_no_daemon() -> None:
    source = inspect.getsource(plugin)
    assert len(source.splitlines()) < 72
    modules = [node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    ours = {str(module) for module in modules if str(module).startswith("skerry")}
    tools = {f"skerry.tools.{name}" for name in ("arguments", "infrastructure", "results", "table")}
    assert ours == {"skerry.errors", *tools}


@pytest.mark.requirement("R4", "R5")
def test_without_the_service_it_cannot_be_used() -> None:
    asked = []

    class Nothing(Infrastructure):
        def get_service(self, name: str) -> Any:
            asked.append(name)

    async def main() -> None:
        words = "Sandbox Infrastructure not available. Cannot initialize Python Tool."
        tool = PythonInterpreterTool()
        with pytest.raises(RuntimeError, match=words):
            await tool.init(PluginContext(Nothing({})))
        assert asked == ["sandbox_manager"]
        result = await tool.execute(AGENT, {"code": "1"})
        assert result["error"] == "Sandbox Error: the tool was not initialized"

    asyncio.run(main())


@pytest.mark.requirement("R3", "R7", "R8", "R13", "R14", "R15")
def test_requests_and_results_have_the_documented_fields() -> None:
    class Service:
        def __init__(self) -> None:
            self.asked: list[dict[str, Any]] = []

        async def runCode(self, request: dict[str, Any]) -> dict[str, Any]:
            self.asked.append(request)
            if request["code"] == "fall":
                raise DaemonUnavailable("container failed to start")
            code = int(request["code"])
            return {"exitCode": code, "stdout": "o", "stderr": "e", "durationMs": 5, "memoryUsage": 7}

    async def main() -> None:
        service = Service()
        tool = await tool_for(service)
        assert await tool.execute(AGENT, {"code": "0"}) == {
            "success": True,
            "output": "o",
            "metadata": {"executionTime": 5, "memoryUsage": 7, "stderr": "e"},
        }
        assert await tool.execute(AGENT, {"code": "3", "requirements": ["a", "b==1"]}) == {
            "success": False,
            "output": "e",
            "error": "Execution failed with non-zero exit code",
            "metadata": {"stdout": "o"},
        }
        assert await tool.execute(AGENT, {"code": "fall", "requirements": None}) == {
            "success": False,
            "output": None,
            "error": "Sandbox Error: container failed to start",
        }
        fields = {"sessionId": "agent 1/ä", "traceId": TRACE, "runtime": "python:3.10"}
        assert service.asked == [
            {**fields, "code": "0", "packages": []},
            {**fields, "code": "3", "packages": ["a", "b==1"]},
            {**fields, "code": "fall", "packages": []},
        ]
        junks: tuple[Any, ...] = (None, {}, {"code": 1}, {"code": "1", "requirements": "a"}, [], "x")
        for junk in junks:
            result = await tool.execute(AGENT, junk)
            assert (result["success"], result["output"]) == (False, None)
            assert result["error"].startswith("Invalid parameters: ")

    asyncio.run(main())


@pytest.mark.requirement("R13", "R14", "R15")
def test_nothing_but_the_promised_fields_where_nothing_else_was_written() -> None:
    class Silent:
        async def runCode(self, request: dict[str, Any]) -> dict[str, Any]:
            code = int(request["code"])
            texts = {"stdout": "" if code else "o", "stderr": "e" if code else ""}
            return {"exitCode": code, **texts, "durationMs": 5, "memoryUsage": 7}

    async def main() -> None:
        tool = await tool_for(Silent())
        metadata = {"executionTime": 5, "memoryUsage": 7}
        assert await tool.execute(AGENT, {"code": "0"}) == {
            "success": True,
            "output": "o",
            "metadata": metadata,
        }
        error = "Execution failed with non-zero exit code"
        assert await tool.execute(AGENT, {"code": "1"}) == {"success": False, "output": "e", "error": error}

    asyncio.run(main())


def test_the_plugins_results_are_bounded_as_sent() -> None:
    class Flood:
        async def runCode(self, request: dict[str, Any]) -> dict[str, Any]:
            if request["code"] == "raise":
                raise DaemonUnavailable("\0" * 100_000)
            text = "\0" * 100_000
            return {"exitCode": 1, "stdout": text, "stderr": text, "durationMs": 5, "memoryUsage": 7}

    async def main() -> None:
        tool = await tool_for(Flood())
        for code in ("1", "raise"):
            result = await tool.execute(AGENT, {"code": code})
            assert len(json.dumps(result)) < 2 * FIELD_MAX + 1000
            assert "characters cut" in json.dumps(result)

    asyncio.run(main())


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.requirement("R3", "R9", "R11", "R13", "R14", "R16")
def test_the_plugin_keeps_variables_in_its_session(door: str, world: World) -> None:
    async def body(manager: SandboxManager) -> None:
        tool = await tool_for(manager)
        result = await tool.execute(AGENT, {"code": "import os\nx = 6\nprint(os.getpid(), x * 7)"})
        assert result["success"], result
        pid, product = str(result["output"]).split()
        assert product == "42"
        assert result["metadata"]["executionTime"] > 0
        assert (await tool.execute(AGENT, {"code": "print(x + 1, os.getpid())"}))["output"] == f"7 {pid}\n"
        other = await tool.execute(AgentContext("agent 2"), {"code": "print(x)"})
        assert not other["success"]
        assert other["error"] == "Execution failed with non-zero exit code"
        assert "NameError: name 'x' is not defined" in str(other["output"])

    world.run(door, body)


@pytest.mark.requirement("R9", "R11")
def test_a_session_is_the_same_by_every_door(world: World) -> None:
    async def body(manager: SandboxManager) -> None:
        await manager.runCode(request("x = 'kept'"))
        async with world.manager("grpc") as other:
            assert (await other.runCode(request("print(x)")))["stdout"] == "kept\n"

    world.run("unix", body)


@pytest.mark.parametrize("door", DOORS)
def test_concurrent_first_calls_of_a_session_wait_for_its_environment(door: str, world: World) -> None:
    async def body(manager: SandboxManager) -> None:
        for number in range(3):
            calls = [manager.runCode(request("print(1)", sessionId=f"new-{number}")) for _ in range(8)]
            assert [each["stdout"] for each in await asyncio.gather(*calls)] == ["1\n"] * 8
        assert len(world.daemon.call("GET", "/environments")["environments"]) == 3

    world.run(door, body)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.requirement("R7", "R12")
def test_the_result_of_the_service(door: str, world: World) -> None:
    async def body(manager: SandboxManager) -> None:
        result = await manager.runCode(request("import sys; print('out'); print('err', file=sys.stderr)"))
        assert list(result) == [
            *("exitCode", "stdout", "stderr", "durationMs", "memoryUsage"),
            *("traceId", "runtime"),
        ]
        assert (result["exitCode"], result["stdout"], result["stderr"]) == (0, "out\n", "err\n")
        assert result["durationMs"] > 0
        assert result["memoryUsage"] is None if os.geteuid() else result["memoryUsage"] > 100_000
        version = (await manager.runCode(request("import platform; print(platform.python_version())")))[
            "stdout"
        ]
        assert result["runtime"] == f"python:{version.strip()}"
        minor = ".".join(version.split(".")[:2])
        fine = request("pass", runtime=f"python:{minor}", strict=True)
        assert (await manager.runCode(fine))["exitCode"] == 0
        for wrong, words in (
            (
                request("pass", runtime="python:2.7", strict=True),
                "runtime python:2.7 is not available, but python:",
            ),
            (request("pass", runtime="cobol:1"), "unknown runtime 'cobol:1'"),
            (request("pass", memory="64g"), "there is no argument 'memory'"),
            ({"code": "pass", "runtime": "python:3.10"}, "sessionId is missing"),
        ):
            with pytest.raises(InvalidRequest, match=words):
                await manager.runCode(wrong)

    world.run(door, body)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.requirement("R7")
def test_code_cannot_forge_the_runtime_that_is_reported(door: str, world: World) -> None:
    async def body(manager: SandboxManager) -> None:
        honest = (await manager.runCode(request("pass")))["runtime"]
        forge = (
            "import builtins, os, sys\n"
            "sys.version_info = (9, 9, 9)\n"
            "builtins.__import__ = lambda *_: type('m', (), {'write': lambda *a: os.write(1, b'9.9.9')})"
        )
        await manager.runCode(request(forge))
        async with world.manager(door) as fresh:
            assert (await fresh.runCode(request("pass")))["runtime"] == honest != "python:unknown"

    world.run(door, body)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.requirement("R10")
def test_the_trace_is_in_the_result_and_in_the_audit(door: str, world: World) -> None:
    trace = f"{'ab' if door == 'unix' else 'cd'}f92f3577b34da6a3ce929d0e0e4736"

    async def body(manager: SandboxManager) -> None:
        assert (await manager.runCode(request("print('traced')", traceId=trace)))["traceId"] == trace

    world.run(door, body)
    with skerry.Client(str(world.daemon.home)) as client:
        rows = [row for row in client.audit() if row["trace_id"] == trace]
    assert any("traced" in str(row["detail"]) for row in rows), rows
    assert "environment.create" in {row["action"] for row in rows}
    assert trace in (world.daemon.home / "daemon.log").read_text()


def test_every_trace_id_has_a_context() -> None:
    assert traceparent("") == ""
    assert traceparent(TRACE)[3:35] == TRACE
    assert traceparent("4BF92F35-77B3-4DA6-A3CE-929D0E0E4736")[3:35] == TRACE
    for odd in ("0" * 32, "trace 7", "ä", "x\r\nevil: 1"):
        context = traceparent(odd)
        assert skerry.client.http1.traceparent(context) == context


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.requirement("R16", "R18")
def test_whatever_the_code_does_the_core_goes_on(door: str, world: World) -> None:
    async def body(manager: SandboxManager) -> None:
        for code in (
            "import os; os._exit(3)",
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            "import os, signal; os.kill(1, signal.SIGKILL); os.kill(-1, signal.SIGKILL); exit(5)",
            "x = 'x' * (1 << 30)",
            "raise SystemExit(4)",
        ):
            result = await manager.runCode(request(code))
            assert result["exitCode"] != 0, code
            assert (await manager.runCode(request("print('fine')")))["stdout"] == "fine\n"
        seen = await manager.runCode(request("import os; print(*os.listdir('/proc'))"))
        assert "self" in seen["stdout"].split()
        assert str(os.getpid()) not in seen["stdout"].split()
        slow = await manager.runCode(request("while True: pass"))
        assert slow["exitCode"] != 0

    world.run(door, body, timeout=4.0)


JUNK: tuple[Any, ...] = (
    *(b"", b"no JSON", b"[" * 100_000, b"\xff\xfe", None, [], {}, "text", 7),
    {"environment_id": {"a": 1}, "stdout": 7, "stderr": None, "exit_code": "0", "version": []},
)


@pytest.mark.requirement("R18")
@pytest.mark.parametrize("junk", JUNK, ids=lambda junk: repr(junk)[:20])
def test_daemon_taken_over_by_a_breach_gives_the_core_an_error_alone(junk: Any) -> None:
    async def main() -> None:
        manager = SandboxManager(HttpDoor())
        result = await (await tool_for(manager)).execute(AGENT, {"code": "print(1)"})
        assert (result["success"], result["output"]) == (False, None)
        assert result["error"].startswith("Sandbox Error: ")

    with serving(every_request(lambda *_: junk)):
        asyncio.run(main())


@pytest.mark.requirement("R18")
@pytest.mark.parametrize(
    "junk", [None, [], {}, {"exitCode": 0, "stdout": b"x", "stderr": 5}, {"exitCode": "0"}]
)
def test_service_taken_over_by_a_breach_gives_the_core_an_error_alone(junk: Any) -> None:
    class Service:
        async def runCode(self, request: dict[str, Any]) -> Any:
            return junk

    async def main() -> None:
        result = await (await tool_for(Service())).execute(AGENT, {"code": "print(1)"})
        assert (result["success"], result["output"]) == (False, None)
        assert result["error"].startswith("Sandbox Error: ")

    asyncio.run(main())


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.requirement("R17", "R19")
def test_environment_and_limits_are_those_of_the_service(door: str, world: World) -> None:
    """The daemon has it, for a time, with its limits, and neither code nor a request gets past them."""

    async def body(manager: SandboxManager) -> None:
        assert world.daemon.call("GET", "/environments")["environments"] == []
        await manager.runCode(request("pass"))
        (info,) = world.daemon.call("GET", "/environments")["environments"]
        assert 0 < info["idle"] <= info["lifetime"]
        assert (info["limits"]["memory"], info["limits"]["cpus"]) == (128 << 20, 0.5)
        assert info["network"] == "none"
        greedy = await manager.runCode(request("x = bytearray(256 << 20)\nprint('taken')"))
        assert (greedy["exitCode"] == 0, greedy["stdout"]) == (False, "")
        for more in ({"memory": "1g"}, {"cpus": 8}, {"limits": {"memory": 1 << 30}}):
            with pytest.raises(InvalidRequest, match="there is no argument"):
                await manager.runCode(request("pass", **more))

    world.run(door, body, memory=128 << 20, cpus=0.5)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.requirement("R15")
def test_a_daemon_that_is_gone(door: str, home: Path) -> None:
    address = f"127.0.0.1:{support.free_port()}"
    with started(home, "--grpc", address) as daemon:
        world = World(daemon, address)
        daemon.kill()

    async def main() -> None:
        async with world.manager(door) as manager:
            result = await (await tool_for(manager)).execute(AGENT, {"code": "print(1)"})
            assert (result["success"], result["output"]) == (False, None)
            assert result["error"].startswith("Sandbox Error: ")

    asyncio.run(main())
    with started(home):
        pass  # and removes what the killed one has left


@pytest.mark.root
@pytest.mark.requirement("R8", "R11")
def test_packages_are_installed_before_the_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("pip", "python3-pip")
    port = support.free_port()

    def body(there: Registries) -> None:
        with through_a_socket(("127.0.0.1", port), tmp_path / "grpc.sock") as address:
            world = World(there.daemon, address)
            for door in DOORS:
                world.run(door, partial(install, world))
        assert sum(path.endswith(".whl") for path in there.asked) == 1

    Shelves(tmp_path, None, monkeypatch).run(body, "--grpc", f"127.0.0.1:{port}")


async def install(world: World, manager: SandboxManager) -> None:
    tool = await tool_for(manager)
    first = await tool.execute(AGENT, {"code": "x = 1\nimport tiny"})
    assert "No module named 'tiny'" in str(first["output"]), first
    code = "import tiny\ntiny.main()\nprint(x)"
    for _ in range(2):
        found = await tool.execute(AGENT, {"code": code, "requirements": ["tiny"]})
        assert found["output"] == "from pip\n1\n", found
    (info,) = world.daemon.call("GET", "/environments")["environments"]
    assert info["network"] == "none"
    for name, words in (
        ("skerry-no-such-thing", "No matching distribution found for"),
        ("-e.", "is not a package"),
    ):
        result = await tool.execute(AGENT, {"code": "print(1)", "requirements": [name]})
        assert result["error"] == "Execution failed with non-zero exit code"
        assert words in str(result["output"])
