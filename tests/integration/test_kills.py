"""A daemon that is killed again and again under load: nothing is lost that was acknowledged, and nothing leaked."""

from __future__ import annotations

import contextlib
import http.client
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.integration import agreement
from tests.integration.daemon import Daemon
from tests.integration.nursery import Nursery, nursery

KILLS = [
    ("namespace", 8),
    pytest.param("namespace", 200, marks=pytest.mark.soak),
    pytest.param("fake", 20, marks=pytest.mark.soak),
    pytest.param("namespace-postgres", 20, marks=pytest.mark.soak),
]
CLIENTS = 6
KEPT_MAX = 3
"""Of each client, so that a round stays short."""
LOST = (OSError, http.client.HTTPException)
"""What a client sees of a daemon that was killed."""


@dataclass
class Promise:
    """What somebody was told of one environment. Where a call was not answered, both may be true: before and after."""

    file: set[str] = field(default_factory=lambda: {""})
    state: set[str] = field(default_factory=lambda: {""})
    """Of its shell."""
    expires_at: set[float] = field(default_factory=set)
    """Empty: unknown."""
    background: set[str] = field(default_factory=set)
    deleted: bool = False
    """Asked for, that is."""


class Client:
    """One of those who make the load. Its environments are its own, and it does one thing after the other."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.promises: dict[str, Promise] = {}

    def work(self, daemon: Daemon, done: threading.Semaphore, stop: threading.Event) -> None:
        with contextlib.suppress(*LOST):
            while not stop.is_set():
                self._step(daemon)
                done.release()

    def _step(self, daemon: Daemon) -> None:
        if len(self.promises) < KEPT_MAX:
            workspace = "auto" if self._random.random() < 0.1 else "memory"
            made = daemon.call("POST", "/environments", {"workspace": workspace}, expect=201)
            self.promises[made["environment_id"]] = Promise(expires_at={made["expires_at"]})
        environment = self._random.choice(list(self.promises))
        actions = (self._write, self._export, self._start, self._heartbeat, self._delete)
        self._random.choice(actions)(daemon, environment, self.promises[environment])

    def _write(self, daemon: Daemon, environment: str, promise: Promise) -> None:
        word = self._word()
        promise.file.add(word)
        path = f"/environments/{environment}/files/write"
        daemon.call("POST", path, {"path": "word", "content": word})
        promise.file = {word}

    def _export(self, daemon: Daemon, environment: str, promise: Promise) -> None:
        word = self._word()
        promise.state.add(word)
        assert daemon.execute(environment, f"export WORD={word}")["outcome"] == "completed"
        promise.state = {word}

    def _start(self, daemon: Daemon, environment: str, promise: Promise) -> None:
        body = {"argv": ["sleep", "1000"]}
        made = daemon.call("POST", f"/environments/{environment}/executions", body, expect=201)
        promise.background.add(made["execution_id"])

    def _heartbeat(self, daemon: Daemon, environment: str, promise: Promise) -> None:
        before, promise.expires_at = promise.expires_at, set()
        answer = daemon.call("POST", f"/environments/{environment}/heartbeat", {"lifetime": 5000})
        assert not before or answer["expires_at"] >= max(before)
        promise.expires_at = {answer["expires_at"]}

    def _delete(self, daemon: Daemon, environment: str, promise: Promise) -> None:
        promise.deleted = True
        daemon.call("DELETE", f"/environments/{environment}")
        del self.promises[environment]

    def _word(self) -> str:
        return f"w{self._random.randrange(1 << 30)}"


def verify(daemon: Daemon, clients: list[Client], seed: int) -> None:
    """What was acknowledged is there; what was not is settled now."""
    listed = daemon.call("GET", "/environments")["environments"]
    found: dict[str, Any] = {each["environment_id"]: each for each in listed}
    for client in clients:
        for environment, promise in list(client.promises.items()):
            if promise.deleted and found.get(environment, {"state": "gone"})["state"] in ("gone", "deleting"):
                del client.promises[environment]
                continue
            assert environment in found, f"seed {seed}: {environment} is lost: {promise}"
            told = found[environment]
            assert told["state"] == "running"
            assert not promise.expires_at or told["expires_at"] in promise.expires_at, (
                f"seed {seed}: {promise}"
            )
            promise.expires_at = {told["expires_at"]}
            inside = daemon.execute(environment, "echo $WORD; cat word 2>/dev/null")["stdout"]
            state, _, content = inside.partition("\n")
            assert state in promise.state, f"seed {seed}: {promise}"
            assert content in promise.file, f"seed {seed}: {promise}"
            promise.state, promise.file = {state}, {content}
            runs = daemon.call("GET", f"/environments/{environment}/executions")["executions"]
            running = {each["execution_id"] for each in runs if each["state"] == "running"}
            assert promise.background <= running, f"seed {seed}: {running}, {promise}"
            promise.deleted = False
    known = {environment for client in clients for environment in client.promises}
    for environment in found.keys() - known:  # made, and never told to anybody
        daemon.call("DELETE", f"/environments/{environment}")


@pytest.fixture(scope="module")
def daemons() -> Iterator[Nursery]:
    with nursery() as loaded:
        yield loaded


@pytest.mark.parametrize(("kind", "kills"), KILLS)
def test_killed_at_random_moments_under_load(
    home: Path,
    kind: str,
    kills: int,
    daemons: Nursery,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kind.endswith("postgres"):
        monkeypatch.setenv("SKERRY_DATABASE", request.getfixturevalue("postgres_server").new_database())
    options = ("--backend", "fake") if kind == "fake" else ()
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    clients = [Client(seed + number) for number in range(CLIENTS)]
    for _ in range(kills):
        done, stop = threading.Semaphore(0), threading.Event()
        with daemons.started(home, *options) as daemon, ThreadPoolExecutor(CLIENTS) as pool:
            verify(daemon, clients, seed)
            work = [pool.submit(client.work, daemon, done, stop) for client in clients]
            for _ in range(chance.randrange(1, 40)):
                assert done.acquire(timeout=60), f"seed {seed}"
            daemon.kill()
            stop.set()
            for each in work:
                each.result()
    with daemons.started(home, *options) as daemon:
        verify(daemon, clients, seed)
        assert daemon.call("GET", "/audit/verify")["intact"], f"seed {seed}"
        daemon.process.send_signal(signal.SIGTERM)
        daemon.process.wait()
        known = {environment for client in clients for environment in client.promises}
        assert agreement.check(home) == known, f"seed {seed}"
    with daemons.started(home, *options) as daemon:
        for environment in known:
            daemon.call("DELETE", f"/environments/{environment}")
        daemon.process.send_signal(signal.SIGTERM)
        daemon.process.wait()
        assert agreement.check(home) == set(), f"seed {seed}"
