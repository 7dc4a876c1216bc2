"""Networks of environments of a real daemon, root's or a plain user's, in an internet of our own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from skerry.client.sync.client import Client
from skerry.client.sync.environment import Environment
from tests import support
from tests.integration.daemon import Daemon, started
from tests.integration.internet import Internet, in_a_network_of_its_own, internet

POOLED = 0
"""How many environments are ready before the first is asked for."""
PUBLIC, OTHER, INTERNAL = "93.184.216.34", "93.184.216.35", "10.1.2.3"
FETCH = """
import sys, urllib.request, urllib.error
try:
    print(urllib.request.urlopen(sys.argv[1], timeout=10).read().decode().strip())
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode().strip())
except OSError as error:
    print("failed:", error)
"""


def contained(test: Callable[..., None]) -> Callable[..., None]:
    """A test that runs in a network of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        in_a_network_of_its_own(lambda: test(*args, **kwargs))

    return run


@contextmanager
def home_of(user: support.Nobody | None) -> Iterator[Path]:
    if user is not None:
        yield user.home
        return
    with support.temporary_home() as home:
        yield home


@contextmanager
def world(
    user: support.Nobody | None, *options: str, **names: str
) -> Iterator[tuple[Internet, Daemon, Client]]:
    with internet([PUBLIC, OTHER, INTERNAL]) as outside, home_of(user) as home:
        outside.names = {"example.com": PUBLIC, "www.example.com": OTHER, "inside.test": INTERNAL, **names}
        if POOLED:
            (home / "pools.toml").write_text(f"[default]\nminimum = {POOLED}\n")
        with started(home, *options, user=user) as daemon, Client(str(home)) as client:
            if POOLED:
                client.warm_up_pool("default", POOLED)
            yield outside, daemon, client
            if POOLED:
                assert client.pools()[0].hits


def fetch(env: Environment, url: str) -> str:
    return env.run(["python3", "-c", FETCH, url]).stdout.strip()
