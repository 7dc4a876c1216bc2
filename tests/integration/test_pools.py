"""Pools on a real daemon: what comes from one is what a cold start gives, nobody gets what another had, and nothing of
them outlives their daemon."""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import support
from tests.integration import agreement
from tests.integration.conftest import BACKENDS
from tests.integration.daemon import Daemon, launch, started

ASKED: dict[str, Any] = {"memory": "200m", "cpus": 0.5, "lifetime": 700}
CALLERS = 50


@contextmanager
def pooled(options: tuple[str, ...], text: str) -> Iterator[Daemon]:
    with support.temporary_home() as home:
        (home / "pools.toml").write_text(text)
        with started(home, *options) as daemon:
            yield daemon


@pytest.fixture(params=support.first_of(BACKENDS))
def options(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return BACKENDS[request.param]


def stats(daemon: Daemon, pool: str = "default") -> dict[str, Any]:
    [found] = [each for each in daemon.call("GET", "/pools")["pools"] if each["pool"] == pool]
    return dict(found)


def warm(daemon: Daemon, count: int, pool: str = "default") -> dict[str, Any]:
    found = daemon.call("POST", f"/pools/{pool}/warmup", {"count": count})
    return dict(found)


def guests(daemon: Daemon) -> dict[str, int]:
    """The process of each instance on the host, also of those that are not even an entry yet."""
    found = {}
    for directory in (daemon.home / "instances").iterdir():
        link = directory / "process"
        if link.is_symlink():
            found[directory.name] = int(os.readlink(link).split()[0])
    return found


def complete(daemon: Daemon) -> dict[str, int]:
    """Those with an image and a policy."""
    made = guests(daemon)
    noted = {id_ for id_ in made if (daemon.home / "instances" / id_ / "facts").is_symlink()}
    return {id_: made[id_] for id_ in noted or made}  # without isolation there is nothing to note


def seen_inside(daemon: Daemon, environment: str) -> dict[str, Any]:
    """All that is told of an environment and that it sees itself, but for what is its own."""
    info = daemon.call("GET", f"/environments/{environment}")
    usual = ("state", "image", "image_digest", "isolation", "backend", "lifetime", "idle", "workspace")
    rows = [row | {"value": "an id"} if row["name"] == "user_limits" else row for row in info["enforced"]]
    enforced = {(row["name"], row["enforced"], row["value"], row["by"]) for row in rows}
    script = (
        "id; pwd; env | grep -v ^HOME= | sort; ulimit -a; ls -la /workspace /tmp | grep -v total | cut -c1-10; "
        "grep -E '^(Cap|NoNewPrivs|Seccomp|Groups)' /proc/self/status; cut -d' ' -f2,3 /proc/self/mounts | sort"
    )
    said = daemon.execute(environment, ["sh", "-c", script])["stdout"].replace(environment, "ID")
    return {
        **{name: info[name] for name in (*usual, "limits", "network", "profile")},
        "enforced": enforced,
        "said": said,
    }


@pytest.mark.requirement("R77", "F8")
def test_what_comes_from_a_pool_is_what_a_cold_start_gives() -> None:
    with pooled((), "") as daemon:
        cold = seen_inside(daemon, daemon.create(**ASKED))
    with pooled((), "[default]\nminimum = 2\n") as daemon:
        warm(daemon, 2)
        environment = daemon.create(**ASKED)
        assert stats(daemon)["hits"] == 1
        assert seen_inside(daemon, environment) == cold


def test_limits_are_those_that_were_asked_for_up_and_down() -> None:
    """The entry was made with others."""
    with pooled((), '[default]\nminimum = 1\nmemory = "300m"\n') as daemon:
        for memory, bytes_ in (("100m", 100 << 20), ("1g", 1 << 30)):
            warm(daemon, 1)
            environment = daemon.create(memory=memory)
            info = daemon.call("GET", f"/environments/{environment}")
            [row] = [row for row in info["enforced"] if row["name"] == "memory"]
            if not row["enforced"]:
                support.missing("no cgroups here")
            assert row["value"] == str(bytes_)
        assert (stats(daemon)["hits"], stats(daemon)["failures"]) == (2, 0)
        used = "x = bytearray(150 << 20); print(len(x))"
        assert daemon.execute(environment, ["python3", "-c", used])["exit_code"] == 0


FILL = """
import errno, os, sys
with open(f"{sys.argv[1]}/file", "wb", buffering=0) as file:
    try:
        for _ in range(1024):
            file.write(bytes(1 << 20))
    except OSError as error:
        print(file.tell(), errno.errorcode[error.errno])
os.unlink(file.name)
"""


@pytest.mark.parametrize("memory", ["64m", "512m"])
def test_tmp_and_shm_have_the_size_that_fits_the_memory_limit(memory: str) -> None:
    """Also in an entry that was started with another limit: full is ENOSPC, never the OOM killer."""
    with pooled((), '[default]\nminimum = 1\nmemory = "256m"\nworkspace = "disk"\n') as daemon:
        warm(daemon, 1)
        environment = daemon.create(memory=memory, workspace="disk")
        assert stats(daemon)["hits"] == (os.geteuid() == 0)  # without root it is started cold
        size = int(memory[:-1]) << 20
        for path, most in (("/tmp", size // 2), ("/dev/shm", min(64 << 20, size // 8))):
            filled = daemon.execute(environment, ["python3", "-c", FILL, path])
            assert (filled["outcome"], filled["stdout"]) == ("completed", f"{most} ENOSPC\n")


def test_another_kind_is_not_served_by_it(options: tuple[str, ...]) -> None:
    with pooled(options, "[default]\nminimum = 2\n") as daemon:
        before = warm(daemon, 2)
        daemon.create(fds=512)
        after = stats(daemon)
        assert (after["hits"], after["misses"], after["available"]) == (0, 0, before["available"])


def test_another_limit_of_processes_starts_cold() -> None:
    """The guest gives it to programs as RLIMIT_NPROC, and cannot be told another."""
    with pooled((), "[default]\nminimum = 1\n") as daemon:
        warm(daemon, 1)
        environment = daemon.create(pids=77)
        assert stats(daemon)["hits"] == 0
        limit = daemon.execute(environment, ["bash", "-c", "ulimit -u"])["stdout"]
        assert int(limit) == 77 - (os.geteuid() == 0)


@pytest.mark.requirement("R77", "R90")
def test_50_callers_at_once(options: tuple[str, ...]) -> None:
    """Nobody gets what another had, it is clean, no more are made than allowed, and the numbers add up."""
    most: list[int] = []
    with pooled(options, "[default]\nminimum = 20\nmaximum = 30\n") as daemon:
        warm(daemon, 20)

        def work(number: int) -> list[str]:
            made = []
            for _ in range(3):
                environment = daemon.create(idle=600)
                found = daemon.execute(environment, ["sh", "-c", f"ls -A; echo {number} > mine; cat mine"])
                assert found["stdout"] == f"{number}\n"
                now = stats(daemon)
                most.append(now["available"] + now["creating"] + now["active"])
                most.append(len(daemon.call("GET", "/environments")["environments"]))
                daemon.call("DELETE", f"/environments/{environment}")
                made.append(environment)
            return made

        with ThreadPoolExecutor(CALLERS) as threads:
            made = [each for some in threads.map(work, range(CALLERS)) for each in some]
        assert len(set(made)) == len(made) == 3 * CALLERS
        assert max(most) <= 30
        after = warm(daemon, 20)
        assert after["hits"] + after["misses"] == len(made)
        assert after["hits"] >= 20
        assert (after["active"], after["failures"], after["error"]) == (0, 0, "")
        assert after["wait_p50_seconds"] <= after["wait_p95_seconds"] <= after["wait_max_seconds"]
        assert guests(daemon).keys().isdisjoint(made)


def test_there_are_never_more_than_its_maximum(options: tuple[str, ...]) -> None:
    """The next one waits until another has ended."""
    with pooled(options, "[default]\nminimum = 3\nmaximum = 4\n") as daemon:
        warm(daemon, 3)
        made = [daemon.create() for _ in range(3)]
        full = warm(daemon, 3)
        assert (full["active"], full["available"]) == (3, 1)
        made.append(daemon.create())
        with ThreadPoolExecutor(3) as threads:
            others = [threads.submit(daemon.create) for _ in range(3)]
            for environment in made[:3]:
                assert stats(daemon)["active"] <= 4
                assert len(daemon.call("GET", "/environments")["environments"]) <= 4
                daemon.call("DELETE", f"/environments/{environment}")
            made = [made[3], *(each.result() for each in others)]
        full = stats(daemon)
        assert (full["active"], full["hits"] + full["misses"]) == (4, 7)
        for environment in made:
            daemon.call("DELETE", f"/environments/{environment}")
        assert warm(daemon, 3)["available"] == 3


def test_a_kind_of_its_own_does_not_wait(options: tuple[str, ...]) -> None:
    with pooled(options, "[default]\nmaximum = 1\n") as daemon:
        daemon.create()
        daemon.create(fds=512)
        assert (stats(daemon)["active"], stats(daemon)["misses"]) == (1, 1)


def test_metrics_tell_what_stats_tell() -> None:
    with pooled(("--backend", "fake"), "[default]\nminimum = 2\nmaximum = 9\n") as daemon:
        warm(daemon, 2)
        daemon.create()
        daemon.call("POST", "/pools/default/shrink", {"count": 0})
        told, lines = stats(daemon), daemon.raw("GET", "/metrics")[2].decode().splitlines()
        while told != (now := stats(daemon)):  # until nothing is being made
            told, lines = now, daemon.raw("GET", "/metrics")[2].decode().splitlines()
        samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        values = {name: float(value) for name, _, value in samples}
        for name in ("available", "creating", "active"):
            assert values[f'skerry_pool_entries{{pool="default",state="{name}"}}'] == told[name]
        for name in ("hits_total", "misses_total", "failures_total", "minimum", "maximum"):
            assert values[f'skerry_pool_{name}{{pool="default"}}'] == told[name.removesuffix("_total")]
        for name, quantile in (("p50", "0.5"), ("p95", "0.95"), ("max", "1")):
            found = values[f'skerry_pool_wait_seconds{{pool="default",quantile="{quantile}"}}']
            assert found == pytest.approx(told[f"wait_{name}_seconds"])
        assert told["wait_max_seconds"] > 0


def test_one_that_died_is_replaced_and_never_handed_out(options: tuple[str, ...]) -> None:
    with pooled(options, "[default]\nminimum = 2\n") as daemon:
        warm(daemon, 2)
        dead, pid = next(iter(complete(daemon).items()))
        fd = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        assert select.select([fd], [], [], 30.0)[0]
        os.close(fd)
        made = {daemon.create() for _ in range(3)}
        assert dead not in made
        for environment in made:
            assert daemon.execute(environment, "echo works")["stdout"] == "works\n"
        assert warm(daemon, 2)["available"] == 2


def test_a_killed_daemon_leaves_nothing_of_its_pools(options: tuple[str, ...]) -> None:
    with support.temporary_home() as home:
        (home / "pools.toml").write_text("[default]\nminimum = 5\n")
        with started(home, *options) as daemon:
            warm(daemon, 5)
            kept = daemon.create(lifetime=5000)
            warm(daemon, 5)
            watched = {id_: os.pidfd_open(pid) for id_, pid in guests(daemon).items()}
            assert len(watched) > 5
            daemon.kill()
        # By themselves, without a next daemon.
        for id_, fd in watched.items():
            if id_ != kept:
                assert select.select([fd], [], [], 30.0)[0], f"{id_} still runs"
        assert not select.select([watched[kept]], [], [], 0)[0]
        for fd in watched.values():
            os.close(fd)
        with started(home, *options) as daemon:
            assert daemon.execute(kept, "echo still here")["stdout"] == "still here\n"
            assert stats(daemon)["active"] == 1
            daemon.process.send_signal(signal.SIGTERM)
            daemon.process.wait()
        assert agreement.check(home) == {kept}
        with started(home, *options):
            pass


def test_its_maximum_can_be_changed(options: tuple[str, ...]) -> None:
    with pooled(options, "[default]\nmaximum = 4\n") as daemon:

        def sized(count: int, maximum: int) -> tuple[int, int, int]:
            found = daemon.call("POST", "/pools/default/warmup", {"count": count, "maximum": maximum})
            return found["minimum"], found["maximum"], found["available"]

        assert sized(5, 6) == (5, 6, 5)
        daemon.create()
        assert sized(5, 6) == (5, 6, 5)
        assert sized(1, 3) == (3, 3, 2), "what is handed out counts"
        assert sized(0, 0) == (0, 0, 0)
        daemon.create()
        assert stats(daemon)["misses"] == 0, "there is no pool any more"
        refused = daemon.call("POST", "/pools/default/warmup", {"count": 2, "maximum": 1}, expect=400)
        assert "at most 1" in refused["message"]
        assert stats(daemon)["maximum"] == 0


@pytest.mark.requirement("R80", "R81")
def test_shrink_and_health(options: tuple[str, ...]) -> None:
    with pooled(options, '[default]\nmaximum = 6\n[other]\nimage = "missing"\n') as daemon:
        assert stats(daemon)["minimum"] == 0
        assert warm(daemon, 4)["available"] == 4
        assert daemon.call("POST", "/pools/default/shrink", {"count": 1})["available"] == 1
        assert daemon.call("POST", "/pools/default/shrink", {"count": 3})["available"] == 1
        health = daemon.call("POST", "/pools/default/health")
        assert health["healthy"]
        assert health["seconds"] > 0
        assert stats(daemon)["available"] == 1
        sick = daemon.call("POST", "/pools/other/health")
        assert not sick["healthy"]
        assert "missing" in sick["error"]
        assert (
            daemon.call("POST", "/pools/other/warmup", {"count": 1}, expect=404)["code"] == "image_not_found"
        )
        failed = stats(daemon, "other")
        assert failed["failures"] >= 1
        assert "missing" in failed["error"]
        assert daemon.call("POST", "/pools/default/warmup", {"count": 7}, expect=400)["hint"]
        assert daemon.call("POST", "/pools/nothing/warmup", {"count": 1}, expect=404)["code"] == "not_found"
        assert daemon.call("POST", "/pools/default/warmup", {"count": -1}, expect=400)
        _, _, told = daemon.raw("GET", "/audit?kind=intent")
        acts = [(row["action"], row["detail"]["pool"]) for row in map(json.loads, told.splitlines())]
        assert [act for act in acts if act[0] == "pool.health"] == [
            ("pool.health", "default"),
            ("pool.health", "other"),
        ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[default]\nminimun = 1\n", "[default] unknown key 'minimun'"),
        ("[default]\nidle = 5\n", "[default] unknown key 'idle'"),
        ("[python]\nidle = 0\n", "idle must be a whole number from 1 to"),
        ("[default]\nage = 'long'\n", "age must be a whole number from 1 to"),
        ("[default]\nminimum = 5\nmaximum = 2\n", "minimum must be a whole number from 0 to 2"),
        ('[default]\nmemory = "lots"\n', "memory"),
        ('[default]\nprofile = "lax"\n', "profile"),
        ("[Default]\n", "cannot be the name of a pool"),
        ("minimum = 4\n", "minimum must be a table, not 4"),
        ("[default\n", "pools.toml"),
        ("[default]\nimage = 7\n", "image must be a string"),
    ],
)
def test_a_mistake_in_the_file_is_told_at_the_start(home: Path, text: str, words: str) -> None:
    (home / "pools.toml").write_text(text)
    process, word = launch(home, "--backend", "fake")
    assert process.wait(30) == 2
    problem = json.loads(word)
    assert problem["code"] == "invalid_request"
    assert words in f"{problem['message']} {problem['hint']}"
    assert "pools.toml" in problem["message"]
