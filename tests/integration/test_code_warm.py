"""Programs whose interpreter was started before them: what runs is what runs otherwise."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import skerry
from skerry.tools.sync.execute_code import ExecuteCode
from tests import support
from tests.integration.daemon import Daemon, started
from tests.integration.test_code import execute, require

LANGUAGES = ("python", "nodejs", "ruby", "php")
LONG = "x = 0\n" + "x += 1  # one more\n" * 20_000 + "print(x)\n"
PYTHON = {
    "itself": """
import inspect, os, sys
def me(): return 1
print(__name__, __file__, sys.argv, sys.path[:1], os.getcwd(), inspect.getsource(me), open(__file__).read() != '')
print(sorted(os.environ.items()), sys.flags, sys.orig_argv)
print(sorted(name for name in globals() if name.startswith('__')), __spec__, type(__loader__).__name__)
open_ones = sorted(map(int, os.listdir('/proc/self/fd')))[3:-1]
print([os.readlink(f'/proc/self/fd/{fd}') for fd in open_ones])
print(sys.stdin.read() == '', sys.stdin.isatty(), sys.stdout.isatty())
print(os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid())
""",
    "traceback": "def f(x):\n    return 1 / x\n\nprint('before')\nf(0)\n",
    "syntax": "print('never')\nif True print(1)\n",
    "exit": "import sys; print('bye'); sys.exit(7)",
    "exit text": "raise SystemExit('no way')",
    "signal": "import os; os.kill(os.getpid(), 9)",
    "interrupt": "raise KeyboardInterrupt",
    "input": "print(input() + '!')\nprint(input())",
    "empty": "",
    "long": LONG,
    "cookie": "# -*- coding: latin-1 -*-\nprint('caf\u00e9')\n",
    "utf-8": "print('caf\u00e9 \u20ac \U0001f40d')\n",
    "nul": "print(1)\0",
    "no newline": "print(1)",
    "module": "import other; print(other.x, other.__file__)",
    "spawn": """
import multiprocessing
def f(x): return x * x
if __name__ == '__main__':
    multiprocessing.set_start_method('spawn')
    with multiprocessing.Pool(1) as pool: print(pool.map(f, [1, 2, 3]))
""",
    "pickle": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)",
    "thread": "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start(); t.join(); print('after')",
    "atexit": "import atexit; atexit.register(print, 'last'); print('first')",
    "warning": "import warnings; warnings.warn('careful')",
    "write": "open('/workspace/new', 'w')",
}
OTHERS = {
    "nodejs": """
const fs = require('fs');
console.log(__filename, process.argv, require.main === module, process.cwd());
console.log(fs.readFileSync(__filename, 'utf8').length, fs.readFileSync(0, 'utf8'));
null.x;
""",
    "ruby": "puts __FILE__, $0, ARGV.inspect, Dir.pwd, STDIN.read, __FILE__ == $0\nraise 'no'\n",
    "php": """<?php
echo __FILE__, ' ', getcwd(), ' ', implode(',', $argv), ' ', stream_get_contents(STDIN);
exit(3);
""",
}


@contextmanager
def pooled(text: str, *options: str) -> Iterator[Daemon]:
    with support.temporary_home() as home:
        (home / "pools.toml").write_text(text)
        with started(home, *options) as daemon:
            yield daemon


@pytest.fixture(scope="module")
def cold() -> Iterator[Daemon]:
    with pooled("".join(f"[{language}]\nmaximum = 0\n" for language in LANGUAGES)) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def warm() -> Iterator[Daemon]:
    with pooled("") as daemon:
        yield daemon


def _pool(daemon: Daemon, language: str = "python") -> dict[str, Any]:
    found: dict[str, Any]
    [found] = [each for each in daemon.call("GET", "/pools")["pools"] if each["pool"] == language]
    return found


def hits(daemon: Daemon, language: str) -> int:
    return int(_pool(daemon, language)["hits"])


def failures(daemon: Daemon) -> int:
    return int(_pool(daemon)["failures"])


def from_pool(daemon: Daemon, language: str, code: str, **more: Any) -> dict[str, Any]:
    daemon.call("POST", f"/pools/{language}/warmup", {"count": 1})
    before = hits(daemon, language)
    result = execute(daemon, language, code, **more)
    assert hits(daemon, language) == before + 1
    return result


def told(result: dict[str, Any]) -> dict[str, Any]:
    """What does not differ from run to run."""
    kept = {
        name: result[name] for name in ("stdout", "exit_code", "outcome", "version", "language", "message")
    }
    return {**kept, "stderr": re.sub(r"0x[0-9a-f]+|<frozen .*>", "", result["stderr"])}


@pytest.mark.requirement("R77", "F8")
@pytest.mark.parametrize("name", list(PYTHON))
@pytest.mark.parametrize("stdin", [None, "one\ntwo\n"], ids=["no input", "input"])
def test_python(cold: Daemon, warm: Daemon, name: str, stdin: str | None) -> None:
    if name == "itself" and stdin:
        pytest.skip("it says whether there is input")
    more: dict[str, Any] = {"files": {"other.py": "x = 5"}}
    if stdin is not None:
        more["stdin"] = stdin
    assert told(from_pool(warm, "python", PYTHON[name], **more)) == told(
        execute(cold, "python", PYTHON[name], **more)
    )
    assert hits(cold, "python") == 0


@pytest.mark.parametrize("language", list(OTHERS))
def test_other_languages(cold: Daemon, warm: Daemon, language: str) -> None:
    require(language)
    code = OTHERS[language]
    expected = told(execute(cold, language, code, stdin="input"))
    assert "input" in expected["stdout"]
    assert told(from_pool(warm, language, code, stdin="input")) == expected


def test_limits_are_its_own(warm: Daemon) -> None:
    """The interpreter was started with others."""
    taken = from_pool(warm, "python", "x = bytearray(200 << 20); print('taken')", mem_limit=64)
    assert (taken["outcome"], taken["stdout"]) == ("oom_killed", "")
    slow = from_pool(warm, "python", "print('begun', flush=True)\nwhile True: pass", timeout=3)
    assert (slow["outcome"], slow["stdout"]) == ("timed_out", "begun\n")
    assert (
        from_pool(warm, "python", "x = bytearray(600 << 20); print('taken')", mem_limit=900)["stdout"]
        == "taken\n"
    )


def test_what_differs_from_what_waits_is_started_then(warm: Daemon) -> None:
    """A trace is a variable of the program."""
    warm.call("POST", "/pools/python/warmup", {"count": 1})
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    body = {"language": "python", "code": "import os; print(os.environ['TRACEPARENT'][3:35])"}
    status, _, answer = warm.raw("POST", "/execute", body, {"traceparent": trace})
    assert (status, b"0af7651916cd43dd8448eb211c80319c" in answer) == (200, True)


ENDLESS = {
    "python": "print('begun', flush=True)\nwhile True: pass",
    "nodejs": "console.log('begun'); setInterval(() => 0, 1000)",
    "ruby": "$stdout.sync = true\nputs 'begun'\nloop { sleep 1 }",
    "php": "<?php echo 'begun'; while (true) sleep(1);",
}


@pytest.mark.requirement("R78", "R79", "R80", "R81")
@pytest.mark.parametrize("language", LANGUAGES)
def test_each_language_has_a_pool_with_its_own_numbers(warm: Daemon, language: str) -> None:
    require(language)
    pool = f"/pools/{language}"
    assert warm.call("POST", f"{pool}/health")["healthy"]
    warm.call("POST", f"{pool}/warmup", {"count": 4})
    assert warm.call("POST", f"{pool}/shrink", {"count": 2})["available"] == 2
    warm.call("POST", f"{pool}/warmup", {"count": 3})
    deadline = time.monotonic() + 60
    while (found := _pool(warm, language))["active"]:  # an earlier test's is removed after its answer
        assert time.monotonic() < deadline, found
        time.sleep(0.005)
    assert found["available"] == 3
    others = {name: _pool(warm, name)["active"] for name in LANGUAGES if name != language}
    body = {"language": language, "code": ENDLESS[language], "timeout": 100}
    with warm.asked("POST", "/execute", body):
        while not (running := warm.call("GET", "/environments?state=running")["environments"]):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        warm.wait_for_output(running[0]["environment_id"], "begun")
        assert _pool(warm, language)["active"] == 1
        assert {name: _pool(warm, name)["active"] for name in others} == others
    warm.call("POST", f"{pool}/shrink", {"count": 0})


@pytest.mark.requirement("R72")
def test_the_options_of_the_tool() -> None:
    """backend, pool size, maximum pool size, default timeout, network: each does what it says."""
    with pooled("") as daemon, skerry.Client(str(daemon.home)) as client:

        def run(code: str, language: str = "python", **options: Any) -> tuple[str, skerry.EnvironmentInfo]:
            with ExecuteCode(client=client, **options) as tool:
                result = tool.execute({"language": language, "code": code})
            return result.content, max(client.environments(ended=True), key=lambda info: info.created_at)

        text, info = run("print(1)", backend="namespace", pool_size=3, max_pool_size=4)
        assert text == "STDOUT:\n1\nExit code: 0"
        assert (info.isolation, info.network) == ("namespace", "none")
        [python] = [each for each in client.pools() if each.pool == "python"]
        assert (python.minimum, python.maximum, python.hits, python.misses) == (3, 4, 1, 0)
        assert run("echo 2", "bash", pool_size=3, max_pool_size=4)[0] == "STDOUT:\n2\nExit code: 0"
        endless = run("while True: pass", default_timeout=1)[0]
        assert endless == "Execution timed out\nExit code: 124"
        assert run("print(3)", network_enabled=True)[1].network == "public"
        made = len(client.environments(ended=True))
        text, _ = run("print(4)", backend="microvm")
        assert "isolation 'microvm' is not available here" in text
        assert len(client.environments(ended=True)) == made, "it does not run with less isolation"


@pytest.mark.requirement("R72")
def test_only_operators_size_pools(warm: Daemon) -> None:
    body = {"name": "agent", "verbs": ["create", "execute", "read"]}
    token = warm.call("POST", "/tokens", body, expect=201)["token"]
    before = warm.call("GET", "/pools")["pools"]
    for size, most in ((1, None), (None, 1)):
        at = f"unix://{warm.socket}"
        with ExecuteCode(url=at, token=token, pool_size=size, max_pool_size=most) as tool:
            result = tool.execute({"language": "python", "code": "print(1)"})
        assert result.is_error
        assert result.content.startswith("Execution failed: no pool: ")
        assert "admin" in result.content
    assert [each["maximum"] for each in warm.call("GET", "/pools")["pools"]] == [
        each["maximum"] for each in before
    ]
    with pytest.raises(skerry.InvalidRequest, match="pool_size 3 is more than max_pool_size 2"):
        ExecuteCode(pool_size=3, max_pool_size=2)


def test_an_interpreter_that_died_is_not_used() -> None:
    with pooled("[python]\nminimum = 2\n") as daemon:
        daemon.call("POST", "/pools/python/warmup", {"count": 2})
        inside = [
            int(pid)
            for pid in os.listdir("/proc")
            if pid.isdecimal() and _argv(pid) == ["python3", "main.py"] and str(daemon.home) in _mounts(pid)
        ]
        assert len(inside) == 2
        for pid in inside:
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while failures(daemon) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        for _ in range(3):
            assert execute(daemon, "python", "print('fine')")["stdout"] == "fine\n"


def _argv(pid: str) -> list[str]:
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read().split("\0")[:-1]
    except OSError:
        return []


def _mounts(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/mountinfo") as file:
            return file.read()
    except OSError:
        return ""
