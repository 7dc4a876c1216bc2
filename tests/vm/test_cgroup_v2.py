"""What this machine's kernel may do with limits on cgroup v1, a virtual machine's kernel does on v2."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.vm.machine import VirtualMachine

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

users = pytest.mark.parametrize("user", ["root", "tester"])

OLD_KERNEL = "memory.peak cannot be reset before Linux 6.12"
SKIPPED = {
    "root": {OLD_KERNEL, "no blkio hierarchy of cgroups v1 here"},
    "tester": {OLD_KERNEL, "becomes another user", "needs root"},
}
"""What the machine cannot show, by user."""

PYTEST = """
import sys
from skerry.host.cgroups import CgroupManager

# Here a plain user's process moves to a leaf of its cgroup, so that the leaf is no leak of the tests.
CgroupManager.detect()
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


@users
def test_commands_run_and_report(vm: VirtualMachine, user: str) -> None:
    noise = "echo noise >/dev/console; " if user == "root" else ""
    done = vm.run(["sh", "-c", f"{noise}id -un; echo '{{}}' >&2; exit 7"], user=user)
    assert done.returncode == 7
    assert done.stdout == f"{user}\n{{}}\n"
    assert vm.run(["sh", "-c", "kill -9 $$"], user=user).returncode == -9


@users
def test_nothing_is_missing(vm: VirtualMachine, user: str) -> None:
    """So that the tests below have nothing to skip."""
    code = "from skerry.host.cgroups import CgroupManager as M; m = M.detect(); print(m.mode, [m.reason])"
    assert vm.run(["python3", "-c", code], user=user).stdout == "v2 ['']\n"


@users
def test_limits(vm: VirtualMachine, user: str) -> None:
    """Every test of the suite that is marked `limits` passes, but for those that are known to be skipped."""
    tests = Path(__file__).parent.parent
    files = [
        path
        for path in tests.rglob("test_*.py")
        if "mark.limits" in path.read_text() and path != Path(__file__)
    ]
    names = sorted(str(path.relative_to(tests.parent)) for path in files)
    options = ["-m", "limits", "-p", "no:cacheprovider", "-rs"]
    done = vm.run(["python3", "-c", PYTEST, *options, *names], user=user)
    assert done.returncode == 0
    skipped = set(re.findall(r"^SKIPPED \[\d+\] \S+: (.*)$", done.stdout, re.MULTILINE))
    assert skipped == SKIPPED[user]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 70
