"""Many clients of a real daemon at once, checked as histories: see tests/histories.py.

Rare orders are tried one by one in tests/unit/test_manager_histories.py; here everything is real.
"""

from __future__ import annotations

import functools
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from skerry.host.processes import start_time
from tests import histories, support
from tests.histories import History
from tests.integration.daemon import Daemon, started

CLIENTS = 8
SLACK = 0.01
"""Seconds. The daemon's loop reads the clock once a turn, in whole milliseconds."""


@pytest.fixture(scope="module", params=["namespace", "fake"])
def daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    with (
        support.temporary_home() as home,
        pytest.MonkeyPatch.context() as patch,
        started(home, "--backend", request.param) as daemon,
    ):
        patch.setenv("SKERRY_HOME", str(home))
        yield daemon


class Client:
    """Calls that are written into a history."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.history = History(time.monotonic)

    def create(self, *, key: str = "", **body: Any) -> str:
        headers = {"idempotency-key": key} if key else {}
        about = {"lifetime": 3600.0, "idle": 3600.0, **body}
        with self.history.call("create", **about, key=key, body=json.dumps(body)) as call:
            answer = self._ask(call, "POST", "/environments", body, headers)
            made: str = answer.get("environment_id", "")
            call.answer = {"environment_id": made}
        return made

    def delete(self, environment: str) -> None:
        process = _process(self.daemon.home, environment)
        with self.history.call("delete", environment=environment) as call:
            self._ask(call, "DELETE", f"/environments/{environment}")
        assert call.error or not (self.daemon.home / "instances" / environment).exists()
        assert call.error or process is None or start_time(process[0]) != process[1], "it still runs"

    def execute(self, environment: str) -> None:
        word = f"{random.random()}"
        with self.history.call("execute", environment=environment, word=f"{word}\n") as call:
            body = {"argv": ["echo", word]}
            call.answer = self._ask(call, "POST", f"/environments/{environment}/execute", body)

    def heartbeat(self, environment: str, lifetime: float) -> None:
        with self.history.call("heartbeat", environment=environment, lifetime=lifetime) as call:
            self._ask(call, "POST", f"/environments/{environment}/heartbeat", {"lifetime": lifetime})

    def look(self, environment: str) -> str:
        """Its state."""
        with self.history.call("look", environment=environment) as call:
            found = self._ask(call, "GET", f"/environments/{environment}")
            state: str = found.get("state", "")
            call.answer = {"state": state, "reason": found.get("ended_reason", "")}
        return state

    def _ask(self, call: histories.Call, *request: Any) -> dict[str, Any]:
        status, _, answer = self.daemon.raw(*request)
        found: dict[str, Any] = json.loads(answer)
        if status >= 400:
            call.error = found["code"]
        return found


def _process(home: Path, environment: str) -> tuple[int, int] | None:
    """The process 1 of an environment, if it has one."""
    try:
        pid, started, _ = map(int, os.readlink(home / "instances" / environment / "process").split())
    except OSError:
        return None
    return pid, started


def at_once(count: int, work: Callable[[random.Random], None], seed: int) -> None:
    """So many clients, each with chances of its own."""
    with ThreadPoolExecutor(count) as pool:
        for each in [pool.submit(work, random.Random(seed + number)) for number in range(count)]:
            each.result()


@pytest.fixture
def seed() -> int:
    return random.randrange(1 << 30)


def test_names(daemon: Daemon, seed: int) -> None:
    client = Client(daemon)

    def work(chance: random.Random) -> None:
        for _ in range(40):
            made = client.create(name=chance.choice(("one", "two")), workspace="memory")
            if made:
                client.delete(made)

    at_once(CLIENTS, work, seed)
    histories.check(client.history, histories.names, histories.deletes, seed=seed)


def test_idempotency_keys(daemon: Daemon, seed: int) -> None:
    client = Client(daemon)
    daemon_keys = [f"{seed}-{number}" for number in range(3)]

    def work(chance: random.Random) -> None:
        for _ in range(5):
            idle = 900 if chance.random() < 0.8 else 901
            client.create(key=chance.choice(daemon_keys), idle=idle, workspace="memory")

    at_once(CLIENTS, work, seed)
    histories.check(client.history, histories.keys, seed=seed)
    made = {call.answer["environment_id"] for call in client.history.of("create") if call.ok}
    assert len(made) == len({call.about["key"] for call in client.history.of("create")})
    refused = {call.error for call in client.history.of("create") if call.error}
    assert refused <= {"conflict"}
    for environment in made:
        client.delete(environment)
    assert daemon.call("GET", "/environments")["environments"] == []


def test_executions_against_deletes(daemon: Daemon, seed: int) -> None:
    client = Client(daemon)
    for _ in range(12):
        environment = client.create(workspace="memory")

        def work(chance: random.Random, environment: str = environment) -> None:
            for _ in range(chance.randrange(1, 6)):
                client.execute(environment)
            if chance.random() < 0.4:
                client.delete(environment)
            client.execute(environment)
            client.look(environment)

        at_once(CLIENTS, work, seed)
        client.delete(environment)
        client.execute(environment)
    histories.check(client.history, histories.executions, histories.deletes, seed=seed)


def test_a_hundred_deletes(daemon: Daemon, seed: int) -> None:
    client = Client(daemon)
    environment = client.create(name="one", workspace="memory")
    daemon.call("POST", f"/environments/{environment}/executions", {"command": "sleep 1000"}, expect=201)

    def work(_: random.Random) -> None:
        client.delete(environment)
        client.look(environment)

    at_once(100, work, seed)
    histories.check(client.history, histories.deletes, seed=seed)
    told = {call.answer["reason"] for call in client.history.of("look")}
    assert told == {"deleted"}
    assert [call for call in client.history.of("look") if call.error] == []
    # Once more, a while after.
    client.delete(environment)
    histories.check(client.history, histories.deletes, seed=seed)


def test_heartbeats_against_expiry(daemon: Daemon, seed: int) -> None:
    """Lives so short that many end between two heartbeats."""
    client = Client(daemon)

    def work(chance: random.Random) -> None:
        for _ in range(4):
            environment = client.create(lifetime=0.15, idle=5.0, workspace="memory")
            if not environment:  # it ended before its row was on disk
                continue
            while client.look(environment) == "running":
                if chance.random() < 0.7:
                    client.heartbeat(environment, 0.15)
                time.sleep(chance.random() * 0.25)
            client.heartbeat(environment, 0.15)

    at_once(CLIENTS, work, seed)
    rule = functools.partial(histories.leases, slack=SLACK)
    rule.__name__ = "leases"  # type: ignore[attr-defined]
    histories.check(client.history, rule, seed=seed)
    ended = {call.error for what in ("create", "heartbeat") for call in client.history.of(what) if call.error}
    assert ended == {"environment_ended"}
