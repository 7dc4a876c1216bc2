"""Daemons for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from skerry.client import autostart
from tests import support
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


@pytest.fixture(params=support.first_of(["rootful", "rootless"]))
def user(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> support.Nobody | None:
    """Whose the daemon is; None: root's."""
    if request.param == "rootful":
        return None
    # Root may use the daemons of others, but its SDK has to be talked into it.
    monkeypatch.setattr(autostart, "_peer", lambda sock: (0, 0))
    nobody: support.Nobody = request.getfixturevalue("as_nobody")
    return nobody
