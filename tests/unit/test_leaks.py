"""The leak check sees what it is there to see."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests import leaks


def test_an_open_file_is_seen(tmp_path: Path) -> None:
    """Only this one is looked for: threads of the session's other fixtures open files of their own meanwhile."""
    path = tmp_path / "open"
    before = leaks.Snapshot.take()
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    leak = f"open file {fd} -> {path}"
    try:
        assert leak in leaks.of_this_process(before)
    finally:
        os.close(fd)
    assert leak not in leaks.of_this_process(before)


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
