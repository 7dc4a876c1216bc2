"""When the guest takes a tree that it kills for one that forks faster than it can be killed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCANS = 32
"""As SK_CHASE_SCANS in native/skerry.h."""

Outruns = Callable[[Iterable[Iterable[int]]], list[bool]]


@pytest.fixture(scope="module")
def outruns(tmp_path_factory: pytest.TempPathFactory) -> Outruns:
    """For each scan in turn, given as the pids that it found: whether the tree outruns the kill."""
    if (cc := shutil.which("cc")) is None:
        pytest.skip("no C compiler here")
    program = tmp_path_factory.mktemp("chase") / "chase"
    sources = (ROOT / "native/tree.c", ROOT / "tests/unit/native/chase_main.c")
    subprocess.run([cc, "-std=gnu11", "-Wall", "-Werror", *sources, "-o", program], check=True)

    def run(scans: Iterable[Iterable[int]]) -> list[bool]:
        text = "".join(" ".join(map(str, scan)) + "\n" for scan in scans)
        answer = subprocess.run([program], input=text, capture_output=True, text=True, check=True).stdout
        return [letter == "1" for letter in answer]

    return run


def test_tree_that_forks_in_every_scan_outruns_its_kill(outruns: Outruns) -> None:
    found = outruns(range(100 + number, 110 + number) for number in range(SCANS + 3))
    assert found == [False] * SCANS + [True] * 3


def test_tree_that_is_slow_to_die_does_not_outrun_its_kill(outruns: Outruns) -> None:
    assert not any(outruns([range(100, 110)] * 1000))


def test_late_forks_with_a_calm_scan_between_them_do_not_outrun_the_kill(outruns: Outruns) -> None:
    calm = [[100 + number // 16, 90] for number in range(1000)]
    assert not any(outruns(calm))


def test_pids_that_begin_anew_do_not_hide_a_tree_that_forks(outruns: Outruns) -> None:
    pids = [*range(32700, 32768), *range(300, 400)]
    assert outruns([[pid] for pid in pids])[-1]
