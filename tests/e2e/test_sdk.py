"""The SDK with a real daemon: what a program that uses it relies on."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import skerry
from tests import support
from tests.e2e.elsewhere import DOORS, daemon_for_others


@pytest.fixture(scope="module", params=support.first_of(["home", *DOORS]))
def client(request: pytest.FixtureRequest) -> Iterator[skerry.Client]:
    """A daemon that starts by itself, and one for others, by each of its doors."""
    if request.param == "home":
        with support.temporary_home() as home, skerry.Client(str(home)) as client:
            yield client
        return
    with daemon_for_others(request.param) as there:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SKERRY_CA", there.variables.get("SKERRY_CA", ""))
            client = skerry.Client(url=there.url, token=there.token)
        with client:
            yield client


@pytest.fixture
def env(client: skerry.Client) -> Iterator[skerry.Environment]:
    with skerry.Environment(memory="256m", client=client) as env:
        yield env


def test_the_example(client: skerry.Client) -> None:
    with skerry.Environment(memory="512m", cpus=1, lifetime=600, client=client) as env:
        env.files.mkdir("src")
        env.execute("cd src && export A=1")
        result = env.execute("pwd; echo $A")
        assert (result.stdout, result.stderr, result.exit_code) == ("/workspace/src\n1\n", "", 0)
        assert result.outcome == skerry.Outcome.COMPLETED
        env.files.write("a/b.txt", "hi")
        assert env.files.read("a/b.txt") == "hi"
        with env.start("python3 -u -m http.server 8000") as process:
            assert b"Serving HTTP" in next(iter(process))[1]
            fetch = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8000/a/b.txt').read())"
            assert env.run(["python3", "-c", fetch]).stdout == "b'hi'\n"
        assert env.run(["pgrep", "-f", "http[.]server"]).exit_code != 0
    assert client.environments() == []
    with pytest.raises((skerry.EnvironmentNotFound, skerry.EnvironmentEnded)):
        env.execute("true")


def test_an_environment_is_gone_after_an_exception(client: skerry.Client) -> None:
    with pytest.raises(ZeroDivisionError), skerry.Environment(client=client):
        _ = 1 / 0
    assert client.environments() == []


def test_an_environment_can_be_found_again(client: skerry.Client, env: skerry.Environment) -> None:
    env.files.write("f", "1")
    for ref in (env.id, env.id[:5]):
        with skerry.Environment.get(ref, client=client) as same:
            assert same.files.read("f") == "1"
    assert [info.environment_id for info in client.environments()] == [env.id]
    with pytest.raises(skerry.EnvironmentNotFound):
        skerry.Environment.get("nothing", client=client)


def test_info_usage_heartbeat(env: skerry.Environment) -> None:
    info = env.info()
    assert (info.state, info.limits["memory"], info.isolation) == (
        skerry.State.RUNNING,
        256 << 20,
        "namespace",
    )
    assert info.enforced
    before = info.expires_at
    assert env.heartbeat(lifetime=info.lifetime * 2) > before
    (pids,) = [row for row in info.enforced if row["name"] == "pids"]
    assert pids["enforced"] == (env.usage().pids is not None)


def test_results(env: skerry.Environment) -> None:
    assert env.execute("exit 3").exit_code == 3
    assert env.run(["sh", "-c", "kill -9 $$"]).outcome == skerry.Outcome.SIGNALED
    assert env.execute("sleep 60", timeout=0.2).outcome == skerry.Outcome.TIMED_OUT
    assert env.run(["no-such-program"]).exit_code == 127
    result = env.run(["cat"], stdin=bytes(range(256)))
    assert result.stdout_bytes == bytes(range(256))
    assert env.run(["cat"], stdin="é").stdout == "é"
    result = env.execute("yes | head -c 100000", output_limit=1000)
    assert (len(result.stdout_bytes), result.stdout_size, result.stdout_truncated) == (1000, 100_000, True)
    assert env.run(["sh", "-c", "echo $A $PWD"], env={"A": "1"}, cwd="/tmp").stdout == "1 /tmp\n"
    assert env.execute("id -u", user="root", shell="other").stdout == "0\n"


def test_a_call_that_is_given_up_kills_its_command(env: skerry.Environment, client: skerry.Client) -> None:
    async def work() -> None:
        async with skerry.AsyncClient(client.version()["home"]) as other:
            same = await skerry.AsyncEnvironment.get(env.id, client=other)
            call = asyncio.create_task(same.run(["sh", "-c", "touch begun; sleep 100"]))
            while not await same.files.exists("begun"):
                pass
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            while (await same.run(["pgrep", "-x", "sleep"])).exit_code == 0:
                pass

    asyncio.run(work())


def test_files(env: skerry.Environment, tmp_path: Path) -> None:
    files = env.files
    odd = b"odd \xff\n\x1b".decode(errors="surrogateescape")
    files.write(odd, bytes(range(256)))
    assert files.read_bytes(odd) == bytes(range(256))
    assert files.read_bytes(odd, offset=10, length=3) == b"\x0a\x0b\x0c"
    files.write(odd, b"XYZ", offset=1)
    assert files.read_bytes(odd, length=5) == b"\0XYZ\x04"
    assert (files.stat(odd).size, files.stat(odd).type) == (256, "file")
    assert [info.name for info in files.list()] == [odd]
    files.mkdir("d/e")
    files.rename(odd, "d/e/f")
    assert [info.name for info in files.list("d", recursive=True)] == ["e", "f"]
    assert files.exists("d/e/f")
    assert not files.exists(odd)
    with pytest.raises(skerry.FileConflict):
        files.remove("d")
    files.remove("d", recursive=True)
    assert files.list() == []
    files.write("x", b"\xff")
    with pytest.raises(skerry.InvalidRequest, match="UTF-8"):
        files.read("x")
    for path in ("../../etc/shadow", "/etc/shadow"):
        with pytest.raises(skerry.SkerryError) as caught:
            files.read(path)
        assert caught.value.status in (400, 403, 404)


def test_a_large_file(env: skerry.Environment) -> None:
    data = os.urandom(8 << 20)
    env.files.write("big", data)
    assert env.files.read_bytes("big") == data


def test_trees(env: skerry.Environment, tmp_path: Path) -> None:
    (tmp_path / "t" / "sub").mkdir(parents=True)
    (tmp_path / "t" / "sub" / "f").write_bytes(b"x" * 300_000)
    (tmp_path / "t" / "l").symlink_to("sub/f")
    env.files.upload(tmp_path / "t", "deep/copy")
    assert env.run(["sh", "-c", "readlink deep/copy/l; wc -c < deep/copy/l"]).stdout.split() == [
        "sub/f",
        "300000",
    ]
    assert env.files.download("deep/copy", tmp_path / "back") == []
    assert (tmp_path / "back" / "l").read_bytes() == b"x" * 300_000
    assert env.files.download(".", tmp_path / "all") == []
    assert (tmp_path / "all" / "deep" / "copy" / "sub" / "f").exists()
    with pytest.raises(skerry.FileMissing):
        env.files.download("nothing", tmp_path / "nothing")


def test_reading_into_memory_has_a_limit(env: skerry.Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skerry.client.sync.files.READ_MAX", 1 << 20)
    env.execute("truncate -s 1T endless; head -c 1048576 /dev/zero > fits")
    assert len(env.files.read_bytes("fits")) == 1 << 20
    for read in (env.files.read_bytes, env.files.read):
        with pytest.raises(skerry.LimitReached, match="endless has more than 1048576 bytes"):
            read("endless")
    assert len(env.files.read_bytes("endless", offset=1 << 39, length=5)) == 5
    pieces = env.files.chunks("endless")
    assert not any(next(pieces))
    pieces.close()  # type: ignore[attr-defined]
    assert env.execute("echo fine").stdout == "fine\n"


def test_watching(env: skerry.Environment) -> None:
    with env.files.watch(".") as changes:
        env.run(["sh", "-c", "mkdir d; echo 1 > f; mv f g"])
        seen: set[tuple[str, str]] = set()
        for change in changes:
            seen.add((change.kind, change.path.removeprefix("/workspace/")))
            if ("moved_to", "g") in seen:
                break
    assert {("created", "d"), ("created", "f"), ("moved_from", "f")} <= seen


def test_a_process_in_both_directions(env: skerry.Environment) -> None:
    data = os.urandom(4 << 20)
    with env.start(["cat"], stdin=True) as process:

        def feed() -> None:
            process.write(data)
            process.close_stdin()

        thread = threading.Thread(target=feed)
        thread.start()
        got = b"".join(chunk for stream, chunk in process if stream == "stdout")
        thread.join()
        assert got == data
        assert process.wait().exit_code == 0


def test_a_process_on_a_terminal(env: skerry.Environment) -> None:
    program = "trap 'stty size; exit 4' WINCH; stty size; while :; do sleep 0.05; done"
    with env.start(program, pty=(10, 20)) as process:
        assert next(iter(process)) == ("stdout", b"10 20\r\n")
        process.resize(30, 40)
        result = process.wait(30)
        assert (result.stdout, result.exit_code) == ("30 40\r\n", 4)


def test_signals_and_kill(env: skerry.Environment) -> None:
    with env.start("trap 'exit 5' USR1; echo ready; while :; do sleep 0.05; done") as process:
        assert next(iter(process)) == ("stdout", b"ready\n")
        with pytest.raises(TimeoutError):
            process.wait(0.05)
        process.signal(10)
        assert process.wait(30).exit_code == 5
    with env.start("sleep 100 & sleep 100") as process:
        process.kill()
        assert process.wait(30).exit_code == 137
    assert env.run(["pgrep", "-x", "sleep"]).exit_code == 1


def test_attaching_to_what_runs(env: skerry.Environment) -> None:
    with env.start("echo early; while ! test -e go; do sleep 0.02; done; echo late") as process:
        next(iter(process))
        assert process.id in [info.execution_id for info in env.executions() if info.state == "running"]
        with env.attach(process.id) as same:
            assert same.pid == process.pid
            assert next(iter(same)) == ("stdout", b"early\n")
        env.files.write("go", "")
        assert process.wait(30).stdout == "late\n"
    with pytest.raises(skerry.ExecutionNotFound):
        env.attach("nothing")


def test_many_at_once(client: skerry.Client) -> None:
    """One client, eight threads, an environment each."""
    results: list[str] = []

    def work(number: int) -> None:
        with skerry.Environment(client=client) as env:
            for i in range(5):
                results.append(env.run(["echo", f"{number}-{i}"]).stdout)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == sorted(f"{n}-{i}\n" for n in range(8) for i in range(5))


def test_asynchronously(client: skerry.Client, tmp_path: Path) -> None:
    async def one(other: skerry.AsyncClient, number: int) -> str:
        async with skerry.AsyncEnvironment(client=other) as env:
            await env.execute(f"export N={number}")
            await env.files.write("f", "text")
            await env.files.download("f", tmp_path / str(number))
            async with await env.start(["cat"], stdin=True) as process:
                await process.write("ping")
                await process.close_stdin()
                assert [data async for _, data in process] == [b"ping"]
            return (await env.execute("echo $N")).stdout

    async def work() -> list[str]:
        async with skerry.AsyncClient(client.version()["home"]) as other:
            return list(await asyncio.gather(*(one(other, number) for number in range(6))))

    assert asyncio.run(work()) == [f"{number}\n" for number in range(6)]


def test_images_and_version(client: skerry.Client) -> None:
    assert "host" in [image.name for image in client.images()]
    assert client.image("host").kind == "host"
    assert client.version()["version"] == skerry.__version__
    with pytest.raises(skerry.ImageNotFound):
        skerry.Environment("nothing", client=client).create()


def test_stopping(home: Path) -> None:
    client = skerry.Client()
    env = skerry.Environment(client=client).create()
    with pytest.raises(skerry.Conflict):
        client.stop()
    assert client.stop(force=True)
    assert not client.stop()
    info = env.info()
    assert (info.state, info.ended_reason) == ("ended", "the daemon stopped")
    assert client.stop()


def test_a_create_that_is_repeated_with_its_key(client: skerry.Client) -> None:
    first = skerry.Environment(client=client, memory="64m").create(key="job 17")
    assert skerry.Environment(client=client, memory="64m").create(key="job 17").id == first.id
    with pytest.raises(skerry.Conflict):
        skerry.Environment(client=client, memory="65m").create(key="job 17")
    with pytest.raises(skerry.InvalidRequest):
        skerry.Environment(client=client).create(key="two\r\nlines")
    first.delete()


def test_a_program_that_runs_once(client: skerry.Client) -> None:
    code = "import sys\nprint(open('a/b', 'rb').read(), sys.stdin.buffer.read())\nsys.exit(3)"
    result = client.execute_code("python", code, files={"a/b": b"\xff\0"}, stdin=b"\xfe", mem_limit=64)
    assert (result.stdout, result.exit_code) == ("b'\\xff\\x00' b'\\xfe'\n", 3)
    assert (result.outcome, result.language, result.ok) == (skerry.Outcome.FAILED, "python", False)
    [python] = [language for language in client.languages() if language.name == "python"]
    assert python.version == result.version
    with pytest.raises(skerry.LanguageNotFound, match="cobol"):
        client.execute_code("cobol", "")
    with pytest.raises(skerry.PathOutside):
        client.execute_code("python", "", files={"../x": ""})
