"""Daemons for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from skerry.client import autostart
from tests import machines, support
from tests.conformance import kinds
from tests.conformance.kinds import NETWORKED, RUNGS, skip_unless_given
from tests.integration import daemon as daemons
from tests.integration.daemon import Daemon, started

BACKENDS = {"namespace": (), "fake": ("--backend", "fake")}


@pytest.fixture(scope="module", params=support.first_of(BACKENDS))
def daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    """One daemon of each kind for all tests of a module."""
    with support.temporary_home() as home, started(home, *BACKENDS[request.param]) as running:
        yield running


@pytest.fixture
def environment(daemon: Daemon) -> Iterator[str]:
    """The id of a fresh environment."""
    environment_id = daemon.create()
    yield environment_id
    daemon.call("DELETE", f"/environments/{environment_id}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test of a daemon's `user`: root's, another's, and root's with each rung, which is a soak but in tests that
    are marked `each_rung`, and with slow ones there, too."""
    if "user" in metafunc.fixturenames and not _chosen_by_itself(metafunc):
        each = metafunc.definition.get_closest_marker("each_rung") is not None
        found = NETWORKED if metafunc.definition.get_closest_marker("networked") else RUNGS
        whose = [*support.first_of(["rootful", "rootless"]), *kinds.parameters(each, found)]
        metafunc.parametrize("user", whose, indirect=True)


def _chosen_by_itself(metafunc: pytest.Metafunc) -> bool:
    return any("user" in marker.args[0] for marker in metafunc.definition.iter_markers("parametrize"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    callspec = getattr(item, "callspec", None)
    if callspec is not None and (rung := NETWORKED.get(callspec.params.get("user", ""))) is not None:
        skip_unless_given(item, rung.name, rung.gives)


@pytest.fixture
def user(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> support.Nobody | None:
    """Whose the daemon is; None: root's. Of a rung, its daemon serves every request with that backend."""
    if request.param == "rootful":
        return None
    if request.param in NETWORKED:
        kinds.require(request.param)
        for name, value in machines.settings().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(daemons, "OPTIONS", ("--backend", request.param))
        for name, value in NETWORKED[request.param].variables().items():
            monkeypatch.setenv(name, value)
        return None
    # Root may use the daemons of others, but its SDK has to be talked into it.
    monkeypatch.setattr(autostart, "_peer", lambda sock: (0, 0))
    nobody: support.Nobody = request.getfixturevalue("as_nobody")
    return nobody
