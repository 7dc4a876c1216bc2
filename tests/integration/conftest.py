"""Daemons for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import support
from tests.integration.daemon import Daemon, started

BACKENDS = {"namespace": (), "fake": ("--backend", "fake")}


@pytest.fixture(scope="module", params=list(BACKENDS))
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
