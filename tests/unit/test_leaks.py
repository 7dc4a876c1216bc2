"""The leak check sees what it is there to see."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests import leaks


def open_files(before: leaks.Snapshot) -> list[str]:
    """Of this process alone: other tests of the session may keep processes for all of it."""
    return [leak for leak in leaks.of_this_process(before) if leak.startswith("open file ")]


def test_an_open_file_is_seen() -> None:
    before = leaks.Snapshot.take()
    fd = os.open("/etc/passwd", os.O_RDONLY)
    try:
        assert open_files(before) == [f"open file {fd} -> /etc/passwd"]
    finally:
        os.close(fd)
    assert open_files(before) == []


def test_a_process_of_a_home_is_seen(tmp_path: Path) -> None:
    before = leaks.Snapshot.take()
    env = {**os.environ, "SKERRY_HOME": str(tmp_path)}
    # The line says that the program runs with its own environment, not with ours from before the exec.
    with subprocess.Popen(
        ["sh", "-c", "echo; exec cat", "skerry.daemon"], env=env, stdin=-1, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        name = f"process {process.pid}: "
        assert any(leak.startswith(name) for leak in leaks.of_home(tmp_path))
        assert any(leak.startswith(name) for leak in leaks.of_this_process(before))
        process.communicate(timeout=30)
    assert leaks.of_home(tmp_path) == []


def test_the_directory_of_an_instance_is_seen(tmp_path: Path) -> None:
    (tmp_path / "instances" / "abcdefghij12").mkdir(parents=True)
    assert leaks.of_home(tmp_path) == [f"directory {tmp_path}/instances/abcdefghij12"]
