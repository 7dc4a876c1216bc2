"""What an environment of a real daemon may reach, in an internet of our own: root's daemon, and a plain user's."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time

import pytest

from skerry.client.sync.client import Client
from skerry.client.sync.environment import Environment
from skerry.errors import InvalidRequest, SkerryError
from skerry.manager.network.network import ONE_BY_ONE
from tests import certificates, support
from tests.conformance.kinds import NETWORKED, skip_sweep
from tests.integration import networks
from tests.integration.daemon import Daemon, started
from tests.integration.internet import internet
from tests.integration.networks import INTERNAL, OTHER, PUBLIC, contained, fetch, home_of, world

pytestmark = [pytest.mark.root, pytest.mark.needs("network")]
needs, each_rung, networked = pytest.mark.needs, pytest.mark.each_rung, pytest.mark.networked
HOLD = """
import socket
held = [socket.create_connection(("example.com", 80)) for _ in range(2)]
s = socket.create_connection(("example.com", 80))
s.sendall(b"GET / HTTP/1.1\\r\\nhost: example.com\\r\\n\\r\\n")
print(s.makefile().read())
"""


@pytest.fixture(autouse=True, params=support.first_of([0, 3]), ids=["cold", "pooled"])
def _start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every policy holds the same way for what is started then and for what was started before."""
    rung = NETWORKED.get(request.node.callspec.params.get("user", ""))
    if request.param and rung is not None and "late_network" not in rung.gives:
        pytest.skip(f"what is in a pool of {rung.name} has no network")
    if request.param and rung is not None:
        skip_sweep(rung.name)
    monkeypatch.setattr(networks, "POOLED", request.param)


@networked
@each_rung
@contained
def test_nothing_by_default(user: support.Nobody | None) -> None:
    with world(user) as (outside, _, client), Environment(client=client) as env:
        for url in ("http://example.com/", f"http://{PUBLIC}/"):
            assert fetch(env, url).startswith("failed:")
        assert outside.arrived == []
        assert outside.asked == []
        assert env.network.show()["network"] == "none"


@networked
@each_rung
@pytest.mark.requirement("R33", "F6")
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
        env.run(["true"])  # which waits for what was to be written before
        rows = [
            json.loads(line) for line in daemon.raw("GET", "/audit?action=network.connect")[2].splitlines()
        ]
        told = {(row["kind"], row["outcome"], row["detail"]["host"]): row["detail"] for row in rows}
        assert len(rows) == 4
        assert told.keys() == {
            ("intent", "", "example.com"),
            ("result", "completed", "example.com"),
            ("denial", "denied", "www.example.com"),
            ("denial", "denied", OTHER),
        }
        assert told["result", "completed", "example.com"]["address"] == PUBLIC
        assert rows[1]["detail"]["received_bytes"] > 6


@networked
@contained
def test_a_flood_of_connections_does_not_fill_the_audit(user: support.Nobody | None) -> None:
    code = (
        "import socket\n"
        "for _ in range(200):\n"
        "    with socket.create_connection(('example.com', 80), 30) as s:\n"
        "        s.sendall(b'GET / HTTP/1.1\\r\\nhost: example.com\\r\\nconnection: close\\r\\n\\r\\n')\n"
        "        while s.recv(4096): pass\n"
    )
    with world(user) as (outside, daemon, client):
        with Environment(client=client, allow=["example.com"]) as env:
            assert env.run(["python3", "-c", code]).ok
        assert len(outside.arrived) == 200
        lines = daemon.raw("GET", "/audit?action=network.connect&kind=result")[2].splitlines()
        rows = [json.loads(line)["detail"] for line in lines]
        assert len(rows) <= 2 * (ONE_BY_ONE + 1)  # or a minute has passed meanwhile
        assert sum(row.get("connections", 1) for row in rows) == 200
        assert all(row["received_bytes"] > 6 for row in rows)
        caused = client.quota("default")["caused"]
        assert caused["connections"] == 200
        assert caused["network_received_bytes"] == sum(row["received_bytes"] for row in rows)
        assert rows[-1]["places"] == {"example.com:80": rows[-1]["connections"]}


@pytest.mark.requirement("R33")
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
    return sum(map(int, re.findall(r"^skerry_instances_prepared{.*} (\d+)", text, re.MULTILINE)))


@needs("prepared")
@contained
def test_one_that_was_made_ready_is_as_one_that_was_not(user: support.Nobody | None) -> None:
    """The half of a start that depends on nothing is made ahead."""
    if networks.POOLED:
        pytest.skip("it looks at what is made ready, and when")
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


@needs("late_network")
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
def test_a_change_that_fails_changes_nothing(user: support.Nobody | None) -> None:
    if networks.POOLED:
        pytest.skip("its environment is of another kind than the pool's")
    with world(user) as (_, daemon, client):
        ca = shutil.copy(certificates.make().ca, daemon.home)
        os.chmod(ca, 0o644)
        preset = f'[git-hosting]\nallow = ["example.com:80"]\nca = "{ca}"\n'
        (daemon.home / "presets.toml").write_text(preset)
        with Environment(client=client, allow=["www.example.com"], memory="64m") as env:
            assert env.run(["sh", "-c", "cat /dev/zero > /tmp/full"]).stderr.endswith(
                "No space left on device\n"
            )
            with pytest.raises(SkerryError):
                env.network.allow("git-hosting")
            assert env.network.show()["allow"] == ["www.example.com"]
            assert fetch(env, "http://example.com/").startswith("failed:")
            env.run(["rm", "/tmp/full"])
            env.network.allow("git-hosting")
            assert fetch(env, "http://example.com/") == "hello"


def denied(daemon: Daemon, env: Environment) -> list[tuple[str, str]]:
    """What the audit tells of it: host and reason."""
    env.run(["true"])  # which waits for what was to be written before
    text = daemon.raw("GET", "/audit?action=network.connect&kind=denial")[2]
    rows = [json.loads(line)["detail"] for line in text.splitlines()]
    return [(row["host"], row["reason"]) for row in rows]


@networked
@contained
def test_connections_at_once(user: support.Nobody | None) -> None:
    with (
        world(user) as (outside, daemon, client),
        Environment(client=client, network="public", connections=2) as env,
    ):
        reason = "its limit of 2 connections at once is reached; env.network.set(connections=...) changes it"
        assert reason in env.run(["python3", "-c", HOLD]).stdout
        assert outside.arrived == []
        assert [each["reason"] for each in env.network.denials()] == [reason]
        assert denied(daemon, env) == [("example.com", reason)]
        env.network.set(connections=3)
        assert "hello" in env.run(["python3", "-c", HOLD]).stdout
        assert env.network.show()["limits"]["connections"] == 3
        told = {row["name"]: row["value"] for row in env.info().enforced}
        assert (told["connections"], told["traffic"]) == ("3", str(100 << 30))


@contained
def test_traffic(user: support.Nobody | None) -> None:
    with (
        world(user) as (_, daemon, client),
        Environment(client=client, allow=["example.com"], traffic=1000) as env,
    ):
        answers = [fetch(env, "http://example.com/") for _ in range(10)]
        reason = "its limit of 1000 B sent and received is used up; env.network.set(traffic=...) changes it"
        assert answers[0] == "hello"
        assert reason in answers[-1]
        assert ("example.com", reason) in denied(daemon, env)
        used = env.network.show()
        assert 500 < used["sent_bytes"] + used["received_bytes"] <= 1000
        env.network.set(traffic="1m")
        assert fetch(env, "http://example.com/") == "hello"
        env.network.set(traffic=1000)
        assert reason in fetch(env, "http://example.com/")


@networked
@contained
def test_traffic_is_counted_beyond_a_daemon(user: support.Nobody | None) -> None:
    """To the byte if it is told to stop; if it is killed, all but a 64th of the limit."""
    with internet([PUBLIC]) as outside, home_of(user) as home:
        outside.names = {"example.com": PUBLIC}

        def used() -> int:
            with Client(str(home)) as client:
                env = Environment.get(ref, client)
                assert fetch(env, "http://example.com/") == "hello"
                env.run(["true"])  # which waits for what was to be written before
                shown = env.network.show()
                assert shown["limits"] == {"connections": 9, "traffic": 6400}
                return int(shown["sent_bytes"] + shown["received_bytes"])

        with started(home, user=user) as daemon:
            ref = daemon.create(network="public", connections=9, traffic=6400)
            once = used()
            daemon.process.send_signal(signal.SIGTERM)
            daemon.process.wait()
        with started(home, user=user) as daemon:
            assert used() == 2 * once
            daemon.kill()
        with started(home, user=user) as daemon:
            assert 3 * once - 100 < used() <= 3 * once
            daemon.call("DELETE", f"/environments/{ref}")


@pytest.mark.parametrize(
    "rule",
    ["", "*", "*.com:0", "exa mple.com", "http://example.com", "1.2.3.4/8", "a" * 300, "example.com:99999"],
)
def test_malformed_rule_is_refused_and_named(rule: str, daemon: Daemon) -> None:
    problem = daemon.call("POST", "/environments", {"network": "allowlist", "allow": [rule]}, expect=400)
    assert problem["code"] == "invalid_request"
    assert rule[:20] in problem["message"]
