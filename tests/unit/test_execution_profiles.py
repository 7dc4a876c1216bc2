"""Execution profiles as data: the built-in ones, an operator's, and what becomes of a profile's name."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from skerry.backends.base import Backend
from skerry.errors import InvalidRequest, IsolationUnavailable
from skerry.guest.errors import reported_error
from skerry.guest.start import Restrictions, Start
from skerry.manager.environments.request import CreateRequest
from skerry.manager.executions.commands import Command
from skerry.manager.executions.profiles import FILE, ExecutionProfile, Profiles
from skerry.models import ExecutionResult
from tests.unit.stubs import CALLER, POLICY, StubBackend, asynchronous, make_manager
from tests.unit.test_seccomp import ALLOW, ARCHES, KILL, NUMBERS, run

EXECUTE = 1
WRITE_FILE, TRUNCATE, REFER, MAKE_FIFO = 1 << 1, 1 << 14, 1 << 13, 1 << 10


class _WithoutPaths(StubBackend):
    name = "elsewhere"

    def path_rules(self) -> str:
        return "its kernel has none"


def restrictions(profile: ExecutionProfile | str, backend: Backend | None = None) -> Restrictions:
    own = {} if isinstance(profile, str) else {profile.name: profile}
    name = profile if isinstance(profile, str) else profile.name
    return Profiles(own).restrictions(name, backend or StubBackend())


def answer(profile: ExecutionProfile | str, call: str, *args: int) -> str:
    """`allow`, or the name of an errno."""
    action = run(restrictions(profile).filter, NUMBERS["x86_64"][call], *args, audit_arch=ARCHES["x86_64"])
    return "allow" if action == ALLOW else errno.errorcode[action & 0xFFFF]


@pytest.fixture(autouse=True)
def _architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.uname", lambda: type("uname", (), {"machine": "x86_64"}))


@pytest.mark.requirement("F10")
def test_filter_denies_what_it_names_and_leaves_the_rest_to_the_environment() -> None:
    profile = ExecutionProfile("own", deny=("mkdir", "mkdirat"))
    denied = {name for name in NUMBERS["x86_64"] if answer(profile, name) != "allow"}
    assert denied == {"mkdir", "mkdirat", "seccomp"}
    assert answer(profile, "mkdir") == "EPERM"
    program = restrictions(profile).filter
    assert run(program, 1000, audit_arch=ARCHES["x86_64"]) == ALLOW  # unknown: the environment says ENOSYS
    assert run(program, 39, audit_arch=ARCHES["aarch64"]) == KILL


def test_no_profile_lets_a_command_put_on_filters() -> None:
    for name in Profiles().names:
        assert answer(name, "seccomp", 1) == answer(name, "prctl", 22, 2) == "EINVAL"
        assert answer(name, "prctl", 15) == "allow"
    assert answer(ExecutionProfile("own", deny=("prctl", "seccomp")), "prctl", 15) == "EPERM"
    assert answer(ExecutionProfile("own", deny=("prctl", "seccomp")), "seccomp", 1) == "EINVAL"


def test_without_sockets_there_are_pairs_that_cannot_be_connected_anew() -> None:
    stream, datagram, sequence, cloexec = 1, 2, 5, 0x80000
    for call in ("socket", "connect", "bind", "listen"):
        assert answer("offline", call, 1, stream) == "EPERM"
    assert answer("offline", "socketpair", 1, stream | cloexec) == "allow"
    assert answer("offline", "socketpair", 1, sequence) == "allow"
    assert answer("offline", "socketpair", 1, datagram | cloexec) == "EPERM"
    assert answer(ExecutionProfile("own", deny=("socketpair",), sockets=False), "socketpair", 1, 1) == "EPERM"


def test_files_without_a_file_system_go_with_execute_new() -> None:
    assert answer(ExecutionProfile("own", execute_new=False), "memfd_create") == "ENOSYS"
    assert answer(ExecutionProfile("own"), "memfd_create") == "allow"


@pytest.mark.parametrize("name", Profiles().names)
def test_rules_never_grant_what_is_not_a_place_to_write(name: str) -> None:
    found = restrictions(name)
    writable = {path for access, path in found.rules if access & ~EXECUTE}
    devices = {"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty"}
    assert writable - devices <= {"/workspace", "/tmp", "/dev/shm", "/dev/pts"}
    assert (
        found.access & (WRITE_FILE | TRUNCATE | REFER | MAKE_FIFO)
        == WRITE_FILE | TRUNCATE | REFER | MAKE_FIFO
    )
    assert all(access & ~found.access == 0 for access, _ in found.rules)


def test_strict_writes_below_tmp_and_executes_what_cannot_be_written() -> None:
    rules = restrictions("strict").rules
    assert {path for access, path in rules if access & EXECUTE} == {"/*", "/run/*"}
    assert "/workspace" not in {path for _, path in rules}
    assert not any(access & EXECUTE for access, _ in restrictions("offline").rules)
    assert restrictions("offline").access & EXECUTE == 0
    assert "/dev/pts" in {path for _, path in restrictions("offline").rules}
    assert "/dev/pts" not in {path for _, path in rules}


def test_an_unknown_profile_names_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match="unknown execution profile 'lax'") as caught:
        restrictions("lax")
    assert "offline, readonly, strict" in caught.value.hint


def test_path_rules_are_refused_where_the_backend_has_none() -> None:
    for name in ("strict", "readonly"):
        with pytest.raises(IsolationUnavailable, match="elsewhere cannot: its kernel has none") as caught:
            restrictions(name, _WithoutPaths())
        assert "offline" in caught.value.hint
    assert restrictions("offline", _WithoutPaths()) == Restrictions(restrictions("offline").filter)


def test_an_operators_profile(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(
        '[build]\ndeny = ["kill"]\nwritable = ["/workspace/out", "/tmp"]\nexecute_new = false\nsockets = false\n[all]\n'
    )
    profiles = Profiles.load(str(tmp_path))
    assert profiles.names == ["all", "build", "offline", "readonly", "strict"]
    build = profiles.restrictions("build", StubBackend())
    assert {path for _, path in build.rules} >= {"/workspace/out", "/tmp", "/*"}
    assert "/workspace" not in {path for _, path in build.rules}
    assert {path for _, path in profiles.restrictions("all", StubBackend()).rules} >= {"/workspace", "/tmp"}
    assert Profiles.load(str(tmp_path / "nowhere")).names == ["offline", "readonly", "strict"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[own", "is not valid TOML"),
        ("own = 1", "own must be a table, not 1"),
        ('["Bad Name"]', "'Bad Name' cannot be the name of an execution profile"),
        ("[strict]", "'strict' is a built-in profile"),
        ("[own]\nallow = []", "[own] unknown key 'allow'"),
        ('[own]\ndeny = "kill"', "[own] deny must be a list of strings"),
        ('[own]\ndeny = ["kill", "killl"]', "[own] deny: unknown system call 'killl'"),
        ('[own]\ndeny = ["execve"]', "[own] deny: without execve the command itself cannot start"),
        ("[own]\nsockets = 0", "[own] sockets must be true or false, not 0"),
        ('[own]\nexecute_new = "no"', "[own] execute_new must be true or false"),
        (
            '[own]\nwritable = ["/etc"]',
            "[own] writable: '/etc' is not a path below /workspace, /tmp, /dev/shm",
        ),
        ('[own]\nwritable = ["/run"]', "'/run' is not a path below"),
        ('[own]\nwritable = ["/"]', "'/' is not a path below"),
        ('[own]\nwritable = ["out"]', "'out' is not a path below"),
        ('[own]\nwritable = ["/workspace/../etc"]', "'/workspace/../etc' is not a path below"),
        ('[own]\nwritable = ["/workspaces"]', "'/workspaces' is not a path below"),
        ('[own]\nwritable = ["/tmp/*"]', "'/tmp/*' is not a path below"),
        (f"[own]\nwritable = {['/tmp'] * 33}", "writable has 33 paths, more than 32"),
    ],
)
def test_a_mistake_in_an_operators_file(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(InvalidRequest) as caught:
        Profiles.load(str(tmp_path))
    assert words in caught.value.message
    assert FILE in caught.value.message


def test_a_filter_that_is_too_long_is_a_mistake_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skerry.manager.executions.profiles._FILTER_MAX", 200)
    (tmp_path / FILE).write_text('[own]\ndeny = ["kill", "mkdir", "rmdir", "chmod", "setsid"]\n')
    with pytest.raises(InvalidRequest, match=r"\[own\] its filter takes \d+ bytes, more than 200"):
        Profiles.load(str(tmp_path))


def test_every_call_at_once_still_fits() -> None:
    every_other = tuple(sorted(NUMBERS["x86_64"], key=lambda name: NUMBERS["x86_64"][name])[::2])
    assert len(ExecutionProfile("own", deny=every_other, sockets=False, execute_new=False).filter) <= 8192


def test_a_stateful_shell_refuses_a_profile() -> None:
    with pytest.raises(InvalidRequest, match="stateful shell cannot have a profile") as caught:
        Command(text="true", shell="main", profile="strict")
    assert "`run`" in caught.value.hint
    assert Command(text="true", profile="strict").told["profile"] == "strict"


def test_a_profile_is_one_field_of_the_request() -> None:
    found = Restrictions(b"12345678", 3, ((2, "/tmp"),))
    payload = Start(argv=["true"], restrictions=found).encode()
    assert payload.endswith(found.encode())
    assert len(found.encode()) == (5 + 8) + (5 + 8) + (5 + 8 + len("/tmp") + 1)
    assert Restrictions(b"12345678").encode() == found.encode()[:13]


def test_a_profile_that_the_guest_cannot_put_in_force_is_an_error() -> None:
    error = reported_error(errno.EOPNOTSUPP.to_bytes(4, "little") + b"profile", "execution")
    assert isinstance(error, IsolationUnavailable)
    assert "the command did not run" in error.hint


@asynchronous
async def test_the_result_and_the_execution_say_which_profile_was_in_force() -> None:
    backend = StubBackend()
    environment = await make_manager(backend).create(CALLER, CreateRequest(policy=POLICY))
    executions, channel = environment.executions, backend.channels[environment.id]
    assert executions is not None
    running = asyncio.create_task(executions.prepare(CALLER, Command(argv=["a"], profile="strict")).run())
    process = await channel.nth(1)
    assert executions.list()[0].info.profile == "strict"
    process.end()
    result = await running
    assert result.profile == "strict"
    assert ExecutionResult.from_dict(result.to_dict()).profile == "strict"
    with pytest.raises(InvalidRequest, match="unknown execution profile"):
        executions.prepare(CALLER, Command(argv=["a"], profile="lax"))
    assert not executions.running
