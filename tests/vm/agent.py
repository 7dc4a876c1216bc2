"""PID 1 of the virtual machine: sets it up, then runs the commands that come in by the second serial line.

Each line in is a JSON object: argv, user, env. So are the lines out: {"out": base64} while the command runs,
then {"exit": code}. Kernel messages go to the first serial line and cannot get in between. A command has the
machine to itself: when it ends, whatever it left running is killed.
"""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import pwd
import signal
import socket
import struct
import subprocess
import sys
import threading
import tty
from pathlib import Path
from typing import Any, BinaryIO

CGROUPS = Path("/sys/fs/cgroup")
TESTER = 1001


def mount(kind: str, where: str, options: str = "") -> None:
    Path(where).mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", kind, *(["-o", options] if options else []), kind, where], check=True)


def set_up() -> None:
    os.environ["PATH"] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    mount("proc", "/proc", "nosuid,nodev,noexec")
    mount("sysfs", "/sys", "nosuid,nodev,noexec")
    mount("cgroup2", str(CGROUPS), "nosuid,nodev,noexec,nsdelegate")
    mount("devpts", "/dev/pts", "gid=5,mode=620,ptmxmode=666")
    mount("tmpfs", "/dev/shm", "mode=1777")
    mount("tmpfs", "/run", "mode=755")
    # The root's disk is smaller than a workspace of the default size.
    roomy = Path("/skerry/tmp")
    roomy.mkdir()
    roomy.chmod(0o1777)
    subprocess.run(["mount", "--bind", str(roomy), "/tmp"], check=True)
    (CGROUPS / "cgroup.subtree_control").write_text("+cpu +memory +pids +io")
    subprocess.run(["modprobe", "-a", "overlay", "loop", "fuse"], check=True)
    # With swap at hand a memory limit that allowed swapping would not kill.
    subprocess.run(["mkswap", "/dev/nvme2n1"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["swapon", "/dev/nvme2n1"], check=True)
    socket.sethostname("skerry-vm")
    with socket.socket() as any_socket:
        up_and_running = struct.pack("16sh22x", b"lo", 0x41)
        fcntl.ioctl(any_socket, 0x8914, up_and_running)
    subprocess.run(["useradd", "--uid", str(TESTER), "--create-home", "tester"], check=True)
    Path(f"/run/user/{TESTER}").mkdir(parents=True, mode=0o700)
    os.chown(f"/run/user/{TESTER}", TESTER, TESTER)
    packages = Path(f"/usr/local/lib/python3.{sys.version_info.minor}/dist-packages")
    (packages / "skerry.pth").write_text("/skerry/repo/src\n/skerry/site\n")


def session(number: int, user: str) -> Path:
    """A cgroup for one command; for a plain user it is delegated, as the kernel's documentation says."""
    directory = CGROUPS / f"session-{number}"
    directory.mkdir()
    if user != "root":
        owner = pwd.getpwnam(user)
        names = Path("/sys/kernel/cgroup/delegate").read_text().split()
        for path in (directory, *(directory / name for name in names)):
            if path.exists():
                os.chown(path, owner.pw_uid, owner.pw_gid)
    return directory


def start(request: dict[str, Any], directory: Path) -> tuple[int, int]:
    """(pid, reading end of its output)"""
    account = pwd.getpwnam(request["user"])
    output, end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            (directory / "cgroup.procs").write_text("0")
            os.setsid()
            os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
            os.dup2(end, 1)
            os.dup2(end, 2)
            os.initgroups(account.pw_name, account.pw_gid)
            os.setgid(account.pw_gid)
            os.setuid(account.pw_uid)
            os.chdir("/skerry/repo")
            identity = {"HOME": account.pw_dir, "USER": account.pw_name, "PATH": os.environ["PATH"]}
            if account.pw_uid:
                identity["XDG_RUNTIME_DIR"] = f"/run/user/{account.pw_uid}"
            os.execvpe(request["argv"][0], request["argv"], identity | request["env"])
        except BaseException as error:
            os.write(2, f"cannot start: {error}\n".encode())
            os._exit(127)
    os.close(end)
    return pid, output


def serve(line: BinaryIO) -> None:
    def send(**message: object) -> None:
        line.write(json.dumps(message).encode() + b"\n")

    def forward(output: int) -> None:
        while data := os.read(output, 1 << 16):
            send(out=base64.b64encode(data).decode())
        os.close(output)

    for number in itertools.count():
        request = json.loads(line.readline())
        pid, output = start(request, session(number, request["user"]))
        forwarding = threading.Thread(target=forward, args=[output])
        forwarding.start()
        while True:
            ended, status = os.waitpid(-1, 0)  # orphans are ours to reap
            if ended == pid:
                break
        while True:
            try:
                os.kill(-1, signal.SIGKILL)
                os.waitpid(-1, 0)
            except (ProcessLookupError, ChildProcessError):
                break
        forwarding.join()
        send(exit=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    if os.getpid() != 1:
        sys.exit("this sets up, and kills, everything: it is for the virtual machine alone")
    set_up()
    with open("/dev/ttyS1", "r+b", buffering=0) as serial:
        tty.setraw(serial.fileno())
        serial.write(b'{"up": true}\n')
        serve(serial)
