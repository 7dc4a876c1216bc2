"""Floods: of output, of requests, of clients that do nothing. The daemon's memory stays flat, and others are served."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from skerry.manager.executions.queue import WAITING_MAX
from skerry.policy import GIB, MIB
from tests import support
from tests.integration.daemon import Connection, Daemon, started
from tests.integration.test_http_attach import attached

FLAT = 50 * MIB
"""How much the daemon may grow, whatever anybody does."""
FLOODING = 100
SLOW_CLIENTS = 200


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with support.temporary_home() as home, started(home) as running:
        yield running


@pytest.fixture
def neighbour(daemon: Daemon) -> Iterator[str]:
    """Somebody else's environment, which must be served."""
    environment = daemon.create(workspace="memory")
    yield environment
    daemon.call("DELETE", f"/environments/{environment}")


def resident(daemon: Daemon) -> int:
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


class Growth:
    """How much the daemon has grown at most since this was made."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._before = resident(daemon)
        self.most = 0

    def look(self) -> None:
        self.most = max(self.most, resident(self._daemon) - self._before)


def unread(daemon: Daemon, method: str, path: str, body: str = "") -> Connection:
    """A request whose answer nobody reads."""
    connection = Connection(daemon.socket)
    connection.request(method, path, body or None, {"content-type": "application/json"} if body else {})
    return connection


@pytest.mark.parametrize("flood", [GIB // 4, pytest.param(10 * GIB, marks=pytest.mark.soak)])
def test_a_flood_for_clients_that_do_not_read(
    daemon: Daemon, environment: str, neighbour: str, flood: int
) -> None:
    """By every way that streams output. Those who must not miss any make the program wait; without them it runs on."""
    growth = Growth(daemon)
    in_environment = f"/environments/{environment}"
    argv = ["head", "-c", str(flood), "/dev/zero"]
    info = daemon.call("POST", f"{in_environment}/executions", {"argv": argv}, expect=201)
    program = f"{in_environment}/executions/{info['execution_id']}"
    with ExitStack() as stack:
        stack.enter_context(closing(unread(daemon, "GET", f"{in_environment}/logs?follow=1")))
        body = json.dumps({"argv": argv})
        stack.enter_context(closing(unread(daemon, "POST", f"{in_environment}/execute", body)))
        with ExitStack() as waiting:
            waiting.enter_context(closing(unread(daemon, "GET", f"{program}/events")))
            waiting.enter_context(attached(daemon, environment, execution_id=info["execution_id"]))
            for _ in range(300):
                assert daemon.execute(neighbour, ["echo", "alive"])["stdout"] == "alive\n"
                growth.look()
            assert daemon.call("GET", program)["state"] == "running"
        while (found := daemon.call("GET", program))["state"] == "running":
            assert daemon.execute(neighbour, ["echo", "alive"])["stdout"] == "alive\n"
            growth.look()
            time.sleep(0.1)  # that it gets on
    assert (found["outcome"], found["result"]["stdout_size"]) == ("completed", flood)
    assert growth.most < FLAT


PAIRS = 10_000
ALTERNATE = f"""
import fcntl, os
for fd in (1, 2):
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
for _ in range({PAIRS}):
    os.write(1, b"o")
    os.write(2, b"e")
"""
"""Packets of one byte: the pipe does not put them together."""


def test_single_bytes_that_alternate_between_streams_cost_little(
    daemon: Daemon, environment: str, neighbour: str
) -> None:
    """By every way that output takes. With an object for each byte they would be 20 MiB."""
    daemon.execute(environment, "cat > alternate.py", stdin=ALTERNATE)
    in_environment = f"/environments/{environment}"
    session = daemon.call("POST", f"{in_environment}/sessions", {"language": "python"}, expect=201)
    growth = Growth(daemon)
    argv = ["python3", "alternate.py"]
    program = daemon.call("POST", f"{in_environment}/executions", {"argv": argv}, expect=201)["execution_id"]
    bodies = [
        ("execute", {"argv": argv}),
        ("execute", {"argv": argv}),
        ("execute", {"command": "python3 alternate.py"}),
        (f"sessions/{session['session_id']}/run", {"code": ALTERNATE}),
    ]
    with ExitStack() as stack, ThreadPoolExecutor(len(bodies)) as pool:
        stack.enter_context(closing(unread(daemon, "GET", f"{in_environment}/logs?follow=1")))
        stack.enter_context(attached(daemon, environment, execution_id=program))
        flood = [pool.submit(daemon.call, "POST", f"{in_environment}/{path}", body) for path, body in bodies]
        while not all(each.done() for each in flood):
            assert daemon.execute(neighbour, ["echo", "alive"])["stdout"] == "alive\n"
            growth.look()
        for each in flood:
            assert (each.result()["stdout"], each.result()["stderr"]) == ("o" * PAIRS, "e" * PAIRS)
    growth.look()
    assert growth.most < 10 * MIB


def test_a_flood_of_commands_for_one_shell(daemon: Daemon, environment: str, neighbour: str) -> None:
    """Some wait their turn, the others are told when to come again; nobody else waits."""
    path = f"/environments/{environment}/execute"
    daemon.execute(environment, ["mkfifo", "go"])
    with ThreadPoolExecutor(FLOODING + 1) as pool:
        first = pool.submit(daemon.raw, "POST", path, {"command": "echo first; read line < go"})
        daemon.wait_for_output(environment, "first")
        flood = [pool.submit(daemon.raw, "POST", path, {"command": "true"}) for _ in range(FLOODING)]
        while sum(each.done() for each in flood) < FLOODING - WAITING_MAX:
            assert daemon.execute(neighbour, ["echo", "alive"])["stdout"] == "alive\n"
        daemon.execute(environment, ["sh", "-c", "echo > go"])
        assert first.result()[0] == 200
        answers = [each.result() for each in flood]
    assert Counter(status for status, _, _ in answers) == {200: WAITING_MAX, 429: FLOODING - WAITING_MAX}
    for status, headers, body in answers:
        if status == 429:
            assert (headers["retry-after"], json.loads(body)["code"]) == ("1", "busy")


def test_two_hundred_slow_clients(daemon: Daemon, environment: str, neighbour: str) -> None:
    """Half of them never finish what they ask, the others do not read what is answered. All are: no guest is lost."""
    growth = Growth(daemon)
    readers = []
    with ExitStack() as stack:
        daemon.execute(environment, ["sh", "-c", f"head -c {4 * MIB} /dev/zero > large"])
        for number in range(SLOW_CLIENTS):
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.connect(daemon.socket)
            if number % 2:
                client.sendall(b"POST /environments HTTP/1.1\r\nhost: skerry\r\ncontent-le")
            else:
                path = f"/environments/{environment}/files/read?path=large"
                client.sendall(f"GET {path} HTTP/1.1\r\nhost: skerry\r\n\r\n".encode())
                readers.append(client)
        for _ in range(20):
            assert daemon.execute(neighbour, ["echo", "alive"])["stdout"] == "alive\n"
            made = daemon.create(workspace="memory")
            daemon.call("DELETE", f"/environments/{made}")
            growth.look()
        found = Counter(reader.recv(12, socket.MSG_PEEK) for reader in readers)
        growth.look()
    assert set(found) == {b"HTTP/1.1 200", b"HTTP/1.1 429"}
    assert growth.most < FLAT
