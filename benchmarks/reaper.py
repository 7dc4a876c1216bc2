"""`python -m benchmarks.reaper program ...`: run a program and reap every orphan that it leaves.

containerd's shims outlive their parents; where process 1 reaps nothing they would stay as zombies for ever.
SIGTERM is passed on; the end comes when the program and all its orphans have ended.
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
