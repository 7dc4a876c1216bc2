"""A private Docker daemon: own data, socket and cgroup, no network, removed afterwards."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

IMAGE = "skerry-bench"
CACHE = Path(__file__).resolve().parent.parent / ".cache" / "bench"
PACKAGES = "python3,python-is-python3"
CGROUP = f"skerry-bench-{os.getpid()}"


class Unavailable(Exception):
    """A program that a comparison needs is not installed; the message names it."""


def require(*programs: str) -> None:
    """Raises Unavailable when one of the programs is missing, or when this is not root."""
    if missing := [program for program in programs if shutil.which(program) is None]:
        raise Unavailable(f"{', '.join(missing)} not installed")
    if os.geteuid() != 0:
        raise Unavailable("needs root")


def root_filesystem() -> Path:
    """A minimal Debian with Python, as a tar archive. Built once and cached."""
    release = platform.freedesktop_os_release()
    suite = release.get("VERSION_CODENAME", "bookworm") if release.get("ID") == "debian" else "bookworm"
    archive = CACHE / f"{suite}.tar"
    if not archive.exists():
        require("mmdebstrap")
        CACHE.mkdir(parents=True, exist_ok=True)
        print(f"building a minimal Debian ({suite}) for runc and Docker ...", flush=True)
        fresh = archive.with_suffix(".new.tar")
        done = subprocess.run(
            ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", suite, fresh],
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            fresh.unlink(missing_ok=True)
            raise Unavailable("mmdebstrap could not make a root filesystem")
        fresh.rename(archive)
    return archive


class Docker:
    """A running daemon with the image loaded."""

    def __init__(self, host: str, description: str) -> None:
        self.host = host
        self.description = description
        # Prefer Debian's client, which matches Debian's daemon.
        self.client = shutil.which("docker", path=f"/usr/bin:{os.environ['PATH']}") or "docker"

    def argv(self, *arguments: str) -> list[str]:
        return [self.client, "-H", self.host, *arguments]

    def output(self, *arguments: str) -> str:
        return subprocess.run(
            self.argv(*arguments), check=True, capture_output=True, text=True
        ).stdout.strip()


@contextmanager
def running(folder: Path) -> Iterator[Docker]:
    """Runs a daemon with all its files below `folder`. Raises Unavailable."""
    require("dockerd", "docker", "containerd", "runc")
    archive = root_filesystem()
    docker = Docker(f"unix://{folder}/docker.sock", "")
    with open(folder / "log", "w") as log:
        daemon = subprocess.Popen(
            [
                *(sys.executable, "-m", "benchmarks.reaper"),
                *("dockerd", "-H", docker.host, "--pidfile", folder / "pid"),
                *("--data-root", folder / "data", "--exec-root", folder / "exec"),
                *("--storage-driver=overlay2", f"--cgroup-parent=/{CGROUP}", "--bridge=none"),
                *("--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false"),
            ],
            stdout=log,
            stderr=log,
        )
    try:
        _wait_until_up(docker, daemon)
        docker.output("import", "--change", 'CMD ["bash"]', str(archive), IMAGE)
        version, driver = docker.output("info", "--format", "{{.ServerVersion}} {{.Driver}}").split()
        docker.description = f"Docker {version} ({driver})"
        yield docker
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(timeout=60)
        for cgroup in Path("/sys/fs/cgroup").glob(f"*/{CGROUP}"):
            cgroup.rmdir()


def _wait_until_up(docker: Docker, daemon: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while subprocess.run(docker.argv("version"), capture_output=True).returncode != 0:
        if daemon.poll() is not None or time.monotonic() > deadline:
            raise Unavailable("dockerd does not start here")
        time.sleep(0.05)
