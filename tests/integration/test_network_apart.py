"""What keeps the network of an environment apart from others and from the daemon, and what keeps it at all."""

from __future__ import annotations

import json
import os
import socket

import pytest

from skerry.client.sync.client import Client
from skerry.client.sync.environment import Environment
from skerry.errors import IsolationUnavailable
from tests import support
from tests.integration import daemon
from tests.integration.daemon import started
from tests.integration.internet import internet
from tests.integration.networks import INTERNAL, OTHER, PUBLIC, contained, fetch, home_of, world

pytestmark = [pytest.mark.root, pytest.mark.needs("network")]
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


@pytest.mark.needs("late_network")
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


@pytest.mark.parametrize("user", ["rootless"], indirect=True)
@contained
def test_no_other_network_than_its_own_is_entered(user: support.Nobody) -> None:
    """The guest hands over what it has; without the number that was noted, it is not believed."""
    with world(user) as (_, daemon, client):
        env = Environment(client=client, allow=["example.com"]).create()
        facts = user.home / "instances" / env.id / "facts"
        noted = json.loads(os.readlink(facts))
        daemon.kill()
        facts.unlink()
        facts.symlink_to(json.dumps({**noted, "network": [noted["network"][0], noted["network"][1] + 1]}))
        with started(user.home, user=user), Client(str(user.home)) as after:
            again = Environment.get(env.id, after)
            assert again.network.show()["network"] == "none"
            assert fetch(again, "http://example.com/").startswith("failed:")
            with pytest.raises(IsolationUnavailable, match="did not hand it over"):
                again.network.allow("example.com")


@pytest.mark.networked
@pytest.mark.requirement("R33")
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
        assert set(has["ports"]) >= {8000, 8080}
        # A kernel of its own shows only its own listeners.
        assert daemon.OPTIONS or len(has["ports"]) > 2, "its proxy listens as well"
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


@pytest.mark.networked
@pytest.mark.requirement("R33")
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
