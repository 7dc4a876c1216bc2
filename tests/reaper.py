"""`python -m tests.reaper program ...`: runs a program and reaps its orphans.

containerd's shims outlive their parents and stay zombies where process 1 reaps nothing.
Forwards SIGTERM. Exits when the program and all its orphans have exited.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress

PR_SET_CHILD_SUBREAPER = 36

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    program = subprocess.Popen(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: program.send_signal(signal.SIGTERM))
    with suppress(ChildProcessError):
        while True:
            os.wait()
