"""The file that the log goes to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, sys
from skerry.daemon import logs
logs.LARGE = 100
path = sys.argv[1]
for number in range(12):
    print(f"line {number:02} " + "x" * 22, file=sys.stderr, flush=True)
    logs.turn_over(path)
os.system("echo child >&2")
"""


def run(log: Path, *words: str) -> None:
    with log.open("ab") as stderr:
        subprocess.run([sys.executable, "-c", PROGRAM, *words], stderr=stderr, check=True)


def test_a_large_log_is_begun_anew(tmp_path: Path) -> None:
    log = tmp_path / "daemon.log"
    run(log, str(log))
    before, now = Path(f"{log}.1").read_text().splitlines(), log.read_text().splitlines()
    assert [line[:7] for line in before] == ["line 08", "line 09", "line 10", "line 11"]
    assert now == ["child"]
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_log_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    log, other = tmp_path / "journal", tmp_path / "daemon.log"
    other.write_text("of an earlier daemon")
    run(log, str(other))
    assert len(log.read_text().splitlines()) == 13
    assert other.read_text() == "of an earlier daemon"
