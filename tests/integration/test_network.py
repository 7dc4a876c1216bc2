"""What an environment of a real daemon may reach, in an internet of our own: root's daemon, and a plain user's."""

from __future__ import annotations

import functools
import json
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from skerry.client import autostart
from skerry.client.sync.client import Client
from skerry.client.sync.environment import Environment
from skerry.errors import InvalidRequest
from tests import support
from tests.integration.daemon import Daemon, started
from tests.integration.internet import Internet, in_a_network_of_its_own, internet

pytestmark = pytest.mark.root
PUBLIC, OTHER, INTERNAL = "93.184.216.34", "93.184.216.35", "10.1.2.3"
FETCH = """
import sys, urllib.request, urllib.error
try:
    print(urllib.request.urlopen(sys.argv[1], timeout=10).read().decode().strip())
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode().strip())
except OSError as error:
    print("failed:", error)
"""

DESCRIPTORS = """
import os
print([os.readlink(f"/proc/{who}/fd/{fd}") for who in ("self", os.getppid()) for fd in range(3, 64)
       if os.path.lexists(f"/proc/{who}/fd/{fd}")])
"""
LISTEN = """
import json, selectors, socket
watched = selectors.DefaultSelector()
for family, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
    for port in (8000, 8080):
        one = socket.create_server((host, port), family=family, dualstack_ipv6=False)
        watched.register(one, selectors.EVENT_READ)
addresses = ["127.0.0.1", "::1", socket.gethostname(), socket.gethostbyname("example.com")]
lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}")]
ports = sorted({int(words[1].rpartition(":")[2], 16) for words in lines if words[3] == "0A"})
print(json.dumps({"addresses": addresses, "ports": ports}), flush=True)
while True:
    for key, _ in watched.select():
        heard, _ = key.fileobj.accept()
        print(heard.getsockname()[:2], heard.recv(100), flush=True)
"""
KNOCK = """
import json, socket, sys
hosts, ports = json.loads(sys.argv[1])
for host in hosts:
    for port in ports:
        try:
            with socket.create_connection((host, port), timeout=10) as heard:
                heard.sendall(f"GET / HTTP/1.1\\r\\nhost: {host}:{port}\\r\\n\\r\\n".encode())
                answer = heard.recv(100)
                if not answer.startswith(b"HTTP/1.1 403"):
                    print(host, port, answer)
        except OSError:
            pass
print("nothing")
"""


def contained(test: Callable[..., None]) -> Callable[..., None]:
    """A test that runs in a network of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        in_a_network_of_its_own(lambda: test(*args, **kwargs))

    return run


@pytest.fixture(params=["rootful", "rootless"])
def user(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> support.Nobody | None:
    """Whose the daemon is; None: root's."""
    if request.param == "rootful":
        return None
    # Root may use the daemons of others, but its SDK has to be talked into it.
    monkeypatch.setattr(autostart, "_peer", lambda sock: (0, 0))
    nobody: support.Nobody = request.getfixturevalue("as_nobody")
    return nobody


@contextmanager
def home_of(user: support.Nobody | None) -> Iterator[Path]:
    if user is not None:
        yield user.home
        return
    with support.temporary_home() as home:
        yield home


@contextmanager
def world(
    user: support.Nobody | None, *options: str, **names: str
) -> Iterator[tuple[Internet, Daemon, Client]]:
    with internet([PUBLIC, OTHER, INTERNAL]) as outside, home_of(user) as home:
        outside.names = {"example.com": PUBLIC, "www.example.com": OTHER, "inside.test": INTERNAL, **names}
        with started(home, *options, user=user) as daemon, Client(str(home)) as client:
            yield outside, daemon, client


def fetch(env: Environment, url: str) -> str:
    return env.run(["python3", "-c", FETCH, url]).stdout.strip()


@contained
def test_nothing_by_default(user: support.Nobody | None) -> None:
    with world(user) as (outside, _, client), Environment(client=client) as env:
        for url in ("http://example.com/", f"http://{PUBLIC}/"):
            assert fetch(env, url).startswith("failed:")
        assert outside.arrived == []
        assert outside.asked == []
        assert env.network.show()["network"] == "none"


@contained
def test_exactly_what_was_allowed(user: support.Nobody | None) -> None:
    with world(user) as (outside, daemon, client), Environment(client=client, allow=["example.com"]) as env:
        assert fetch(env, "http://example.com/") == "hello"
        assert outside.arrived == [(PUBLIC, 80)]
        assert fetch(env, "http://www.example.com/").startswith("failed:")
        assert "is not in this environment's allowlist" in fetch(env, f"http://{OTHER}/")
        assert set(outside.asked) == {"example.com"}
        assert outside.arrived == [(PUBLIC, 80)]
        assert [(each["host"], each["port"]) for each in env.network.denials()] == [
            ("www.example.com", 0),
            (OTHER, 80),
        ]
        rows = [
            json.loads(line) for line in daemon.raw("GET", "/audit?action=network.connect")[2].splitlines()
        ]
        told = [(row["kind"], row["outcome"], row["detail"]["host"]) for row in rows]
        assert told == [
            ("intent", "", "example.com"),
            ("result", "completed", "example.com"),
            ("denial", "denied", "www.example.com"),
            ("denial", "denied", OTHER),
        ]
        assert rows[1]["detail"]["address"] == PUBLIC
        assert rows[1]["detail"]["received_bytes"] > 6


@contained
def test_never_the_inside(user: support.Nobody | None) -> None:
    with world(user) as (outside, _, client):
        with Environment(client=client, network="public") as env:
            assert fetch(env, "http://www.example.com/") == "hello"
            assert "never reached" in fetch(env, "http://inside.test/")
            assert "never reached" in fetch(env, f"http://{INTERNAL}/")
        with Environment(client=client, allow=["inside.test", f"{INTERNAL}/32", "127.0.0.1"]) as env:
            assert "never reached" in fetch(env, "http://inside.test/")
            assert "never reached" in fetch(env, f"http://{INTERNAL}/")
        assert outside.arrived == [(OTHER, 80)]


def prepared(daemon: Daemon) -> int:
    text = daemon.raw("GET", "/metrics")[2].decode()
    (found,) = re.findall(r"^skerry_instances_prepared\S* (\d+)", text, re.MULTILINE)
    return int(found)


@contained
def test_one_that_was_made_ready_is_as_one_that_was_not(user: support.Nobody | None) -> None:
    with world(user) as (outside, daemon, client):
        assert prepared(daemon) == 0
        for round in range(2):
            with Environment(client=client, allow=["example.com"]) as env:
                assert fetch(env, "http://example.com/") == "hello"
                assert fetch(env, "http://www.example.com/").startswith("failed:")
                assert "never reached" in fetch(env, f"http://{INTERNAL}/")
                assert "allowlist" in fetch(env, f"http://{OTHER}/")
            with Environment(client=client) as env:
                assert fetch(env, "http://example.com/").startswith("failed:")
            assert outside.arrived == [(PUBLIC, 80)] * (round + 1)
            while not prepared(daemon):
                time.sleep(0.01)


@contained
def test_never_the_machine_itself(user: support.Nobody | None) -> None:
    with internet([PUBLIC]) as outside, home_of(user) as home:
        subprocess.run(["ip", "addr", "add", OTHER, "dev", "lo"], check=True)
        outside.names = {"www.example.com": OTHER}
        listener = socket.create_server((OTHER, 80))
        with listener, started(home, user=user), Client(str(home)) as client:
            with Environment(client=client, network="public") as env:
                for url in (f"http://{OTHER}/", "http://www.example.com/"):
                    assert "an address of this machine" in fetch(env, url)
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.accept()


@contained
def test_operators_know_their_ranges(user: support.Nobody | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKERRY_PUBLIC_RANGES", "10.1.0.0/16")
    monkeypatch.setenv("SKERRY_INTERNAL_RANGES", f"{OTHER}/32, 2001:db8::/32")
    with world(user) as (_, _, client), Environment(client=client, network="public") as env:
        assert fetch(env, "http://inside.test/") == "hello"
        assert "internal here" in fetch(env, "http://www.example.com/")


@contained
def test_a_change_counts_at_once(user: support.Nobody | None) -> None:
    with world(user) as (_, _, client), Environment(client=client) as env:
        env.network.allow("example.com")
        assert fetch(env, "http://example.com/") == "hello"
        env.network.allow("*.example.com")
        assert fetch(env, "http://www.example.com/") == "hello"
        env.network.deny("example.com")
        assert fetch(env, "http://example.com/").startswith(("failed:", "403"))
        assert fetch(env, "http://www.example.com/") == "hello"
        env.network.set("none")
        assert fetch(env, "http://www.example.com/").startswith(("failed:", "403"))
        env.network.set("public")
        assert fetch(env, "http://example.com/") == "hello"
        with pytest.raises(InvalidRequest):
            env.network.allow("example.com")
        info = env.info()
        (row,) = [row for row in info.enforced if row["name"] == "network"]
        assert (info.network, row["value"], row["enforced"]) == ("public", "public", True)


@contained
def test_it_outlives_the_daemon(user: support.Nobody | None) -> None:
    with internet([PUBLIC, OTHER, INTERNAL]) as outside, home_of(user) as home:
        outside.names = {"example.com": PUBLIC, "www.example.com": OTHER}
        with started(home, user=user) as daemon, Client(str(home)) as client:
            env = Environment(client=client, allow=["example.com"]).create()
            without = Environment(client=client).create()
            assert fetch(env, "http://example.com/") == "hello"
            seen = env.run(["python3", "-c", DESCRIPTORS]).stdout
            daemon.kill()
        for _ in range(2):
            with started(home, user=user) as daemon, Client(str(home)) as client:
                again = Environment.get(env.id, client)
                assert again.network.show()["allow"] == ["example.com"]
                assert fetch(again, "http://example.com/") == "hello"
                assert fetch(again, "http://www.example.com/").startswith("failed:")
                assert "allowlist" in fetch(again, f"http://{OTHER}/")
                assert "never reached" in fetch(again, f"http://{INTERNAL}/")
                assert fetch(Environment.get(without.id, client), "http://example.com/").startswith("failed:")
                assert again.run(["python3", "-c", DESCRIPTORS]).stdout == seen
                daemon.kill()
        with started(home, user=user), Client(str(home)) as client:
            first = Environment.get(without.id, client)
            first.network.allow("www.example.com")
            assert fetch(first, "http://www.example.com/") == "hello"
            assert fetch(first, "http://example.com/").startswith("failed:")
        assert set(outside.arrived) == {(PUBLIC, 80), (OTHER, 80)}


@contained
def test_two_environments_do_not_reach_each_other(user: support.Nobody | None) -> None:
    """Not by any address that the other one has, nor by a name that leads there."""
    names = {"two.inside.example": "127.0.0.1", "stands.inside.example": "198.18.0.1"}
    with (
        world(user, **names) as (outside, _, client),
        Environment(client=client, network="public") as one,
        Environment(client=client, network="public", name="two") as two,
        Environment(client=client, allow=["*.inside.example:*", "0.0.0.0/0:*", "::/0:*"]) as three,
        two.start(["python3", "-c", LISTEN]) as server,
    ):
        has = json.loads(next(server)[1])
        assert set(has["ports"]) > {8000, 8080}, "its proxy listens as well"
        assert has["addresses"][-1].startswith("198.18."), "what stands for a name there"
        hosts = [*has["addresses"], "127.0.0.2", "::", "0.0.0.0", "10.0.0.1", *names, "two", two.id]
        for each in (one, three):
            tried = each.run(["python3", "-c", KNOCK, json.dumps([hosts, has["ports"]])], timeout=60)
            assert tried.stdout == "nothing\n", tried
        itself = "import socket; socket.create_connection(('127.0.0.1', 8000)).sendall(b'itself')"
        two.run(["python3", "-c", itself])
        assert next(server)[1] == b"('127.0.0.1', 8000) b'itself'\n"
        assert two.network.denials() == []
        assert outside.arrived == []
        server.kill()


@contained
def test_never_the_daemon(user: support.Nobody | None) -> None:
    with world(user, "--listen", "127.0.0.1:7443", **{"api.inside.example": "127.0.0.1"}) as (_, _, client):
        with socket.create_connection(("127.0.0.1", 7443)) as here:
            here.sendall(b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1:7443\r\n\r\n")
            assert here.recv(9) == b"HTTP/1.1 "
        allow = ["*.inside.example:*", "127.0.0.0/8:*", "0.0.0.0/8:*", "198.51.100.1:*"]
        for policy in ({"network": "public"}, {"allow": allow}):
            with Environment(client=client, **policy) as env:
                for host in ("127.0.0.1", "0.0.0.0", "[::1]", "[::ffff:127.0.0.1]", "localhost"):
                    assert fetch(env, f"http://{host}:7443/healthz").startswith("failed:")
                for host in ("198.51.100.1", "api.inside.example"):
                    assert "never reached" in fetch(env, f"http://{host}:7443/healthz")


@pytest.mark.parametrize(
    "rule",
    ["", "*", "*.com:0", "exa mple.com", "http://example.com", "1.2.3.4/8", "a" * 300, "example.com:99999"],
)
def test_what_is_no_rule(rule: str, daemon: Daemon) -> None:
    problem = daemon.call("POST", "/environments", {"network": "allowlist", "allow": [rule]}, expect=400)
    assert problem["code"] == "invalid_request"
    assert problem["hint"] or problem["message"]
