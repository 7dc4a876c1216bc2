"""Programs that run once, beside the same programs on the host."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import skerry
from benchmarks.baselines import BUBBLEWRAP
from benchmarks.dockerd import Unavailable
from benchmarks.measure import Subject, command, timed

PRINT = ["/usr/bin/python3", "-c", "print('hello')"]
GO = 'package main\n\nimport "fmt"\n\nfunc main() { fmt.Println("hello") }\n'
GO_PROGRAM = "/usr/bin/go"


def _once(client: skerry.Client, language: str, code: str) -> None:
    result = client.execute_code(language, code)
    if result.stdout != "hello\n":
        raise RuntimeError(f"{language} gave the wrong output: {result.stdout!r} {result.stderr!r}")


@contextmanager
def python(client: skerry.Client) -> Iterator[list[Subject]]:
    def pooled() -> dict[str, float]:
        times = {"code_python": timed(lambda: _once(client, "python", "print('hello')"))}
        client.warm_up_pool("python", 8)  # else it refills while the next subject is measured
        return times

    yield [
        command("bare_print", PRINT),
        Subject(lambda: {"code_cold": timed(lambda: _once(client, "cold", "print('hello')"))}),
        Subject(pooled),
    ]


async def many(count: int, at_once: int) -> dict[str, float]:
    """Runs `count` programs, each in an environment of its own, with `at_once` concurrent callers."""
    left = iter(range(count))
    before = _pool(await _stats())

    async def caller() -> None:
        async with skerry.AsyncClient() as client:
            for _ in left:
                result = await client.execute_code("python", "print('hello')")
                if result.stdout != "hello\n":
                    raise RuntimeError(f"python gave the wrong output: {result.stderr!r}")

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(at_once)))
    seconds = time.perf_counter() - began
    after = _pool(await _stats())
    return {
        "per_second": count / seconds,
        "callers": at_once,
        "from_pool": (after.hits - before.hits) / count,
    }


def many_without(count: int, at_once: int) -> dict[str, float]:
    """Programs a second on the bare host, and in bubblewrap if it is installed."""
    commands = {"bare": PRINT}
    if shutil.which("bwrap"):
        commands["bubblewrap"] = [*BUBBLEWRAP, *PRINT]
    return {name: _rate(argv, count, at_once) for name, argv in commands.items()}


def _rate(argv: list[str], count: int, at_once: int) -> float:
    def once(_: int) -> None:
        subprocess.run(argv, stdout=subprocess.DEVNULL, check=True)

    began = time.perf_counter()
    with ThreadPoolExecutor(at_once) as callers:
        list(callers.map(once, range(count)))
    return count / (time.perf_counter() - began)


async def _stats() -> list[skerry.PoolStats]:
    async with skerry.AsyncClient() as client:
        return await client.pools()


def _pool(found: list[skerry.PoolStats]) -> skerry.PoolStats:
    return next(stats for stats in found if stats.pool == "python")


@contextmanager
def go(client: skerry.Client, folder: Path) -> Iterator[list[Subject]]:
    """Skerry and `go run` with a warm cache. Raises Unavailable."""
    if not os.path.exists(GO_PROGRAM):
        raise Unavailable("apt-get install golang-go")
    (folder / "main.go").write_text(GO)
    env = {**os.environ, "HOME": str(folder), "GOCACHE": f"{folder}/cache"}
    yield [
        command("bare_go", [GO_PROGRAM, "run", f"{folder}/main.go"], env),
        Subject(lambda: {"code_go": timed(lambda: _once(client, "go", GO))}),
    ]
