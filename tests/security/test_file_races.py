"""A directory that is swapped for symlinks, thousands of times a second, while the file API works below it.

The API may reach the directory or be refused, never what the symlinks lead to: a directory of the environment
outside of the API's roots, which the workload's user could read and write, and a directory of the host.
"""

from __future__ import annotations

import io
import json
import signal
import tarfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import pytest

from tests.conformance.kinds import skip_sweep
from tests.integration.daemon import Connection
from tests.security.conftest import Mutate
from tests.security.daemons import Serve

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
import ctypes, errno, os, signal, time
libc = ctypes.CDLL(None, use_errno=True)
exchange = 2
rests = False
def rest(*_):
    global rests
    rests = True
signal.signal(signal.SIGUSR1, rest)
def move(source, target):
    while True:
        try:
            return os.rename(source, target)
        except OSError:
            try:
                os.rename(target, b"made-%d" % time.monotonic_ns())
            except FileNotFoundError:
                pass
def swap(name):
    if libc.renameat2(-100, b"d", -100, name, exchange) == 0:
        return
    if ctypes.get_errno() != errno.EINVAL:
        raise OSError(ctypes.get_errno(), "renameat2")
    for source, target in ((b"d", b"aside"), (name, b"d"), (b"aside", name)):
        move(source, target)  # gVisor does not exchange: for a moment there is no d, and an upload makes one
print("racing", flush=True)
swaps = 0
while True:
    for name in (b"out", b"out", b"host", b"host"):
        swap(name)
        swaps += 1
        if rests and swaps % 101 == 0:
            time.sleep(0.001)
"""
"""As fast as it can, and after SIGUSR1 with rests, each in another of the four places than the one before."""


class Arena:
    """An environment in which the race is on, and the file API to it."""

    def __init__(self, connection: Connection, environment_id: str) -> None:
        self._connection = connection
        self._path = f"/environments/{environment_id}"
        self._swapping = ""

    def start(self) -> None:
        body = json.dumps({"argv": ["python3", "-I", "-S", "-c", SWAP]}).encode()
        _, answer = self.call("POST", "/executions", body, "application/json")
        self._swapping = f"/executions/{json.loads(answer)['execution_id']}"
        self._connection.request("GET", f"{self._path}/logs?follow=1")
        with self._connection.getresponse() as log:
            while b"racing" not in log.readline():
                pass
        self._connection.close()

    def rest(self) -> None:
        """From now on the directory, and each of the symlinks, stays for a moment every now and then."""
        body = json.dumps({"signal": signal.SIGUSR1}).encode()
        code, answer = self.call("POST", f"{self._swapping}/signal", body, "application/json")
        assert code == "ok", answer

    def is_on(self) -> bool:
        _, answer = self.call("GET", self._swapping)
        return bool(json.loads(answer)["state"] == "running")

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


Arenas = Callable[..., AbstractContextManager[Arena]]


@pytest.fixture
def arena(host_folder: Path, serve: Serve) -> Arenas:
    @contextmanager
    def make(mode: str, helper: Path | None = None) -> Iterator[Arena]:
        with serve(mode, helper) as home, closing(Connection(f"{home}/daemon.sock")) as connection:
            body = json.dumps({"workspace": "memory", "cpus": 2, "env": {"HOST_FOLDER": str(host_folder)}})
            connection.request("POST", "/environments", body, {"content-type": "application/json"})
            made = json.loads(connection.getresponse().read())
            found = Arena(connection, made["environment_id"])
            found.run("sh", "-c", PREPARE)
            assert found.outside() == UNTOUCHED
            found.start()
            yield found
            assert found.is_on()

    return make


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
MORE_ROUNDS = 5000
REACHED = {"ok", "file_missing"}
"""The directory was there: what was asked for may not have been."""
REFUSED = {"path_outside", "file_conflict"}


def leaked(verb: str, answer: bytes) -> bool:
    return SECRET in answer or (verb.startswith("list") and b'"keep"' in answer)


Codes = dict[str, Counter[str]]
"""How often the calls ended how, by verb."""


def race(arena: Arena, rounds: Mapping[str, int], unmet: Callable[[Codes], Collection[str]]) -> Codes:
    """All the rounds against a race at full speed; then some more with the verbs that are `unmet`.

    Where the calls meet the race at full speed is for the scheduler and the kernel's locks to say. With rests every
    call has a fair chance to meet each side whatever else the machine does, so that few more are needed.
    """
    codes: Codes = {verb: Counter() for verb in rounds}

    def play(verb: str) -> None:
        code, answer = VERBS[verb](arena)
        codes[verb]["leaked" if leaked(verb, answer) else code] += 1

    for turn in range(max(rounds.values())):
        for verb in [verb for verb, wanted in rounds.items() if turn < wanted]:
            play(verb)
    arena.rest()
    for _ in range(MORE_ROUNDS):
        if not (verbs := unmet(codes)):
            break
        for verb in verbs:
            play(verb)
    return codes


def sides(ended: Counter[str]) -> tuple[int, int]:
    """(how often the directory was reached, how often a symlink was refused)"""
    return sum(ended[code] for code in REACHED), sum(ended[code] for code in REFUSED)


def check(arena: Arena, rounds: Mapping[str, int]) -> None:
    """Race: every verb meets both sides, and ends in nothing else."""
    codes = race(
        arena,
        rounds,
        lambda codes: [verb for verb in rounds if min(sides(codes[verb])) <= rounds[verb] // 50],
    )
    assert arena.outside() == UNTOUCHED
    for verb, ended in codes.items():
        assert sum(sides(ended)) == ended.total(), (verb, ended)
        assert min(sides(ended)) > rounds[verb] // 50, (verb, ended)


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


FEWER_ROUNDS = {verb: wanted // 10 for verb, wanted in ROUNDS.items()}


@pytest.mark.parametrize(
    "rounds",
    [FEWER_ROUNDS, pytest.param(ROUNDS, marks=pytest.mark.soak)],
    ids=lambda rounds: sum(rounds.values()),
)
def test_no_leak_in_any_round(arena: Arenas, mode: str, rounds: Mapping[str, int]) -> None:
    if rounds is ROUNDS:
        skip_sweep(mode)
    with arena(mode) as found:
        check(found, rounds)


def test_the_walk_by_hand_does_not_leak_either(arena: Arenas, mode: str, mutate: Mutate) -> None:
    """It stands in where the kernel has no openat2, or a filter does not let it through."""
    loop = "for (int i = 0; i < RACE_RETRIES; i++) {"
    with arena(mode, mutate(("paths.c", loop, f"return -ENOSYS;\n    {loop}"))) as found:
        check(found, FEWER_ROUNDS)


def test_without_the_defence_it_leaks(arena: Arenas, mode: str, mutate: Mutate) -> None:
    """The same race, with the kernel told to follow whatever it meets."""
    with arena(mode, mutate(("paths.c", "RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS,", "0,"))) as found:

        def unharmed(codes: Codes) -> set[str]:
            after = found.outside()
            return {
                *(verb for verb in ("read", "download") if not codes[verb]["leaked"]),
                *(["upload"] if "uploaded" not in after.values() else []),
                *(["remove all"] if "./sub/keep" in after else []),
            }

        codes = race(found, FEWER_ROUNDS, unharmed)
        assert not unharmed(codes), codes
