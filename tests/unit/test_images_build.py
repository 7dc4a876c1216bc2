"""Builds, with a stand-in for mmdebstrap: progress, failures, limits, cancellation; nothing is ever left."""

from __future__ import annotations

import os
import select
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from skerry.errors import ImageBuildFailed, LimitReached
from skerry.host import uids
from skerry.images import apt, preflight
from skerry.images.build import build
from skerry.images.definition import Definition
from skerry.images.progress import Progress
from skerry.images.store import ImageStore
from skerry.images.unpack import UnpackLimits

DEFINITION = Definition(
    "base", "a test", "bookworm", ("git", "jq"), (("echo", "a b", "$HOME"),), {"LANG": "C"}
)

SPEAK = r"""
say() { printf '%s\n' "$1" >&2; }
say 'I: running apt-get update...'
say 'Get:1 http://mirror.example bookworm InRelease'
say 'I: downloading packages with apt...'
say 'I: installing essential packages...'
say 'Setting up base (1)'
say 'I: installing remaining packages inside the chroot...'
say '0 upgraded, 2 newly installed, 0 to remove and 0 not upgraded.'
for package in git jq; do say "Get:1 http://mirror.example $package"; done
for package in git jq; do say "Unpacking $package (1) ..."; done
for package in git jq; do say "Setting up $package (1) ..."; done
say 'I: running --customize-hook in shell: sh -c ...'
say 'I: creating tarball...'
"""
ARCHIVE = r"""
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
mkdir -p usr/bin etc/apt/apt.conf.d etc/apt/sources.list.d var/log var/lib/apt/lists
echo tool > usr/bin/tool
for secret in etc/apt/sources.list etc/apt/sources.list.d/x.list etc/apt/apt.conf.d/00skerry var/log/x; do
  echo password > $secret
done
tar -c .
"""


class Fake:
    """mmdebstrap as a script, and a record of how it was called."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.store = ImageStore(base / "images")
        self.seen: list[Progress] = []

    def runs(self, script: str) -> None:
        program = self.base / "mmdebstrap"
        record = f"printf '%s\\n' \"$@\" > {self.base}/arguments; env > {self.base}/environment\n"
        record += f"printf %s $(readlink /proc/self/ns/mnt) > {self.base}/namespace\n"
        program.write_text(f"#!/bin/sh\nset -e\n{record}{script}")
        program.chmod(0o755)

    def nothing_left(self) -> bool:
        left = sorted(p.name for p in self.store.root.iterdir())
        return left == [".lock", "names"] and not any((self.store.root / "names").iterdir())


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    """In a directory that every user can write: root's builds run as somebody else."""
    monkeypatch.setattr(apt, "settings", lambda: "")
    with tempfile.TemporaryDirectory(prefix="skerry-build-") as folder:
        os.chmod(folder, 0o777)
        monkeypatch.setattr(preflight, "check", lambda *_: f"{folder}/mmdebstrap")
        yield Fake(Path(folder))


def test_a_build(fake: Fake) -> None:
    fake.runs(SPEAK + ARCHIVE)
    image = build(DEFINITION, fake.store, fake.seen.append)
    assert image == fake.store.get("base")
    assert (image.env, image.description) == ({"LANG": "C"}, "a test")
    assert image.rootfs is not None
    assert (image.rootfs / "usr/bin/tool").exists()
    assert sorted(p.name for p in image.rootfs.parent.iterdir()) == ["image.json", "rootfs"]


def test_the_hosts_settings_are_not_in_the_image(fake: Fake) -> None:
    fake.runs(ARCHIVE)
    image = build(DEFINITION, fake.store)
    assert image.rootfs is not None
    for path in image.rootfs.rglob("*"):
        assert path.is_dir() or "password" not in path.read_text()


def test_progress(fake: Fake) -> None:
    fake.runs(SPEAK + ARCHIVE)
    build(DEFINITION, fake.store, fake.seen.append)
    fractions = [step.fraction or 0.0 for step in fake.seen]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    packages = [step.fraction for step in fake.seen if step.step == "installing packages"]
    assert len(packages) == 7
    assert packages[-1] == pytest.approx(0.7)


def test_how_it_is_called(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    fake.runs(ARCHIVE)
    build(DEFINITION, fake.store)
    if os.geteuid() == 0:
        assert (fake.base / "namespace").read_text() != os.readlink("/proc/self/ns/mnt")
    arguments = (fake.base / "arguments").read_text()
    assert "--include=git,jq\n" in arguments
    assert (
        '--customize-hook=chroot "$1" /usr/bin/env -i '
        "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C echo 'a b' '$HOME' >&2\n"
    ) in arguments
    environment = (fake.base / "environment").read_text()
    assert "HTTPS_PROXY=http://proxy.example" in environment
    assert "secret" not in environment


@pytest.mark.root
def test_a_build_by_root_is_nobody_on_the_host(fake: Fake) -> None:
    """What it runs is root of a user namespace with a range of ids of its own, which is free again afterwards."""
    os.mkdir(fake.base / "closed", 0o700)
    look = f"cat /proc/self/uid_map /proc/self/gid_map > {fake.base}/ids; ls -dn /var/tmp > {fake.base}/tmp\n"
    fake.runs(f"{look}touch {fake.base}/closed/x 2>/dev/null && exit 9\n" + ARCHIVE)
    build(DEFINITION, fake.store)
    bases = set()
    for line in (fake.base / "ids").read_text().splitlines():
        inside, outside, count = map(int, line.split())
        assert (inside, count) == (0, uids.SIZE)
        bases.add(outside)
    (base,) = bases
    assert base >= uids.FIRST
    assert (fake.base / "ids").stat().st_uid == base
    assert (fake.base / "tmp").read_text().split()[2] == "0"  # its own directory, not the host's
    assert not os.path.lexists(f"{uids.DIRECTORY}/{(base - uids.FIRST) // uids.SIZE}")


def test_the_words_of_a_failure_are_kept(fake: Fake) -> None:
    fake.runs("for i in $(seq 100); do echo line $i >&2; done\necho 'E: no such package' >&2\nexit 25")
    with pytest.raises(ImageBuildFailed, match="25: E: no such package") as caught:
        build(DEFINITION, fake.store)
    assert caught.value.detail["output"] == [*(f"line {i}" for i in range(82, 101)), "E: no such package"]
    assert fake.nothing_left()


def test_a_failure_after_half_an_archive(fake: Fake) -> None:
    fake.runs("head -c 700 /dev/zero | tr '\\0' x\nexit 1")
    with pytest.raises(ImageBuildFailed):
        build(DEFINITION, fake.store)
    fake.runs(ARCHIVE + "exit 1")
    with pytest.raises(ImageBuildFailed):
        build(DEFINITION, fake.store)
    assert fake.nothing_left()


def test_a_limit_ends_a_build_that_goes_on(fake: Fake) -> None:
    fake.runs(
        f"trap 'exit 1' TERM PIPE\ncd {fake.base}\nhead -c 9000000 /dev/zero > big\ntar -c big\nsleep 100"
    )
    with pytest.raises(LimitReached):
        build(DEFINITION, fake.store, limits=UnpackLimits(bytes=1 << 20))
    assert fake.nothing_left()


def test_what_progress_raises_ends_the_build(fake: Fake) -> None:
    class Canceled(Exception):
        pass

    def refuse(step: Progress) -> None:
        if step.fraction:  # not before it is at work
            raise Canceled

    fake.runs(SPEAK + "exec sleep 100")
    with pytest.raises(Canceled):
        build(DEFINITION, fake.store, refuse)
    assert fake.nothing_left()


def test_what_it_started_ends_with_it(fake: Fake) -> None:
    """mmdebstrap's children are in its session, and the signal goes to all of them."""
    fifo = fake.base / "held"
    os.mkfifo(fifo)
    fifo.chmod(0o666)
    fd = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    fake.runs(f"exec 7> {fifo}\n(exec sleep 1000) &\n{SPEAK}\nwait")

    def refuse(step: Progress) -> None:
        if step.fraction:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        build(DEFINITION, fake.store, refuse)
    select.select([fd], [], [])  # ends when nobody holds the other end any more
    os.close(fd)
