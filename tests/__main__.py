"""`python -m tests`: every test but the soaks.

Files are given to two processes; tests marked `alone` follow in one. A test that fails while another process loads the
machine is run once more without: it fails the run if it fails again, and is listed as unstable if it does not.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

PYTEST = (sys.executable, "-m", "pytest")
TOGETHER = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-m", "not soak and not alone")
AGAIN = ("--last-failed", "--last-failed-no-failures", "none", "-m", "not soak and not alone")
ALONE = ("-p", "no:cacheprovider", "-m", "alone and not soak")


def run(*options: str) -> int:
    print(f"== pytest {' '.join(options)}", flush=True)
    return subprocess.run([*PYTEST, *options]).returncode


def main() -> int:
    code = run(*TOGETHER)
    unstable = code == pytest.ExitCode.TESTS_FAILED
    if unstable:
        code = run(*AGAIN, "-rA", "--show-capture=no")
    alone = run(*ALONE)
    if unstable and not code:
        print("== unstable: the tests that were run again failed in two processes, and passed in one")
    return code or alone


if __name__ == "__main__":
    sys.exit(main())
