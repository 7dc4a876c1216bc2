"""How much of the kernel can be reached from inside a real environment: every call, socket family and number.

Whether the filter or the kernel has answered is told by a second environment, whose filter gives MARK, an errno
that the kernel does not have, for everything that it refuses. A third, without a filter, is the control: there
the kernel answers all of them.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import struct
from collections.abc import Mapping, Sequence

import pytest

from skerry.host.seccomp import compile_profile
from tests.conformance.kinds import RUNGS, skip_sweep
from tests.security.box import Box, Boxes, own_kernel, users
from tests.unit.test_seccomp import NUMBERS as TABLES
from tests.unit.test_seccomp import answer

pytestmark = pytest.mark.timeout(100)

ARCH = os.uname().machine
NUMBERS = TABLES[ARCH]
PROFILES = ("default", "strict", "debug", "filters")
SWEPT = ("default", *(pytest.param(name, marks=pytest.mark.soak) for name in PROFILES[1:]))
"""Trying every call takes seconds for each profile: `make test` does it for one."""
MARK = 4000
RETURN, ERRNO = 0x06, 0x00050000

SKIPPED = {
    "vfork": "its child would return on our stack",
    "sync": "writes back all of the host, where it is let through",
}
# All zeroes but for these: with them, what is allowed does nothing that outlasts the process.
ARGUMENTS = {
    "kill": (0, 0),
    "clone": (17,),
    "ioctl": (0, 0x5401),
    "prctl": (3,),
    "socket": (1, 1),
    "socketpair": (1, 1),
    "setrlimit": (7,),
    "ioprio_set": (1,),
    "select": (0, 0, 0, 0, 8),
    "pselect6": (0, 0, 0, 0, 8),
    "ppoll": (0, 0, 8),
    "mknod": (0, 0o010600),
    "mknodat": (0, 0, 0o010600),
}


def marked(program: bytes) -> bytes:
    """`program` with MARK in place of every errno."""
    code = []
    for op, if_true, if_false, operand in struct.iter_unpack("<HBBI", program):
        refusal = op == RETURN and operand & 0xFFFF0000 == ERRNO
        code.append(struct.pack("<HBBI", op, if_true, if_false, ERRNO | MARK if refusal else operand))
    return b"".join(code)


def outcomes(box: Box, calls: Sequence[tuple[int, ...]]) -> list[int | str]:
    found = box.probe("syscalls.all", stdin=json.dumps(calls).encode(), seconds=60)
    assert len(found) == len(calls)
    return list(found)


def expected(profile: str, number: int, arguments: tuple[int, ...]) -> int | None:
    """The errno that the profile gives; None: the kernel decides."""
    word = answer(profile, number, *arguments, arch=ARCH)
    return (
        None
        if word == "allow"
        else 0
        if word == "ignore"
        else -signal.SIGSYS
        if word == "kill"
        else getattr(errno, word)
    )


def check(
    boxes: Boxes, mode: str, profile: str, calls: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[str, str]]:
    """Make the calls (number, arguments...) in both environments; what is not as the profile says: (wanted, got)."""
    plain = outcomes(boxes(mode, profile=profile), list(calls.values()))
    differs = {
        name: (str(wanted), str(got))
        for (name, (number, *arguments)), got in zip(calls.items(), plain, strict=True)
        if (wanted := expected(profile, number, tuple(arguments))) not in (None, got)
    }
    if differs:
        return differs
    marks = outcomes(
        boxes(mode, profile=profile, program=marked(compile_profile(profile))), list(calls.values())
    )
    wrong = {}
    for (name, (number, *arguments)), got, mark in zip(calls.items(), plain, marks, strict=True):
        wanted = expected(profile, number, tuple(arguments))
        if (wanted is not None) != (mark in (MARK, -signal.SIGSYS)):
            wrong[name] = (str(wanted), f"{got}, {mark}")
    return wrong


def once_where_the_kernel_is_not_ours(mode: str, profile: str) -> None:
    """The programs are compiled alike: one of them shows that another kernel obeys."""
    if mode in RUNGS and profile != "default":
        pytest.skip("one profile shows that its kernel obeys filters")


def sweep_once_in_gvisor(mode: str) -> None:
    """An engine adds a filter of its own to the host's kernel alone."""
    if own_kernel(mode):
        skip_sweep(mode)


@pytest.mark.parametrize("profile", SWEPT)
def test_every_call(boxes: Boxes, mode: str, profile: str) -> None:
    once_where_the_kernel_is_not_ours(mode, profile)
    calls = {
        name: (number, *ARGUMENTS.get(name, ())) for name, number in NUMBERS.items() if name not in SKIPPED
    }
    if own_kernel(mode):  # gVisor has no listeners: there a filter may be installed
        del calls["seccomp"]
    padded = {name: (*call, *[0] * (7 - len(call))) for name, call in calls.items()}
    assert check(boxes, mode, profile, padded) == {}
    if profile == "default":
        assert MARK not in outcomes(boxes(mode, without=["seccomp"]), list(padded.values()))


@pytest.mark.parametrize("profile", SWEPT)
def test_numbers_that_no_table_knows(boxes: Boxes, mode: str, profile: str) -> None:
    once_where_the_kernel_is_not_ours(mode, profile)
    sweep_once_in_gvisor(mode)
    gaps = set(range(1024)) - set(NUMBERS.values())
    numbers: dict[str, tuple[int, ...]] = {
        str(number): (number,) for number in [*sorted(gaps), 0x3FFFFFFF, -1, -2, 1 << 31]
    }
    if ARCH == "x86_64":
        numbers |= {
            f"x32 {number}": (0x40000000 | number, 0, 0, 0) for number in [*range(0, 548, 13), 0x3FFFFFFF]
        }
    assert check(boxes, mode, profile, numbers) == {}
    bare = outcomes(boxes(mode, without=["seccomp"]), list(numbers.values()))
    assert -signal.SIGSYS not in bare


@pytest.mark.needs("host_kernel")
@pytest.mark.skipif(ARCH != "x86_64", reason="an ABI of x86_64")
@pytest.mark.parametrize("profile", PROFILES)
def test_i386_calls_kill(boxes: Boxes, mode: str, profile: str) -> None:
    assert boxes(mode, profile=profile).probe("syscalls.foreign") == -signal.SIGSYS
    assert boxes(mode, without=["seccomp"]).probe("syscalls.foreign") == 0


@pytest.mark.parametrize("profile", PROFILES)
def test_every_socket_family(boxes: Boxes, mode: str, profile: str) -> None:
    once_where_the_kernel_is_not_ours(mode, profile)
    sweep_once_in_gvisor(mode)
    socket, pair = NUMBERS["socket"], NUMBERS["socketpair"]
    calls = {
        f"{name} {family} {kind} {protocol}": (number, family, kind, protocol)
        for name, number in (("socket", socket), ("pair", pair))
        for family in (*range(48), 0xFFFFFFFF)
        for kind, protocol in (
            (1, 0),
            (2, 0),
            (3, 0),
            (3, 1),
            (5, 0),
            (10, 0),
            (1, 132),
            (2, 9),
            (0x80801, 6),
        )
    }
    assert check(boxes, mode, profile, calls) == {}


def test_only_these_sockets_open(boxes: Boxes, mode: str) -> None:
    """What the default profile comes to, whoever refuses the others."""
    sweep_once_in_gvisor(mode)
    calls = [
        (NUMBERS["socket"], family, kind, protocol)
        for family in range(48)
        for kind in (1, 2, 3, 5)
        for protocol in (0, 1, 6, 9, 17, 132)
    ]
    opened = [call[1:] for call, got in zip(calls, outcomes(boxes(mode), calls), strict=True) if got == 0]
    assert {(family, kind) for family, kind, _ in opened} == {
        *((1, kind) for kind in (1, 2, 3, 5)),
        *((family, kind) for family in (2, 10) for kind in (1, 2)),
        *((16, kind) for kind in (2, 3)),
    }
    assert {protocol for family, _, protocol in opened if family == 16} == {0}
    bare = outcomes(boxes(mode, without=["seccomp"]), calls)
    families = {call[1] for call, got in zip(calls, bare, strict=True) if got == 0}
    assert families > {1, 2, 10, 16}


DANGEROUS = {
    "io_uring_setup": errno.ENOSYS,
    "keyctl": errno.EPERM,
    "add_key": errno.EPERM,
    "request_key": errno.EPERM,
    "bpf": errno.EPERM,
    "perf_event_open": errno.EPERM,
    "userfaultfd": errno.EPERM,
    "memfd_secret": errno.ENOSYS,
    "kexec_load": errno.EPERM,
    "finit_module": errno.EPERM,
    "clone3": errno.ENOSYS,
    "fanotify_init": errno.EPERM,
    "quotactl": errno.EPERM,
    "syslog": errno.EPERM,
    "settimeofday": errno.EPERM,
    "clock_settime": errno.EPERM,
    "syncfs": errno.ENOSYS,
}


@pytest.mark.each_rung
@pytest.mark.parametrize("profile", PROFILES)
def test_what_must_never_be_allowed(boxes: Boxes, mode: str, profile: str) -> None:
    """Whatever a profile says: written down apart from all of them."""
    calls = [(NUMBERS[name], *[0] * 6) for name in DANGEROUS]
    assert dict(zip(DANGEROUS, outcomes(boxes(mode, profile=profile), calls), strict=True)) == DANGEROUS


def test_crashes_reach_no_handler_of_the_host(boxes: Boxes, mode: str) -> None:
    """A limit of 1, and of nothing else, keeps the kernel from running what core_pattern names as the host's root."""
    attempt = (
        "import resource as r, sys\n"
        "for limits in ((0, 0), (0, 1)):\n"
        "    r.setrlimit(r.RLIMIT_CORE, limits)\n"
        "    r.prlimit(0, r.RLIMIT_CORE, limits)\n"
        "print(open('/proc/self/limits').read().partition('core file size')[2].split()[:2])"
    )
    for user in users(mode):
        assert boxes(mode).run(["python3", "-c", attempt], user=user).text == "['1', '1']"
    assert boxes(mode).shell("ulimit -c 0; grep core /proc/self/limits").text.split()[4:6] == ["1", "1"]
    assert boxes(mode, without=["seccomp"]).run(["python3", "-c", attempt]).text != "['1', '1']"
