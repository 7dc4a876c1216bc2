"""What the daemon asks of the kernel, as the kernel has it."""

from __future__ import annotations

import ctypes
import os
import platform

import pytest

from tests import support
from tests.integration.daemon import started

IOPRIO_GET = {"x86_64": 252, "aarch64": 31}.get(platform.machine())
REAL_TIME = 1


def disk_class(thread: int) -> int:
    assert IOPRIO_GET is not None
    return int(ctypes.CDLL(None).syscall(ctypes.c_long(IOPRIO_GET), 1, thread)) >> 13


@pytest.mark.root
def test_the_store_has_the_disk_first_and_nothing_else_has() -> None:
    with support.temporary_home() as home, started(home) as daemon:
        env = daemon.create()
        daemon.execute(env, ["true"])
        threads = os.listdir(f"/proc/{daemon.process.pid}/task")
        assert [disk_class(int(thread)) for thread in threads].count(REAL_TIME) == 2
        assert daemon.execute(env, ["ionice"])["stdout"].split(":")[0] in ("none", "best-effort")
