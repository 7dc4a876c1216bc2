"""The runner of the tests: `python -m tests`."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from scripts.generate_requirements import not_shown
from tests import __main__ as runner
from tests.__main__ import ROOT, Part, Runner
from tests.conformance.elsewhere import selectable


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A project of its own, with nothing but the plugin that writes results."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider\n")


def run(root: Path, code: str, part: Part) -> int:
    """Run one part with a test file of this code; returns the exit code of the runner."""
    (root / "test_it.py").write_text(textwrap.dedent(code))
    found = Runner(root)
    found.stage([part], found.runs)
    found.repeat()
    return found.summary()


def test_summary_and_second_run_of_failures(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = """
    import pytest
    from pathlib import Path

    @pytest.mark.parametrize("number", [1, 2])
    def test_skipped(number):
        pytest.skip("no such program")

    def test_broken():
        assert 1 + 1 == 3

    def test_unstable():
        again = Path("again")
        if not again.exists():
            again.touch()
            raise RuntimeError("the first time")

    def test_of_many():
        pass
    """
    (tmp_path / "conftest.py").write_text(
        "def pytest_collection_modifyitems(items): items += [i for i in items if i.name == 'test_of_many'] * 2"
    )
    assert run(tmp_path, code, Part("part", ())) == 1
    output = capfd.readouterr().out
    assert "   2  no such program\n" in output
    assert output.count("FAILED test_it.py::test_broken") == 2
    assert "assert (1 + 1) == 3" in output
    assert "unstable: failed beside others, passed alone:\n  part: test_it.py::test_unstable\n" in output
    assert output.endswith("4 passed, 1 failed, 2 skipped\n")
    assert "\x1b" not in output


@pytest.mark.soak
def test_random_history_is_not_repeated(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "def test_it(): assert False", Part("part", (), repeats=False)) == 1
    assert capfd.readouterr().out.count("FAILED") == 1


@pytest.mark.soak
def test_long_test_that_is_no_soak_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "LONGEST_SECONDS", 0.0)
    monkeypatch.setattr(runner, "BUSY_LOAD", 1e6)
    assert run(tmp_path, "def test_it(): pass", Part("part", (), short=True)) == 1
    assert "alone: make it shorter" in capfd.readouterr().out
    assert run(tmp_path, "def test_it(): pass", Part("part", ())) == 0


@pytest.mark.parametrize(
    ("code", "options"),
    [
        ("import os\ndef test_it(): os._exit(1)", ()),
        ("import os\ndef test_it(): os._exit(1)", ("-n", "1")),
        ("def test_it(:", ()),
        ("", ()),
    ],
    ids=["pytest ends", "one of its processes ends", "syntax error", "no tests"],
)
@pytest.mark.soak
def test_part_that_breaks_fails_the_run(tmp_path: Path, code: str, options: tuple[str, ...]) -> None:
    assert run(tmp_path, code, Part("part", options, repeats=False)) == 1


def test_what_runs_elsewhere_is_repeated_by_the_test_that_it_is_made_of() -> None:
    for name, wanted in {
        "tests/conformance/test_a.py::test_b[namespace-x-rootless]": "tests/conformance/test_a.py::test_b[namespace-x]",
        "tests/conformance/test_a.py::test_b[fake-without-bash]": "tests/conformance/test_a.py::test_b[fake]",
        "tests/conformance/test_a.py::test_b[oci]": "tests/conformance/test_a.py::test_b[oci]",
        "tests/security/test_a.py::test_b[x-rootless]": "tests/security/test_a.py::test_b[x-rootless]",
    }.items():
        assert selectable(name) == wanted


def test_skipped_test_shows_no_requirement(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    outcomes = {
        "tests/a.py::test_shown[1]": "passed",
        "tests/a.py::test_shown[2]": "skipped",
        "tests/a.py::test_skipped": "skipped",
        "tests/a.py::test_half[1]": "passed",
        "tests/a.py::test_half[2]": "failed",
        "tests/a.py::test_unstable": "failed",
    }
    found = [{"collected": 6}, *({"test": test, "outcome": outcome} for test, outcome in outcomes.items())]
    found.append({"test": "tests/a.py::test_unstable", "outcome": "passed"})
    results.write_text("".join(json.dumps(each) + "\n" for each in found))
    names = ("shown", "skipped", "half", "unstable", "absent")
    requirements = {name: [f"a.py::test_{name}"] for name in names}
    assert not_shown(requirements, [results]).keys() == {"skipped", "half", "absent"}
