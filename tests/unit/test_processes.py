"""Handles of processes."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess

from skerry.host.processes import Handle, is_running

HIGH = 1500


def test_the_end_is_seen_whatever_the_number_of_the_descriptor() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, HIGH + 10), hard))
    try:
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
            handle = Handle(child.pid)
            low, handle.fd = handle.fd, fcntl.fcntl(handle.fd, fcntl.F_DUPFD_CLOEXEC, HIGH)
            os.close(low)
            assert not handle.ended()
            child.kill()
            assert handle.ended(10.0)
            handle.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_stopped_process_runs_no_more_than_a_dead_one() -> None:
    with subprocess.Popen(["sh", "-c", "kill -STOP $$"]) as child:
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert not is_running(child.pid)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not is_running(child.pid)
    assert is_running(os.getpid())
