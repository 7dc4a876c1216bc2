"""Execution profiles: every backend denies system calls to one command, and those that can limit its paths."""

from __future__ import annotations

from typing import Any

import pytest

from skerry.errors import GuestFailed, IsolationUnavailable, SkerryError
from skerry.guest.start import Restrictions
from skerry.manager.executions.profiles import ExecutionProfile, Profiles
from tests.conformance.harness import Box, needs

pytestmark = pytest.mark.requirement("F10")

SOCKETS = """
import socket, sys
try:
    socket.socket(socket.AF_INET)
    print("socket")
except PermissionError:
    print("refused")
print(len(socket.socketpair()))
"""
TREE = """
mkdir a 2>/dev/null || echo refused
sh -c 'mkdir b' 2>/dev/null || echo refused
(setsid sh -c 'mkdir c 2>/dev/null || echo refused' &) | cat
"""


def profile(box: Box, name: str, **fields: Any) -> Restrictions:
    own = {name: ExecutionProfile(name, **fields)} if fields else {}
    return Profiles(own).restrictions(name, box.backend)


async def test_no_sockets_for_one_command(box: Box) -> None:
    python = ("python3", "-c", SOCKETS)
    assert (await box.run(*python, restrictions=profile(box, "offline"))).stdout == b"refused\n2\n"
    assert (await box.run(*python)).stdout == b"socket\n2\n"


async def test_a_denied_call_is_denied_to_its_children_and_orphans(box: Box) -> None:
    denied = profile(box, "own", deny=("mkdir", "mkdirat"))
    assert (await box.sh(TREE, restrictions=denied)).stdout.split() == [b"refused"] * 3
    assert (await box.sh(TREE)).stdout == b""


async def test_ends_as_without_a_profile(box: Box) -> None:
    offline = profile(box, "offline")
    assert (await box.sh("exit 7", restrictions=offline)).code == 7
    assert (await box.sh("kill -9 $$", restrictions=offline)).exit.signal == 9
    assert (await box.run("no-such-program", restrictions=offline)).code == 127
    assert (await box.run("cat", stdin=b"x" * 100_000, restrictions=offline)).stdout == b"x" * 100_000


async def test_a_terminal_works(box: Box) -> None:
    said = await box.sh("stty size; echo x", pty=(33, 44), restrictions=profile(box, "offline"))
    assert said.stdout.split() == [b"33", b"44", b"x"]


@needs("path_rules")
async def test_writes_below_the_given_paths_alone(box: Box) -> None:
    await box.channel.mkdir("out")
    limited = profile(box, "own", writable=(box.path("out"),))
    script = (
        "echo x >out/a; mv out/a out/b && echo out; echo x >a || echo refused; echo >/dev/null && echo null"
    )
    said = await box.sh(script, restrictions=limited)
    assert said.stdout.split() == [b"out", b"refused", b"null"]


@needs("path_rules")
async def test_strict_executes_nothing_new(box: Box) -> None:
    await box.sh("cp /bin/true new; chmod +x new")
    assert (await box.run(box.path("new"), restrictions=profile(box, "strict"))).code == 126
    assert (await box.run("true", restrictions=profile(box, "strict"))).code == 0
    assert (await box.run(box.path("new"))).code == 0


async def test_rules_on_paths_are_refused_where_there_are_none(box: Box) -> None:
    if reason := box.backend.path_rules():
        with pytest.raises(IsolationUnavailable, match="limits paths") as caught:
            profile(box, "strict")
        assert reason in caught.value.message
        return
    profile(box, "strict")


@pytest.mark.parametrize(
    "broken",
    [
        Restrictions(b""),
        Restrictions(b"1234567"),
        Restrictions(b"\0" * 8 * 1025),
        Restrictions(b"\xff" * 8),
        Restrictions(b"\x06\0\0\0\0\0\xff\x7f", 0, ((2, "/tmp"),)),
    ],
    ids=["empty", "odd", "long", "no-program", "rule-of-nothing"],
)
async def test_a_malformed_profile_starts_nothing(box: Box, broken: Restrictions) -> None:
    with pytest.raises(SkerryError, match="profile"):
        await box.sh("echo ran >ran", restrictions=broken)
    assert (await box.sh("ls ran")).code != 0
    await box.channel.ping()


async def test_neither_shells_nor_applets_take_one(box: Box) -> None:
    offline = profile(box, "offline")
    for refused in (
        box.start_shell("true", restrictions=offline),
        box.start(".", applet="list", restrictions=offline),
    ):
        with pytest.raises(GuestFailed, match="malformed"):
            await refused
    assert await box.said("echo fine") == "fine"
