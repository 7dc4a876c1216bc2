"""Starting the daemon, with a stand-in for it that does as the test says."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skerry.client import autostart
from skerry.errors import DaemonUnavailable, IsolationUnavailable
from skerry.settings import Home

STAND_IN = """
import os, socket, sys, json
home = os.environ["SKERRY_HOME"]
fd = int(sys.argv[sys.argv.index("--ready-fd") + 1])
with open(home + "/started", "a") as started:
    started.write(json.dumps({
        "pid": os.getpid(), "session": os.getsid(0), "cwd": os.getcwd(), "fd": fd,
        "fds": {int(n): os.readlink("/proc/self/fd/" + n) for n in os.listdir("/proc/self/fd")
                if os.path.lexists("/proc/self/fd/" + n)},
    }) + "\\n")
what = os.environ.get("STAND_IN")
if what == "problem":
    os.write(fd, os.environ["PROBLEM"].encode() + b"\\n"); sys.exit(1)
if what == "die":
    print("the database is on \\x1b[31mfire", flush=True); sys.exit(1)
if what == "silent":
    listener = None
else:
    listener = socket.socket(socket.AF_UNIX); listener.bind(home + "/daemon.sock"); listener.listen(64)
    os.write(fd, b"ready\\n"); os.close(fd)
while not os.path.exists(home + "/end"):
    import time; time.sleep(0.01)
if listener is not None:
    os.unlink(home + "/daemon.sock")
"""
CONNECT = """
from skerry.client import autostart
from skerry.settings import Home
autostart.MODULE = "stand_in"
autostart.connect(Home())
"""


@pytest.fixture
def stand_in(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setattr(autostart, "MODULE", "stand_in")
    monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}:{tmp_path}")
    yield home
    (home / "end").touch()
    for one in started(home):
        _await_end(int(str(one["pid"])))


def _await_end(pid: int) -> None:
    """Of a process that is not our child: who reaps it may take a while."""
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            assert select.select([fd], [], [], 30.0)[0]
        finally:
            os.close(fd)


def started(home: Path) -> list[dict[str, object]]:
    if not (home / "started").exists():
        return []
    return [json.loads(line) for line in (home / "started").read_text().splitlines()]


def test_twenty_clients_at_once_start_one(stand_in: Path) -> None:
    clients = [subprocess.Popen([sys.executable, "-c", CONNECT]) for _ in range(20)]
    assert [client.wait(60) for client in clients] == [0] * 20
    assert len(started(stand_in)) == 1


def test_it_is_detached_and_inherits_nothing(stand_in: Path) -> None:
    leak = os.open("/etc/passwd", os.O_RDONLY)
    os.set_inheritable(leak, True)
    try:
        autostart.connect(Home()).close()
    finally:
        os.close(leak)
    (one,) = started(stand_in)
    assert one["session"] not in (one["pid"], os.getsid(0))
    assert one["cwd"] == "/"
    log = str(stand_in / "daemon.log")
    fds = one["fds"]
    assert isinstance(fds, dict)
    pipe = fds.pop(str(one["fd"]))
    assert pipe.startswith("pipe:")
    named = {fd: name for fd, name in fds.items() if not name.startswith("/proc/")}
    assert named.pop("0") == "/dev/null"
    assert (named.pop("1"), named.pop("2")) == (log, log)
    assert set(named.values()) <= {str(stand_in / "started")}
    assert os.stat(log).st_mode & 0o777 == 0o600


def test_it_is_not_our_child(stand_in: Path) -> None:
    """Or it would be a zombie of ours when it ends first."""
    autostart.connect(Home()).close()
    (one,) = started(stand_in)
    parent = Path(f"/proc/{one['pid']}/stat").read_text().rsplit(")", 1)[1].split()[1]
    assert int(parent) != os.getpid()


def test_a_relative_python_path_still_leads_there(
    stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ".")
    autostart.connect(Home()).close()
    assert len(started(stand_in)) == 1


def test_a_socket_that_nobody_listens_on_is_started_anew(stand_in: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{stand_in}/elsewhere")
    os.rename(stand_in / "elsewhere", stand_in / "daemon.sock")
    with pytest.raises(DaemonUnavailable):
        autostart.connect(Home(), start=False)
    os.unlink(stand_in / "daemon.sock")  # the daemon's own work
    autostart.connect(Home()).close()


def test_a_daemon_that_says_why_it_cannot_start(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN", "problem")
    problem = IsolationUnavailable("no user namespaces", hint="sysctl kernel.x=1")
    monkeypatch.setenv("PROBLEM", json.dumps(problem.to_dict()))
    with pytest.raises(IsolationUnavailable, match="no user namespaces") as caught:
        autostart.connect(Home())
    assert caught.value.hint == "sysctl kernel.x=1"


def test_a_daemon_that_dies(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN", "die")
    (stand_in / "daemon.log").write_text("old news\n")
    with pytest.raises(DaemonUnavailable, match=r"on .*fire") as caught:
        autostart.connect(Home())
    assert "old news" not in caught.value.message
    assert "skerry doctor" in caught.value.hint


def test_a_daemon_that_never_answers(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN", "silent")
    monkeypatch.setattr(autostart, "START_SECONDS", 0.3)
    with pytest.raises(DaemonUnavailable, match="did not start"):
        autostart.connect(Home())


def test_somebody_who_starts_it_for_ever(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    monkeypatch.setattr(autostart, "START_SECONDS", 0.1)
    with open(stand_in / "daemon.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DaemonUnavailable, match="another client"):
            autostart.connect(Home())
    assert started(stand_in) == []


def test_one_that_was_started_by_hand_meanwhile_is_used(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that we start finds the other at work and says so: then we have what we wanted."""
    from skerry.errors import Conflict

    real = autostart._spawn

    def spawn(home: Home, deadline: float) -> None:
        real(home, deadline)
        monkeypatch.setenv("STAND_IN", "problem")
        monkeypatch.setenv("PROBLEM", json.dumps(Conflict("a daemon is running").to_dict()))
        real(home, deadline)

    monkeypatch.setattr(autostart, "_spawn", spawn)
    autostart.connect(Home()).close()
    assert len(started(stand_in)) == 2


@pytest.mark.parametrize("bad", ["file", "open"])
def test_a_home_that_cannot_be_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str) -> None:
    from skerry.errors import InvalidRequest

    place = tmp_path / "home"
    if bad == "file":
        place.write_text("")
    else:
        place.mkdir()
        place.chmod(0o777)
    with pytest.raises((InvalidRequest, DaemonUnavailable)):
        autostart.connect(Home(str(place)))
