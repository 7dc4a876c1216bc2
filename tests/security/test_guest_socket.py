"""How the daemon finds the guest of a runtime, in a root that who has broken out of the runtime may have changed."""

from __future__ import annotations

import array
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skerry.backends.instances import PASS_RIGHTS, connect_inside
from skerry.errors import GuestFailed
from skerry.host.processes import below_root

pytestmark = [pytest.mark.timeout(60), pytest.mark.root]

SOCKET = "ctl/guest.sock"
LIVE = "import os, sys; os.chroot(sys.argv[1]); os.chdir('/'); print(flush=True); sys.stdin.read()"


@contextmanager
def rooted(folder: Path) -> Iterator[int]:
    """The pid of a process whose root this is."""
    argv = [sys.executable, "-c", LIVE, str(folder)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.communicate()


@contextmanager
def listening(folder: Path) -> Iterator[socket.socket]:
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "guest.sock"))
        listener.listen()
        yield listener


def test_guest_is_reached_in_its_own_root(tmp_path: Path) -> None:
    with (
        listening(tmp_path / "ctl") as listener,
        rooted(tmp_path) as pid,
        connect_inside(pid, SOCKET) as stream,
    ):
        accepted, _ = listener.accept()
        with accepted:
            accepted.sendall(b"x")
            stream.setblocking(True)
            assert stream.recv(1) == b"x"


@pytest.mark.parametrize("link", ["ctl", "ctl/guest.sock"])
@pytest.mark.parametrize("kind", ["absolute", "relative"])
def test_link_to_the_guest_of_another_is_not_followed(tmp_path: Path, link: str, kind: str) -> None:
    """An absolute one would be followed in the daemon's own root."""
    inside, other = tmp_path / "inside", tmp_path / "other"
    (inside / link).parent.mkdir(parents=True)
    with listening(other), listening(inside / "another"):
        target = other if kind == "absolute" else Path("another" if link == "ctl" else "../another")
        (inside / link).symlink_to(target if link == "ctl" else target / "guest.sock")
        with rooted(inside) as pid, pytest.raises(GuestFailed):
            connect_inside(pid, SOCKET)


def test_what_is_no_socket_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ctl").mkdir()
    os.mkfifo(tmp_path / "ctl" / "guest.sock")
    with rooted(tmp_path) as pid, pytest.raises(GuestFailed, match="its socket is gone"):
        connect_inside(pid, SOCKET)


def test_descriptors_from_a_guest_are_refused(tmp_path: Path) -> None:
    with (
        listening(tmp_path / "ctl") as listener,
        rooted(tmp_path) as pid,
        connect_inside(pid, SOCKET) as stream,
    ):
        try:
            assert stream.getsockopt(socket.SOL_SOCKET, PASS_RIGHTS) == 0
        except OSError:
            pytest.skip("Linux before 6.16 cannot refuse them")
        accepted, _ = listener.accept()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))]
        with accepted, pytest.raises(PermissionError):
            accepted.sendmsg([b"x"], rights)


def test_no_link_on_the_way_to_a_workspace_is_followed(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "workspace").symlink_to(tmp_path)
    with rooted(inside) as pid:
        place = below_root(pid, "workspace")
        try:
            assert os.path.islink(f"/proc/self/fd/{place}")
            assert os.fstat(place).st_ino == os.lstat(inside / "workspace").st_ino
        finally:
            os.close(place)
