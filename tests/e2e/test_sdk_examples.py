"""The examples do what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("quickstart", "hello from /workspace/src A = 1"),
        ("stream", "stdout: got one\nexit code 0"),
        ("many", "[0, 1, 4, 9"),
    ],
)
def test_example(home: Path, name: str, says: str) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py"], capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert says in done.stdout


def test_python_example_of_the_readme(home: Path) -> None:
    [code] = re.findall(r"```python\n(.*?)```", (EXAMPLES.parent / "README.md").read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "/workspace/src\n1\n\n42\n\n"
