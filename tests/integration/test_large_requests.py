"""Requests that are large, or wrong in every part: refused early, while everybody else is served."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection as MultiprocessingConnection
from pathlib import Path
from typing import Any

import pytest

from skerry.manager.executions.commands import VARIABLES_MAX
from skerry.policy import MIB
from tests import support
from tests.integration.daemon import Connection, Daemon, started
from tests.integration.test_floods import Growth

STALL = 2.0
"""Seconds that the longest answer to /healthz may take, on a machine that is busy with other things. One of these
requests took 5 to 44 s."""
LARGE = 15 * MIB


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with support.temporary_home() as home, started(home) as running:
        yield running


def _look(path: str, other: MultiprocessingConnection) -> None:
    longest = 0.0
    with closing(Connection(path)) as connection:
        while not other.poll():
            began = time.perf_counter()
            connection.request("GET", "/healthz")
            assert connection.getresponse().read()
            if not longest:
                other.send("ready")
            longest = max(longest, time.perf_counter() - began)
    other.send(longest)


@contextmanager
def served(daemon: Daemon) -> Iterator[None]:
    """Another process asks for /healthz all the time, and is answered."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    looking = context.Process(target=_look, args=(daemon.socket, there))
    looking.start()
    there.close()
    try:
        assert here.recv() == "ready"
        yield
        here.send("enough")
        assert here.recv() < STALL
    finally:
        here.close()
        looking.join()


ATTACKS: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "arguments": ("execute", lambda: json.dumps({"argv": ["a"] * 1_000_000}).encode(), "elements"),
    "wrong arguments": ("execute", lambda: b'{"argv":[' + b"1," * (LARGE // 2) + b"1]}", "elements"),
    "few wrong arguments": ("execute", lambda: json.dumps({"argv": [1] * 20_000}).encode(), "must be text"),
    "unknown fields": ("execute", lambda: json.dumps({str(n): 1 for n in range(20_000)}).encode(), "unknown"),
    "arguments that do not fit": (
        "execute",
        lambda: json.dumps({"argv": ["a" * 999] * 1000}).encode(),
        "bytes",
    ),
    "variables": (
        "",
        lambda: json.dumps({"env": {f"V{n}": "" for n in range(900_000)}}).encode(),
        "elements",
    ),
    "rules": (
        "",
        lambda: json.dumps({"network": "allowlist", "allow": ["a.example"] * 30_000}).encode(),
        "rules",
    ),
    "rules to remove": (
        "network/deny",
        lambda: json.dumps({"rules": ["a.example"] * 30_000}).encode(),
        "rules",
    ),
    "long name": ("", lambda: json.dumps({"name": "x" * LARGE}).encode(), "longer"),
    "deep": ("execute", lambda: b"[" * LARGE, "elements"),
    "spaces": ("execute", lambda: b" " * LARGE, "no content"),
    "number": ("execute", lambda: b'{"timeout":' + b"9" * (MIB // 2) + b"}", "JSON"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_large_structure_is_refused_and_stalls_nobody(daemon: Daemon, environment: str, name: str) -> None:
    operation, body, words = ATTACKS[name]
    path = f"/environments/{environment}/{operation}" if operation else "/environments"
    text = body()
    growth = Growth(daemon)
    with served(daemon):
        for _ in range(2):
            status, _, answer = daemon.raw("POST", path, text, {"content-type": "application/json"})
            assert status in (400, 413), answer
            assert words in json.loads(answer)["message"]
            growth.look()
    assert growth.most < 50 * MIB


def test_large_content_stalls_nobody(daemon: Daemon, environment: str) -> None:
    content = 'é"\n\U0001f600' * (LARGE // 12)
    body = json.dumps({"path": "large", "content": content}, ensure_ascii=False).encode()
    with served(daemon):
        daemon.call("POST", f"/environments/{environment}/files/write", body)
    found = daemon.execute(environment, ["sha256sum", "large"])["stdout"]
    assert found.startswith(hashlib.sha256(content.encode()).hexdigest())


def test_variables_that_never_fit_are_refused_at_the_create(daemon: Daemon) -> None:
    fits = {"V": "x" * (VARIABLES_MAX - 100)}
    environment = daemon.create(env=fits)
    assert daemon.execute(environment, ["sh", "-c", "echo ${#V}"])["stdout"] == f"{len(fits['V'])}\n"
    daemon.call("DELETE", f"/environments/{environment}")
    for env in (
        {"V": "x" * VARIABLES_MAX},
        {"V": "é" * (VARIABLES_MAX // 2)},
        {f"V{n}": "" for n in range(20_000)},
    ):
        problem = daemon.call("POST", "/environments", {"env": env}, expect=400)
        assert "the variables take" in problem["message"]


def ended(daemon: Daemon, path: str) -> tuple[Any, Any]:
    info = daemon.call("GET", path)
    del info["workspace"]  # the next daemon knows what was asked for, not what it was given
    return info, daemon.call("GET", f"{path}/network")


def test_ended_environments_keep_only_what_tells_of_their_end(home: Path) -> None:
    """In the store, and so in the memory of the next daemon."""
    with started(home) as daemon:
        env = {"V": "secret-value-of-the-past"}
        environment = daemon.create(env=env, network="allowlist", allow=["example.com"], cpus=0.5)
        daemon.call("DELETE", f"/environments/{environment}")
        path = f"/environments/{environment}"
        before = ended(daemon, path)
    with started(home) as daemon:
        assert ended(daemon, path) == before
    assert before[0]["limits"]["cpus"] == 0.5
    assert (before[1]["network"], before[1]["allow"]) == ("allowlist", [])
    with closing(sqlite3.connect(home / "state.db")) as store:
        (row,) = store.execute("SELECT variables, policy FROM environments").fetchall()
    assert row[0] == "{}"
    assert json.loads(row[1])["allow"] == []
