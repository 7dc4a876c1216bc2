"""Fixtures for every kind of test, and the check that the whole suite leaves the host as it found it."""

from __future__ import annotations

import fcntl
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import uvloop

from tests import dockerd, leaks, postgres, support

SETTLE_SECONDS = 10.0
LEFT_BEHIND = 6
"""The exit code of a run that leaves something on the host, or in its own processes."""


def pytest_configure() -> None:
    # A run in the background or below nohup ignores these signals, and so would every program that it starts;
    # with a handler of its own it goes on as it was, and its programs begin with the default.
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    # How long an example takes says more about the machine than about us.
    hypothesis.settings.register_profile("skerry", deadline=None)
    hypothesis.settings.load_profile("skerry")
    # The first loop makes a pipe that all later ones share, and that stays: it is no leak of a test.
    uvloop.new_event_loop().close()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") and os.geteuid() != 0:
        support.missing("needs root")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, so that two processes end at about the same time."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


_HOST = pytest.StashKey[tuple[int, leaks.Snapshot]]()
_LEFT = pytest.StashKey[list[str]]()
"""What was left behind: by processes that ran tests, then also on the host."""


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Remember the host as it is; each run of the tests holds a shared lock on /tmp."""
    if not _is_worker(session.config):
        lock = os.open("/tmp", os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_SH)
        session.config.stash[_HOST] = lock, leaks.Snapshot.take()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A process of pytest-xdist has ended."""
    left = getattr(node, "workeroutput", {}).get("left", [])
    node.config.stash.setdefault(_LEFT, []).extend(left)


@pytest.hookimpl(wrapper=True, trylast=True)  # before the summary is printed
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Fail the run when the host has a mount, cgroup, loop device or process more than before.

    What another run of the tests has on the host at the moment cannot be told from this one's: while one is under way,
    leaks are printed and do not count.
    """
    yield
    if _HOST not in session.config.stash:
        return
    lock, before = session.config.stash[_HOST]
    try:
        alone = _try_lock(lock)
        deadline = time.monotonic() + SETTLE_SECONDS
        while (left := leaks.on_host(before)) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        os.close(lock)
    processes = session.config.stash.setdefault(_LEFT, [])
    if processes or (left and alone):
        session.exitstatus = LEFT_BEHIND
    processes += left if alone else [f"{leak} (or of another run of the tests)" for leak in left]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left := config.stash.get(_LEFT, []):
        terminalreporter.section("left behind", red=True)
        for leak in left:
            terminalreporter.line(leak)


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left(pytestconfig: pytest.Config) -> Iterator[None]:
    """Fail the run when this process has a child or an open file more than before."""
    before = leaks.Snapshot.take()
    yield
    deadline = time.monotonic() + SETTLE_SECONDS
    while (left := leaks.of_this_process(before)) and time.monotonic() < deadline:
        time.sleep(0.1)
    if left:
        if _is_worker(pytestconfig):
            pytestconfig.workeroutput["left"] = left  # type: ignore[attr-defined]
        pytest.fail("the tests left behind:\n" + "\n".join(left), pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def _engine_ends(_nothing_is_left: None) -> Iterator[None]:
    """End the Docker Engine of this process, if a test has started one."""
    yield
    dockerd.shared.close()


@pytest.fixture(autouse=True)
def _variables_are_restored() -> Iterator[None]:
    """Fail a test that leaves an environment variable changed: the next one would see it."""
    before = dict(os.environ)
    yield
    changed = {name for name, _ in before.items() ^ os.environ.items()} - {"PYTEST_CURRENT_TEST"}
    assert not changed


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A fresh SKERRY_HOME for this test, in the environment too; see support.temporary_home."""
    with support.temporary_home() as path:
        monkeypatch.setenv("SKERRY_HOME", str(path))
        yield path


@pytest.fixture(scope="session")
def _python_for_nobody() -> Iterator[tuple[str, Path | None]]:
    with tempfile.TemporaryDirectory(prefix="skerry-test-", dir="/tmp") as folder:
        yield support.python_for_nobody(Path(folder))


@pytest.fixture
def as_nobody(request: pytest.FixtureRequest) -> Iterator[support.Nobody]:
    """The unprivileged user `nobody`, with a fresh home. Skipped unless root runs the tests."""
    if os.geteuid() != 0:
        support.missing("needs root, to become another user")
    support.require("setpriv", "util-linux")
    python, packages = request.getfixturevalue("_python_for_nobody")
    with support.temporary_home(support.NOBODY) as path:
        yield support.Nobody(path, python, packages)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[postgres.Server]:
    """One Postgres for the whole run, started by the first test that asks; see tests/postgres.py."""
    with postgres.server() as running:
        yield running


@pytest.fixture(params=["sqlite", "postgres"])
def store_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of an empty store, of each kind."""
    if request.param == "postgres":
        yield request.getfixturevalue("postgres_server").new_database()
        return
    with tempfile.TemporaryDirectory(prefix="skerry-test-", dir="/tmp") as folder:
        yield f"sqlite://{folder}/store.db"
