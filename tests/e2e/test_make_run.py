"""A fresh clone on this machine: `make run` sets up everything by itself and shows an environment at work."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import support

ROOT = Path(__file__).resolve().parents[2]
NO_NETWORK = ("No matching distribution found", "Could not find a version")


@pytest.mark.soak
@pytest.mark.timeout(180)
def test_a_fresh_clone_runs(home: Path, tmp_path: Path) -> None:
    support.require("make")
    clone = tmp_path / "clone"
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, os.fsdecode(tracked.stdout).split("\0")):
        if (ROOT / name).exists():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, clone / name)

    env = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    done = subprocess.run(
        ["make", "run"], cwd=clone, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )

    if any(words in done.stderr for words in NO_NETWORK):
        support.missing("no package index within reach")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    for language in ("python3", "bash"):
        assert any(line[:1] == [language] and line[-1] == "42" for line in lines), done.stdout
    assert os.access(clone / "src" / "skerry" / "_native" / "skerry-guest", os.X_OK)
