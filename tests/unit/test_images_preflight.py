"""What a build needs is looked at before it begins, and all that is missing is told with what to do."""

from __future__ import annotations

import os
import pwd
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from skerry.errors import ImageBuildFailed
from skerry.images import apt, preflight
from skerry.images.build import build
from skerry.images.definition import Definition
from skerry.images.progress import Progress
from skerry.images.store import ImageStore


class Machine:
    """One on which an image can be built, until something is taken away."""

    def __init__(self, base: Path) -> None:
        self.store = ImageStore(base / "images")
        self.programs = {"mmdebstrap", "apt-config", "newuidmap"}
        self.sources = apt.Sources("deb http://mirror.example bookworm main\n", "")
        self.free = 1 << 40
        self.user = 0

    def refusal(self) -> tuple[str, str]:
        """What a build says: it has told that it looks, and has done nothing else."""
        seen: list[Progress] = []
        with pytest.raises(ImageBuildFailed) as caught:
            build(Definition("x", "", "bookworm", (), (), {}), self.store, seen.append)
        assert [step.step for step in seen] == ["checking what a build needs"]
        message = caught.value.message
        assert message.startswith("an image cannot be built here: ")
        return message.removeprefix("an image cannot be built here: "), caught.value.hint


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)

    def which(program: str) -> str | None:
        return f"/usr/bin/{program}" if program in made.programs else None

    monkeypatch.setattr(shutil, "which", which)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=made.free))
    monkeypatch.setattr(apt, "sources", lambda _: made.sources)
    monkeypatch.setattr(preflight, "KEYS", tmp_path / "keys")
    monkeypatch.setattr(os, "geteuid", lambda: made.user)
    monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_name="skerry-nobody-knows"))
    return made


def test_nothing_is_missing(machine: Machine) -> None:
    assert preflight.check("bookworm", machine.store.root) == "/usr/bin/mmdebstrap"


@pytest.mark.requirement("R110")
@pytest.mark.parametrize(
    ("program", "advice"),
    [
        ("mmdebstrap", "apt install mmdebstrap"),
        ("apt-config", "apt install apt"),
    ],
)
def test_programs(machine: Machine, program: str, advice: str) -> None:
    machine.programs.remove(program)
    assert machine.refusal() == (f"{program} is not installed", advice)


@pytest.mark.requirement("R110")
def test_a_plain_user_needs_ids(machine: Machine) -> None:
    machine.user = 4_000_000_000
    machine.programs -= {"newuidmap"}
    what, advice = machine.refusal()
    assert what == (
        "newuidmap is not installed; skerry-nobody-knows has no ids in /etc/subuid; "
        "skerry-nobody-knows has no ids in /etc/subgid"
    )
    assert "apt install uidmap" in advice
    for option in ("--add-subuids", "--add-subgids"):
        assert f"usermod {option} 100000-165535 skerry-nobody-knows" in advice


@pytest.mark.requirement("R110")
def test_keys_of_another_distribution(machine: Machine, tmp_path: Path) -> None:
    machine.sources = apt.Sources("", "")
    what = "the keys of Debian's bookworm are not installed"
    assert machine.refusal() == (what, "apt install debian-archive-keyring")
    (tmp_path / "keys").touch()
    preflight.check("bookworm", machine.store.root)


@pytest.mark.requirement("R110")
def test_everything_that_is_missing_is_told_at_once(machine: Machine) -> None:
    machine.programs.clear()
    machine.free = 100 << 20
    what, advice = machine.refusal()
    assert what == (
        "mmdebstrap is not installed; apt-config is not installed; "
        f"only 100.0 MiB are free at {machine.store.root}"
    )
    assert advice.count("apt install") == 2
    assert "make 1.0 GiB free" in advice
