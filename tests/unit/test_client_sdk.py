"""The SDK against a server that does as it is told."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import io
import json
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import skerry
from skerry import errors, models
from skerry.client import autostart
from skerry.client.http1 import Malformed
from tests.unit.scripted_server import Peer, every_request, serving

ROOT = Path(__file__).resolve().parents[2]
INFO = {
    "environment_id": "abc123abc123",
    "state": "running",
    "image": "host",
    "image_digest": "",
    "isolation": "namespace",
    "backend": "namespace",
    "created_at": 1.0,
    "expires_at": 2.0,
    "lifetime": 3600,
    "idle": 900,
    "something_new": True,
}
EXECUTION = {
    "execution_id": "e1",
    "environment_id": "abc123abc123",
    "command": "x",
    "state": "running",
    "started_at": 1.0,
    "pid": 7,
}
ENDED = {
    "execution_id": "e1",
    "outcome": "completed",
    "exit_code": 0,
    "stdout_size": 5,
    "stderr_size": 0,
    "duration_seconds": 0.1,
    "usage": {"cpu_seconds": 0.5},
    "message": "",
}
RESULT = {**ENDED, "stdout": "aGn/", "stdout_encoding": "base64", "stderr": "", "stderr_encoding": "utf-8"}


def test_the_public_names() -> None:
    """What is exported is a promise; this is all of it, and all of it is there."""
    client = {"Client", "Environment", "Files", "Process", "Session", "Watch"}
    expected = {"__version__"} | client | {f"Async{name}" for name in client}
    expected |= {cls.__name__ for cls in vars(errors).values() if isinstance(cls, type)}
    expected |= {
        name
        for name, cls in vars(models).items()
        if isinstance(cls, type) and cls.__module__ == models.__name__ and not name.startswith("_")
    }
    assert set(skerry.__all__) == expected
    assert sorted(skerry.__all__) == skerry.__all__ == dir(skerry)
    for name in skerry.__all__:
        assert getattr(skerry, name) is not None
    with pytest.raises(AttributeError):
        skerry.nothing  # noqa: B018


@pytest.mark.parametrize("module", ["skerry", "skerry.cli.run", "skerry.client.sync.transport"])
def test_importing_is_light(module: str) -> None:
    """Each of these would be paid for by every `skerry run`."""
    heavy = {"asyncio", "dataclasses", "typing", "contextlib", "shutil", "subprocess", "hashlib", "urllib"}
    heavy |= {"inspect", "threading", "tarfile", "pydantic", "base64", "tempfile", "http"}
    heavy |= {"ssl", "skerry.client.remote", "skerry.client.tls"}
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); import {module}; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-ISc", code], text=True).split()
    assert heavy & set(loaded) == set()


def test_what_the_generator_does() -> None:
    spec = importlib.util.spec_from_file_location("generate_sync", ROOT / "scripts" / "generate_sync.py")
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    source = '''
class AsyncThing:
    """An `AsyncThing`: `async with await make()`. One task."""
    async def __aenter__(self) -> AsyncIterator[int]:
        async with a, b:  # await it
            return [x async for x in await self.y(f(await z))]
        awaiting = asynchronous = Asynchron
'''
    expected = '''
class Thing:
    """An `Thing`: `with make()`. One thread."""
    def __enter__(self) -> Iterator[int]:
        with a, b:  # it
            return [x for x in self.y(f(z))]
        awaiting = asynchronous = Asynchron
'''
    assert generator.convert(source) == expected


def recorded(
    answers: dict[str, Any],
) -> tuple[list[tuple[str, Any]], Callable[[Peer], None]]:
    """A script that answers by "METHOD path", and a list of what it was asked."""
    seen: list[tuple[str, Any]] = []

    def answer(method: str, target: str, body: bytes) -> Any:
        seen.append((f"{method} {target}", json.loads(body) if body[:1] == b"{" else body))
        return answers[f"{method} {target.partition('?')[0]}"]

    return seen, every_request(answer)


def test_environments_of_every_page() -> None:
    asked: list[str] = []

    def answer(method: str, target: str, body: bytes) -> Any:
        asked.append(target)
        return {"environments": [INFO], "next": "1.5_abc" if len(asked) == 1 else None}

    with serving(every_request(answer)), skerry.Client() as client:
        found = client.environments(state="running", name="web", image="host")
    assert [info.environment_id for info in found] == ["abc123abc123"] * 2
    wanted = "/environments?state=running&name=web&image=host"
    assert asked == [wanted, f"{wanted}&after=1.5_abc"]


ENV = "/environments/abc123abc123"
BASIC = {
    "POST /environments": (INFO, 201),
    f"GET {ENV}": INFO,
    f"DELETE {ENV}": {"environment_id": "abc123abc123", "deleted": True},
}


def test_an_environment_lives_as_long_as_its_block() -> None:
    seen, script = recorded({**BASIC, f"POST {ENV}/execute": RESULT})
    with serving(script):
        with skerry.Environment(memory="512m", cpus=0.5, env={"A": "1"}) as env:
            assert env.id == "abc123abc123"
            result = env.execute("pwd", timeout=5, stdin=b"\xff", cwd="/tmp", env={"B": "2"})
            env.run(["true"], user="root", output_limit=10, stdin="text")
        with pytest.raises(ZeroDivisionError), skerry.Environment():
            _ = 1 / 0
    assert (result.stdout_bytes, result.outcome, result.ok) == (b"hi\xff", skerry.Outcome.COMPLETED, True)
    assert (result.usage.cpu_seconds, result.stdout_truncated) == (0.5, True)
    assert seen == [
        ("POST /environments", {"image": "host", "memory": "512m", "cpus": 0.5, "env": {"A": "1"}}),
        (
            f"POST {ENV}/execute",
            {
                "command": "pwd",
                "shell": "main",
                "timeout": 5,
                "stdin": base64.b64encode(b"\xff").decode(),
                "stdin_encoding": "base64",
                "cwd": "/tmp",
                "env": {"B": "2"},
            },
        ),
        (
            f"POST {ENV}/execute",
            {
                "argv": ["true"],
                "user": "root",
                "output_limit": 10,
                "stdin": "text",
                "stdin_encoding": "utf-8",
            },
        ),
        (f"DELETE {ENV}", b""),
        ("POST /environments", {"image": "host"}),
        (f"DELETE {ENV}", b""),
    ]


def test_an_environment_that_was_found_is_not_deleted() -> None:
    seen, script = recorded({"GET /environments/web": INFO, **BASIC})
    with serving(script), skerry.Environment.get("web") as env:
        assert env.info().image == "host"
    assert [request for request, _ in seen] == ["GET /environments/web", f"GET {ENV}"]


def test_an_environment_that_is_not_there_yet() -> None:
    with pytest.raises(skerry.InvalidRequest, match="not been created"):
        _ = skerry.Environment().id
    with pytest.raises(skerry.InvalidRequest):
        skerry.Environment.get("")


def test_deleting_what_is_gone_is_fine() -> None:
    gone = (skerry.EnvironmentNotFound("gone").to_dict(), 404)
    _, script = recorded({**BASIC, f"DELETE {ENV}": gone})
    with serving(script):
        env = skerry.Environment().create()
        env.delete()
        with pytest.raises(skerry.InvalidRequest, match="already"):
            env.create()


def test_the_rest_of_an_environment() -> None:
    seen, script = recorded(
        {
            **BASIC,
            f"GET {ENV}/usage": {"pids": 3},
            f"POST {ENV}/heartbeat": {"expires_at": 9.5},
            f"GET {ENV}/executions": {"executions": [EXECUTION]},
        }
    )
    with serving(script), skerry.Environment() as env:
        assert env.usage().pids == 3
        assert env.heartbeat(60) == 9.5
        assert env.executions()[0].pid == 7
    assert (f"POST {ENV}/heartbeat", {"lifetime": 60}) in seen


def attached(script: Callable[[Peer, dict[str, Any]], None]) -> Callable[[Peer], None]:
    """A script for /attach; other connections create and delete the environment."""

    def run(peer: Peer) -> None:
        assert peer.upgrade() == f"{ENV}/attach"
        opcode, request = peer.take_frame()
        assert opcode == 1
        script(peer, json.loads(request))

    return every_request(lambda method, target, body: BASIC[f"{method} {target}"], "/attach", run)


def test_a_process() -> None:
    sent: list[tuple[int, bytes]] = []

    def script(peer: Peer, request: dict[str, Any]) -> None:
        assert request == {"argv": ["cat"], "stdin": True, "pty": {"rows": 10, "cols": 20}}
        peer.send_event(event="started", execution=EXECUTION)
        peer.send_frame(2, b"\x01out")
        peer.send_frame(2, b"\x02err")
        sent.extend(peer.take_frame() for _ in range(6))
        peer.send_frame(2, b"\x01late")
        peer.send_event(event="ended", result={**ENDED, "exit_code": 3, "outcome": "failed"})
        peer.send_frame(8, b"\x03\xe8")

    with serving(attached(script)), skerry.Environment() as env:
        with env.start(["cat"], stdin=True, pty=(10, 20)) as process:
            assert (process.id, process.pid) == ("e1", 7)
            output = iter(process)
            assert [next(output), next(output)] == [("stdout", b"out"), ("stderr", b"err")]
            process.write(b"x" * 65537)
            process.close_stdin()
            process.signal(2)
            process.resize(3, 4)
            process.kill()
            result = process.wait()
            assert list(process) == []
            process.write(b"nobody hears this")
        assert (result.exit_code, result.stdout, result.stderr) == (3, "late", "")
    assert [payload for _, payload in sent[:3]] == [b"\0" + b"x" * 65536, b"\0x", b"\0"]
    assert [json.loads(payload) for _, payload in sent[3:]] == [
        {"signal": 2},
        {"resize": [3, 4]},
        {"kill": True},
    ]


def test_wait_keeps_no_more_than_a_mebibyte() -> None:
    def script(peer: Peer, request: dict[str, Any]) -> None:
        peer.send_event(event="started", execution=EXECUTION)
        for _ in range(17):
            peer.send_frame(2, b"\x01" + b"x" * 65536)
        peer.send_event(event="ended", result={**ENDED, "stdout_size": 17 * 65536})

    with serving(attached(script)), skerry.Environment() as env, env.start("yes") as process:
        result = process.wait()
        assert (len(result.stdout_bytes), result.stdout_size) == (1 << 20, 17 * 65536)
        assert result.stdout_truncated


def test_wait_can_be_tried_again() -> None:
    go = threading.Event()

    def script(peer: Peer, request: dict[str, Any]) -> None:
        peer.send_event(event="started", execution=EXECUTION)
        peer.send_frame(2, b"\x01early ")
        go.wait(10)
        peer.send_frame(2, b"\x01late")
        peer.send_event(event="ended", result=ENDED)

    with serving(attached(script)), skerry.Environment() as env, env.start("x") as process:
        with pytest.raises(TimeoutError):
            process.wait(0.05)
        go.set()
        assert process.wait(10).stdout == "early late"


@pytest.mark.parametrize("started", [True, False])
def test_the_end_of_the_block_kills_what_was_started_and_leaves_what_was_found(started: bool) -> None:
    heard: list[bytes] = []

    def script(peer: Peer, request: dict[str, Any]) -> None:
        assert request == ({"command": "sleep 9", "stdin": False} if started else {"execution_id": "e1"})
        peer.send_event(event="started", execution=EXECUTION)
        try:
            heard.append(peer.take_frame()[1])
        except EOFError:
            heard.append(b"gone")
            return
        peer.send_frame(2, b"\x01unread")
        peer.send_event(event="ended", result=ENDED)

    with serving(attached(script)), skerry.Environment() as env:
        with env.start("sleep 9") if started else env.attach("e1"):
            pass
    assert heard == [b'{"kill": true}' if started else b"gone"]


def test_a_process_that_cannot_start() -> None:
    def script(peer: Peer, request: dict[str, Any]) -> None:
        peer.send_event(event="error", error=skerry.ExecutionNotFound("no e9").to_dict())

    with serving(attached(script)), skerry.Environment() as env:
        with pytest.raises(skerry.ExecutionNotFound, match="no e9"):
            env.attach("e9")


@pytest.mark.parametrize("answer", [b"[]", b"{", b'{"event": "ended"}'])
def test_an_attachment_that_makes_no_sense(answer: bytes) -> None:
    with serving(attached(lambda peer, _: peer.send_frame(1, answer))), skerry.Environment() as env:
        with pytest.raises(Malformed):
            env.start("x")


FILE = {"path": "a/b", "type": "file", "size": 2, "mode": 0o644, "modified_at": 1.0}


def test_files() -> None:
    files = f"{ENV}/files"
    seen, script = recorded(
        {
            **BASIC,
            f"GET {files}/read": b"h\xc3\xa9",
            f"POST {files}/write": {"error": False},
            f"GET {files}/stat": FILE,
            f"GET {files}/list": {"entries": [FILE]},
            f"POST {files}/mkdir": {},
            f"POST {files}/rename": {},
            f"DELETE {files}": {},
        }
    )
    odd = b"\xff\n".decode(errors="surrogateescape")
    with serving(script), skerry.Environment() as env:
        assert env.files.read("a b") == "hé"
        assert env.files.read_bytes("x", offset=5, length=0) == b"h\xc3\xa9"
        env.files.write(odd, "hé")
        env.files.write("x", b"\xff", offset=3)
        assert env.files.stat("x").size == 2
        assert env.files.exists("x")
        assert env.files.list(recursive=True)[0].name == "b"
        env.files.mkdir("d")
        env.files.rename("a", "b")
        env.files.remove("d", recursive=True)
    assert seen[1:-1] == [
        (f"GET {files}/read?path=a%20b", b""),
        (f"GET {files}/read?path=x&offset=5&length=0", b""),
        (f"POST {files}/write?path=%FF%0A", b"h\xc3\xa9"),
        (f"POST {files}/write?path=x&offset=3", b"\xff"),
        (f"GET {files}/stat?path=x", b""),
        (f"GET {files}/stat?path=x", b""),
        (f"GET {files}/list?path=.&recursive=1", b""),
        (f"POST {files}/mkdir", {"path": "d"}),
        (f"POST {files}/rename", {"source": "a", "target": "b"}),
        (f"DELETE {files}?path=d&recursive=1", b""),
    ]


def test_files_that_are_not_there_or_not_text() -> None:
    missing = (skerry.FileMissing("no x").to_dict(), 404)
    _, script = recorded({**BASIC, f"GET {ENV}/files/stat": missing, f"GET {ENV}/files/read": b"\xff"})
    with serving(script), skerry.Environment() as env:
        assert not env.files.exists("x")
        with pytest.raises(skerry.InvalidRequest, match="not UTF-8"):
            env.files.read("x")


def test_copying_in_and_out(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_text("1")
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        tar.add(tmp_path / "d", "d")
        link = tarfile.TarInfo("d/out")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    archive = f"{ENV}/files/archive"
    seen, script = recorded(
        {**BASIC, f"GET {archive}": stream.getvalue(), f"PUT {archive}": {}, f"POST {ENV}/files/mkdir": {}}
    )
    with serving(script), skerry.Environment() as env:
        left_out = [models.LeftOut("d/out", "leads outside")]
        assert env.files.download("src/d/", tmp_path / "copy") == left_out
        assert env.files.download(".", tmp_path / "all") == left_out
        assert env.files.upload(tmp_path / "d", "x/y") == []
        env.files.upload(tmp_path / "d" / "f", "x/g")
        env.files.upload(tmp_path / "d" / "f", "g")
        with pytest.raises(FileNotFoundError):
            env.files.upload(tmp_path / "nothing", "g")
    assert (tmp_path / "copy" / "f").read_text() == "1"
    assert (tmp_path / "all" / "d" / "f").read_text() == "1"
    asked = [request for request, _ in seen[1:-1]]
    assert asked == [
        f"GET {archive}?path=src%2Fd",
        f"GET {archive}?path=.&contents=1",
        f"POST {ENV}/files/mkdir",
        f"PUT {archive}?path=x%2Fy",
        f"POST {ENV}/files/mkdir",
        f"PUT {archive}?path=x",
        f"PUT {archive}?path=.",
    ]
    names = []
    for request, body in seen:
        if request.startswith("PUT"):
            with tarfile.open(fileobj=io.BytesIO(body)) as tar:
                names.append(tar.getnames())
    assert names == [[".", "./f"], ["g"], ["g"]]


def test_watching() -> None:
    wrote = threading.Event()

    def script(peer: Peer) -> None:
        assert peer.request()[1] == f"{ENV}/files/watch?path=.&recursive=1"
        peer.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for line in ({"kind": "ready", "path": ""}, {"kind": "created", "path": "x", "cookie": 0}):
            data = json.dumps(line).encode() + b"\n"
            peer.send(b"%x\r\n%b\r\n" % (len(data), data))
            wrote.wait(10)
        with pytest.raises(EOFError):
            peer.take(1)

    answers = every_request(lambda method, target, body: BASIC[f"{method} {target}"], "/watch", script)
    with serving(answers), skerry.Environment() as env:
        with env.files.watch() as changes:
            wrote.set()
            assert next(iter(changes)) == skerry.FileEvent("created", "x", 0)


IMAGE = {"name": "dev", "digest": "sha256:1", "kind": "rootfs", "size": 5}


def lines(*rows: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def test_the_client(tmp_path: Path) -> None:
    built = lines({"step": "unpack", "fraction": 0.5}, {"image": IMAGE})
    (tmp_path / "archive").write_bytes(b"x" * 300_000)
    seen, script = recorded(
        {
            "GET /version": {"version": "1", "pid": 1},
            "GET /environments": {"environments": [INFO]},
            "GET /images": {"images": [IMAGE], "definitions": []},
            "GET /images/dev": IMAGE,
            "DELETE /images/dev": {},
            "POST /images/build": built,
            "POST /images/import": built,
        }
    )
    steps: list[tuple[str, float]] = []
    with serving(script), skerry.Client() as client:
        assert client.version()["pid"] == 1
        assert client.environments(ended=True)[0].environment_id == "abc123abc123"
        assert client.images()[0].name == client.image("dev").name == "dev"
        client.remove_image("dev")
        assert client.build_image("dev", lambda *step: steps.append(step)).size == 5
        assert client.import_image(tmp_path / "archive", "dev").size == 5
    assert steps == [("unpack", 0.5)]
    assert seen[1][0] == "GET /environments?all=1"
    assert seen[-1] == ("POST /images/import?name=dev", b"x" * 300_000)


def test_an_image_that_cannot_be_built() -> None:
    failed = lines({"step": "x", "fraction": 0}, {"error": skerry.ImageBuildFailed("no network").to_dict()})
    _, script = recorded({"POST /images/build": failed})
    with serving(script), skerry.Client() as client, pytest.raises(skerry.ImageBuildFailed, match="network"):
        client.build_image("dev")
    _, script = recorded({"POST /images/build": lines({"step": "x", "fraction": 0})})
    with (
        serving(script),
        skerry.Client() as client,
        pytest.raises(skerry.PlatformError, match="before the build ended"),
    ):
        client.build_image("dev")


def test_a_daemon_that_says_it_stops_and_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autostart, "STOP_SECONDS", 0.05)
    seen, script = recorded({"POST /stop": {"stopping": True}})
    with serving(script), skerry.Client() as client, pytest.raises(skerry.PlatformError, match="not ended"):
        client.stop(force=True)
    assert seen == [("POST /stop", {"force": True})]


def test_stopping_nothing_starts_nothing(home: Path) -> None:
    assert not skerry.Client().stop()
    assert list(home.iterdir()) == []


def test_the_asynchronous_one() -> None:
    """Generated from one source, so one walk through it is enough."""

    def script(peer: Peer, request: dict[str, Any]) -> None:
        peer.send_event(event="started", execution=EXECUTION)
        peer.send_frame(2, b"\x01out")
        assert json.loads(peer.take_frame()[1]) == {"kill": True}
        peer.send_event(event="ended", result={**ENDED, "exit_code": 137, "outcome": "signaled"})

    async def work() -> None:
        async with skerry.AsyncEnvironment() as env:
            assert (await env.info()).image == "host"
            async with await env.start("x") as process:
                async for stream, data in process:
                    assert (stream, data) == ("stdout", b"out")
                    break
                await process.kill()
                assert (await process.wait()).exit_code == 137

    with serving(attached(script)):
        asyncio.run(work())
