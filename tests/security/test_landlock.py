"""Landlock alone: each test takes away the other layers that would refuse the same."""

from __future__ import annotations

import os
import socket

import pytest

from skerry.host import readback
from tests import support
from tests.security.box import Box, Boxes
from tests.security.conftest import Mutate
from tests.security.test_mounts import OF_THE_HOST, UNDONE, changes

pytestmark = [pytest.mark.timeout(60), pytest.mark.needs("landlock")]

SCOPES = 6
"""The ABI that knows scopes of sockets and signals."""
UNSCOPED = ("privileges.c", ".scoped = abi >= 6 ? 3 : 0", ".scoped = 0")
OUTSIDER = (
    "privileges.c",
    "    landlock();\n    /* From its start",
    """    if (fork() == 0) { /* shares everything but the domain */
        if (syscall(SYS_setresuid, 1000, 1000, 1000) < 0 && getuid() != 1000)
            _exit(1);
        prctl(PR_SET_NAME, "outsider", 0, 0, 0);
        for (;;)
            pause();
    }
    landlock();
    /* From its start""",
)
"""A process with the workload's user, in the namespaces of the environment and out of its Landlock domain."""


@pytest.fixture(autouse=True)
def _landlock() -> None:
    abi, reason = readback.landlock()
    if abi < SCOPES:
        support.missing(f"Landlock ABI {abi}, and not {SCOPES}: {reason}")


def test_image_stays_read_only_on_a_writable_mount(boxes: Boxes, mode: str) -> None:
    # Landlock has nothing to say about modes, and allows what is below /dev.
    attempts = {each for each in set(UNDONE) - OF_THE_HOST if "chmod" not in each and "/dev" not in each}
    user = "root" if mode == "rootful" else "appuser"  # the owner of the image inside
    others = ["own-root", "own", "seal"]
    with boxes.fresh(mode, without=others) as box:
        assert changes(box, user, attempts) == set()
    with boxes.fresh(mode, without=[*others, "landlock"]) as weak:
        assert "touch /x" in changes(weak, user, attempts)


def test_abstract_sockets_of_the_host_are_refused_in_its_network(
    boxes: Boxes, mode: str, mutate: Mutate
) -> None:
    shared = ("launch.c", "CLONE_NEWNET | ", "")
    with socket.socket(socket.AF_UNIX) as abstract:
        name = f"skerry-test-{os.getpid()}"
        abstract.bind(f"\0{name}")
        abstract.listen()
        box = boxes(mode, helper=mutate(shared), without=["loopback"])
        assert box.probe("escape.connect_unix", f"@{name}") == "EPERM"
        weak = boxes(mode, helper=mutate(shared, UNSCOPED), without=["loopback"])
        assert weak.probe("escape.connect_unix", f"@{name}") == "done"


def test_signals_to_processes_out_of_the_domain_are_refused(boxes: Boxes, mode: str, mutate: Mutate) -> None:
    with boxes.fresh(mode, helper=mutate(OUTSIDER)) as box:
        assert _kill_outsider(box) == (1, True)
    with boxes.fresh(mode, helper=mutate(OUTSIDER, UNSCOPED)) as weak:
        assert _kill_outsider(weak) == (0, False)


def _kill_outsider(box: Box) -> tuple[int, bool]:
    """The exit code of a `kill` from inside, and whether the outsider lives on."""
    number = box.sh("grep -l outsider /proc/[0-9]*/comm").text.split("/")[2]
    done = box.sh(f"kill -KILL {number} && while [ -d /proc/{number} ]; do sleep 0.01; done")
    return done.code, "outsider" in box.on_host().values()
