"""The limits of an environment, through the SDK and the daemon down to the kernel, on whatever cgroups there are.

Those that are marked `limits` also run on cgroup v2, in a virtual machine that is slow: nothing here depends on
how long something takes, only on what the kernel counted.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skerry
from skerry.policy import MIB
from tests import leaks, support

MEMORY = 128 * MIB
PYTHON = ["python3", "-I", "-S", "-c"]

HOLD = "import signal; signal.pause()"
ALLOCATE = "import sys; bytearray(int(sys.argv[1])); print('fits')"
FORK = """
import os, signal
children = why = 0
try:
    while children < 1000:
        if os.fork() == 0:
            signal.pause()
        children += 1
except OSError as error:
    why = error.errno
print(children, why, flush=True)
signal.pause()
"""


@pytest.fixture(scope="module")
def client() -> Iterator[skerry.Client]:
    with support.temporary_home() as home, skerry.Client(str(home)) as client:
        yield client


@pytest.fixture
def env(client: skerry.Client) -> Iterator[skerry.Environment]:
    with skerry.Environment(
        memory=MEMORY, cpus=0.25, pids=32, fds=64, disk="16m", inodes=64, client=client
    ) as env:
        yield env


def rows(env: skerry.Environment) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in env.info().enforced}


def need(env: skerry.Environment, name: str) -> None:
    """Skips where this user cannot have the limit: then the report says so, which has a test of its own."""
    row = rows(env)[name]
    if not row["enforced"]:
        support.missing(f"{name} is not enforced here: {row['by']}")


def folders(environment_id: str) -> list[Path]:
    """Its cgroups, in all hierarchies."""
    return [Path(path) for path in leaks.cgroups() if path.endswith(f"/skerry-{environment_id}")]


def kernel(env: skerry.Environment, *names: str) -> str:
    """What the first of these files says that one of its cgroups has."""
    for folder in folders(env.id):
        for name in names:
            if (folder / name).exists():
                return (folder / name).read_text().strip()
    raise AssertionError(f"no cgroup of the environment has any of {names}")


def members(env: skerry.Environment) -> set[int]:
    """The host's pids of everything inside."""
    found = {pid for folder in folders(env.id) for pid in (folder / "cgroup.procs").read_text().split()}
    return {int(pid) for pid in found}


def first_line(process: skerry.Process) -> list[int]:
    return [int(word) for word in next(iter(process))[1].split()]


def settle(env: skerry.Environment, pids: int) -> None:
    """Returns when so many are inside. A supervisor, and the shell before the last command, end on their own."""
    while env.usage().pids != pids:
        assert len(members(env)) >= pids


# What is reported


@pytest.mark.limits
def test_what_is_reported_is_what_the_kernel_says(env: skerry.Environment) -> None:
    found = rows(env)
    need(env, "memory")
    assert found["memory"]["value"] == kernel(env, "memory.limit_in_bytes", "memory.max") == str(MEMORY)
    assert found["pids"]["value"] == kernel(env, "pids.max") == "32"
    assert found["cpu"]["value"] == "0.25"
    quota = kernel(env, "cpu.cfs_quota_us", "cpu.max").split()[0]
    assert quota == "25000"
    if found["swap"]["enforced"]:
        both = int(kernel(env, "memory.memsw.limit_in_bytes", "memory.swap.max"))
        assert both in (0, MEMORY)
        assert found["swap"]["value"] == "0"
    limit = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    assert found["fds"]["value"] == "64"
    assert env.run([*PYTHON, limit]).stdout == "(64, 64)\n"
    space = "import os; s = os.statvfs('/workspace'); print(s.f_bavail * s.f_frsize, s.f_favail)"
    assert (found["disk"]["value"], found["inodes"]["value"]) == (str(16 << 20), "64")
    assert env.run([*PYTHON, space]).stdout == f"{16 * MIB} 64\n"
    status = env.run(["cat", "/proc/self/status"]).stdout
    for line in ("NoNewPrivs:\t1", "Seccomp:\t2", "CapBnd:\t0000000000000000", "CapEff:\t0000000000000000"):
        assert line in status
    assert all(found[name]["enforced"] for name in ("no_new_privs", "seccomp", "capabilities"))


# CPU


@pytest.mark.requirement("R32")
@pytest.mark.limits
@pytest.mark.alone
def test_the_cpu_quota_holds_within_five_percent(env: skerry.Environment) -> None:
    """Two processes that want a core each get a quarter of one together."""
    need(env, "cpu")
    burn = (
        "import os, time; end = time.monotonic() + 4; child = os.fork()\n"
        "while time.monotonic() < end: pass\n"
        "if child: os.waitpid(child, 0)"
    )
    result = env.run([*PYTHON, burn])
    assert result.ok
    assert result.usage.cpu_seconds == pytest.approx(0.25 * result.duration_seconds, rel=0.05)
    throttled = [line for line in kernel(env, "cpu.stat").splitlines() if line.startswith("nr_throttled ")]
    assert int(throttled[0].split()[1]) > 30


@pytest.mark.limits
def test_cpu_time_is_what_was_used(client: skerry.Client) -> None:
    """What starting and ending a program costs is not in its own count, and is measured by one that does nothing."""
    burn = "import sys, time\nwhile time.process_time() < int(sys.argv[1]): pass\nprint(time.process_time())"
    with skerry.Environment(client=client) as env:
        need(env, "cpu")
        excess = []
        for seconds in (0, 2):
            result = env.run([*PYTHON, burn, str(seconds)])
            assert result.usage.cpu_seconds is not None
            excess.append(result.usage.cpu_seconds - float(result.stdout))
        assert abs(excess[1] - excess[0]) < 0.05 * 2
        total = env.usage().cpu_seconds
        assert total is not None
        assert total >= 2


# Memory


@pytest.mark.requirement("R32")
@pytest.mark.limits
def test_the_memory_limit_is_exact(env: skerry.Environment) -> None:
    need(env, "memory")
    assert env.run([*PYTHON, ALLOCATE, str(MEMORY * 3 // 4)]).stdout == "fits\n"
    assert env.usage().oom_kills == 0
    for kills in (1, 2):
        result = env.run([*PYTHON, ALLOCATE, str(MEMORY * 11 // 10)])
        assert (result.outcome, result.exit_code, result.stdout) == ("oom_killed", 137, "")
        assert "memory" in result.message
        assert result.usage.oom_kills == 1
        assert env.usage().oom_kills == kills
    peak = env.usage().memory_peak_bytes
    if peak is not None:
        assert MEMORY - 2 * MIB < peak <= MEMORY
    assert env.run(["echo", "alive"]).stdout == "alive\n"


@pytest.mark.limits
def test_a_shell_keeps_its_state_when_memory_runs_out(env: skerry.Environment) -> None:
    need(env, "memory")
    program = shlex.join([*PYTHON, ALLOCATE, str(MEMORY * 11 // 10)])
    env.execute("cd /tmp; A=kept; f() { echo function; }")
    result = env.execute(f"A=lost; exec {program}")
    assert (result.outcome, result.exit_code) == ("oom_killed", 137)
    assert env.execute("pwd; echo $A; f").stdout == "/tmp\nkept\nfunction\n"
    result = env.execute(f"{program}; echo $?")
    assert (result.outcome, result.stdout) == ("completed", "137\n")
    assert result.usage.oom_kills == 1


@pytest.mark.limits
def test_files_in_memory_count_as_memory(env: skerry.Environment) -> None:
    need(env, "memory")
    before = env.usage().memory_bytes
    fill = "import sys; open(sys.argv[1], 'wb').write(bytes(int(sys.argv[2])))"
    for path, size in (("/tmp/file", 30 * MIB), ("/dev/shm/file", 15 * MIB)):
        assert env.run([*PYTHON, fill, path, str(size)]).ok
    after = env.usage().memory_bytes
    assert before is not None
    assert after is not None
    assert after - before > 45 * MIB - 1 * MIB
    assert env.run([*PYTHON, ALLOCATE, str(MEMORY * 3 // 4)]).outcome == "oom_killed"
    env.run(["rm", "/tmp/file", "/dev/shm/file"])
    assert env.run([*PYTHON, ALLOCATE, str(MEMORY * 3 // 4)]).stdout == "fits\n"


@pytest.mark.limits
def test_the_memory_peak_is_that_of_the_execution(env: skerry.Environment) -> None:
    need(env, "memory")
    peak = env.run([*PYTHON, ALLOCATE, str(100 * MIB)]).usage.memory_peak_bytes
    if peak is None:
        pytest.skip("this kernel does not count the peak")
    assert 100 * MIB < peak < 128 * MIB


# Processes


@pytest.mark.limits
def test_the_pids_limit_is_exact(env: skerry.Environment) -> None:
    """Everything inside counts: the guest, and for each execution a supervisor and the program itself."""
    need(env, "pids")
    guest = supervisor = program = 1
    with env.start([*PYTHON, FORK]) as process:
        assert first_line(process) == [32 - guest - supervisor - program, 11]
        assert env.usage().pids == 32
        with pytest.raises(skerry.LimitReached, match="cannot start another process") as caught:
            env.run(["true"])
        assert "pids" in caught.value.hint
        env.files.write("a", "files need no process")
        assert env.files.read("a") == "files need no process"
    assert env.run(["true"]).ok
    settle(env, guest)


@pytest.mark.limits
def test_refused_forks_do_not_reach_the_cgroup(env: skerry.Environment) -> None:
    """There each would cost a copy of the memory map, under locks that all environments share."""
    need(env, "pids")
    with env.start([*PYTHON, FORK]) as process:
        first_line(process)
        assert kernel(env, "pids.events") == "max 0"


@pytest.mark.limits
def test_a_shell_has_its_place_under_the_pids_limit(env: skerry.Environment) -> None:
    """A shell that waits takes two: a supervisor and itself."""
    need(env, "pids")
    env.execute("true")
    settle(env, 3)
    with env.start([*PYTHON, FORK]) as process:
        assert first_line(process) == [32 - 3 - 2, 11]


@pytest.mark.limits
def test_the_fds_limit_is_exact(env: skerry.Environment) -> None:
    """64 descriptors: three for stdio, 61 to open."""
    program = (
        "import os\ntry:\n    while True: last = os.open('/', 0)\nexcept OSError as e: print(last, e.errno)"
    )
    assert env.run([*PYTHON, program]).stdout == "63 24\n"
    assert env.execute(shlex.join([*PYTHON, program])).stdout == "63 24\n"
    raise_it = "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (65, 65))"
    assert "not allowed to raise" in env.run([*PYTHON, raise_it]).stderr


# The workspace


@pytest.mark.requirement("R37")
@pytest.mark.limits
@pytest.mark.parametrize("workspace", ["auto", "memory"])
def test_the_workspace_is_exact(client: skerry.Client, workspace: str) -> None:
    fill = (
        "import os; fd = os.open('f', os.O_WRONLY | os.O_CREAT); n, size = 0, 1 << 20\n"
        "while size:\n"
        "    try: n += os.write(fd, bytes(size))\n"
        "    except OSError as e: size, why = size // 2, e.errno\n"
        "os.fsync(fd); print(n, why)"
    )
    make = (
        "import os; n = 0\n"
        "try:\n"
        "    while n < 1000: os.mkdir(f'd{n}') if n % 2 else open(f'f{n}', 'x').close(); n += 1\n"
        "except OSError as e: print(n, e.errno)"
    )
    limits: dict[str, Any] = {"memory": MEMORY, "disk": "16m", "inodes": 64, "workspace": workspace}
    with skerry.Environment(**limits, client=client) as env:
        size, reason = map(int, env.run([*PYTHON, fill]).stdout.split())
        # Never more; on a disk the file's own index may take one of the blocks.
        assert (size in (16 * MIB, 16 * MIB - 4096), reason) == (True, errno.ENOSPC)
        with pytest.raises(skerry.DiskFull):
            env.files.write("g", b"x" * 100_000)
        assert env.execute("echo the shell works").stdout == "the shell works\n"
        env.run(["rm", "-f", "f", "g"])
        assert env.run([*PYTHON, make]).stdout == "64 28\n"
        with pytest.raises(skerry.DiskFull):
            env.files.write("one-more", "")
        assert env.execute("echo the shell works").stdout == "the shell works\n"


def test_a_workspace_in_memory_takes_at_most_half_of_it(client: skerry.Client) -> None:
    space = "import os; s = os.statvfs('/workspace'); print(s.f_bavail * s.f_frsize)"
    with skerry.Environment(memory="64m", workspace="memory", client=client) as env:
        assert env.run([*PYTHON, space]).stdout == f"{32 * MIB}\n"
        assert rows(env)["disk"]["value"] == str(32 << 20)


# The end


DAEMONIZE = """
import os, signal, sys
def daemon(depth):
    os.setsid()
    if os.fork() == 0:
        if depth:
            daemon(depth - 1)
        else:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            os.write(1, b"daemon\\n")
            signal.pause()
    os._exit(0)
for _ in range(3):
    if os.fork() == 0:
        daemon(3)
signal.pause()
"""


@pytest.mark.requirement("R32")
@pytest.mark.limits
@pytest.mark.parametrize("how", ["run", "execute"])
def test_after_a_timeout_nothing_of_the_command_lives(env: skerry.Environment, how: str) -> None:
    env.execute("A=kept")
    if rows(env)["pids"]["enforced"]:
        settle(env, 3)
    baseline = members(env)
    # Long enough to daemonise in, on an emulated machine too.
    timeout = max(2, round(20 * env.run([*PYTHON, "pass"]).duration_seconds))
    if how == "run":
        result = env.run([*PYTHON, DAEMONIZE], timeout=timeout)
    else:
        result = env.execute(f"A=lost; {shlex.join([*PYTHON, DAEMONIZE])}", timeout=timeout)
    said = f"killed after {timeout} s"
    assert (result.outcome, result.exit_code, result.message) == ("timed_out", 124, said)
    assert result.stdout == "daemon\n" * 3
    assert members(env) <= baseline
    assert env.execute("echo $A").stdout == "kept\n"


@pytest.mark.requirement("R27", "R38")
@pytest.mark.limits
def test_a_delete_leaves_nothing(client: skerry.Client) -> None:
    with skerry.Environment(client=client) as env:
        env.execute("sleep 1000 & (setsid sleep 1000 &)")
        with env.start([*PYTHON, HOLD]):
            inside, made = members(env), folders(env.id)
            if rows(env)["pids"]["enforced"]:
                assert len(inside) >= 7
                assert made
            env.delete()
        assert not any(os.path.exists(f"/proc/{pid}") for pid in inside)
        assert not any(folder.exists() for folder in made)
        assert folders(env.id) == []
    assert not Path(client.version()["home"], "instances", env.id).exists()


# Without cgroups

WITHOUT_CGROUPS = """
import json, sys
import skerry
FORK, ALLOCATE = sys.argv[1:]
python = ["python3", "-I", "-S", "-c"]
with skerry.Environment(memory="128m", pids=32, fds=64, disk="16m", inodes=64) as env:
    fits = env.run([*python, ALLOCATE, str(96 << 20)])
    hog = env.run([*python, ALLOCATE, str(140 << 20)])
    with env.start([*python, FORK]) as process:
        forked = next(iter(process))[1].decode()
    usage = env.usage()
    print(json.dumps({
        "enforced": env.info().enforced,
        "workspace": env.info().workspace,
        "fits": [fits.outcome, fits.stdout],
        "hog": [hog.outcome, hog.exit_code, hog.stderr.splitlines()[-1]],
        "forked": forked,
        "usage": [usage.cpu_seconds, usage.memory_bytes, usage.pids, usage.oom_kills],
        "alive": env.run(["echo", "alive"]).stdout,
    }))
"""


def test_without_cgroups_rlimits_bite_and_the_report_says_what_does_not(as_nobody: support.Nobody) -> None:
    done = as_nobody.run([as_nobody.python, "-c", WITHOUT_CGROUPS, FORK, ALLOCATE])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    reported = {row["name"]: row for row in found["enforced"]}
    assert {name for name, row in reported.items() if not row["enforced"]} == {
        "cpu",
        "memory",
        "swap",
        "pids",
        "user_limits",
    }
    for name in ("cpu", "memory", "swap", "pids"):
        assert "delegat" in reported[name]["by"]
    assert reported["memory_per_process"]["value"] == str(128 << 20)
    assert reported["pids_of_user"]["value"] == "32"
    assert found["workspace"] == "memory"
    assert found["fits"] == ["completed", "fits\n"]
    assert found["hog"] == ["failed", 1, "MemoryError"]
    # All of the user's processes in there count, with the guest and the supervisor.
    assert found["forked"] == "29 11\n"
    assert found["usage"] == [None, None, None, None]
    assert found["alive"] == "alive\n"
