from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import support
from tests.vm.machine import VirtualMachine, missing


@pytest.fixture(scope="session")
def vm() -> Iterator[VirtualMachine]:
    """A booted machine with cgroup v2 and no other cgroups, and without IPv6."""
    if why := missing():
        support.missing(why)
    with VirtualMachine() as machine:
        yield machine
