"""`python -m tests.soak`: runs every soak at the same time, each in a pytest process of its own.

Each line of output is prefixed with the name of its soak. The exit code is 1 if any of them failed.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

HERE = Path(__file__).resolve().parent
NOTHING_COLLECTED = 5
"""pytest's exit code for a file without a soak."""


def _forward(name: str, output: IO[str]) -> None:
    for line in output:
        print(f"[{name}] {line}", end="", flush=True)


def main() -> int:
    running = []
    for file in sorted(HERE.glob("test_*.py")):
        argv = [sys.executable, "-m", "pytest", "-m", "soak", "-s", str(file)]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        name = file.stem.removeprefix("test_")
        reader = threading.Thread(target=_forward, args=(name, process.stdout))
        reader.start()
        running.append((name, process, reader))
    failed = []
    for name, process, reader in running:
        reader.join()
        if process.wait() not in (0, NOTHING_COLLECTED):
            failed.append(name)
    for name in failed:
        print(f"the soak {name} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
