"""Daemons with a URL: which one is meant, what is sent to it, and what never is."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import skerry
from skerry.cli import main
from skerry.client import endpoint, http1
from skerry.client.aio.transport import AsyncTransport
from skerry.client.contexts import Contexts
from skerry.client.endpoint import Local
from skerry.client.remote import Remote, is_loopback
from skerry.client.sync.transport import Transport
from skerry.errors import DaemonUnavailable, Denied, InvalidRequest, NotFound, PlatformError, SkerryError
from tests import certificates
from tests.unit import scripted_server
from tests.unit.scripted_server import Peer, serving

TOKEN = "skt_abc_verysecret"
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty configuration; returns where the file of contexts will be."""
    for name in ("URL", "TOKEN", "CA", "CONTEXT", "HOME"):
        monkeypatch.delenv(f"SKERRY_{name}", raising=False)
    monkeypatch.delenv("TRACEPARENT", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "skerry" / "contexts.json"


@pytest.mark.parametrize(
    ("url", "normal", "host"),
    [
        ("https://build.example.com:7443", "https://build.example.com:7443", "build.example.com:7443"),
        ("HTTPS://Build.Example.com/", "https://build.example.com", "build.example.com"),
        ("https://a:443", "https://a", "a"),
        ("http://127.0.0.1:80", "http://127.0.0.1", "127.0.0.1"),
        ("http://[::1]:7000", "http://[::1]:7000", "[::1]:7000"),
        ("https://[2001:db8::7]", "https://[2001:db8::7]", "[2001:db8::7]"),
        ("unix:///run/skerry/daemon.sock", "unix:///run/skerry/daemon.sock", "skerry"),
    ],
)
def test_urls(url: str, normal: str, host: str) -> None:
    place = Remote(url)
    assert (place.url, place.host, place.home) == (normal, host, None)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "build:7443",
        "ftp://a",
        "https://",
        "https:///x",
        "https://a/path",
        "https://a?x=1",
        "https://a:0",
        "https://a:65536",
        "https://a:7x",
        "https://a:",
        "https://a b",
        "https://a\r\nx: y",
        "https://é",
        "https://[::1",
        "https://[a.b]:1",
        "https://[::1]x",
        "https://::1:7000",
        "unix://run/daemon.sock",
        "https://user:hunter2@a",
    ],
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Remote(url)
    assert caught.value.hint
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("127.0.0.1.example.com", False),
        ("localhost.example.com", False),
        ("10.0.0.1", False),
        ("0.0.0.0", False),
        ("127", False),
    ],
)
def test_what_is_loopback(name: str, loopback: bool) -> None:
    assert is_loopback(name) is loopback


def test_a_token_is_not_sent_where_others_can_read_it() -> None:
    Remote("http://10.1.2.3:7000")
    Remote("http://127.0.0.1:7000", TOKEN)
    Remote("https://10.1.2.3:7000", TOKEN)
    with pytest.raises(InvalidRequest, match="refusing to send a token unencrypted") as caught:
        skerry.Client(url="http://10.1.2.3:7000", token=TOKEN)
    assert "https" in caught.value.hint


@pytest.mark.parametrize("token", ["a b", "a\r\nx: y", "é", "a\0"])
def test_tokens_that_are_none(token: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        skerry.Client(url="https://a", token=token)
    assert token not in str(caught.value)


def found() -> tuple[str, str, str]:
    place = endpoint.find()
    return place.url, place.token, place.ca


def test_what_counts_most(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_context(name: str, **entry: str) -> None:
        contexts = Contexts.load()
        contexts.entries[name] = entry
        contexts.current = name
        contexts.save()

    place = endpoint.find()
    assert isinstance(place, Local)
    assert place.url.startswith("unix:///")
    with_context("here", url="https://here", token="t1", ca="/ca1")
    assert found() == ("https://here", "t1", "/ca1")
    monkeypatch.setenv("SKERRY_TOKEN", "t2")
    monkeypatch.setenv("SKERRY_CA", "/ca2")
    assert found() == ("https://here", "t1", "/ca1")
    with_context("bare", url="https://bare")
    assert found() == ("https://bare", "t2", "/ca2")
    monkeypatch.setenv("SKERRY_HOME", "/tmp/skerry-test-home")
    assert found() == ("unix:///tmp/skerry-test-home/daemon.sock", "", "")
    monkeypatch.setenv("SKERRY_CONTEXT", "here")
    assert found() == ("https://here", "t1", "/ca1")
    monkeypatch.setenv("SKERRY_CONTEXT", "default")
    assert found() == ("unix:///tmp/skerry-test-home/daemon.sock", "", "")
    monkeypatch.setenv("SKERRY_URL", "https://there")
    assert found() == ("https://there", "t2", "/ca2")
    assert endpoint.find(token="t3").token == "t3"
    assert endpoint.find(token="").token == ""
    assert endpoint.find(url="https://elsewhere").url == "https://elsewhere"
    assert endpoint.find(home="/tmp/x").url == "unix:///tmp/x/daemon.sock"
    with pytest.raises(InvalidRequest, match="not both"):
        endpoint.find("/tmp/x", "https://a")
    with pytest.raises(InvalidRequest, match="needs a URL"):
        endpoint.find("/tmp/x", token=TOKEN)
    monkeypatch.delenv("SKERRY_URL")
    monkeypatch.setenv("SKERRY_CONTEXT", "nowhere")
    with pytest.raises(NotFound, match="nowhere"):
        endpoint.find()


def test_the_file_of_contexts_is_private(config: Path) -> None:
    os.umask(os.umask(0))
    contexts = Contexts.load()
    contexts.entries["a"] = {"url": "https://a", "token": TOKEN}
    contexts.save()
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    assert stat.S_IMODE(config.parent.stat().st_mode) & 0o077 == 0
    assert [path.name for path in config.parent.iterdir()] == ["contexts.json"]
    config.chmod(0o640)
    with pytest.raises(InvalidRequest, match="readable by others") as caught:
        Contexts.load()
    assert TOKEN not in str(caught.value)
    config.chmod(0o620)
    with pytest.raises(InvalidRequest, match="writable by others"):
        Contexts.load()
    config.write_text('{"contexts": {"a": {"url": "https://a"}}}')
    config.chmod(0o644)
    assert Contexts.load().entries == {"a": {"url": "https://a"}}


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"contexts": []}', '{"contexts": {"a": "https://a"}}', "\xff"]
)
def test_a_file_of_contexts_that_makes_no_sense(config: Path, text: str) -> None:
    config.parent.mkdir()
    config.write_text(text, encoding="latin-1")
    config.chmod(0o600)
    with pytest.raises(InvalidRequest, match="not a valid contexts file"):
        endpoint.find()


def test_a_write_that_fails_leaves_the_old_contexts(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = Contexts.load()
    contexts.entries["a"] = {"url": "https://a"}
    contexts.save()
    contexts.entries["b"] = {"url": "https://b"}

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        contexts.save()
    assert set(Contexts.load().entries) == {"a"}
    assert [path.name for path in config.parent.iterdir()] == ["contexts.json"]


def test_context_verbs(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    monkeypatch.setenv("SKERRY_CONTEXT", "")  # `--context` sets it

    def said(*words: str) -> Any:
        assert main(["context", *words, "--json"]) == 0
        out = capsys.readouterr().out
        assert TOKEN not in out
        return json.loads(out)

    add = ["context", "add", "work", "--url", "https://work:7443", "--token-file", str(tmp_path / "token")]
    assert main(add) == 0
    assert said("show")["name"] == "default"
    assert main(["context", "use", "work"]) == 0
    work = {"name": "work", "url": "https://work:7443", "token": True, "ca": ""}
    assert said("show") == work
    assert said("ls")[1] == {**work, "current": True}
    assert json.loads(config.read_text())["contexts"]["work"]["token"] == TOKEN
    assert main(["--context", "default", "context", "show"]) == 0
    assert "unix://" in capsys.readouterr().out
    monkeypatch.delenv("SKERRY_CONTEXT")
    assert main(["context", "ls"]) == 0
    assert TOKEN not in capsys.readouterr().out
    assert main(["context", "rm", "work"]) == 0
    assert said("show")["name"] == "default"
    assert main(["context", "rm", "work"]) == 2
    assert main(["context", "use", "work"]) == 2
    assert main(["context", "add", "default", "--url", "https://a"]) == 2
    assert main(["context", "add", "a/b", "--url", "https://a"]) == 2
    assert main(["context", "add", "a"]) == 2
    assert main(["context", "add", "a", "--url", "https://a", "--ca", str(tmp_path / "token")]) == 2
    assert main(["context", "add", "a", "--url", "http://a", "--token-file", str(tmp_path / "token")]) == 2
    assert Contexts.load().entries == {}
    assert TOKEN not in "".join(capsys.readouterr())


def test_the_option_counts_more_than_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKERRY_URL", "https://other")
    monkeypatch.setenv("SKERRY_TOKEN", TOKEN)
    monkeypatch.setenv("SKERRY_CONTEXT", "default")
    assert main(["context", "add", "work", "--url", "https://work"]) == 0
    assert main(["--context=work", "context", "show", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "name": "work",
        "url": "https://work",
        "token": False,
        "ca": "",
    }
    assert main(["--context"]) == 2


Ask = Callable[..., Any]


def ask(**options: str) -> Any:
    transport = Transport(**options)
    try:
        return transport.call("GET", "/")
    finally:
        transport.close()


def ask_async(**options: str) -> Any:
    async def work() -> Any:
        transport = AsyncTransport(**options)
        try:
            return await transport.call("GET", "/")
        finally:
            transport.close()

    return asyncio.run(work())


both = pytest.mark.parametrize("ask", [ask, ask_async])


def headers_of_a_request(peer: Peer) -> None:
    _, _, headers, _ = peer.request()
    peer.respond(headers)


@both
@pytest.mark.parametrize("door", ["unix", "tcp", "tls"])
def test_what_is_sent(ask: Ask, door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripted_server, "DOOR", door)
    monkeypatch.setenv("TRACEPARENT", TRACE)
    with serving(headers_of_a_request) as server:
        url = server.variables.get("SKERRY_URL", f"unix://{server.home}/daemon.sock")
        got = ask(url=url, token=TOKEN)
        assert got["authorization"] == f"Bearer {TOKEN}"
        assert got["traceparent"] == TRACE
        assert got["host"] == ("skerry" if door == "unix" else url.partition("://")[2])
        monkeypatch.setenv("TRACEPARENT", "00-zz")
        monkeypatch.setenv("SKERRY_TOKEN", "another")
        got = ask()
        assert "traceparent" not in got
        assert got.get("authorization") == (None if door == "unix" else "Bearer another")


@pytest.mark.parametrize(
    ("text", "good"),
    [
        (TRACE, True),
        (TRACE.upper(), False),
        ("", False),
        ("ff" + TRACE[2:], False),
        (TRACE + "-x", False),
        (f"00-{'0' * 32}-b7ad6b7169203331-01", False),
        (f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01", False),
        (TRACE + "\r\nx: y", False),
    ],
)
def test_trace_contexts(text: str, good: bool) -> None:
    assert http1.traceparent(text) == (text if good else "")


@both
def test_a_certificate_must_be_from_the_right_ca(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripted_server, "DOOR", "tls")
    made = certificates.make()
    # Put back while the server still has the variable set, which it deletes.
    with serving(headers_of_a_request) as server, pytest.MonkeyPatch.context() as patch:
        assert ask(token=TOKEN)
        port = server.variables["SKERRY_URL"].rpartition(":")[2]
        for ca in (made.other_ca, ""):
            patch.setenv("SKERRY_CA", ca)
            with pytest.raises(Denied, match="cannot verify the certificate") as caught:
                ask(token=TOKEN)
            assert "SKERRY_CA" in caught.value.hint
        patch.setenv("SKERRY_CA", made.key)
        with pytest.raises(InvalidRequest, match="no certificate"):
            ask()
        patch.setenv("SKERRY_CA", made.ca)
        # Another name of the same address, which is not in the certificate.
        with pytest.raises(Denied, match=r"127\.1"):
            ask(url=f"https://127.1:{port}", token=TOKEN)


@both
def test_a_session_that_is_cut_is_not_the_end_of_a_body(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a length the end of the connection is the end of the body, so that must be the daemon's own word."""
    monkeypatch.setattr(scripted_server, "DOOR", "tls")

    def script(peer: Peer) -> None:
        peer.request()
        peer.send(b'HTTP/1.1 200 OK\r\n\r\n{"a": 1}')
        raise EOFError

    with serving(script), pytest.raises(DaemonUnavailable):
        ask()


def test_a_session_that_ends_right_behind_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both come in one piece, and the connection stays open until the client closes it: it must not be kept."""
    monkeypatch.setattr(scripted_server, "DOOR", "tls")
    free = threading.Event()

    def script(peer: Peer) -> None:
        peer.request()
        peer.end_with(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        free.wait(60)

    with serving(script) as server:
        transport = Transport()
        assert transport.call("GET", "/") == {}
        transport.gone(5)
        assert transport.call("GET", "/") == {}
        assert server.connections == 2
        transport.close()
        free.set()


@both
def test_redirects_are_not_followed(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripted_server, "DOOR", "tcp")
    asked = []

    def script(peer: Peer) -> None:
        asked.append(peer.request()[1])
        peer.send(b"HTTP/1.1 307 X\r\nlocation: /elsewhere\r\ncontent-length: 0\r\n\r\n")

    with serving(script):
        with pytest.raises(PlatformError, match="307"):
            ask(token=TOKEN)
    assert asked == ["/"]


@both
def test_nobody_there(ask: Ask, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for url in (f"http://127.0.0.1:{port}", f"https://127.0.0.1:{port}", f"unix://{tmp_path}/daemon.sock"):
        with pytest.raises(DaemonUnavailable) as caught:
            ask(url=url, token=TOKEN)
        assert url in caught.value.message
        assert "listening" in caught.value.hint
        assert list(tmp_path.iterdir()) == []


def test_no_text_has_the_token_in_it() -> None:
    client = skerry.Client(url="http://127.0.0.1:1", token=TOKEN)
    texts = [repr(client), repr(client.transport), repr(client.transport.endpoint)]
    try:
        client.version()
    except SkerryError as error:
        texts += [repr(error), str(error), json.dumps(error.to_dict())]
    assert len(texts) == 6
    assert TOKEN not in "".join(texts)


def test_an_environment_takes_a_url_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripted_server, "DOOR", "tcp")

    def script(peer: Peer) -> None:
        assert peer.request()[2]["authorization"] == f"Bearer {TOKEN}"
        peer.respond({"environment_id": "abc123abc123"})

    with serving(script) as server:
        url = server.variables["SKERRY_URL"]
        env = skerry.Environment.get("abc", url=url, token=TOKEN)
        assert env.id == "abc123abc123"
    with pytest.raises(InvalidRequest, match="combined with client"):
        skerry.Environment(client=skerry.Client(url=url), url=url)


def test_stopping_one_elsewhere_waits_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripted_server, "DOOR", "tls")
    done = []

    def script(peer: Peer) -> None:
        assert peer.request()[1] == "/stop"
        peer.respond({"stopping": True})
        done.append(True)

    with serving(script), skerry.Client() as client:
        assert client.stop() is True
        assert done == [True]


def test_a_connection_that_comes_after_the_caller_gave_up_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    begun, go = threading.Event(), threading.Event()

    def connect(self: Remote, start: bool) -> tuple[socket.socket, None]:
        begun.set()
        go.wait()
        return ours, None

    async def give_up() -> None:
        async with skerry.AsyncClient(url="http://127.0.0.1:1", token=TOKEN) as client:
            call = asyncio.create_task(client.version())
            await asyncio.to_thread(begun.wait)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            go.set()

    monkeypatch.setattr(Remote, "connect", connect)
    with ours, theirs:
        asyncio.run(give_up())
        assert ours.fileno() == -1
