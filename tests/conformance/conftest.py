"""Behaviours that every backend must show, through the contract and the channel to the guest alone.

Each test runs once for each entry of kinds.KINDS. As root the suite runs the namespace backend a second time, as
the user nobody, and the tests marked `posix` once more on a machine without bash: see elsewhere.py.

Tests are coroutines on one event loop. `box` is an instance that the tests of a module share; each leaves it
with nothing running. Tests that need one of their own take `site` and open it.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import secrets
from collections.abc import Iterator
from functools import partial

import pytest
from uvloop import new_event_loop

from skerry.backends.base import Backend
from tests import support
from tests.conformance import elsewhere, harness
from tests.conformance.harness import Box, Site
from tests.conformance.kinds import KINDS, Kind, skip_unless_given

TEST_SECONDS = 50.0

# The loop's library keeps a pipe for good from its first use on: now, before the open files are counted.
new_event_loop().close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = os.path.dirname(__file__)
    ours = [
        item for item in items if isinstance(item, pytest.Function) and str(item.path).startswith(f"{here}/")
    ]
    for item in ours:
        kind = _kind(item)
        item.add_marker(pytest.mark.timeout(60 * (kind.slowness if kind else 1)))
        if kind is not None and kind.always is not None and item.path.stem not in kind.always:
            item.add_marker(pytest.mark.soak)
    if os.geteuid() != 0 or elsewhere.INSIDE in os.environ:
        return
    rootless, without_bash = elsewhere.SUFFIXES
    places = {
        "namespace": elsewhere.Elsewhere(rootless, elsewhere.as_nobody),
        "fake": elsewhere.Elsewhere(without_bash, elsewhere.without_bash),
    }
    for item in ours:
        kind = _kind(item)
        place = None if kind is None else places.get(kind.name)
        if place is not None and (place.suffix == rootless or item.get_closest_marker("posix")):
            other = elsewhere.Item.of(item, place)
            if place.suffix == without_bash:
                other.add_marker(pytest.mark.soak)
            items.append(other)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Of the tests that run elsewhere, only those that were chosen here."""
    for item in session.items:
        if isinstance(item, elsewhere.Item):
            item.place.chosen.append(item.original)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if (kind := _kind(item)) is not None:
        skip_unless_given(item, kind.name, kind.gives)


def _kind(item: pytest.Item) -> Kind | None:
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("kind")


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        yield runner


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    runner: asyncio.Runner = pyfuncitem._request.getfixturevalue("runner")
    kind = _kind(pyfuncitem)
    runner.run(_bounded(partial(pyfuncitem.obj, **arguments), kind.slowness if kind else 1))
    return True


async def _bounded(test: partial[object], slowness: float) -> None:
    harness.slowness.set(slowness)
    async with asyncio.timeout(TEST_SECONDS * slowness):
        await test()  # type: ignore[misc]


@pytest.fixture(scope="session", params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def site(kind: Kind, runner: asyncio.Runner) -> Iterator[Site]:
    """One backend for the whole run, in a home of its own."""
    with support.temporary_home() as home:
        backend = kind.make(str(home))
        try:
            if not (capabilities := runner.run(backend.capabilities())).available:
                support.missing(f"{kind.name} is not available here: {capabilities.reason}")
            yield Site(kind, home, backend)
        finally:
            runner.run(_close(backend))


async def _close(backend: Backend) -> None:
    for environment_id in await backend.list():
        await backend.stop(environment_id)
    await backend.close()


@pytest.fixture(scope="module")
def _shared(site: Site, runner: asyncio.Runner) -> Iterator[Box]:
    box = runner.run(site.open())
    yield box
    runner.run(box.channel.close())
    runner.run(site.backend.stop(box.id))


@pytest.fixture
def box(_shared: Box, runner: asyncio.Runner) -> Box:
    """An instance that the tests of a module share, with nothing running in it."""
    runner.run(_shared.calm())
    return _shared


@pytest.fixture
def nap() -> str:
    """A time to sleep that nobody else on the machine asks for: what sleeps so long is the test's own."""
    return f"3600.{secrets.randbelow(10**12):012d}"
