"""A directory that is swapped for symlinks, thousands of times a second, while the file API works below it.

The API may reach the directory or be refused, never what the symlinks lead to: a directory of the environment
outside of the API's roots, which the workload's user could read and write, and a directory of the host.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import support
from tests.integration.daemon import Connection

Mutate = Callable[..., Path]

SECRET = b"a secret from outside"
OUTSIDE = "/dev/shm/outside"
"""What `d` never is: in the environment's memory, so that its user may do everything with it."""

PREPARE = f"""
mkdir d d/sub {OUTSIDE} {OUTSIDE}/sub
printf inside > d/canary
for name in canary w u v sub/keep; do printf '{SECRET.decode()}' > {OUTSIDE}/$name; done
ln -s {OUTSIDE} out
ln -s "$HOST_FOLDER" host
"""
SWAP = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
exchange = 2
print("racing", flush=True)
while True:
    for name in (b"out", b"out", b"host", b"host"):
        if libc.renameat2(-100, b"d", -100, name, exchange) != 0:
            raise OSError(ctypes.get_errno(), "renameat2")
"""

# The daemon with another helper than the one that was built.
PATCHED = """
import pathlib, runpy, sys
from skerry.host import launcher
launcher.Helper.__init__.__defaults__ = (pathlib.Path(sys.argv.pop(1)),)
sys.argv[0] = "skerry.daemon"
runpy.run_module("skerry.daemon", run_name="__main__", alter_sys=True)
"""


class Arena:
    """An environment in which the race is on, and the file API to it."""

    def __init__(self, connection: Connection, environment_id: str) -> None:
        self._connection = connection
        self._path = f"/environments/{environment_id}"

    def call(
        self, method: str, path: str, body: bytes | None = None, kind: str = "application/octet-stream"
    ) -> tuple[str, bytes]:
        """(`ok` or the code of the error, the answer)"""
        self._connection.request(method, self._path + path, body, {"content-type": kind})
        response = self._connection.getresponse()
        answer = response.read()
        return ("ok" if response.status < 300 else str(json.loads(answer)["code"])), answer

    def run(self, *argv: str) -> str:
        body = json.dumps({"argv": argv}).encode()
        code, answer = self.call("POST", "/execute", body, "application/json")
        assert code == "ok", answer
        return str(json.loads(answer)["stdout"])

    def outside(self) -> dict[str, str]:
        """Every file out there, and what is in it."""
        listing = self.run("sh", "-c", f"cd {OUTSIDE} && grep -r '' . | sort")
        return dict(line.split(":", 1) for line in listing.splitlines())


UNTOUCHED = {f"./{name}": SECRET.decode() for name in ("canary", "w", "u", "v", "sub/keep")}


@contextmanager
def arena(host_folder: Path, helper: Path | None = None) -> Iterator[Arena]:
    with support.temporary_home() as home:
        patch = ["-c", PATCHED, str(helper)] if helper else ["-m", "skerry.daemon"]
        with daemon(home, patch) as connection:
            body = json.dumps({"workspace": "memory", "cpus": 2, "env": {"HOST_FOLDER": str(host_folder)}})
            connection.request("POST", "/environments", body, {"content-type": "application/json"})
            made = json.loads(connection.getresponse().read())
            found = Arena(connection, made["environment_id"])
            found.run("sh", "-c", PREPARE)
            assert found.outside() == UNTOUCHED
            start = json.dumps({"argv": ["python3", "-I", "-S", "-c", SWAP]}).encode()
            _, answer = found.call("POST", "/executions", start, "application/json")
            swapping = json.loads(answer)["execution_id"]
            yield found
            _, answer = found.call("GET", f"/executions/{swapping}")
            assert json.loads(answer)["state"] == "running", answer


@contextmanager
def daemon(home: Path, module: list[str]) -> Iterator[Connection]:
    """A daemon started by these arguments of Python, and one connection to it."""
    ready, tell = os.pipe()
    command = [sys.executable, *module, "--home", str(home), "--foreground", "--ready-fd", str(tell)]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=[tell]
    ) as process:
        os.close(tell)
        with open(ready) as word:
            assert word.readline() == "ready\n"
        connection = Connection(f"{home}/daemon.sock")
        try:
            yield connection
        finally:
            connection.close()
            process.terminate()


def archive() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        member = tarfile.TarInfo("u")
        member.size = len(b"uploaded")
        tar.addfile(member, io.BytesIO(b"uploaded"))
    return buffer.getvalue()


ARCHIVE = archive()
VERBS: Mapping[str, Callable[[Arena], tuple[str, bytes]]] = {
    "read": lambda a: a.call("GET", "/files/read?path=d/canary"),
    "stat": lambda a: a.call("GET", "/files/stat?path=d/canary"),
    "write": lambda a: a.call("POST", "/files/write?path=d/w", b"written"),
    "remove": lambda a: a.call("DELETE", "/files?path=d/v"),
    "rename": lambda a: a.call(
        "POST", "/files/rename", b'{"source": "d/w", "target": "d/v"}', "application/json"
    ),
    "list": lambda a: a.call("GET", "/files/list?path=d"),
    "upload": lambda a: a.call("PUT", "/files/archive?path=d", ARCHIVE),
    "download": lambda a: a.call("GET", "/files/archive?path=d&contents=1"),
    "list all": lambda a: a.call("GET", "/files/list?path=d/sub&recursive=1"),
    "remove all": lambda a: a.call("DELETE", "/files?path=d/sub/keep&recursive=1"),
}
ROUNDS = {
    **dict.fromkeys(("read", "write"), 2500),
    **dict.fromkeys(("stat", "rename", "remove"), 1250),
    **dict.fromkeys(("list", "upload", "download", "list all", "remove all"), 250),
}
REACHED = {"ok", "file_missing"}
"""The directory was there: what was asked for may not have been."""


def leaked(verb: str, answer: bytes) -> bool:
    return SECRET in answer or (verb.startswith("list") and b'"keep"' in answer)


def race(arena: Arena, rounds: Mapping[str, int]) -> dict[str, Counter[str]]:
    """How the calls ended, by verb."""
    codes: dict[str, Counter[str]] = {verb: Counter() for verb in rounds}
    for turn in range(max(rounds.values())):
        for verb in [verb for verb, wanted in rounds.items() if turn < wanted]:
            code, answer = VERBS[verb](arena)
            codes[verb]["leaked" if leaked(verb, answer) else code] += 1
    return codes


@pytest.fixture
def host_folder(tmp_path: Path) -> Iterator[Path]:
    """A directory of the host with the same names in it, open to everybody."""
    (tmp_path / "sub").mkdir()
    for path in (tmp_path, tmp_path / "sub"):
        path.chmod(0o777)
    names = ["canary", "w", "u", "v", "sub/keep"]
    for name in names:
        (tmp_path / name).write_bytes(SECRET)
    yield tmp_path
    found = {str(path.relative_to(tmp_path)): path for path in tmp_path.rglob("*") if path.is_file()}
    assert {name: path.read_bytes() for name, path in found.items()} == dict.fromkeys(names, SECRET)


@pytest.mark.slow
def test_no_leak_in_ten_thousand_rounds(host_folder: Path) -> None:
    assert sum(ROUNDS.values()) == 10_000
    with arena(host_folder) as found:
        codes = race(found, ROUNDS)
        assert found.outside() == UNTOUCHED
    check(codes, ROUNDS)


def check(codes: Mapping[str, Counter[str]], rounds: Mapping[str, int]) -> None:
    """Both sides of the race were met with every verb, and nothing else."""
    for verb, ended in codes.items():
        reached = sum(ended[code] for code in REACHED)
        refused = ended["path_outside"] + ended["file_conflict"]
        assert reached + refused == rounds[verb], (verb, ended)
        assert min(reached, refused) > rounds[verb] // 50, (verb, ended)


def test_the_walk_by_hand_does_not_leak_either(host_folder: Path, mutate: Mutate) -> None:
    """It stands in where the kernel has no openat2, or a filter does not let it through."""
    loop = "for (int i = 0; i < RACE_RETRIES; i++) {"
    rounds = {verb: wanted // 10 for verb, wanted in ROUNDS.items()}
    with arena(host_folder, mutate(("paths.c", loop, f"return -ENOSYS;\n    {loop}"))) as found:
        codes = race(found, rounds)
        assert found.outside() == UNTOUCHED
    check(codes, rounds)


def test_without_the_defence_it_leaks(host_folder: Path, mutate: Mutate) -> None:
    """The same race, with the kernel told to follow whatever it meets."""
    helper = mutate(("paths.c", "RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS,", "0,"))
    with arena(host_folder, helper) as found:
        codes = race(found, {verb: wanted // 10 for verb, wanted in ROUNDS.items()})
        after = found.outside()
    assert codes["read"]["leaked"]
    assert codes["download"]["leaked"]
    assert after != UNTOUCHED
    assert "uploaded" in after.values()
    assert "./sub/keep" not in after
