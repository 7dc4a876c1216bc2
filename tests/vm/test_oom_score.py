"""A negative OOM score for a daemon takes CAP_SYS_RESOURCE, which the root of the suite may lack."""

from __future__ import annotations

import pytest

from tests.vm.machine import VirtualMachine

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

TEST = "tests/security/test_shared_resources.py::test_a_negative_oom_score_of_the_daemon_cannot_be_had_inside"


def test_a_negative_score_stays_outside(vm: VirtualMachine) -> None:
    done = vm.run(["python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", TEST], user="root")
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
