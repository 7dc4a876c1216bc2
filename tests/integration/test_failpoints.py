"""A daemon is killed at every step of everything it does: the next one's answers are true, and rows and host agree."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skerry.failpoints import POINTS, VARIABLE
from tests.integration import agreement
from tests.integration.daemon import Daemon, launch
from tests.integration.nursery import Nursery, nursery

LOST = (OSError, http.client.HTTPException)
KEY = {"idempotency-key": "once"}
SLEEP = ["sleep", "4321"]
NEW: dict[str, Any] = {"name": "new", "lifetime": 1000}
NOT_IN_FAKE = {point for point in POINTS if point.startswith(("blank.", "volume."))} | {"delete.cgroups"}
ON_POSTGRES = {
    "create.recorded",
    "create.served",
    "execute.recorded",
    "delete.noted",
    "delete.stopped",
    "recover.swept",
}
"""Where the store matters; the rest is the same code."""
UNDONE = {"delete.intended"}
"""Where nothing of a delete has happened yet."""


@pytest.fixture(scope="module")
def daemons() -> Iterator[Nursery]:
    with nursery() as loaded:
        yield loaded


class World:
    """A home with two environments, `old` and `other`, that must survive whatever is not done to them."""

    def __init__(self, daemons: Nursery, home: Path, options: tuple[str, ...]) -> None:
        self._daemons = daemons
        self.home = home
        self._options = options
        with self.daemon() as daemon:
            self.old = daemon.create(name="old", lifetime=5000)
            self.other = daemon.create(name="other", lifetime=5000, workspace="memory")
            self.background = {each: self._begin(daemon, each) for each in (self.old, self.other)}
            self._leave(daemon)

    def daemon(self, failpoint: str = "") -> contextlib.AbstractContextManager[Daemon]:
        return self._daemons.started(self.home, *self._options, env={VARIABLE: failpoint})

    def _begin(self, daemon: Daemon, environment: str) -> str:
        daemon.execute(environment, "export WORD=word; echo content > file")
        info = daemon.call("POST", f"/environments/{environment}/executions", {"argv": SLEEP}, expect=201)
        found: str = info["execution_id"]
        return found

    def _leave(self, daemon: Daemon) -> None:
        """With everything in order."""
        daemon.process.send_signal(signal.SIGTERM)
        daemon.process.wait()

    def die_at(self, point: str, act: Callable[[Daemon], object]) -> None:
        """Do something at a daemon that dies there, which is looked at."""
        with self.daemon(point) as daemon:
            with contextlib.suppress(*LOST):
                act(daemon)
            daemon.process.wait()
        assert (self.home / "daemon.log").read_text().endswith(f"killed at {point.partition(':')[0]}\n")

    def is_whole(self, daemon: Daemon, environment: str) -> None:
        """Its shell, its files, what runs in its background, and nothing else."""
        inside = daemon.execute(environment, "echo $WORD; cat file")["stdout"]
        assert inside == "word\ncontent\n"
        assert self.background[environment] in running(daemon, environment)

    def has_ended(self, daemon: Daemon, environment: str, reason: str) -> None:
        found = daemon.call("GET", f"/environments/{environment}")
        assert (found["state"], found["ended_reason"]) == ("ended", reason)

    def agree(self, daemon: Daemon) -> None:
        """The daemon goes, and rows and host are compared with what it has said."""
        told = set(listed(daemon))
        self._leave(daemon)
        assert agreement.check(self.home) == told


def listed(daemon: Daemon) -> dict[str, str]:
    found = daemon.call("GET", "/environments")["environments"]
    assert {each["state"] for each in found} <= {"running"}
    return {each["environment_id"]: each["name"] for each in found}


def running(daemon: Daemon, environment: str) -> set[str]:
    """The executions that run as the daemon says, which are all that run inside."""
    found = daemon.call("GET", f"/environments/{environment}/executions")["executions"]
    return {each["execution_id"] for each in found if each["state"] == "running"}


@pytest.fixture
def world(
    request: pytest.FixtureRequest,
    home: Path,
    point: str,
    kind: str,
    daemons: Nursery,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[World]:
    if kind == "postgres":
        if point not in ON_POSTGRES:
            pytest.skip("the same code as with SQLite")
        monkeypatch.setenv("SKERRY_DATABASE", request.getfixturevalue("postgres_server").new_database())
    if kind == "fake" and point in NOT_IN_FAKE:
        pytest.skip("the fake backend does not come there")
    world = World(daemons, home, ("--backend", "fake") if kind == "fake" else ())
    yield world
    with world.daemon():
        pass  # its end is that of all environments


def points(*prefixes: str) -> Callable[[Any], Any]:
    found = [point for point in POINTS if point.startswith(prefixes)]
    kinds = pytest.mark.parametrize("kind", ["namespace", "fake", "postgres"])
    parametrized = pytest.mark.parametrize("point", found)
    return lambda test: kinds(parametrized(test))


def create(daemon: Daemon) -> tuple[int, dict[str, Any]]:
    status, _, body = daemon.raw("POST", "/environments", NEW, KEY)
    return status, json.loads(body)


@points("create.", "volume.")
def test_create(world: World, point: str) -> None:
    """It was never answered. Whoever asks again, with the same key, gets one environment, and it works."""
    if point == "volume.mounted":
        point = "volume.mounted:2"  # the first is made to see whether it works
    world.die_at(point, lambda daemon: create(daemon) if point != "volume.mounted:2" else None)
    with world.daemon() as daemon:
        assert listed(daemon).keys() - {world.old, world.other} <= {
            each for each, name in listed(daemon).items() if name == "new"
        }
        world.agree(daemon)
    with world.daemon() as daemon:
        status, made = create(daemon)
        assert status == 201, made
        assert create(daemon) == (201, made)
        assert listed(daemon) == {world.old: "old", world.other: "other", made["environment_id"]: "new"}
        assert daemon.execute("new", "echo works")["stdout"] == "works\n"
        for environment in (world.old, world.other):
            world.is_whole(daemon, environment)
        world.agree(daemon)


@points("blank.")
def test_what_is_made_ahead(world: World, point: str) -> None:
    made: list[str] = []
    world.die_at(point, lambda daemon: made.append(daemon.create(workspace="memory")))
    with world.daemon() as daemon:
        assert set(made) <= listed(daemon).keys()
        for environment in (world.old, world.other):
            world.is_whole(daemon, environment)
        world.agree(daemon)


@points("execute.")
@pytest.mark.parametrize("how", ["wait", "background"])
def test_execute(world: World, point: str, how: str) -> None:
    """What somebody waited for is not run any more; what was to run in the background does if that was written down."""
    if (point, how) == ("execute.recorded", "wait"):
        pytest.skip("it is never written down")
    script = "echo begun > begun; echo output; exec sleep 9876"
    if point in ("execute.ended", "execute.concluded"):
        script = "echo begun > begun; echo output"
    argv = ["sh", "-c", script]
    path = f"/environments/{world.old}/" + ("execute" if how == "wait" else "executions")
    world.die_at(point, lambda daemon: daemon.raw("POST", path, {"argv": argv}))
    with world.daemon() as daemon:
        for environment in (world.old, world.other):
            world.is_whole(daemon, environment)
        left = running(daemon, world.old) - {world.background[world.old]}
        lives = point in ("execute.recorded", "execute.output") and how == "background"
        assert len(left) == lives
        inside = daemon.execute(world.old, ["sh", "-c", "cat begun 2>/dev/null"])["stdout"]
        if point in ("execute.admitted", "execute.intended"):
            assert inside == ""
        if how == "background" and lives:
            (execution,) = left
            daemon.raw("DELETE", f"/environments/{world.old}/executions/{execution}")
        world.agree(daemon)


@points("delete.")
def test_delete(world: World, point: str) -> None:
    """All of it happens, or nothing of it does."""
    world.die_at(point, lambda daemon: daemon.call("DELETE", f"/environments/{world.old}"))
    with world.daemon() as daemon:
        world.is_whole(daemon, world.other)
        if point in UNDONE:
            world.is_whole(daemon, world.old)
        else:
            assert listed(daemon).keys() == {world.other}
            world.has_ended(daemon, world.old, "deleted")
        daemon.call("DELETE", f"/environments/{world.old}")
        world.has_ended(daemon, world.old, "deleted")
        daemon.create(name="old", workspace="memory")
        world.agree(daemon)


@points("heartbeat.")
def test_heartbeat(world: World, point: str) -> None:
    path = f"/environments/{world.old}/heartbeat"
    with world.daemon() as daemon:
        before = daemon.call("POST", path, {"lifetime": 5000})["expires_at"]
        daemon.kill()
    world.die_at(point, lambda daemon: daemon.call("POST", path, {"lifetime": 9000}))
    with world.daemon() as daemon:
        world.is_whole(daemon, world.old)
        after = daemon.call("GET", f"/environments/{world.old}")["expires_at"]
        assert after == before if point == "heartbeat.extended" else after > before + 3000
        world.agree(daemon)


@points("recover.")
def test_recovery(world: World, point: str) -> None:
    """Killed while it recovers, and the next one, too: nothing is lost by that either."""
    with world.daemon("delete.killed") as daemon, contextlib.suppress(*LOST):
        half = daemon.create(workspace="memory")
        daemon.call("DELETE", f"/environments/{half}")
    for _ in range(2):
        world.die_at(point, lambda daemon: None)
        if point == "recover.ended":  # there is only one
            break
    with world.daemon() as daemon:
        for environment in (world.old, world.other):
            world.is_whole(daemon, environment)
        world.has_ended(daemon, half, "deleted")
        world.agree(daemon)


def test_an_unknown_point_is_an_error_at_the_start(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "create.recored")
    process, word = launch(home)
    assert process.wait(30) == 1
    assert json.loads(word)["code"] == "invalid_request"
