"""What a program sees of the host on each backend is what SECURITY.md says."""

from __future__ import annotations

import json

import pytest

from scripts import probe_rungs
from tests.security.box import Boxes

TOLD = json.loads(probe_rungs.TARGET.read_text())
LIMITS = {"memory": probe_rungs.MEMORY}


@pytest.mark.each_rung
@pytest.mark.needs("users")
def test_the_table_of_what_is_seen_is_true(boxes: Boxes, mode: str) -> None:
    box = boxes(mode, limits=LIMITS)
    done = box.run(["python3", "-B", "-"], stdin=probe_rungs.PROGRAM.read_bytes())
    assert done.code == 0, done.stderr
    found = probe_rungs.rows(json.loads(done.stdout), probe_rungs.on_host())
    told = TOLD["namespace" if mode == "rootful" else mode]
    same = [row for row in told if row not in probe_rungs.MEASURED]
    assert {row: found[row] for row in same} == {row: told[row] for row in same}
    calls = "system calls that are answered"
    assert int(found[calls]) <= 1.1 * int(told[calls])
