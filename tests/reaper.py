"""`python -m tests.reaper program ...`: runs a program and reaps its orphans.

containerd's shims outlive their parents and stay zombies where process 1 reaps nothing.
Forwards SIGTERM, and kills what is left when the program has exited then. Exits when the program and all its orphans
have exited.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress

from tests.leaks import processes

PR_SET_CHILD_SUBREAPER = 36


def main(argv: list[str]) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    program = subprocess.Popen(argv)
    told_to_end = False
    ended = -1

    def end(*_: object) -> None:
        nonlocal told_to_end
        told_to_end = True
        if ended != program.pid:
            os.kill(program.pid, signal.SIGTERM)
        else:
            kill_orphans()

    signal.signal(signal.SIGTERM, end)
    with suppress(ChildProcessError):
        while True:
            pid, _ = os.wait()
            if pid == program.pid:
                ended = pid
            if told_to_end and ended == program.pid:
                kill_orphans()


def kill_orphans() -> None:
    for process in processes():
        if process.parent == os.getpid():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
