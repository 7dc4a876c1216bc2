"""A daemon is killed at every step of everything it does: the next one's answers are true, and rows and host agree."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from skerry.failpoints import POINTS, VARIABLE
from skerry.ids import new_id
from tests import dockerd, support
from tests.conformance import kinds
from tests.conformance.kinds import RUNGS
from tests.integration import agreement
from tests.integration.daemon import Daemon, launch
from tests.integration.nursery import Nursery, nursery

LOST = (OSError, http.client.HTTPException)
SLEEP = ["sleep", "4321"]
NEW: dict[str, Any] = {"name": "new", "lifetime": 1000}
PLACES = {
    "namespace": set(POINTS),
    **{name: kind.failpoints for name, kind in RUNGS.items()},
    "fake": {point for point in POINTS if not point.startswith(("blank.", "volume."))}
    - {"create.noted", "delete.cgroups"},
    # Where the store matters; the rest is the same code.
    "postgres": {
        "create.recorded",
        "create.served",
        "execute.recorded",
        "delete.noted",
        "delete.stopped",
        "recover.swept",
    },
}
BEFORE = "the daemon ended before it was known"
UNDONE = {"delete.intended"}
"""Where nothing of a delete has happened yet."""


@pytest.fixture(scope="module")
def daemons() -> Iterator[Nursery]:
    with nursery() as loaded:
        yield loaded


class World:
    """A home with two environments, `old` and `other`, that must survive whatever is not done to them."""

    def __init__(self, daemons: Nursery, place: Place) -> None:
        self._daemons = daemons
        self.home = place.home
        self.kind = place.kind
        self._options = place.options
        rung = RUNGS.get(place.kind)
        self._variables = rung.variables() if rung else {}
        self._engine = dockerd.shared.get() if rung and rung.engine else None
        self.key = {"idempotency-key": new_id()}
        with self.daemon() as daemon:
            self.old = daemon.create(name="old", lifetime=5000)
            self.other = daemon.create(name="other", lifetime=5000, workspace="memory")
            self.background = {each: self._begin(daemon, each) for each in (self.old, self.other)}
            self._leave(daemon)

    def daemon(self, failpoint: str = "") -> contextlib.AbstractContextManager[Daemon]:
        return self._daemons.started(self.home, *self._options, env={VARIABLE: failpoint, **self._variables})

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

    def create(self, daemon: Daemon) -> tuple[int, dict[str, Any]]:
        """A new one, however often it is asked for."""
        status, _, body = daemon.raw("POST", "/environments", NEW, self.key)
        return status, json.loads(body)

    def is_whole(self, daemon: Daemon, environment: str) -> None:
        """Its shell, its files, what runs in its background, and nothing else."""
        inside = daemon.execute(environment, "echo $WORD; cat file")["stdout"]
        assert inside == "word\ncontent\n"
        assert self.background[environment] in running(daemon, environment)

    def has_ended(self, daemon: Daemon, environment: str, reason: str) -> None:
        found = daemon.call("GET", f"/environments/{environment}")
        assert (found["state"], found["ended_reason"]) == ("ended", reason)

    def agree(self, daemon: Daemon) -> None:
        """The audit holds; the daemon goes, and rows and host are compared with what it has said."""
        assert daemon.call("GET", "/audit/verify")["intact"]
        told = set(listed(daemon))
        self._leave(daemon)
        assert agreement.check(self.home, self._engine) == told


def listed(daemon: Daemon) -> dict[str, str]:
    found = daemon.call("GET", "/environments")["environments"]
    assert {each["state"] for each in found} <= {"running"}
    return {each["environment_id"]: each["name"] for each in found}


def unknown(daemon: Daemon, environment: str) -> list[str]:
    """What was to be done in an environment and, by the audit, nobody knows how it ended."""
    _, _, body = daemon.raw("GET", f"/audit?environment={environment}")
    rows = [json.loads(line) for line in body.splitlines()]
    intents = {row["request_id"]: row["action"] for row in rows if row["kind"] == "intent"}
    results = {row["request_id"]: row["detail"].get("reason") for row in rows if row["kind"] == "result"}
    return sorted(action for request, action in intents.items() if results.get(request, BEFORE) == BEFORE)


def running(daemon: Daemon, environment: str) -> set[str]:
    """The executions that run as the daemon says, which are all that run inside."""
    found = daemon.call("GET", f"/environments/{environment}/executions")["executions"]
    return {each["execution_id"] for each in found if each["state"] == "running"}


@dataclass(frozen=True)
class Place:
    """Where daemons start again and again; what one test leaves is ended before the next begins."""

    kind: str
    home: Path

    @property
    def options(self) -> tuple[str, ...]:
        """With one backend, as the probes of others would pass the same points."""
        return ("--backend", "namespace" if self.kind == "postgres" else self.kind)


@pytest.fixture(scope="module")
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param in RUNGS:
        kinds.require(request.param)
    with support.temporary_home() as home, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SKERRY_HOME", str(home))
        if request.param == "postgres":
            patch.setenv("SKERRY_DATABASE", request.getfixturevalue("postgres_server").new_database())
        yield Place(request.param, home)


@pytest.fixture
def world(place: Place, daemons: Nursery) -> Iterator[World]:
    world = World(daemons, place)
    try:
        yield world
    finally:
        with world.daemon():
            pass  # its end is that of all environments


def points(*prefixes: str) -> pytest.MarkDecorator:
    """Failpoints by prefix, at each kind of place that reaches them. All but the first are soaks, and of creates and
    deletes the first on each rung that is like no other."""
    found = [
        (kind, point)
        for kind, some in PLACES.items()
        for point in POINTS
        if point.startswith(prefixes) and point in some
    ]
    short = {found[0]}
    if prefixes[0] in ("create.", "delete."):
        short |= {
            next(each for each in found if each[0] == name) for name, kind in RUNGS.items() if not kind.alike
        }
    cases = [pytest.param(*each, marks=() if each in short else pytest.mark.soak) for each in found]
    return pytest.mark.parametrize(("place", "point"), cases, indirect=["place"])


@points("create.", "volume.")
def test_create(world: World, point: str) -> None:
    """It was never answered. Whoever asks again, with the same key, gets one environment, and it works."""
    if point == "volume.mounted":
        point = "volume.mounted:2"  # the first is made to see whether it works
    world.die_at(point, lambda daemon: world.create(daemon) if point != "volume.mounted:2" else None)
    with world.daemon() as daemon:
        assert listed(daemon).keys() - {world.old, world.other} <= {
            each for each, name in listed(daemon).items() if name == "new"
        }
        world.agree(daemon)
    with world.daemon() as daemon:
        status, made = world.create(daemon)
        assert status == 201, made
        assert world.create(daemon) == (201, made)
        assert listed(daemon) == {world.old: "old", world.other: "other", made["environment_id"]: "new"}
        assert daemon.execute("new", "echo works")["stdout"] == "works\n"
        for environment in (world.old, world.other):
            world.is_whole(daemon, environment)
        world.agree(daemon)


@points("code.")
def test_a_program_that_runs_once(world: World, point: str) -> None:
    """Nobody waits for it any more: its environment is not taken over."""
    world.die_at(point, lambda daemon: daemon.call("POST", "/execute", {"language": "bash", "code": "true"}))
    with world.daemon() as daemon:
        assert set(listed(daemon)) == {world.old, world.other}
        world.agree(daemon)


@points("blank.")
def test_what_is_made_ahead(world: World, point: str) -> None:
    made: list[str] = []
    # The first is for the one who asks, the others are made ahead.
    for time in ("1", "2", "3"):
        world.die_at(f"{point}:{time}", lambda daemon: made.append(daemon.create(workspace="memory")))
    if world.kind not in RUNGS:  # whose creates take longer than what is made ahead
        assert len(made) == 2
    with world.daemon() as daemon:
        assert set(made) <= listed(daemon).keys()
        for environment in (world.old, world.other):
            world.is_whole(daemon, environment)
        world.agree(daemon)


@points("pool.")
def test_a_pool(world: World, point: str) -> None:
    """What is kept ready is nobody's, until its row is there: nothing of it is left, and who asks again gets one."""

    def work(daemon: Daemon) -> None:
        daemon.call("POST", "/pools/default/warmup", {"count": 2})
        world.create(daemon)

    world.die_at(point, work)
    with world.daemon() as daemon:
        assert listed(daemon).keys() == {world.old, world.other}
        status, made = world.create(daemon)
        assert status == 201, made
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
        look = ["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"]
        assert daemon.execute(world.old, look)["stdout"].count("sleep 9876 ") == lives
        inside = daemon.execute(world.old, ["sh", "-c", "cat begun 2>/dev/null"])["stdout"]
        if point in ("execute.admitted", "execute.intended"):
            assert inside == ""
        told = [] if point == "execute.admitted" else ["execution"]
        if how == "wait":  # the other that has no result yet is still running
            assert unknown(daemon, world.old) == [*told, "execution"]
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
            assert "environment.delete" in unknown(daemon, world.old)
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
    assert process.wait(30) == 2
    assert json.loads(word)["code"] == "invalid_request"
