"""A daemon for others, as they see it: tokens, names, terminals, its end."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import skerry
from tests import certificates, support
from tests.e2e.conftest import Cli
from tests.e2e.elsewhere import Elsewhere, daemon_for_others
from tests.integration.daemon import launch, started

REMOTE = ("tls", "tcp")


@pytest.fixture(scope="module", params=support.first_of(REMOTE))
def there(request: pytest.FixtureRequest) -> Iterator[Elsewhere]:
    with daemon_for_others(request.param) as there:
        yield there


@pytest.fixture
def variables(there: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Clients of this test find the daemon."""
    for name, value in there.variables.items():
        monkeypatch.setenv(name, value)
    return there.variables


def test_nobody_comes_in_without_a_token(there: Elsewhere, variables: dict[str, str]) -> None:
    for token in ("", "nonsense", there.token[:-1] + "x"):
        with (
            skerry.Client(url=there.url, token=token) as client,
            pytest.raises(skerry.Unauthorized) as caught,
        ):
            client.environments()
        assert caught.value.hint
        with skerry.Client(url=there.url, token=token) as client:
            client.transport.call("GET", "/healthz")
            with pytest.raises(skerry.Unauthorized):
                client.transport.websocket("/environments/x/attach")
    with skerry.Client() as client:
        assert client.environments() == []


def test_much_goes_there_and_back_unchanged(variables: dict[str, str], tmp_path: Path) -> None:
    data = os.urandom(24 << 20)
    (tmp_path / "big").write_bytes(data)
    with skerry.Environment(memory="256m") as env:
        env.files.upload(tmp_path / "big", "big")
        digest = hashlib.sha256(data).hexdigest()
        assert env.run(["sha256sum", "big"]).stdout.split()[0] == digest
        env.files.download("big", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == data


def test_reading_and_writing_at_once(variables: dict[str, str]) -> None:
    """From two threads, on one connection: what TLS libraries do not do by themselves."""
    data = os.urandom(8 << 20)
    with skerry.Environment() as env, env.start(["cat"], stdin=True) as process:

        def write() -> None:
            process.write(data)
            process.close_stdin()

        writer = threading.Thread(target=write)
        writer.start()
        got = b"".join(part for _, part in process)
        writer.join()
        assert hashlib.sha256(got).digest() == hashlib.sha256(data).digest()


def test_a_revoked_token_loses_its_streams(there: Elsewhere, variables: dict[str, str]) -> None:
    made = there.daemon.call("POST", "/tokens", {"name": "short"}, expect=201)
    with skerry.Client(url=there.url, token=made["token"]) as client:
        env = skerry.Environment(client=client).create()
        process = env.start("echo here; sleep 1000")
        assert next(iter(process)) == ("stdout", b"here\n")
        there.daemon.call("DELETE", f"/tokens/{made['id']}")
        with pytest.raises(skerry.DaemonUnavailable):
            process.wait()
        with pytest.raises(skerry.Unauthorized):
            env.info()
    there.daemon.call("DELETE", f"/environments/{env.id}")


def test_the_trace_goes_along(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEPARENT", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    with skerry.Environment() as env:
        assert "0af7651916cd43dd8448eb211c80319c" in env.run(["env"]).stdout


def test_contexts(there: Elsewhere, tmp_path: Path) -> None:
    cli = Cli(there.daemon.home, {"XDG_CONFIG_HOME": str(tmp_path), "SKERRY_HOME": ""})
    ca = there.variables.get("SKERRY_CA")
    more = ("--ca", ca) if ca else ()
    cli.ok(
        *("context", "add", "box", "--url", there.url, "--token-file", "-", *more),
        input=there.token.encode(),
    )
    assert cli.ok("--context", "box", "run", "--", "echo", "hi") == "hi"
    cli.ok("context", "use", "box")
    assert cli.ok("run", "--", "echo", "hi") == "hi"
    assert json.loads(cli.ok("version", "--json"))["daemon"]["pid"] == there.daemon.process.pid
    report = json.loads(cli.ok("doctor", "--json"))
    assert {check["name"] for check in report["checks"]} >= {"helper", "seccomp"}
    assert "helper" in cli.ok("doctor")
    assert there.token not in cli.ok("context", "ls") + cli.ok("context", "show", "--json")


def test_a_certificate_of_somebody_else(tmp_path: Path) -> None:
    with daemon_for_others("tls", "--backend", "fake") as there:
        cli = Cli(there.daemon.home, {**there.variables, "SKERRY_CA": certificates.make().other_ca})
        code, _, err = cli("ls")
        assert (code, b"cannot verify" in err, there.token.encode() in err) == (2, True, False)


@pytest.mark.parametrize("door", REMOTE)
def test_stop(door: str) -> None:
    with daemon_for_others(door, "--backend", "fake") as there:
        cli = Cli(there.daemon.home, there.variables)
        ref = cli.ok("create")
        code, _, err = cli("stop")
        assert (code, b"alive" in err) == (2, True)
        cli.ok("stop", "--force")
        there.daemon.process.wait(30)
        code, _, err = cli("info", ref)
        assert (code, there.url.encode() in err) == (125, True)
        assert not os.path.exists(f"{there.daemon.home}/daemon.sock")  # nothing was started in its place


def test_it_does_not_end_when_it_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other way round, with an ordinary daemon, this takes half a second."""
    monkeypatch.setenv("SKERRY_LISTEN", "127.0.0.1:0")
    with support.temporary_home() as home:
        with started(home, "--backend", "fake", "--idle-exit", "0.2") as daemon:
            with pytest.raises(subprocess.TimeoutExpired):
                daemon.process.wait(2)
        monkeypatch.delenv("SKERRY_LISTEN")
        with started(home, "--backend", "fake", "--idle-exit", "0.2") as daemon:
            daemon.process.wait(30)


def test_serve_refuses_what_is_not_safe() -> None:
    with support.temporary_home() as home:
        process, word = launch(home, "--backend", "fake", "--listen", "0.0.0.0:0")
        assert process.wait(30) == 2
        assert "without TLS" in json.loads(word)["message"]
        assert "--tls-cert" in json.loads(word)["hint"]
        assert not (home / "daemon.sock").exists()


def test_serve_says_where_it_listens() -> None:
    made = certificates.make()
    with support.temporary_home() as home:
        cli = Cli(home)
        words = ("serve", "--listen", "127.0.0.1:0", "--tls-cert", made.cert, "--tls-key", made.key)
        with cli.start(*words, "--host-name", "skerry.test") as process:
            assert process.stderr is not None
            assert process.stderr.readline().decode() == f"skerry: listening on unix://{home}/daemon.sock\n"
            url = process.stderr.readline().decode().partition(" on ")[2].strip()
            assert url.startswith("https://127.0.0.1:")
            token = json.loads(_post(home, "/tokens", {"name": "x"}))["token"]
            there = {"SKERRY_URL": url, "SKERRY_TOKEN": token, "SKERRY_CA": made.ca}
            assert Cli(home, there).ok("ls", "-q") == ""
            process.send_signal(signal.SIGINT)
            process.wait(30)


def _post(home: Path, path: str, body: dict[str, str]) -> bytes:
    from tests.integration.daemon import Connection

    connection = Connection(f"{home}/daemon.sock")
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        return connection.getresponse().read()
    finally:
        connection.close()


def test_one_user_in_many_threads(variables: dict[str, str]) -> None:
    """One client, eight threads, kept connections."""
    with skerry.Client() as client, skerry.Environment(client=client) as env:
        failures: list[BaseException] = []

        def work(number: int) -> None:
            try:
                for turn in range(10):
                    assert env.run(["echo", f"{number}-{turn}"]).stdout == f"{number}-{turn}\n"
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []


def test_a_daemon_that_went_away_and_came_back(tmp_path: Path) -> None:
    """Kept connections are dead then; a request that may be repeated finds the new one."""
    with support.temporary_home() as home:
        with started(home, "--backend", "fake", "--foreground", "--listen", "127.0.0.1:0") as daemon:
            line = (home / "daemon.log").read_text().splitlines()[-1]
            url = line.partition(" on ")[2]
            token = daemon.call("POST", "/tokens", {"name": "x"}, expect=201)["token"]
            client = skerry.Client(url=url, token=token)
            assert client.environments() == []
        with pytest.raises(skerry.DaemonUnavailable, match="cannot reach"):
            client.environments()
        place = url.partition("//")[2]
        with started(home, "--backend", "fake", "--foreground", "--listen", place):
            assert client.environments() == []
            client.close()
