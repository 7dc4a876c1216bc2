"""Programs and their files, before anything is made for them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from skerry.backends.instances import InstanceDirectory
from skerry.errors import InvalidRequest, PathOutside
from skerry.languages import Language, Languages
from skerry.manager.code.program import Program
from skerry.policy import MIB


@pytest.fixture
def python(tmp_path: Path) -> Language:
    return Languages(str(tmp_path)).get("python")


@pytest.mark.requirement("R64", "R65", "R66", "R67", "R68", "R82")
def test_what_a_program_gets_when_nothing_is_said() -> None:
    program = Program("python", "")
    limits = program.policy.limits
    assert (program.timeout, limits.cpus, limits.memory) == (30.0, 1.0, 512 * MIB)
    assert (limits.pids, limits.fds, program.policy.network) == (100, 1024, "none")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"timeout": 300.1}, "timeout must be more than 0 and at most 300 seconds, not 300.1"),
        ({"timeout": 0}, "timeout must be"),
        ({"timeout": float("nan")}, "timeout must be"),
        ({"cpu_limit": 9}, "cpu_limit must be a whole number of millicores from 10 to 1024000, not 9"),
        ({"cpu_limit": True}, "cpu_limit must be"),
        ({"mem_limit": 15}, "mem_limit must be a whole number of MB from 16 to 1048576, not 15"),
        ({"mem_limit": 1.5}, "mem_limit must be"),
    ],
)
def test_limits_that_make_no_sense(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Program("python", "", **given)
    assert words in caught.value.message


@pytest.mark.requirement("R70")
def test_files_lie_beside_the_program(python: Language) -> None:
    files = {"data.json": "{}", "a/b/c.txt": "é", "./d//e": "\udcff", "a/main.py": "2"}
    assert Program("python", "1", files=files).tree(python) == {
        "main.py": b"1",
        "data.json": b"{}",
        "a/b/c.txt": "é".encode(),
        "d/e": b"\xff",
        "a/main.py": b"2",
    }


@pytest.mark.parametrize(
    ("files", "kind", "words"),
    [
        (["main.py"], InvalidRequest, "'main.py' would replace the program"),
        (["./main.py"], InvalidRequest, "'./main.py' would replace the program"),
        (["main.py/x"], InvalidRequest, "'main.py' is a file, and cannot hold 'main.py/x'"),
        (["a/b/c", "a/b"], InvalidRequest, "'a/b' is a file, and cannot hold 'a/b/c'"),
        (["x", "./x"], InvalidRequest, "'./x' is there twice"),
        (["/etc/passwd"], PathOutside, "outside"),
        (["../x"], PathOutside, "outside"),
        (["a/../../x"], PathOutside, "outside"),
        (["a/../main.py"], PathOutside, "outside"),
        # A megabyte of names would be half a million directories.
        ([f"{n}/{'a/' * 500}x" for n in range(2)], InvalidRequest, "in too many directories"),
        ([""], InvalidRequest, "'' is not the path of a file"),
        (["a/"], InvalidRequest, "'a/' is not the path of a file"),
        (["."], InvalidRequest, "'.' is not the path of a file"),
        (["a\0b"], InvalidRequest, "NUL"),
        (["\ud800"], InvalidRequest, "not valid text"),
        (["x" * 1025], InvalidRequest, "more than 1024 bytes"),
        (map(str, range(1001)), InvalidRequest, "1001 files are too many"),
    ],
)
def test_files_that_cannot_be(
    python: Language, files: list[str], kind: type[InvalidRequest], words: str
) -> None:
    with pytest.raises(kind) as caught:
        Program("python", "", files=dict.fromkeys(files, "")).tree(python)
    assert words in caught.value.message


def test_content_that_is_no_text(python: Language) -> None:
    with pytest.raises(InvalidRequest, match="code is not valid text"):
        Program("python", "\ud800").tree(python)
    with pytest.raises(InvalidRequest, match="the file 'x' is not valid text"):
        Program("python", "", files={"x": "\ud800"}).tree(python)


NAMES = st.text(st.sampled_from("ab./\\\0\n é\udcff\ud800%") | st.characters(), max_size=12)


@hypothesis.given(
    st.dictionaries(
        NAMES | st.sampled_from(["main.py", "main.py/x", "..", "a/../b", "node_modules", "node_modules/x"]),
        st.text(),
    )
)
def test_whatever_the_paths_are_nothing_leaves_the_directory(files: dict[str, str]) -> None:
    """Either they are refused before anything is done, or exactly they are there."""
    with tempfile.TemporaryDirectory(prefix="skerry-test-") as folder:
        python = Languages(folder).get("python")
        try:
            tree = Program("python", "code", files=files).tree(python)
        except InvalidRequest:
            return
        place = InstanceDirectory(folder, "instance")
        place.make()
        workspace = place.place("workspace", 0o755)
        place.deliver(tree, {"node_modules": "/elsewhere"})
        if "node_modules" not in {path.partition("/")[0] for path in tree}:
            assert os.readlink(f"{workspace}/node_modules") == "/elsewhere"
            os.unlink(f"{workspace}/node_modules")
        found = {
            os.path.relpath(os.path.join(parent, name), workspace)
            for parent, _, names in os.walk(workspace)
            for name in names
        }
        assert found == set(tree)
        assert tree["main.py"] == b"code"
        assert len(tree) == len(files) + 1
        assert (os.listdir(folder), os.listdir(place.path)) == (["instance"], ["workspace"])
