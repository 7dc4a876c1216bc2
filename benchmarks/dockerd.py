"""A private Docker Engine with a minimal Debian, and its client."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import dockerd
from tests.dockerd import Unavailable as Unavailable
from tests.dockerd import require as require

IMAGE = "skerry-bench"
CACHE = Path(__file__).resolve().parent.parent / ".cache" / "bench"
PACKAGES = "python3,python-is-python3"


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
    """Runs an engine with all its files below `folder`. Raises Unavailable."""
    require("docker")
    archive = root_filesystem()
    with dockerd.running(folder) as engine:
        docker = Docker(engine.host, "")
        docker.output("import", "--change", 'CMD ["bash"]', str(archive), IMAGE)
        version, driver = docker.output("info", "--format", "{{.ServerVersion}} {{.Driver}}").split()
        docker.description = f"Docker {version} ({driver})"
        yield docker
