"""Environments of one tenant share the weight that one of another has, where CPU is short."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import skerry
from tests import leaks, support
from tests.integration.daemon import started
from tests.integration.test_races import eventually

pytestmark = pytest.mark.alone
COUNT = 4
BURN = "for i in $(seq $(nproc)); do while :; do :; done & done; wait"


class Burner:
    """An environment that uses all CPU it can get."""

    def __init__(self, client: skerry.Client) -> None:
        self.id = skerry.Environment(client=client, cpus=float(os.cpu_count() or 1)).create().id
        client.transport.call(
            "POST", f"/environments/{self.id}/executions", json={"argv": ["sh", "-c", BURN]}
        )

    @property
    def weight(self) -> float:
        """As a part of what is usual."""
        file, usual = weight_of(self.id)
        return int(file.read_text()) / usual


def weight_of(environment_id: str) -> tuple[Path, int]:
    """The file of the kernel that has it, and what is usual there."""
    for path in leaks.cgroups():
        if path.endswith(f"/skerry-{environment_id}"):
            for name, usual in (("cpu.shares", 1024), ("cpu.weight", 100)):
                if (file := Path(path, name)).exists():
                    return file, usual
    support.missing("no cgroup with weights of CPU that this user may write")
    raise AssertionError


@contextmanager
def tenants(home: Path) -> Iterator[list[skerry.Client]]:
    """A daemon, and clients of two tenants."""
    address = f"127.0.0.1:{support.free_port()}"
    with started(home, "--listen", address), skerry.Client(str(home)) as operator:
        tokens = [operator.create_token(name, tenant=name)["token"] for name in ("many", "one")]
        with (
            skerry.Client(url=f"http://{address}", token=tokens[0]) as many,
            skerry.Client(url=f"http://{address}", token=tokens[1]) as one,
        ):
            yield [many, one]


def test_a_tenant_with_many_gets_no_more_than_one_with_one() -> None:
    with support.temporary_home() as home, tenants(home) as (many, one):
        alone = Burner(one)
        together = [Burner(many) for _ in range(COUNT)]
        eventually(lambda: {burner.weight for burner in together} == {1 / COUNT})
        assert alone.weight == 1


def test_a_daemon_that_takes_over_begins_with_the_usual_weight() -> None:
    with support.temporary_home() as home:
        with started(home) as daemon:
            env = daemon.create()
            file, usual = weight_of(env)
            daemon.kill()
        file.write_text(str(usual // 4))
        with started(home) as daemon:
            assert daemon.execute(env, ["echo", "there"])["stdout"] == "there\n"
            assert int(file.read_text()) == usual
            daemon.call("DELETE", f"/environments/{env}")
