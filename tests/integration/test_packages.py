"""Packages that are installed before the code runs, from the test's own registries, by root's daemon and another's."""

from __future__ import annotations

from pathlib import Path

import pytest

from skerry.errors import InstallFailed
from tests import support
from tests.integration.shelves import Shelves, World
from tests.integration.test_installs import need

pytestmark = [pytest.mark.root, pytest.mark.timeout(200)]
IMPORT = "import tiny, os; tiny.main(); print(os.path.dirname(tiny.__file__)); os.system('tiny-pip')"
REACH = """
import socket, tiny
try:
    print("reached", socket.create_connection(("skerry.test", 443), timeout=5))
except OSError as error:
    print("not reached:", error)
"""


@pytest.fixture
def shelves(tmp_path: Path, user: support.Nobody | None, monkeypatch: pytest.MonkeyPatch) -> Shelves:
    need("git", "git")
    need("pip", "python3-pip")
    return Shelves(tmp_path, user, monkeypatch)


@pytest.mark.requirement("R8", "F4")
def test_a_program_has_its_packages(shelves: Shelves) -> None:
    def body(world: World) -> None:
        first = world.client.execute_code("python", IMPORT, packages=["tiny>=1"])
        assert first.ok, (first.stderr, (world.daemon.home / "daemon.log").read_text())
        print(first.stdout)

    shelves.run(body)
