"""Images built and imported for real, by mmdebstrap from the host's own mirrors."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from skerry.errors import ImageBuildFailed
from skerry.host import uids
from skerry.images import store as store_module
from skerry.images.build import build
from skerry.images.definition import Definition, find
from skerry.images.importer import import_archive
from skerry.images.progress import Progress
from skerry.images.store import Image, ImageStore
from tests.integration.daemon import started
from tests.support import folder_in_memory, require, stop_daemon, temporary_home

pytestmark = [pytest.mark.root, pytest.mark.soak, pytest.mark.timeout(600)]


def minimal(*commands: tuple[str, ...], name: str = "minimal") -> Definition:
    return Definition(name, "a test", "bookworm", ("tree",), commands, {"LANG": "C.UTF-8"})


def tools(*commands: tuple[str, ...]) -> Definition:
    """`dev` without Go: its compiler and what it compiles take as long as all else."""
    dev = find("dev")
    return replace(dev, packages=tuple({*dev.packages} - {"golang-go"}), commands=commands)


def mounts() -> list[str]:
    return Path("/proc/self/mounts").read_text().splitlines()


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with temporary_home(folder=folder_in_memory()) as home:
        yield home


@pytest.fixture(scope="module")
def store(place: Path) -> ImageStore:
    require("mmdebstrap")
    return ImageStore(place / "images")


@pytest.fixture(scope="module")
def built(store: ImageStore) -> Iterator[tuple[Image, list[Progress]]]:
    before = mounts()
    steps: list[Progress] = []
    image = build(tools(("sh", "-c", 'echo "$LC_CTYPE as $(id -u)" > /made-by-command')), store, steps.append)
    assert [line for line in mounts() if str(store.root) in line] == [
        line for line in before if str(store.root) in line
    ]
    yield image, steps
    store.remove("dev", lambda _: False)


def run_in(image: Image, *argv: str) -> str:
    assert image.rootfs is not None
    return subprocess.run(
        ["chroot", "--userspec=1000:1000", image.rootfs, *argv], check=True, capture_output=True, text=True
    ).stdout


def test_it_works_for_the_user(built: tuple[Image, list[Progress]]) -> None:
    image, _ = built
    assert run_in(image, "/bin/sh", "-c", "id -un; tree --version").split()[:2] == ["appuser", "tree"]
    assert run_in(image, "/bin/cat", "/made-by-command") == "C.UTF-8 as 0\n"


def test_nothing_of_the_host_is_in_it(built: tuple[Image, list[Progress]]) -> None:
    image, _ = built
    assert image.rootfs is not None
    assert not (image.rootfs / "etc/apt/sources.list").exists()
    assert not (image.rootfs / "etc/apt/apt.conf.d/00skerry").exists()
    assert (image.rootfs / "etc/resolv.conf").read_text() == ""
    assert (image.rootfs / "etc/hostname").read_text() == "skerry\n"
    setuid = [
        p for p in image.rootfs.rglob("*") if not p.is_symlink() and p.is_file() and p.stat().st_mode & 0o6000
    ]
    assert setuid == []


@pytest.mark.requirement("R36")
def test_a_base_image_has_the_tools_of_the_trade(place: Path, built: tuple[Image, list[Progress]]) -> None:
    has_the_tools(place)


@pytest.mark.soak
@pytest.mark.requirement("R36")
@pytest.mark.timeout(1200)
def test_shipped_dev_image_has_the_tools_of_the_trade() -> None:
    """As `skerry image build dev` makes it, Go and its warm cache included."""
    require("mmdebstrap")
    with temporary_home(folder=folder_in_memory()) as home:
        command = [sys.executable, "-m", "skerry.cli", "image", "build", "dev"]
        env = {**os.environ, "SKERRY_HOME": str(home)}
        done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        stop_daemon(home)  # which the command has started
        has_the_tools(home, "go version")


def has_the_tools(home: Path, *more: str) -> None:
    programs = ("git", "python3", "pip", "node", "npm", "g++", "make", "tree")
    compiled = "echo 'int main(void) { return 7; }' > a.c && cc -o a a.c && ./a"
    with started(home) as daemon:
        environment = daemon.create(image="dev")
        for command in (*(f"{program} --version" for program in programs), *more):
            assert daemon.execute(environment, command)["exit_code"] == 0, command
        assert daemon.execute(environment, compiled)["exit_code"] == 7
        script = (
            "git init -q . && npm init -y && python3 -m venv .venv && .venv/bin/pip --version && tree -L 1"
        )
        assert "package.json" in daemon.execute(environment, script)["stdout"]


@pytest.mark.requirement("R110")
def test_progress_is_real(built: tuple[Image, list[Progress]]) -> None:
    _, steps = built
    fractions = [step.fraction or 0.0 for step in steps]
    assert fractions == sorted(fractions)
    assert {step.step for step in steps} >= {
        "reading the package lists",
        "downloading the base system",
        "installing packages",
        "running the definition's commands",
        "unpacking the new root filesystem",
        "computing the digest",
    }


def test_only_the_image_is_left(store: ImageStore, built: tuple[Image, list[Progress]]) -> None:
    digest = built[0].digest.removeprefix("sha256:")
    assert sorted(p.name for p in store.root.iterdir()) == sorted([".lock", "names", digest])


def test_a_failing_command_leaves_nothing(tmp_path: Path) -> None:
    require("mmdebstrap")
    store, before = ImageStore(tmp_path), mounts()
    with pytest.raises(ImageBuildFailed) as caught:
        build(minimal(("sh", "-c", "echo the reason >&2; exit 3")), store)
    assert "the reason" in caught.value.detail["output"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "names"]
    assert [line for line in mounts() if str(tmp_path) in line] == [
        line for line in before if str(tmp_path) in line
    ]


def test_scripts_of_packages_are_nobody_on_the_host(tmp_path: Path) -> None:
    """What the definition runs, and what packages run, is root of a user namespace with ids of its own."""
    require("mmdebstrap")
    command = (
        "cat /proc/self/uid_map /proc/self/gid_map > /ids; touch /dev/mem 2>/dev/null; echo $? > /denied"
    )
    image = build(minimal(("sh", "-c", command)), ImageStore(tmp_path))
    assert image.rootfs is not None
    for line in (image.rootfs / "ids").read_text().splitlines():
        inside, outside, count = map(int, line.split())
        assert (inside, count) == (0, 65536)
        assert outside >= uids.FIRST
    assert not [
        name
        for name in os.listdir(uids.DIRECTORY)
        if os.readlink(f"{uids.DIRECTORY}/{name}").startswith(f"{os.getpid()} ")
    ]


_BUILD = """
import sys
from pathlib import Path
from skerry.images.build import build
from skerry.images.definition import Definition
from skerry.images.store import ImageStore

def report(progress):
    print(progress.step, flush=True)

build(Definition("x", "", "bookworm", (), (), {}), ImageStore(Path(sys.argv[1])), report)
"""


def at_work_in(folder: Path) -> list[int]:
    """Descriptors of the processes that build there: they see a directory of it as /var/tmp."""
    found = []
    for path in Path("/proc").glob("[0-9]*/mountinfo"):
        with suppress(OSError):
            if any(
                f"{folder.name}/" in line and " /var/tmp " in line for line in path.read_text().splitlines()
            ):
                found.append(os.pidfd_open(int(path.parent.name)))
    assert found
    return found


def test_a_killed_builder_leaves_only_what_the_sweep_removes(tmp_path: Path) -> None:
    require("mmdebstrap")
    source = Path(store_module.__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", _BUILD, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(source)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert any("installing the base system" in line for line in process.stdout)
        children = at_work_in(tmp_path)
        process.send_signal(signal.SIGKILL)
    for fd in children:
        select.select([fd], [], [])  # the process has ended: nobody listened to it any more
        os.close(fd)
    ImageStore(tmp_path).sweep()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "names"]


def test_the_archive_of_another_mmdebstrap_is_imported(tmp_path: Path) -> None:
    archive = tmp_path / "root.tar.zst"
    require("zstd")
    subprocess.run(
        [require("mmdebstrap"), "-q", "--variant=essential", "bookworm", archive], check=True, timeout=500
    )
    image = import_archive(archive, "imported", ImageStore(tmp_path / "images"))
    assert run_in(image, "/bin/bash", "-c", "echo $((6 * 7)); id -u").split() == ["42", "1000"]
