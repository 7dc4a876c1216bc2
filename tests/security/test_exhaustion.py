"""An environment that takes all it can get: it gets its limits, and neither the host nor a neighbour notices.

How exact the limits are is in tests/integration/test_limits.py; here they are attacked. `env` is the attacker's,
`neighbour` somebody else's on the same daemon.
"""

from __future__ import annotations

import asyncio
import re
import shlex
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

import skerry
from skerry.manager.executions.registry import RUNNING_MAX
from skerry.policy import MIB
from tests import support
from tests.conformance.kinds import given, skip_sweep
from tests.integration.daemon import Connection
from tests.security.box import Boxes
from tests.security.conftest import Mutate

PYTHON = ["python3", "-I", "-S", "-c"]
MEMORY = 128 * MIB
MEMORY_OF_GVISOR = 1024 * MIB
"""gVisor needs 5 MiB for each process of Python's."""
FLAT = 50 * MIB
"""How much the daemon may grow, whatever an environment does."""


@pytest.fixture(scope="module")
def neighbour(client: skerry.Client) -> Iterator[skerry.Environment]:
    with skerry.Environment(memory="64m", workspace="memory", client=client) as neighbour:
        yield neighbour


@pytest.fixture
def env(
    request: pytest.FixtureRequest, client: skerry.Client, neighbour: skerry.Environment
) -> Iterator[skerry.Environment]:
    """For each attack one of its own; afterwards it and its neighbour still work."""
    memory = MEMORY if "host_kernel" in given(request.node.callspec.params["client"]) else MEMORY_OF_GVISOR
    with skerry.Environment(memory=memory, pids=128, disk="16m", inodes=1024, client=client) as env:
        yield env
        if not out_of_memory(env):
            works(env)
        works(neighbour)


def works(env: skerry.Environment) -> None:
    assert env.run(["echo", "alive"]).stdout == "alive\n"
    assert env.execute("echo alive").stdout == "alive\n"


def own_kernel(env: skerry.Environment) -> bool:
    """True on a rung whose kernel takes the environment's memory for itself too: at the limit all of it ends."""
    return env.info().isolation != "namespace"


def out_of_memory(env: skerry.Environment) -> bool:
    """True if it has ended for want of memory, which only such a rung does."""
    info = env.info()
    return info.ended_reason == "out of memory" and info.isolation != "namespace"


def patience(env: skerry.Environment) -> float:
    """Seconds that fifty forks take at most: a rung's are slower."""
    return 6.0 if own_kernel(env) else 2.0


def python(code: str) -> str:
    return shlex.join([*PYTHON, code])


def rootless(env: skerry.Environment) -> bool:
    users = [row for row in env.info().enforced if row["name"] == "users"]
    return any(str(row["value"]).startswith("one user") for row in users)


def enforced(env: skerry.Environment, name: str) -> bool:
    """What a daemon of root's does not enforce is missing; without root much depends on the host."""
    row = next(row for row in env.info().enforced if row["name"] == name)
    if not row["enforced"] and not rootless(env):
        support.missing(f"{name} is not enforced here: {row['by']}")
    return bool(row["enforced"])


def strangers(env: skerry.Environment) -> Counter[str]:
    """What is inside beside the guest, a shell, their supervisors, a relay, and the program that looks."""
    look = "for f in /proc/[0-9]*/comm; do read n < $f && echo $n; done"
    known = ["skerry-init", "skerry-watch", "bash", "skerry-watch", "sh", "skerry-relay"]
    return Counter(env.run(["sh", "-c", look]).stdout.split()) - Counter(known)


def resident(pid: int) -> int:
    fields = Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()
    return int(fields[0]) * 1024


# Processes

BOMBS = {
    "shell": "bomb() { bomb | bomb & }; bomb; sleep 1000",
    "python": python("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"),
    "daemons": python(
        "import os\nwhile True:\n    try:\n        if os.fork() == 0: os.setsid(); os.fork()\n    except OSError: pass"
    ),
}


@pytest.mark.needs("outlives")
@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("how", ["run", "execute"])
def test_a_fork_bomb(env: skerry.Environment, neighbour: skerry.Environment, bomb: str, how: str) -> None:
    assert enforced(env, "pids") or enforced(env, "pids_of_user")
    with ThreadPoolExecutor(1) as pool:
        if how == "run":
            exploding = pool.submit(env.run, ["bash", "-c", BOMBS[bomb]], timeout=1)
        else:
            exploding = pool.submit(env.execute, BOMBS[bomb], timeout=1)
        while not exploding.done():
            works(neighbour)
        try:
            result = exploding.result()
        except skerry.EnvironmentEnded:
            assert out_of_memory(env)
            return
    assert (result.outcome, result.exit_code) == ("timed_out", 124)
    assert strangers(env) == Counter()


ESCAPE = """
import os, signal, sys
count = int(sys.argv[1])
if len(sys.argv) > 2:
    import ctypes
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
for _ in range(count):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            for number in range(1, 32):
                if number not in (9, 19):
                    signal.signal(number, signal.SIG_IGN)
            os.write(1, b"out\\n")
            while True:
                signal.pause()
        os._exit(0)
while True:
    signal.pause()
"""


@pytest.mark.parametrize("subreaper", [[], ["subreaper"]], ids=["plain", "subreaper"])
@pytest.mark.parametrize("how", ["run", "execute"])
def test_daemons_die_with_their_execution(env: skerry.Environment, how: str, subreaper: list[str]) -> None:
    argv = [*PYTHON, ESCAPE, "50", *subreaper]
    seconds = patience(env)
    result = (
        env.run(argv, timeout=seconds) if how == "run" else env.execute(shlex.join(argv), timeout=seconds)
    )
    assert result.outcome == "timed_out"
    assert result.stdout == "out\n" * 50
    assert strangers(env) == Counter()


HEADLESS = """
import ctypes, os, threading, time
def live():
    while True:
        time.sleep(0.01)
        os.utime('/workspace/alive')
open('/workspace/alive', 'x').close()
threading.Thread(target=live).start()
os.posix_spawn('/bin/sleep', ['sleep', '1000'], {})
print('up', flush=True)
ctypes.CDLL(None).syscall(60, 0)  # exit(), of this thread alone
"""


@pytest.mark.parametrize("how", ["run", "execute"])
def test_a_process_that_looks_like_a_zombie_dies_with_its_execution(
    env: skerry.Environment, how: str
) -> None:
    """Its first thread has ended, another goes on."""
    argv = [*PYTHON, HEADLESS]
    result = env.run(argv, timeout=2) if how == "run" else env.execute(shlex.join(argv), timeout=2)
    assert (result.outcome, result.stdout) == ("timed_out", "up\n")
    assert strangers(env) == Counter()


def test_orphans_are_put_away(request: pytest.FixtureRequest, env: skerry.Environment) -> None:
    """Ten times as many as there may be processes."""
    if own_kernel(env):  # where a fork takes long
        skip_sweep(request.node.callspec.params["client"])
    code = """
import os
for _ in range(1280):
    pid = os.fork()
    if pid == 0:
        try:
            os.fork()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
"""
    result = env.run([*PYTHON, code])
    assert result.ok, result.stderr
    while strangers(env):
        pass


@pytest.mark.needs("host_kernel")
def test_zombies_that_nobody_puts_away_count(env: skerry.Environment) -> None:
    assert enforced(env, "pids") or enforced(env, "pids_of_user")
    code = """
import os
children = 0
try:
    while children < 1000:
        if os.fork() == 0:
            os._exit(0)
        children += 1
except OSError as error:
    print(children, error.errno)
"""
    assert env.run([*PYTHON, code]).stdout == "125 11\n"
    while strangers(env):
        pass


# Memory and disk


HOGS = {
    "heap": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "shared": "import mmap\nx = []\nwhile True: x.append(mmap.mmap(-1, 1 << 20)); x[-1].write(bytes(1 << 20))",
    "memfd": "import os\nfd = os.memfd_create('x')\nwhile True: os.write(fd, bytes(1 << 20))",
    "many": """
import os, signal
for _ in range(8):
    if os.fork() == 0:
        held = bytearray(40 << 20)
        signal.pause()
held = bytearray(200 << 20)
""",
    "sockets": """
import socket
pairs = []
while True:
    pairs.append(socket.socketpair())
    pairs[-1][0].setblocking(False)
    try:
        while True: pairs[-1][0].send(bytes(65536))
    except BlockingIOError: pass
""",
}


@pytest.mark.needs("outlives")
@pytest.mark.parametrize("hog", HOGS)
def test_memory(env: skerry.Environment, neighbour: skerry.Environment, hog: str) -> None:
    by_process = not enforced(env, "memory")
    if by_process and hog != "heap":
        pytest.skip("without a cgroup only what each process allocates is limited")
    try:
        result = env.run([*PYTHON, HOGS[hog]], timeout=60)
    except skerry.EnvironmentEnded:
        assert out_of_memory(env)
        works(neighbour)
        return
    # Whoever holds sockets runs out of descriptors first, or of memory, which is charged to the environment too.
    ends = [("failed", 1)] if by_process else [("oom_killed", 137), ("failed", 1)][: 1 + (hog == "sockets")]
    assert (result.outcome, result.exit_code) in ends
    peak = env.usage().memory_peak_bytes
    assert peak is None or peak <= MEMORY or own_kernel(env)
    works(neighbour)


@pytest.mark.needs("outlives")
@pytest.mark.parametrize("place", ["/tmp", "/dev/shm", "/run"])
def test_a_place_in_memory_that_is_filled_up(env: skerry.Environment, place: str) -> None:
    """Bytes, then names: the environment goes on, and with it its shell as soon as there is room again."""
    fill = f"dd if=/dev/zero of={place}/full bs=64k 2>&1 | grep -c 'No space left'"
    assert env.run(["sh", "-c", fill]).stdout == "1\n"
    assert env.run(["echo", "alive"]).stdout == "alive\n"
    env.run(["rm", f"{place}/full"])
    names = (
        "import sys\ntry:\n    for n in range(200000): open(f'{sys.argv[1]}/n{n}', 'x').close()\n"
        "except OSError as error: print(error.errno)"
    )
    assert env.run([*PYTHON, names, place]).stdout == "28\n"
    assert env.run(["echo", "alive"]).stdout == "alive\n"
    if place == "/run":
        with pytest.raises(skerry.SkerryError) as caught:
            env.execute("true")
        assert isinstance(caught.value, skerry.LimitReached)
    env.run(["sh", "-c", f"find {place} -name 'n*' -delete"])


def test_all_places_in_memory_together_spare_the_guest(
    client: skerry.Client, neighbour: skerry.Environment
) -> None:
    with skerry.Environment(memory="64m", workspace="memory", client=client) as env:
        for place in ("/workspace", "/tmp", "/dev/shm", "/run"):
            env.run(["sh", "-c", f"dd if=/dev/zero of={place}/full bs=64k 2>/dev/null"])
        assert env.run(["echo", "alive"]).stdout == "alive\n"
        env.files.remove("/workspace/full")
        works(neighbour)


@pytest.mark.each_rung
def test_a_full_disk(env: skerry.Environment, neighbour: skerry.Environment) -> None:
    env.run(["sh", "-c", "dd if=/dev/zero of=full bs=64k 2>/dev/null"])
    with pytest.raises(skerry.DiskFull) as caught:
        env.files.write("more", b"x" * 70000)
    assert caught.value.hint
    neighbour.files.write("mine", b"x" * 1000000)
    works(env)
    env.files.remove("full")
    env.files.write("more", b"x" * 70000)
    files = next(row for row in env.info().enforced if row["name"] == "inodes")
    if not files["enforced"]:
        assert own_kernel(env)  # where they take memory, which is limited
        return
    deep = "import os\nfor i in range(3000): os.mkdir('d'); os.chdir('d')"
    assert env.run([*PYTHON, deep]).stderr.rstrip().endswith("No space left on device: 'd'")
    env.files.remove("d", recursive=True)
    assert [info.name for info in env.files.list()] == ["more"]


# Descriptors and other things that the kernel counts


@pytest.mark.parametrize(
    "code",
    [
        "import os\nwhile True: os.open('/', 0)",
        "import os\nwhile True: os.pipe()",
        "import select\nx = []\nwhile True: x.append(select.epoll())",
        pytest.param(
            "import ctypes, os\nwhile True:\n    if ctypes.CDLL(None).inotify_init() < 0: raise OSError(24, '')",
            marks=pytest.mark.needs("own_limits"),
        ),
        "import socket\nx = []\nwhile True: x.append(socket.socket())",
    ],
    ids=["files", "pipes", "epoll", "inotify", "sockets"],
)
def test_descriptors(env: skerry.Environment, neighbour: skerry.Environment, code: str) -> None:
    """While one environment holds all that it can, in many processes, another gets its own."""
    hold = """
import os, signal, sys
for _ in range(4):
    if os.fork() == 0:
        break
try:
    exec(sys.argv[1])
except OSError:
    os.write(1, b"x")
signal.pause()
"""
    with env.start([*PYTHON, hold, code]) as process:
        held = b""
        while len(held) < 5:
            held += next(iter(process))[1]
        works(neighbour)
        with neighbour.files.watch(".") as changes:
            neighbour.files.write("seen", "")
            assert next(iter(changes)).path.endswith("seen")
        works(env)


# Output


async def flood(env_id: str, home: str, command: str) -> int:
    """Start what writes without end and read nothing of it, by both ways that stream; the daemon's growth."""
    async with skerry.AsyncClient(home) as client:
        pid = (await client.version())["pid"]
        env = await skerry.AsyncEnvironment.get(env_id, client=client)
        before = resident(pid)
        processes = [await env.start(command) for _ in range(4)]
        follower = Connection(f"{home}/daemon.sock")
        follower.request("GET", f"/environments/{env_id}/logs?follow=1")
        grown = 0
        for _ in range(50):
            await env.run(["sh", "-c", "head -c 3000000 /dev/zero"])
            grown = max(grown, resident(pid) - before)
        follower.close()
        for process in processes:
            await process.kill()
            await process.close()
        return grown


def test_output_that_nobody_reads_stays_where_it_is(env: skerry.Environment, client: skerry.Client) -> None:
    """Four programs write as fast as they are let, to clients that do not read: the programs wait."""
    home = client.version()["home"]
    assert asyncio.run(flood(env.id, home, "yes 'a line of output'")) < FLAT


@pytest.mark.parametrize("size", [256 << 20, pytest.param(10 << 30, marks=pytest.mark.soak)])
def test_a_flood_of_output(
    request: pytest.FixtureRequest, env: skerry.Environment, client: skerry.Client, size: int
) -> None:
    """Cut at the limit and flagged, with the true size; the daemon does not even see the rest."""
    if size > 1 << 30:
        skip_sweep(request.node.callspec.params["client"])
    if rootless(env):
        pytest.skip("it is the same code, and takes long")
    pid = client.version()["pid"]
    before = resident(pid)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(env.execute, f"head -c {size} /dev/zero; head -c 3000000 /dev/zero >&2")
        grown = 0
        while not running.done():
            grown = max(grown, resident(pid) - before)
            env.files.exists("anything")
        result = running.result()
    assert grown < FLAT
    assert result.ok
    assert (len(result.stdout_bytes), result.stdout_size, result.stdout_truncated) == (1 << 20, size, True)
    assert (len(result.stderr_bytes), result.stderr_size, result.stderr_truncated) == (1 << 20, 3000000, True)


def test_the_output_limit_is_the_callers(env: skerry.Environment) -> None:
    for limit in (0, 1, 70000, 2 << 20):
        result = env.run(["head", "-c", "3000000", "/dev/zero"], output_limit=limit)
        assert (len(result.stdout_bytes), result.stdout_size) == (limit, 3000000)
    with pytest.raises(skerry.InvalidRequest):
        env.run(["true"], output_limit=1 << 40)


def test_the_guest_itself_cuts_output(boxes: Boxes, mode: str, mutate: Mutate) -> None:
    """What nobody will keep does not even reach the daemon, which would cut it too."""
    argv = ["head", "-c", "3000000", "/dev/zero"]
    assert len(boxes(mode).run(argv, output_limit=70000).stdout) == 70000
    careless = mutate(
        ("streams.c", " && s->total < p->limit;", ";"),
        ("streams.c", "if (p->limit - s->total < most)", "if (0)"),
    )
    assert len(boxes(mode, helper=careless).run(argv, output_limit=70000).stdout) == 3000000


# Requests


def test_huge_arguments(env: skerry.Environment) -> None:
    """Up to the size of a frame they work; beyond it they are refused in words, and nothing breaks."""
    assert env.run(["sh", "-c", "echo ${#1}", "sh", "x" * 100_000]).stdout == "100000\n"
    assert env.run(["sh", "-c", "echo $#", "sh", *["x"] * 10_000]).stdout == "10000\n"
    for argv, variables in (
        (["true", "x" * 1_000_000], {}),
        (["true", *["x"] * 200_000], {}),
        (["true"], {"A": "x" * 1_000_000}),
        (["true"], {f"A{n}": "x" * 100 for n in range(10_000)}),
    ):
        with pytest.raises((skerry.InvalidRequest, skerry.LimitReached)) as caught:
            env.run(argv, env=variables)
        assert re.search(r"(more|longer) than [0-9]+ (bytes|elements)", caught.value.message)
        assert caught.value.hint
    with pytest.raises((skerry.InvalidRequest, skerry.LimitReached)):
        env.execute("true " + "x" * 1_000_000)
    with pytest.raises(skerry.LimitReached):
        env.run(["true", "x" * (20 << 20)])


def test_a_flood_of_executions_is_turned_away(env: skerry.Environment, client: skerry.Client) -> None:
    """One more than may wait for a shell gets 429, and those that wait are served in their order."""
    home = client.version()["home"]

    async def work() -> None:
        async with skerry.AsyncClient(home) as other:
            same = await skerry.AsyncEnvironment.get(env.id, client=other)
            first = asyncio.create_task(same.execute("while ! test -e go; do sleep 0.05; done; echo > order"))
            while not await same.executions():
                pass
            calls = [asyncio.create_task(same.execute(f"echo {n} >> order")) for n in range(80)]
            refused = 0
            for call in asyncio.as_completed(calls):
                try:
                    await call
                except skerry.Busy:
                    refused += 1
                    if refused == 16:
                        await same.files.write("go", "")
            await first
            assert refused == 16
            assert len((await same.files.read("order")).split()) == 64

    asyncio.run(work())
    assert (skerry.Busy.status, skerry.Busy.retryable) == (429, True)


def test_one_execution_too_many(client: skerry.Client, neighbour: skerry.Environment) -> None:
    """It gets 429, by every way to run something; those that run go on, and one that ends makes room."""

    async def work() -> None:
        async with (
            skerry.AsyncClient(client.version()["home"]) as other,
            skerry.AsyncEnvironment(memory="2g", pids=1024, workspace="memory", client=other) as env,
            AsyncExitStack() as stack,
        ):
            first, *others = [
                await stack.enter_async_context(await env.start(["cat"], stdin=True))
                for _ in range(RUNNING_MAX)
            ]
            calls: list[Callable[[], Awaitable[object]]] = [
                lambda: env.run(["true"]),
                lambda: env.execute("true"),
                lambda: env.start(["true"]),
            ]
            for call in calls:
                with pytest.raises(skerry.Busy, match=f"{RUNNING_MAX} executions are running") as caught:
                    await call()
                assert caught.value.hint
                assert (caught.value.status, caught.value.retryable) == (429, True)
            await env.files.write("beside", "them")
            works(neighbour)
            await first.kill()
            await first.wait()
            assert (await env.run(["cat", "beside"])).stdout == "them"
            for number, process in enumerate(others):
                await process.write(str(number))
                await process.close_stdin()
            results = [await process.wait() for process in others]
            assert [result.stdout for result in results] == [str(number) for number in range(len(others))]
            assert all(result.ok for result in results)

    asyncio.run(work())
