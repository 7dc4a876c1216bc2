"""Hours of mixed load in minutes: what the daemon uses stays flat."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from skerry.client.sync.client import Client
from tests import support
from tests.integration.daemon import started
from tests.integration.internet import in_a_network_of_its_own, internet
from tests.soak import load
from tests.soak.durations import SECONDS

ADDRESS = "93.184.216.34"


@pytest.mark.soak
@pytest.mark.root
@pytest.mark.timeout(SECONDS + 300)
def test_mixed_load_leaves_the_daemon_as_it_was(home: Path) -> None:
    seed = random.randrange(1 << 30)
    found: list[tuple[load.Load, list[load.Sample]]] = []

    def body() -> None:
        with internet([ADDRESS]) as outside:
            outside.names = {load.ALLOWED: ADDRESS}
            (home / "pools.toml").write_text("[default]\nminimum = 3\n")
            port = support.free_port()
            with started(home, "--listen", f"127.0.0.1:{port}", module="tests.soak.compressed") as daemon:
                with Client(str(home)) as operator:
                    tokens = [
                        operator.create_token("soak", tenant=f"tenant{number}")["token"]
                        for number in range(load.TENANTS)
                    ]
                    verbs = ["read", "audit", "admin"]
                    admin = operator.create_token("soak", verbs=verbs)["token"]

                async def run() -> None:
                    running = load.Load(home, daemon.process.pid, port, tokens, admin, seed)
                    found.append((running, await running.run(SECONDS, SECONDS / 30)))

                asyncio.run(run())

    in_a_network_of_its_own(body)
    ((running, samples),) = found
    print(f"seed {seed}: {dict(running.done)}")
    for one in samples:
        print(one)
    assert running.unexpected == []
    assert load.growth(samples) == []
