"""`skerry doctor` tries things, as root and without, and says what to do about what fails."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skerry.daemon import doctor
from skerry.host import launcher
from skerry.images import preflight
from skerry.policy import ISOLATIONS
from skerry.settings import Home
from tests import support
from tests.support import Nobody


def checks(report: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in report["checks"]}


def test_this_machine_can_run_environments(home: Path) -> None:
    command = [sys.executable, "-m", "skerry.daemon.doctor", "--json"]
    done = subprocess.run(
        command, env={**os.environ, "SKERRY_HOME": str(home)}, capture_output=True, text=True, timeout=60
    )
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert report["isolation"] in ISOLATIONS
    found = checks(report)
    assert found["environment"]["status"] == found["user namespaces"]["status"] == "ok"
    assert all(check["fix"] for check in found.values() if check["status"] != "ok")


def test_it_works_for_a_plain_user_and_names_what_is_weaker(as_nobody: Nobody) -> None:
    done = as_nobody.run([as_nobody.python, "-m", "skerry.daemon.doctor", "--json"])
    report = json.loads(done.stdout)
    assert report["isolation"] == "namespace"
    found = checks(report)
    assert found["disk workspaces"]["status"] == "warning"
    assert "root" in found["disk workspaces"]["fix"]


@pytest.mark.root
def test_other_backends_are_tried_and_the_age_of_gvisor_is_told(home: Path) -> None:
    support.require("runsc")
    report = doctor.run(Home(str(home)))
    assert report["isolation"] in ("gvisor", "microvm")
    found = checks(report)
    assert re.search(r"`gvisor`: gVisor \S*20\d{6}\S* \(\d+ months old\), platform ", found["oci"]["found"])
    assert "isolation `namespace` is not available: no Docker Engine" in found["docker"]["found"]
    assert "isolation `microvm`" in found["microvm"]["found"]


def test_a_missing_helper_is_a_failure_with_its_fix(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher.Helper.__init__, "__defaults__", (Path("/nonexistent/helper"),))
    report = doctor.run(Home(str(home)))
    found = checks(report)
    assert report["isolation"] == "none"
    assert found["helper"]["status"] == found["environment"]["status"] == "failure"
    assert "make native" in found["helper"]["fix"]


def test_what_a_build_of_an_image_lacks_is_told(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "SPACE", 1 << 60)
    found = checks(doctor.run(Home(str(home))))["image building"]
    assert found["status"] == "warning"
    assert f"are free at {home}" in found["found"]
    assert "SKERRY_HOME" in found["fix"]


def test_refused_user_namespaces_come_with_the_fix(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise launcher.explained("E\tnamespaces\t1\t")

    monkeypatch.setattr(doctor, "try_steps", refuse)
    found = checks(doctor.run(Home(str(home))))
    assert found["user namespaces"]["status"] == "failure"
    assert "apparmor_restrict_unprivileged_userns" in found["user namespaces"]["fix"]


def test_every_failing_step_is_told_with_errno_and_advice() -> None:
    failure = launcher.explained("E\tproc\t1\tmount")
    assert failure.detail == {"step": "proc", "errno": "EPERM", "what": "mount"}
    assert "/proc" in failure.hint


def test_a_home_that_is_full_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(home)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    found = checks(doctor.run(Home(str(home))))
    assert found["home"]["status"] == "warning"
    assert "1.0 MiB" in found["home"]["found"]


@pytest.mark.parametrize("rootful", [True, False])
def test_too_small_sysctls_come_with_the_values_that_are_needed(
    rootful: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0 if rootful else 1000)
    values = {"fs.inotify.max_user_instances": 100, "kernel.pty.reserve": 0}
    monkeypatch.setattr(doctor, "_sysctl", lambda name: values.get(name, 1 << 40))
    monkeypatch.setattr(os, "sysconf", lambda name: 4096 if name == "SC_PAGE_SIZE" else 1 << 21)  # 8 GiB
    found = doctor._kernel_limits()
    if rootful:  # each environment has the host's limit for itself
        assert found.status == "ok"
    else:
        assert found.status == "warning"
        assert "fs.inotify.max_user_instances is 100" in found.found
        assert found.fix == "sysctl fs.inotify.max_user_instances=512"


def test_the_sysctls_of_this_machine_are_read() -> None:
    for name in doctor._wanted_sysctls(1, rootful=True):
        assert doctor._sysctl(name) is not None, name
    assert doctor._sysctl("kernel.no_such_setting") is None
