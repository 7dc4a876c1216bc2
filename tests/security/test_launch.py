"""A guest lives on without the process that launched it only when it was told to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from skerry.errors import LaunchFailed
from skerry.host import plan
from skerry.host.launcher import Helper, Launch
from skerry.host.processes import Handle
from tests.security.box import Boxes
from tests.security.conftest import Mutate

PATIENCE = 10.0
STEPS = {"newroot": "mounts.c", "drop": "privileges.c", "confine": "privileges.c"}
NOT_TOLD = ("launch.c", "if (recv(sk_control_fd, &last, 1, 0) != 1)", "if (0)")


def lives_on(helper: Path | None, *, told: bool) -> bool:
    """Whether it is still there, and serves, when the launcher's end of its socket is gone."""
    made = Helper(helper) if helper is not None else Helper()
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    launch = Launch(made, null)
    try:
        launch.send(plan.probe_steps())
        if told:
            launch.keep()
        launch.attempt()
        guest = Handle(launch.pid)
        launch.close()
        try:
            # One that goes on waits for connections for ever; one that does not is gone in a moment.
            return not guest.ended(1.0 if told or helper is not None else PATIENCE)
        finally:
            guest.close()
    finally:
        launch.end()
        os.close(null)
        made.close()


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_fails_is_named_whatever_else_was_sent(
    boxes: Boxes, mode: str, mutate: Mutate, step: str
) -> None:
    found = f'sk_is_step(c, "{step}", '
    fails = (
        f'strcmp(c->argv[0], "{step}") == 0) {{ errno = EPERM; sk_fail("{step}", "on purpose"); }} else if ('
    )
    broken = mutate((STEPS[step], found, fails + found))
    with pytest.raises(LaunchFailed, match=f"step {step} failed"), boxes.fresh(mode, helper=broken):
        pass


@pytest.mark.parametrize("told", [True, False])
def test_a_guest_stays_only_if_it_was_told_to(told: bool, mutate: Mutate) -> None:
    assert lives_on(None, told=told) == told
    assert lives_on(mutate(NOT_TOLD), told=told)
