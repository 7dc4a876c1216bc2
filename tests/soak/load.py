"""Mixed load: clients of several tenants that come, use every verb, and go.

Each worker is one tenant's. Its *episodes* have a client of their own, so that clients come and go all the time.
Between episodes a worker has no environment and no connection: when all workers are there at once, the daemon is
quiet, and what it uses is compared with what it used at an earlier quiet moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from skerry import AsyncClient, AsyncEnvironment, SkerryError
from skerry.errors import Busy, DaemonUnavailable, NotFound
from skerry.settings import Home
from skerry.store import Connection, Store
from tests.soak.durations import DAY

WORKERS = 10
TENANTS = 5
STEPS = 8
"""Of an episode, at most."""
ALLOWED, DENIED = "example.com", "denied.example"
FETCH = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], 80), 5) as s:
        s.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
        print(len(s.recv(100)) > 0)
except OSError: print("refused")
"""
DATABASE = "state.db"

STALE = {
    "environments": "state <> 'ended' OR ended_at < :before",
    "executions": "ended_at IS NULL OR ended_at < :before",
    "idempotency_keys": "created_at < :before",
    "audit": "at < :before",
}
"""Rows that should not be there at a quiet moment, by table."""
Step = Callable[[AsyncEnvironment, random.Random], Awaitable[None]]


class Unexpected(Exception):
    """An answer that should have been another."""


async def execute(env: AsyncEnvironment, chance: random.Random) -> None:
    word = str(chance.random())
    result = await env.execute(f"X={word}; echo $X; echo bad >&2")
    if (result.outcome, result.stdout) != ("completed", f"{word}\n"):
        raise Unexpected(result)


async def fail(env: AsyncEnvironment, chance: random.Random) -> None:
    result = await env.run(["sh", "-c", "exit 3"])
    if result.exit_code != 3:
        raise Unexpected(result)


async def output(env: AsyncEnvironment, chance: random.Random) -> None:
    size = chance.randrange(1 << 20)
    result = await env.run(["head", "-c", str(size), "/dev/zero"])
    if result.stdout_size != size:
        raise Unexpected(result)


async def time_out(env: AsyncEnvironment, chance: random.Random) -> None:
    result = await env.execute("sleep 60", timeout=0.05)
    if result.outcome != "timed_out":
        raise Unexpected(result)


async def give_up(env: AsyncEnvironment, chance: random.Random) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(chance.random() * 0.1):
            await env.execute("sleep 60")


async def background(env: AsyncEnvironment, chance: random.Random) -> None:
    async with await env.start("echo begun; sleep 60") as process:
        async for _, data in process:
            if b"begun" in data:
                break
        async with await env.attach(process.id):
            pass
        if chance.random() < 0.5:
            await process.kill()
            await process.wait()


async def sessions(env: AsyncEnvironment, chance: random.Random) -> None:
    language = chance.choice(("python", "bash"))
    async with await env.session(language) as session:
        code = "6 * 7" if language == "python" else "echo 42"
        result = await session.run(code)
        if "42" not in (result.value or "") + result.stdout:
            raise Unexpected(result)
        if chance.random() < 0.3:
            await session.restart()
            await session.run(code)


async def files(env: AsyncEnvironment, chance: random.Random) -> None:
    content = "x" * chance.randrange(1 << 18)
    await env.files.write("a", content)
    await env.files.rename("a", "b")
    if await env.files.read("b") != content:
        raise Unexpected("another content")
    await env.files.mkdir("d")
    await env.files.list(".", recursive=True)
    await env.files.remove("b")
    with contextlib.suppress(NotFound):
        await env.files.read("b")


async def trees(env: AsyncEnvironment, chance: random.Random) -> None:
    with tempfile.TemporaryDirectory(prefix="skerry-soak-", dir="/tmp") as folder:
        _make_tree(folder)
        await env.files.upload(folder, "tree")
        await env.files.download("tree", f"{folder}/back")


def _make_tree(folder: str) -> None:
    for number in range(20):
        Path(folder, str(number)).write_text("x" * number)


async def watch(env: AsyncEnvironment, chance: random.Random) -> None:
    async with await env.files.watch(".") as changes:
        await env.files.write("watched", "x")
        await anext(aiter(changes))


async def network(env: AsyncEnvironment, chance: random.Random) -> None:
    await env.network.set("allowlist", [ALLOWED])
    for host, expected in ((ALLOWED, "True"), (DENIED, "refused")):
        result = await env.run(["python3", "-c", FETCH, host])
        if result.stdout.strip() != expected:
            raise Unexpected(f"{host}: {result}")
    await env.network.denials()
    await env.network.set("none")


async def look(env: AsyncEnvironment, chance: random.Random) -> None:
    await env.heartbeat(600)
    await env.info()
    await env.usage()
    await env.executions()


VERBS: tuple[Step, ...] = (
    execute, execute, fail, output, time_out, give_up, background, sessions, files, trees, watch, network, look,
)  # fmt: skip


@dataclass
class Sample:
    """The daemon at a quiet moment."""

    at: float
    resident: int
    descriptors: int
    threads: int
    disk: int
    """Bytes in its home, without its log and the database."""
    database: int
    """Bytes of the database that are in use. The file never shrinks."""
    kept: int
    """Rows of the audit."""
    rows: dict[str, int]
    """By table, of what should be gone by now: nothing lives at a quiet moment, and old rows are deleted."""


class Load:
    def __init__(self, home: Path, pid: int, port: int, tokens: list[str], admin: str, seed: int) -> None:
        self._home = home
        self._pid = pid
        self._url = f"http://127.0.0.1:{port}"
        self._tokens = tokens
        self._admin = admin
        self._seed = seed
        self._go = asyncio.Event()
        self._over = False
        self._at_rest = 0
        self._rested = asyncio.Condition()
        self.done: Counter[str] = Counter()
        self.unexpected: list[str] = []

    async def run(self, seconds: float, every: float) -> list[Sample]:
        """The load for this long, with a quiet moment every so often. Returns what was seen there."""
        workers = [asyncio.create_task(self._work(number)) for number in range(WORKERS)]
        samples = []
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end:
                self._go.set()
                await asyncio.sleep(every)
                samples.append(await self._quiet())
        finally:
            self._over = True
            self._go.set()
            await asyncio.gather(*workers)
        return samples

    async def _quiet(self) -> Sample:
        self._go.clear()
        async with self._rested:
            await self._rested.wait_for(lambda: self._at_rest == WORKERS)
        await asyncio.sleep(2.0)  # what was cancelled or expired is being cleared away
        return await sample(self._home, self._pid)

    async def _work(self, number: int) -> None:
        chance = random.Random(f"{self._seed}/{number}")
        while not self._over:
            if not self._go.is_set():
                async with self._rested:
                    self._at_rest += 1
                    self._rested.notify_all()
                await self._go.wait()
                self._at_rest -= 1
                continue
            episode = chance.choices(
                (self._environment, self._program, self._refused, self._operator), (10, 3, 2, 1)
            )[0]
            name = episode.__name__.strip("_")
            try:
                await episode(self._tokens[number % TENANTS], chance)
            except Busy:
                self.done["busy"] += 1
            except (SkerryError, Unexpected) as error:
                self.unexpected.append(f"{name}: {type(error).__name__}: {error}")
            self.done[name] += 1

    async def _environment(self, token: str, chance: random.Random) -> None:
        options: dict[str, Any] = {}
        if chance.random() < 0.3:
            options["name"] = f"n{chance.getrandbits(40):x}"
        if chance.random() < 0.7:
            options["workspace"] = "memory"
        key = f"k{chance.getrandbits(40):x}" if chance.random() < 0.3 else None
        async with AsyncClient(url=self._url, token=token) as client:
            env = AsyncEnvironment(client=client, **options)
            await env.create(key)
            try:
                for verb in chance.choices(VERBS, k=chance.randrange(1, STEPS)):
                    await verb(env, chance)
                    self.done[verb.__name__] += 1
            finally:
                await env.delete()

    async def _program(self, token: str, chance: random.Random) -> None:
        async with AsyncClient(url=self._url, token=token) as client:
            if chance.random() < 0.2:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(chance.random() * 0.2):
                        await client.execute_code("python", "while True: pass")
                return
            result = await client.execute_code("python", "print(6 * 7)")
            if result.stdout != "42\n":
                raise Unexpected(result)

    async def _refused(self, token: str, chance: random.Random) -> None:
        """Requests that are wrong, or not allowed."""
        async with AsyncClient(url=self._url, token="skt_wrong_token") as stranger:
            await _refusal("unauthorized", stranger.environments())
        async with AsyncClient(url=self._url, token=token) as client:
            call = client.transport.call
            await _refusal("environment_not_found", call("GET", "/environments/aaaaaaaaaaaa"))
            await _refusal("invalid_request", call("POST", "/environments", json={"memory": "x"}))
            await _refusal("invalid_request", call("POST", "/environments", json={"unknown": [1] * 1000}))
            await _refusal("denied", client.tokens())

    async def _operator(self, token: str, chance: random.Random) -> None:
        async with AsyncClient(url=self._url, token=self._admin) as client:
            await client.pools()
            await (await client.transport.send("GET", "/metrics")).read()
            await client.verify_audit()
            async for _ in client.audit(last=20):
                pass
            await client.quota("tenant0")


async def _refusal(code: str, call: Awaitable[Any]) -> None:
    try:
        answer = await call
    except DaemonUnavailable:
        raise
    except SkerryError as error:
        if error.code != code:
            raise
        return
    raise Unexpected(f"{code} was expected, not {answer}")


async def sample(home: Path, pid: int) -> Sample:
    status = await asyncio.to_thread(Path(f"/proc/{pid}/status").read_text)
    database, kept, rows = await _rows(home)
    return Sample(
        at=time.monotonic(),
        resident=1024 * int(status.split("VmRSS:")[1].split()[0]),
        descriptors=len(os.listdir(f"/proc/{pid}/fd")),
        threads=int(status.split("Threads:")[1].split()[0]),
        disk=_disk(home),
        database=database,
        kept=kept,
        rows=rows,
    )


def _disk(home: Path) -> int:
    total = 0
    for folder, _, names in os.walk(home):
        for name in names:
            if name in (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", "daemon.log"):
                continue
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total


async def _rows(home: Path) -> tuple[int, int, dict[str, int]]:
    """The bytes of all rows, how many the audit has, and how many of each table should be gone."""
    before = {"before": time.time() - 2 * DAY}

    def read(tx: Connection) -> tuple[int, int, dict[str, int]]:
        used = "SELECT (page_count - freelist_count) * page_size"
        pages = "pragma_page_count(), pragma_freelist_count(), pragma_page_size()"
        return (
            tx.rows(f"{used} FROM {pages}", {})[0][0],
            tx.rows("SELECT count(*) FROM audit", {})[0][0],
            {
                table: tx.rows(f"SELECT count(*) FROM {table} WHERE {stale}", before)[0][0]
                for table, stale in STALE.items()
            },
        )

    store = await Store.open(Home(str(home)).database)
    try:
        return await store.read(read)
    finally:
        await store.close()


def growth(samples: list[Sample]) -> list[str]:
    """What has grown by more than 5 % between the end of the warm-up and the end: medians of two windows.

    The first third of the samples is the warm-up: caches, pools and the allocator's arenas fill up. Descriptors and
    threads are few: there two more are noise, such as a pool entry that is being made. Of rows, none may be left that
    should be gone; how many there are besides depends on how much was done lately: more after the end of the other
    soak. So does the size of the database: it is compared for each row of the audit.
    """
    third = len(samples) // 3
    early, late = samples[third : 2 * third], samples[-third:]
    found = []
    for name, least in (("resident", 0), ("descriptors", 2), ("threads", 2), ("disk", 1 << 20)):
        before, after = (median(getattr(one, name) for one in window) for window in (early, late))
        if after > before + max(0.05 * before, least):
            found.append(f"{name} grew from {before:,.0f} to {after:,.0f}")
    before, after = (median(one.database / one.kept for one in window) for window in (early, late))
    if after > 1.05 * before:
        found.append(f"the database grew from {before:,.0f} to {after:,.0f} bytes a row")
    for table, count in samples[-1].rows.items():
        if count:
            found.append(f"{count} rows of {table} should be gone")
    return found
