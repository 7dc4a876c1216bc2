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
from typing import Any, Self

import httpx2
import jsonschema_rs
import pytest
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

import skerry
from skerry.tools import table
from tests import support

TRANSPORTS = ("stdio", "http")
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
SKERRY = [sys.executable, "-m", "skerry.cli"]
INFO = {"name": "test", "version": "1"}


class Raw:
    """One HTTP session, spoken by hand."""

    def __init__(self, url: str, token: str, version: str = "2025-11-25") -> None:
        self._place = url.split("/")[2]
        self._connections: list[http.client.HTTPConnection] = []
        self.headers = {
            "authorization": f"Bearer {token}",
            "content-type": "application/json",
            "accept": "application/json, text/event-stream",
            "mcp-protocol-version": version,
        }
        response = self.send(
            0, "initialize", {"protocolVersion": version, "capabilities": {}, "clientInfo": INFO}
        )
        self.headers["mcp-session-id"] = response.headers["mcp-session-id"]
        list(events(response))
        self.post({"jsonrpc": "2.0", "method": "notifications/initialized"}).read()

    def request(self, method: str, body: str | None = None, **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self._place, timeout=30)
        self._connections.append(connection)
        more = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, "/mcp", body, {**self.headers, **more})
        return connection.getresponse()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.drop()

    def drop(self) -> None:
        """Close all connections, whatever is still to come on them."""
        while self._connections:
            self._connections.pop().close()

    def post(self, message: dict[str, Any]) -> http.client.HTTPResponse:
        return self.request("POST", json.dumps(message))

    def send(self, number: int, method: str, params: dict[str, Any]) -> http.client.HTTPResponse:
        return self.post({"jsonrpc": "2.0", "id": number, "method": method, "params": params})

    def call(self, number: int, name: str, **arguments: Any) -> http.client.HTTPResponse:
        return self.send(number, "tools/call", {"name": name, "arguments": arguments})

    def answer(self, number: int, method: str, params: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = [event for _, event in events(self.send(number, method, params)) if event][-1]
        return found

    def run(self, number: int, command: str) -> dict[str, Any]:
        params = {"name": "environment.execute_command", "arguments": {"command": command}}
        found: dict[str, Any] = self.answer(number, "tools/call", params)["result"]["structuredContent"]
        return found


def events(response: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    """The id and the message of each event."""
    number = ""
    for line in response:
        key, _, value = line.decode().rstrip("\r\n").partition(": ")
        if key == "id":
            number = value
        elif key.startswith("data"):
            yield number, json.loads(value) if value else None


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
        assert [(tool.name, tool.input_schema, tool.output_schema) for tool in tools] == [
            (tool.name, tool.parameters, tool.result) for tool in table.TOOLS
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
        text, is_error = await call(client, "environment.read_file", path=[1])
        assert (is_error, text[:18]) == (True, "Invalid parameters")
        with pytest.raises(
            MCPError, match=r"There is no tool 'nothing'\. Tools: environment\.execute_command"
        ):
            await client.call_tool("nothing", {})

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
        written = asyncio.Event()

        async def tell(progress: float, total: float | None, message: str | None) -> None:
            told.append((progress, message))
            if len(told) == 1:
                await call(client, "environment.write_file", path="go", content="")
                written.set()

        command = "until [ -e go ]; do sleep 0.05; done; echo went"
        result = await client.call_tool(
            "environment.execute_command", {"command": command}, progress_callback=tell
        )
        await written.wait()
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


def test_the_scheme_of_a_token_is_read_in_any_case(home: Path) -> None:
    with http_server(home, token="given-token") as (url, token):
        with Raw(url, token) as session:
            for scheme in ("bearer", "BEARER", "Bearer"):
                session.headers["authorization"] = f"{scheme} {token}"
                assert session.request("GET", last_event_id="0").status == 200
            session.headers["authorization"] = f"Basic {token}"
            assert session.request("GET").status == 401


def test_a_dropped_answer_is_resumed(home: Path) -> None:
    with http_server(home) as (url, token), Raw(url, token) as one, Raw(url, token) as other:
        dropped = one.call(
            7, "environment.execute_command", command="until [ -e go ]; do sleep 0.05; done; echo went"
        )
        last, begun = next(events(dropped))
        assert begun is None
        dropped.close()
        one.drop()
        # Another session numbers its requests the same way, and gets nothing of this one.
        assert other.answer(
            7, "tools/call", {"name": "environment.write_file", "arguments": {"path": "go", "content": ""}}
        )["result"]["structuredContent"] == {"error": False, "message": "File saved successfully."}
        resumed = events(one.request("GET", last_event_id=last))
        answer = next(message for _, message in resumed if message is not None)
        assert answer["id"] == 7
        assert answer["result"]["structuredContent"]["stdout"] == "went\n"
        # Once it is answered, what is sent again ends by itself.
        assert [message for _, message in events(one.request("GET", last_event_id=last)) if message] == [
            answer
        ]
        for unknown in ("999", "x", "9" * 5000):
            assert list(events(other.request("GET", last_event_id=unknown))) == []


def test_a_cursor_that_no_list_has_named_is_refused(home: Path) -> None:
    with http_server(home) as (url, token), Raw(url, token) as session:
        for cursor in ("9" * 5000, "-1", "x", "\u0663", "0"):
            error = session.answer(1, "resources/list", {"cursor": cursor})["error"]
            assert error["code"] == -32602
            assert len(error["message"]) < 500
            assert "there is no page" in error["message"]


def test_calls_that_cannot_be_made_create_no_environment(home: Path) -> None:
    async def body(client: Client) -> None:
        with pytest.raises(MCPError, match="There is no tool"):
            await client.call_tool("nothing", {})
        assert (await client.call_tool("environment.read_file", {"path": 5})).is_error
        assert not (await client.call_tool("execute_code", {"language": "bash", "code": "true"})).is_error
        with skerry.Client(str(home)) as daemon:
            # The program's own, which is removed after the answer, may still be there.
            assert [info for info in daemon.environments() if info.workspace != "program"] == []

    run("stdio", home, body)


def test_results_are_structured_and_tools_have_hints(home: Path) -> None:
    async def body(client: Client) -> None:
        hints = {tool.name: tool.annotations for tool in (await client.list_tools()).tools}
        read = hints["environment.read_file"]
        assert read is not None
        assert (read.read_only_hint, read.destructive_hint, read.open_world_hint) == (True, False, False)
        run_code = hints["environment.execute_command"]
        assert run_code is not None
        assert (run_code.read_only_hint, run_code.destructive_hint, run_code.open_world_hint) == (
            False,
            True,
            True,
        )
        for name, arguments in (
            ("environment.execute_command", {"command": "echo out; sleep 9", "timeout_seconds": 0.5}),
            ("environment.write_file", {"path": "f", "content": "x"}),
            ("environment.read_file", {"path": "f"}),
            ("environment.read_file", {"path": "none"}),
            ("python:execute", {"code": "print(1)\n2"}),
            ("python:execute", {"code": "print(1)\n1/0"}),
        ):
            result = await client.call_tool(name, arguments)
            assert result.structured_content == json.loads(result.content[-1].text)  # type: ignore[union-attr]
            schema = next(tool.result for tool in table.TOOLS if tool.name == name)
            assert schema is not None
            jsonschema_rs.validate(schema, result.structured_content)
        text = await client.call_tool("execute_code", {"language": "bash", "code": "echo hi"})
        assert text.structured_content is None

    run("stdio", home, body)


def test_each_session_has_an_environment_if_asked_for(home: Path) -> None:
    async def body(web: httpx2.AsyncClient, url: str, daemon: skerry.Client) -> None:
        async with Client(streamable_http_client(url, http_client=web)) as one:
            await call(one, "environment.write_file", path="mine", content="x")
            async with Client(streamable_http_client(url, http_client=web)) as two:
                assert (await call(two, "environment.read_file", path="mine"))[0]["error"]
                assert len(daemon.environments()) == 2
            ended(daemon, 1)
            assert (await call(one, "environment.read_file", path="mine"))[0]["content"] == "x"
        ended(daemon, 0)

    async def main(url: str, token: str, daemon: skerry.Client) -> None:
        async with httpx2.AsyncClient(headers={"authorization": f"Bearer {token}"}, timeout=60) as web:
            await body(web, url, daemon)

    with skerry.Client(str(home)) as daemon:
        with http_server(home, "--per-session") as (url, token):
            asyncio.run(main(url, token, daemon))
            with Raw(url, token) as left:
                left.run(1, "true")
            assert len(daemon.environments()) == 1
        assert daemon.environments() == []  # with the server


def ended(daemon: skerry.Client, count: int) -> None:
    """Wait until there are no more environments than this."""
    for _ in daemon.audit(follow=True):
        if len(daemon.environments()) <= count:
            return


def test_a_session_that_nobody_uses_ends_with_its_environment(home: Path) -> None:
    with (
        http_server(home, "--per-session", "--session-idle", "0.5") as (url, token),
        skerry.Client(str(home)) as daemon,
        Raw(url, token) as session,
    ):
        session.run(1, "true")
        assert len(daemon.environments()) == 1
        ended(daemon, 0)
        assert session.call(2, "environment.execute_command", command="true").status == 404


def test_variables_are_in_no_list_of_processes(home: Path, tmp_path: Path) -> None:
    (tmp_path / "variables").write_text("# for the test\nIN_FILE=file-value-1\n\nWITH_EQUALS=a=b\n")
    options = (
        "--env",
        "INHERITED",
        "--env",
        "GIVEN=given-value-2",
        "--env-file",
        str(tmp_path / "variables"),
    )
    env = {**os.environ, "SKERRY_HOME": str(home), "INHERITED": "inherited-value-3"}
    command = [*SKERRY, "mcp", "--listen", "127.0.0.1:0", *options]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            url = re.findall(r"http:\S+", process.stderr.readline())[0]
            token = process.stderr.readline().split("Bearer ")[1].strip()
            assert b"value" not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
            with Raw(url, token) as session:
                told = session.run(1, "echo $INHERITED $GIVEN $IN_FILE $WITH_EQUALS")
            assert told["stdout"] == "inherited-value-3 given-value-2 file-value-1 a=b\n"
        finally:
            process.send_signal(signal.SIGTERM)


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


INSPECTOR = Path(__file__).resolve().parents[2] / ".cache" / "inspector"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_inspector(transport: str, home: Path, tmp_path: Path) -> None:
    if not (INSPECTOR / "installed").exists():
        support.missing("npm could not install the inspector (scripts/setup_test_deps.sh)")
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
