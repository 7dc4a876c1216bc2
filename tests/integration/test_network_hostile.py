"""An environment that would spoil the network of others, or the daemon, or what is known of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from skerry.client.sync.client import Client
from skerry.client.sync.environment import Environment
from tests import support
from tests.integration.daemon import Daemon, started
from tests.integration.internet import internet
from tests.integration.networks import PUBLIC, contained, fetch, home_of

pytestmark = [pytest.mark.root, pytest.mark.needs("network")]
OPEN = f"""
import socket, time
held = [socket.create_connection(("{PUBLIC}", 80)) for _ in range(2)]
for one in held:
    one.sendall(b"x")
    one.recv(1)
print("open")
time.sleep(600)
"""


def rows(daemon: Daemon, kind: str) -> list[dict[str, Any]]:
    lines = daemon.raw("GET", f"/audit?action=network.connect&kind={kind}")[2].splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.networked
@contained
def test_every_connection_has_its_own_end_in_the_audit(user: support.Nobody | None) -> None:
    """Also those that were open when the daemon was killed, while others had come to theirs."""
    with internet([PUBLIC]) as outside, home_of(user) as home:
        outside.names = {"example.com": PUBLIC}
        with started(home, user=user) as daemon, Client(str(home)) as client:
            env = Environment(client=client, network="public").create()
            assert fetch(env, "http://example.com/") == "hello"
            argv = ["python3", "-uc", OPEN]
            daemon.call("POST", f"/environments/{env.id}/executions", {"argv": argv}, expect=201)
            daemon.wait_for_output(env.id, "open")
            env.run(["true"])  # which waits for what was to be written before
            assert (len(rows(daemon, "intent")), len(rows(daemon, "result"))) == (3, 1)
            daemon.kill()
        with started(home, user=user) as daemon:
            begun, ended = rows(daemon, "intent"), rows(daemon, "result")
            assert len({row["request_id"] for row in begun}) == 3
            assert sorted(row["request_id"] for row in ended) == sorted(row["request_id"] for row in begun)
            assert sorted(row["outcome"] for row in ended) == ["completed", "internal", "internal"]
            daemon.call("DELETE", f"/environments/{env.id}")
