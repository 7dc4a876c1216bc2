"""All tests of egress once more for a plain user, with a proxy that has no capabilities."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support import Nobody

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "pattern", ["test_egress_table.py", pytest.param("test_egress*.py", marks=pytest.mark.soak)]
)
def test_egress_of_a_plain_user(as_nobody: Nobody, pattern: str) -> None:
    # The machine's network is left before anything is begun; the user is root in the new one, as long as it is made.
    alone = ["unshare", "--user", "--map-root-user", "--net", "--"]
    shutil.copytree(REPOSITORY / "tests", as_nobody.home / "tests")
    shutil.copy(REPOSITORY / "pyproject.toml", as_nobody.home)
    here = Path(__file__)
    files = [f"tests/integration/{path.name}" for path in here.parent.glob(pattern) if path != here]
    done = as_nobody.run(
        [*alone, as_nobody.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *sorted(files)],
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout
    shutil.rmtree(as_nobody.home / "tests")
