"""The real guest, built with sanitizers and running as an ordinary process of `nobody`, to be spoken to in bytes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts import build_native
from skerry.guest import frames
from skerry.guest.frames import Type
from skerry.host import plan
from skerry.policy import Limits
from tests import support

OPTIONS = Path(__file__).parents[1] / "unit" / "native" / "guest_fuzz.c"
FLAGS = ["-g", "-O1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
SECONDS = 20.0


IMPATIENT = [
    ("kill.c", "#define CHASE_MS 2000", "#define CHASE_MS 20"),
    ("kill.c", "#define REPORT_MS 4000", "#define REPORT_MS 40"),
    ("kill.c", "#define STARVED_MS 25000", "#define STARVED_MS 250"),
    ("shell.c", "#define DEPTH_MAX 128", "#define DEPTH_MAX 4"),
]
"""So that what happens rarely happens often."""


def edited(native: Path, *edits: tuple[str, str, str]) -> None:
    """A copy of native/ as `native`, with (file, old, new) edited."""
    shutil.copytree(build_native.SOURCES, native)
    for file, old, new in edits:
        text = (native / file).read_text()
        assert text.count(old) == 1, f"{file} has changed: {old!r} is in it {text.count(old)} times"
        (native / file).write_text(text.replace(old, new))


def build(folder: Path, *edits: tuple[str, str, str]) -> Path:
    """The program, with (file, old, new) edited; its sanitizers write to `folder`/reports.*"""
    program, native = folder / "guest", folder / "native"
    edited(native, *IMPATIENT, *edits)
    sources = [*sorted(native.glob("*.c")), OPTIONS]
    reports = f'-DREPORTS="{folder}/reports"'
    command = [support.require("gcc"), "-std=gnu11", *FLAGS, reports, *map(str, sources), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


class Guest:
    """One process of it."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self._folder = folder
        self._process = process

    def connect(self, greet: bool = True) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        timeout = struct.pack("ll", int(SECONDS), 0)
        # Unlike a timeout of Python's, this one waits for a place in the queue as well.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        try:
            sock.connect(f"{self._folder}/guest.sock")
            if greet:
                sock.sendall(frames.encode(Type.HELLO, 0, struct.pack("<I", frames.VERSION)))
        except OSError:
            sock.close()
            raise
        return sock

    def check(self) -> None:
        """It is alive and well: no sanitizer has said anything, and it answers on a fresh connection."""
        reports = sorted(self._folder.glob("reports.*"))
        assert not reports, reports[0].read_text(errors="replace")[:6000]
        assert self._process.poll() is None, "it has ended"
        with self.connect() as sock:
            sock.sendall(frames.encode(Type.PING, 77, b"still there?"))
            parser = frames.Parser()
            while True:
                data = sock.recv(65536)
                assert data, "it hung up"
                if any(frame == (Type.PONG, 77, b"still there?") for frame in parser.feed(data)):
                    return


@contextmanager
def running(program: Path, folder: Path) -> Iterator[Guest]:
    """The guest as a process of nobody's, with a workspace in `folder`.

    It has processes of its own (a pid namespace and /proc), which end with it, and signals nobody else's.
    """
    support.require("unshare", "util-linux")
    support.require("setpriv", "util-linux")
    root = os.geteuid() == 0
    uid = support.NOBODY if root else os.geteuid()
    places = [folder / name for name in ("workspace", "tmp", "run")]
    for place in (folder, *places):
        place.mkdir(exist_ok=True)
        if root:
            os.chown(place, uid, uid)
    steps = plan.bare_steps(str(places[0]), str(places[1]), str(places[2]), Limits())
    steps = steps.replace(f"id={os.geteuid()}\0".encode(), f"id={uid}\0".encode())
    control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.settimeout(SECONDS)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{folder}/guest.sock")
    listener.listen(16)
    own = ["unshare", *([] if root else ["-c"]), "--pid", "--fork", "--kill-child", "--mount-proc"]
    become = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"] if root else []
    process = subprocess.Popen(
        [
            *own,
            "bash",
            "-c",
            f'exec 3<&{listener.fileno()}; exec "$@"',
            "bash",
            *become,
            str(program),
            "launch",
        ],
        stdin=other.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(listener.fileno(),),
    )
    listener.close()
    other.close()
    try:
        control.send(steps)
        said = [control.recv(1024), control.recv(1024)]
        assert said[1] == b"R", said
        control.send(b"K")
        yield Guest(folder, process)
    finally:
        # Becoming another user has cut the tie by which it would end with unshare.
        for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        process.wait()
        control.close()
