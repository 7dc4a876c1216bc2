"""The MCP server with the official Python client, by both ways in, and with the official inspector."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

import skerry
from skerry.tools import table

TRANSPORTS = ("stdio", "http")
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
SKERRY = [sys.executable, "-m", "skerry.cli"]


@contextmanager
def http_server(home: Path, *options: str, token: str = "") -> Iterator[tuple[str, str]]:
    """A server on a free port: its URL and its token, which may be given. It is ended by SIGTERM."""
    command = [*SKERRY, "mcp", "--listen", "127.0.0.1:0", *options]
    env = {**os.environ, "SKERRY_HOME": str(home), "SKERRY_MCP_TOKEN": token}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            url = re.findall(r"http:\S+", process.stderr.readline())[0]
            yield url, token or process.stderr.readline().split("Bearer ")[1].strip()
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0, process.stderr.read()


@asynccontextmanager
async def connected(transport: str, home: Path, *options: str) -> AsyncIterator[Client]:
    if transport == "stdio":
        words = [*SKERRY, "mcp", *options]
        parameters = StdioServerParameters(
            command=words[0], args=words[1:], env={**os.environ, "SKERRY_HOME": str(home)}
        )
        async with Client(stdio_client(parameters)) as client:
            yield client
        return
    with http_server(home, *options) as (url, token):
        async with httpx2.AsyncClient(headers={"authorization": f"Bearer {token}"}, timeout=60) as web:
            async with Client(streamable_http_client(url, http_client=web)) as client:
                yield client


def run(transport: str, home: Path, body: Callable[[Client], Awaitable[None]], *options: str) -> None:
    """Do something with a server, which leaves no more environments behind than there were."""

    async def main() -> None:
        async with connected(transport, home, *options) as client:
            await body(client)

    with skerry.Client(str(home)) as client:
        before = client.environments()
        asyncio.run(main())
        assert [info.environment_id for info in client.environments()] == [
            info.environment_id for info in before
        ]


async def call(client: Client, name: str, **arguments: Any) -> tuple[Any, bool]:
    result = await client.call_tool(name, arguments)
    text = result.content[-1].text  # type: ignore[union-attr]
    return (json.loads(text) if text.startswith("{") else text), result.is_error


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.requirement("R43", "R44", "R45", "R46", "R47")
def test_tools(transport: str, home: Path) -> None:
    async def body(client: Client) -> None:
        tools = (await client.list_tools()).tools
        assert [(tool.name, tool.input_schema) for tool in tools] == [
            (tool.name, tool.parameters) for tool in table.TOOLS
        ]
        saved = {"error": False, "message": "File saved successfully."}
        assert await call(client, "environment.write_file", path="a/b.py", content="print(6*7)") == (
            saved,
            False,
        )
        await call(client, "environment.execute_command", command="cd a")
        done = {"error": True, "stdout": "42\n", "stderr": "", "exit_code": 3}
        answer = await call(client, "environment.execute_command", command="python3 b.py; exit 3")
        assert answer == (done, True)
        assert await call(client, "environment.read_file", path="a/b.py") == (
            {"error": False, "content": "print(6*7)"},
            False,
        )
        for name, arguments in (("nothing", {}), ("environment.read_file", {"path": [1]})):
            text, is_error = await call(client, name, **arguments)
            assert (is_error, text[:5]) in ((True, "There"), (True, "Inval"))

    run(transport, home, body)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_resources(transport: str, home: Path) -> None:
    async def body(client: Client) -> None:
        await call(client, "environment.write_file", path="dir/text ä.md", content="# Hi")
        write = f"import base64; open('dot.png', 'wb').write(base64.b64decode({base64.b64encode(PNG)!r}))"
        await call(client, "environment.execute_command", command=f'python3 -c "{write}"')
        listed = {resource.name: resource for resource in (await client.list_resources()).resources}
        assert set(listed) == {"images", "dir/text ä.md", "dot.png"}
        text = (await client.read_resource(listed["dir/text ä.md"].uri)).contents[0]
        assert (text.text, text.mime_type) == ("# Hi", "text/markdown")  # type: ignore[union-attr]
        picture = (await client.read_resource(listed["dot.png"].uri)).contents[0]
        assert picture.mime_type == "image/png"
        assert base64.b64decode(picture.blob) == PNG  # type: ignore[union-attr]
        images = (await client.read_resource("skerry://images")).contents[0]
        assert json.loads(images.text)[0]["name"] == "host"  # type: ignore[union-attr]
        templates = (await client.list_resource_templates()).resource_templates
        assert [template.uri_template for template in templates] == ["skerry://workspace/{+path}"]
        for uri in ("skerry://workspace/none", "skerry://workspace/../etc/passwd", "file:///etc/passwd"):
            with pytest.raises(MCPError):
                await client.read_resource(uri)

    run(transport, home, body)


def test_a_figure_is_a_picture(home: Path) -> None:
    async def body(client: Client) -> None:
        code = f"class Figure:\n    def _repr_png_(self): return {PNG!r}\nFigure()"
        text, picture = (await client.call_tool("python:execute", {"code": code})).content
        assert json.loads(text.text)["success"]  # type: ignore[union-attr]
        assert picture.mime_type == "image/png"  # type: ignore[union-attr]
        assert base64.b64decode(picture.data) == PNG  # type: ignore[union-attr]

    run("stdio", home, body)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_calls_at_once_share_one_environment(transport: str, home: Path) -> None:
    async def body(client: Client) -> None:
        calls = (
            call(client, "environment.execute_command", command=f"touch {number}; hostname")
            for number in range(8)
        )
        answers = await asyncio.gather(*calls)
        assert len({answer["stdout"] for answer, _ in answers}) == 1
        with skerry.Client(str(home)) as daemon:
            assert len(daemon.environments()) == 1
        listed = (await call(client, "environment.execute_command", command="ls"))[0]["stdout"]
        assert listed.split() == [str(number) for number in range(8)]

    run(transport, home, body)


def test_many_files_come_in_pages(home: Path) -> None:
    async def body(client: Client) -> None:
        await call(client, "environment.execute_command", command="touch $(seq 1200)")
        names, cursor = [], None
        while True:
            page = await client.list_resources(cursor=cursor)
            names += [resource.name for resource in page.resources]
            cursor = page.next_cursor
            if cursor is None:
                break
        assert sorted(names) == sorted(["images", *(str(number) for number in range(1, 1201))])

    run("stdio", home, body)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_long_run_tells_of_its_progress(transport: str, home: Path) -> None:
    async def body(client: Client) -> None:
        told: list[tuple[float, str | None]] = []

        async def tell(progress: float, total: float | None, message: str | None) -> None:
            told.append((progress, message))
            await call(client, "environment.write_file", path="go", content="")

        command = "until [ -e go ]; do sleep 0.05; done; echo went"
        result = await client.call_tool(
            "environment.execute_command", {"command": command}, progress_callback=tell
        )
        assert "went" in str(result.content)
        assert told[0][0] > 0
        assert "running for" in str(told[0][1])

    run(transport, home, body)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_giving_up_kills_the_command(transport: str, home: Path) -> None:
    async def body(client: Client) -> None:
        begun = asyncio.Event()

        async def tell(progress: float, total: float | None, message: str | None) -> None:
            begun.set()

        running = asyncio.ensure_future(
            client.call_tool("environment.execute_command", {"command": "sleep 601"}, progress_callback=tell)
        )
        await begun.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        # Commands of one shell queue up: this one runs when the other is gone.
        assert (await call(client, "environment.execute_command", command="echo free"))[0][
            "stdout"
        ] == "free\n"
        done, _ = await call(client, "environment.execute_command", command="pgrep -f 'sleep 60[1]'")
        assert done["exit_code"] == 1

    run(transport, home, body)


def test_an_environment_that_has_ended_is_replaced_and_the_model_is_told(home: Path) -> None:
    async def body(client: Client) -> None:
        await call(client, "environment.write_file", path="file", content="x")
        with skerry.Client(str(home)) as daemon:
            for info in daemon.environments():
                assert info.limits["memory"] == 256 << 20
                skerry.Environment.get(info.environment_id, daemon).delete()
        result = await client.call_tool("environment.read_file", {"path": "file"})
        first, second = (content.text for content in result.content)  # type: ignore[union-attr]
        assert "This is a new one: files and state are gone." in first
        assert json.loads(second)["error"]

    run("stdio", home, body, "--memory", "256m")


def test_an_environment_that_exists_is_used_and_left(home: Path) -> None:
    async def body(client: Client) -> None:
        assert (await call(client, "environment.read_file", path="file"))[0]["content"] == "kept"

    with skerry.Client(str(home)) as daemon, skerry.Environment(name="mine", client=daemon) as env:
        env.files.write("file", "kept")
        run("stdio", home, body, "mine")
        assert env.files.read("file") == "kept"


@pytest.mark.parametrize("given", ["", "given-token"])
def test_http_is_for_those_who_know_the_token_and_call_it_by_its_name(given: str, home: Path) -> None:
    with http_server(home, token=given) as (url, token):
        place = url.split("/")[2]
        port = place.rpartition(":")[2]
        message = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
        good = {
            "host": place,
            "authorization": f"Bearer {token}",
            "content-type": "application/json",
            "accept": "application/json, text/event-stream",
        }

        def status(**changed: str | None) -> int:
            headers = {name: value for name, value in {**good, **changed}.items() if value is not None}
            connection = http.client.HTTPConnection(place, timeout=30)
            try:
                connection.request("POST", "/mcp", json.dumps(message), headers)
                return connection.getresponse().status
            finally:
                connection.close()

        accepted = status()
        assert accepted not in (401, 403, 421)
        assert status(origin=f"http://localhost:{port}") == accepted
        assert status(authorization=None) == 401
        assert status(authorization="Bearer wrong") == 401
        assert status(authorization="Bearer ä") == 401
        assert status(host=f"evil.example:{port}") == 421
        assert status(origin="http://evil.example") == 403
        assert status(origin=f"http://127.0.0.1:{int(port) + 1}") == 403


@pytest.mark.parametrize("place", ["0.0.0.0:0", "example.com:80", "127.0.0.1", "::1:x"])
def test_others_are_not_listened_to(place: str, home: Path) -> None:
    done = subprocess.run([*SKERRY, "mcp", "--listen", place], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "is no address of this machine alone" in done.stderr


def test_a_signal_ends_a_server_on_standard_input(home: Path) -> None:
    with subprocess.Popen([*SKERRY, "mcp"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            for number, method, params in (
                (1, "initialize", {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": INFO}),
                (2, "tools/call", {"name": "environment.execute_command", "arguments": {"command": "true"}}),
            ):
                message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
                process.stdin.write(json.dumps(message).encode() + b"\n")
                process.stdin.flush()
                assert json.loads(process.stdout.readline())["id"] == number
                if number == 1:
                    process.stdin.write(b'{"jsonrpc": "2.0", "method": "notifications/initialized"}\n')
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    with skerry.Client(str(home)) as client:
        assert client.environments() == []


INFO = {"name": "test", "version": "1"}
INSPECTOR = Path(__file__).resolve().parents[2] / ".cache" / "inspector"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_inspector(transport: str, home: Path, tmp_path: Path) -> None:
    if not (INSPECTOR / "installed").exists():
        pytest.skip("npm could not install the inspector (scripts/setup_test_deps.sh)")
    programs = INSPECTOR / "node_modules" / ".bin"
    env = {**os.environ, "HOME": str(tmp_path), "PATH": f"{programs}:{os.environ['PATH']}"}

    def inspect(*words: str) -> Any:
        done = subprocess.run(
            [programs / "mcp-inspector", "--cli", *words],
            capture_output=True,
            text=True,
            timeout=90,
            stdin=subprocess.DEVNULL,
            env=env,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def look(*target: str) -> None:
        tools = inspect("--method", "tools/list", *target)["tools"]
        assert [tool["name"] for tool in tools] == [tool.name for tool in table.TOOLS]
        words = ("--tool-name", "environment.execute_command", "--tool-arg", "command=echo inspected")
        result = inspect("--method", "tools/call", *words, *target)
        assert json.loads(result["content"][0]["text"])["stdout"] == "inspected\n"

    if transport == "stdio":
        look("-e", f"SKERRY_HOME={home}", "--", *SKERRY, "mcp")
        return
    with http_server(home) as (url, token):
        look("--transport", "http", "--header", f"Authorization: Bearer {token}", "--server-url", url)
