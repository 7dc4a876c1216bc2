"""The daemon's own socket."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from skerry.daemon.server import listen
from skerry.settings import Home


@pytest.mark.parametrize("umask", [0, 0o077])
def test_the_socket_is_our_users_alone_and_nobody_elses_umask_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    """The umask belongs to the whole process: a thread that makes a directory meanwhile would get it too."""
    home = Home(str(tmp_path))
    before = os.umask(umask)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "umask", None)
            listen(home).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(home.socket).st_mode) == 0o600
