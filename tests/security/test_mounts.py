"""What an environment sees of files, without the API: what it shares is read-only, what it may write is its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from skerry.host import injected
from tests.conformance.kinds import RUNGS
from tests.security.box import Box, Boxes, own_kernel, users
from tests.security.conftest import Mutate

pytestmark = pytest.mark.timeout(60)

DEVICES = {f"/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty")}
WRITABLE = {"/workspace", "/tmp", "/run", "/dev/shm", "/dev/pts", "/proc"}


def lacking(box: Box) -> set[tuple[str, str]]:
    """(option, place) where a mount has not got what it should."""
    mounts = [line.split() for line in box.run(["cat", "/proc/self/mountinfo"]).text.splitlines()]
    assert len(mounts) > 10
    found = set()
    for source, place, options in (fields[3:6] for fields in mounts):
        device = source in DEVICES
        wanted = {
            "nosuid": True,
            "nodev": not device and place != "/dev/pts",
            "ro": not device and place not in WRITABLE,
        }
        found |= {(name, place) for name, there in wanted.items() if there and name not in options.split(",")}
    return found


WITHOUT = {
    "nosuid": ("kernel.h", "#define ATTR_NOSUID 0x2u", "#define ATTR_NOSUID 0u"),
    "nodev": ("kernel.h", "#define ATTR_NODEV 0x4u", "#define ATTR_NODEV 0u"),
    "ro": ("kernel.h", "#define ATTR_RDONLY 0x1u", "#define ATTR_RDONLY 0u"),
}


@pytest.mark.needs("host_kernel")
@pytest.mark.parametrize("option", WITHOUT)
def test_mounts_have_the_options_that_they_should(
    boxes: Boxes, mode: str, mutate: Mutate, option: str
) -> None:
    found = lacking(boxes(mode))
    if mode in RUNGS:  # what else an engine mounts can only be written by root, and nobody inside is
        found = {(name, place) for name, place in found if place in WRITABLE}
    assert found == set()
    with boxes.fresh(mode, helper=mutate(WITHOUT[option])) as weak:
        found = lacking(weak)
    assert {name for name, _ in found} == {option}
    places = {"/dev", "/proc/sys"} if option == "ro" else WRITABLE - {"/dev/pts"}
    assert places <= {place for _, place in found}


UNDONE = {
    "touch /x": "rm /x",
    "mkdir /etc/x": "rmdir /etc/x",
    "ln -s /etc /etc/x": "rm /etc/x",
    "mv /etc/passwd /etc/passwd2": "mv /etc/passwd2 /etc/passwd",
    "echo >>/etc/passwd": "true",
    "chmod 700 /etc": "chmod 755 /etc",
    "touch /dev/x": "rm /dev/x",
    "touch /usr/x": "rm /usr/x",
    "chmod 700 /usr": "chmod 755 /usr",
    "mv /usr/bin/env /usr/bin/x": "mv /usr/bin/x /usr/bin/env",
    f"mv {injected.SOCKET} {injected.SOCKET}2": f"mv {injected.SOCKET}2 {injected.SOCKET}",
}
"""What changes the image or what it shares with the host, and what takes that back."""
OF_THE_HOST = {attempt for attempt in UNDONE if "/usr" in attempt}


def changes(box: Box, user: str, attempts: set[str]) -> set[str]:
    """Those of the attempts that succeed; each is undone at once."""
    return {
        attempt
        for attempt in attempts
        if box.sh(f"({attempt}) 2>/dev/null && {UNDONE[attempt]}", user=user).code == 0
    }


@pytest.mark.parametrize("user", ["appuser", "root"])
def test_the_image_stays_as_it_is(boxes: Boxes, mode: str, user: str) -> None:
    if user not in users(mode):
        pytest.skip("there is one user inside")
    attempts = set(UNDONE)
    if own_kernel(
        mode
    ):  # /dev is gVisor's own, in memory, and who is root there can replace the guest's socket
        known = ("/dev", injected.SOCKET) if user == "root" else ("/dev",)
        attempts = {each for each in UNDONE if not any(path in each for path in known)}
    assert changes(boxes(mode), user, attempts) == set()
    assert not os.path.exists("/usr/x")
    if mode == "rootless" or user == "root":
        # As the owner of all that is not the host's own, which is not tried.
        with boxes.fresh(mode, without=["own-root", "seal", "landlock"]) as weak:
            assert changes(weak, user, set(UNDONE) - OF_THE_HOST) >= {"touch /x", "touch /dev/x"}


# 0x8000 is AT_RECURSIVE: there can be mounts below /tmp, which may not be shown without.
SHARED_TMP = (
    (
        "mounts.c",
        "static void stage(void)\n{\n",
        "static int host_tmp = -1;\nstatic void stage(void)\n{\n"
        '    host_tmp = (int)syscall(NR_OPEN_TREE, AT_FDCWD, "/tmp", TREE_CLONE | TREE_CLOEXEC | 0x8000);\n',
    ),
    (
        "mounts.c",
        '    else if (sk_is_step(c, "tmpfs", 3))\n',
        '    else if (sk_is_step(c, "tmpfs", 3) && strcmp(c->argv[1], "tmp") == 0)\n'
        '        attach("tmpfs", host_tmp, "tmp");\n'
        '    else if (sk_is_step(c, "tmpfs", 3))\n',
    ),
)
PLACES = ("/tmp", "/dev/shm", "/run")


@pytest.mark.each_rung
def test_temporary_places_are_not_shared(boxes: Boxes, mode: str, mutate: Mutate) -> None:
    """Neither with the host nor with other environments."""
    assert seen(boxes, mode) == (set(), set(), set())
    assert seen(boxes, mode, helper=mutate(*SHARED_TMP)) == ({"/tmp"}, {"/tmp"}, {"/tmp"})


def seen(boxes: Boxes, mode: str, **options: object) -> tuple[set[str], set[str], set[str]]:
    """Where an environment sees the host's file; the host the environment's; and a neighbour the environment's."""
    name = f"skerry-test-{os.getpid()}"
    host = {f"{place}/{name}-host" for place in PLACES if os.access(place, os.W_OK)}
    mine = {f"{place}/{name}-inside" for place in PLACES}
    with boxes.fresh(mode, **options) as box, boxes.fresh(mode, **options) as neighbour:
        try:
            for path in host:
                Path(path).touch()
            assert box.sh(f"touch {' '.join(mine)}").code == 0
            find = f"find {' '.join(PLACES)} -xdev -name '{name}-*'"
            inside, beside = (set(other.sh(find).text.split()) for other in (box, neighbour))
            assert mine <= inside
            return places(inside & host), places(set(filter(os.path.exists, mine))), places(beside & mine)
        finally:
            for path in host | mine:
                Path(path).unlink(missing_ok=True)


def places(paths: set[str]) -> set[str]:
    return {os.path.dirname(path) for path in paths}
