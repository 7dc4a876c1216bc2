"""Skerry through its SDK over the unix socket, with every protection on and default settings."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import skerry
from benchmarks.measure import Subject, command, timed

CALLS = 10
"""Consecutive calls in a session, as in an agent's loop. The first after a pause is slower."""
NATIVE = Path(skerry.__file__).parent / "_native" / "skerry-guest"


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


URL = f"http://127.0.0.1:{_free_port()}"
POOLED = {"disk": "1g"}
"""Options that select the pool `bench`."""
FILES = {
    "pools.toml": '[bench]\nminimum = 4\ndisk = "1g"\n[python]\nminimum = 8\n',
    # The same interpreter, without a pool.
    "languages.toml": '[cold]\nfile = "main.py"\ncommand = ["python3", "main.py"]\nversion = ["python3", "-V"]\n',
}


def _environment(**options: Any) -> skerry.Environment:
    return skerry.Environment(memory="512m", cpus=1, lifetime=3600, **options)


def _run(env: skerry.Environment) -> None:
    if env.run(["echo", "x"]).stdout != "x\n":
        raise RuntimeError("env.run gave the wrong output")


@contextmanager
def daemon(home: str) -> Iterator[skerry.Client]:
    """Runs a daemon in `home` that also listens at `URL`."""
    os.makedirs(home, 0o700)
    for name, text in FILES.items():
        Path(home, name).write_text(text)
    os.environ["SKERRY_HOME"] = home
    os.environ["SKERRY_LISTEN"] = URL.removeprefix("http://")
    with skerry.Client() as client:
        client.version()
        try:
            yield client
        finally:
            client.stop(force=True)


@contextmanager
def subjects(client: skerry.Client) -> Iterator[list[Subject]]:
    """All calls through one client with an open connection, as in a long-running program."""

    def cycle(prefix: str = "", **options: Any) -> dict[str, float]:
        start = time.perf_counter()
        env = _environment(client=client, **options).create()
        created = time.perf_counter()
        _run(env)
        first = time.perf_counter()
        env.delete()
        deleted = time.perf_counter()
        times = {"fresh": first - start, "create": created - start, "delete": deleted - first}
        return {prefix + key: seconds for key, seconds in times.items()}

    def pooled() -> dict[str, float]:
        times = cycle("pooled_", **POOLED)
        client.warm_up_pool("bench", 4)  # else it refills while the next subject is measured
        return times

    with _environment(client=client) as env:

        def execute() -> None:
            if env.execute("echo x").stdout != "x\n":
                raise RuntimeError("env.execute gave the wrong output")

        def write() -> None:
            env.files.write("a.txt", b"x" * 1024)

        def read() -> None:
            if len(env.files.read("a.txt")) != 1024:
                raise RuntimeError("files.read gave the wrong content")

        session = env.session("python")

        def calls() -> None:
            for _ in range(CALLS):
                if session.run("6 * 7").value != "42":
                    raise RuntimeError("session.run gave the wrong value")

        execute()
        write()
        calls()
        yield [
            Subject(cycle),
            Subject(lambda: {"run": timed(lambda: env.run(["true"]))}),
            Subject(lambda: {"execute": timed(execute)}),
            Subject(lambda: {"session": timed(calls) / CALLS}),
            Subject(lambda: {"write": timed(write)}),
            Subject(lambda: {"read": timed(read)}),
            command("cli", [_script(), "run", "--", "true"]),
            command("helper", [str(NATIVE), "version"]),
            Subject(pooled),
        ]


def _script() -> str:
    """The `skerry` command beside this interpreter."""
    found = shutil.which("skerry", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        raise RuntimeError("the skerry command is not installed")
    return found


def idle_memory() -> dict[str, int | None]:
    """Bytes charged to an unused environment, and after one command."""
    with _environment() as env:
        fresh = env.usage().memory_bytes
        env.run(["true"])
        return {"idle_bytes": fresh, "idle_after_run_bytes": env.usage().memory_bytes}


def many(client: skerry.Client, count: int) -> dict[str, float | int | None]:
    """Creates `count` environments, runs a command in each, deletes them."""
    before = _rss(client)
    environments: list[skerry.Environment] = []

    def run_in_all() -> None:
        for env in environments:
            _run(env)

    with ExitStack() as stack:
        create = timed(
            lambda: environments.extend(
                stack.enter_context(_environment(client=client)) for _ in range(count)
            )
        )
        running = {info.environment_id for info in client.environments() if info.state == "running"}
        alive = sum(env.id in running for env in environments)
        run = timed(run_in_all)
        charged = [env.usage().memory_bytes for env in environments]
        rss = _rss(client)
        start = time.perf_counter()
    return {
        "count": count,
        "alive": alive,
        "create_seconds": create,
        "run_in_all_seconds": run,
        "delete_seconds": time.perf_counter() - start,
        "daemon_rss_bytes": rss,
        "daemon_rss_growth_bytes": rss - before,
        "charged_bytes": None if None in charged else sum(value or 0 for value in charged),
    }


def _rss(client: skerry.Client) -> int:
    status = Path(f"/proc/{client.version()['pid']}/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:")))
