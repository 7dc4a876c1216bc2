"""Failpoints: a closed set, all of which are in the code."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

import skerry
from skerry import failpoints
from skerry.errors import InvalidRequest


def test_every_point_is_somewhere_and_no_other_is() -> None:
    sources = [path.read_text() for path in Path(skerry.__file__).parent.rglob("*.py")]
    hits = {name for text in sources for name in re.findall(r'\bhit\("([^"]*)"\)', text)}
    assert hits == set(failpoints.POINTS)


@pytest.mark.parametrize("wish", ["create", "create.recorded:x", "create.recorded:-1", "x:1"])
def test_what_is_no_point_is_refused(wish: str) -> None:
    with pytest.raises(InvalidRequest, match="SKERRY_FAILPOINT"):
        failpoints.arm(wish)


def test_the_nth_time_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *what: killed.append(what))
    failpoints.arm("create.recorded:3")
    try:
        for _ in range(2):
            failpoints.hit("create.recorded")
            failpoints.hit("create.served")
        assert killed == []
        failpoints.hit("create.recorded")
        assert killed == [(os.getpid(), signal.SIGKILL)]
    finally:
        failpoints.arm("")
    failpoints.hit("create.recorded")
    assert len(killed) == 1


def test_what_a_probe_passes_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *what: killed.append(what))
    failpoints.arm("create.taken")
    try:
        with failpoints.ignored():
            failpoints.hit("create.taken")
        assert killed == []
        failpoints.hit("create.taken")
        assert len(killed) == 1
    finally:
        failpoints.arm("")
