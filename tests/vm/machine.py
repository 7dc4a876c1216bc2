"""A virtual machine with cgroup v2 alone and no IPv6, whatever the host has: Debian 12 under QEMU's emulation.

Three disks: the root filesystem, made once by mmdebstrap and never written to; this repository with the
interpreter's packages, made anew for each boot; and swap. Debian's cloud kernel has NVMe, ext4 and the serial
lines built in, so that it needs no initial RAM disk and is up in a few seconds.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import platform
import selectors
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
CACHE = REPOSITORY / ".cache" / "vm"

SUITE = "bookworm"
PYTHON = (3, 11)
PACKAGES = ("linux-image-cloud-amd64", "python3", "kmod")
TOOLS = {"qemu-system-x86_64": "qemu-system-x86", "mmdebstrap": "mmdebstrap", "mke2fs": "e2fsprogs"}
NOT_NEEDED_INSIDE = (
    "mypy*",
    "*__mypyc*",
    "ruff*",
    "pip*",
    "setuptools*",
    "pkg_resources",
    "grimp*",
    "ast_serialize*",
)


class MachineFailed(Exception):
    """The virtual machine, not the command in it, failed."""


def missing() -> str:
    """Why no virtual machine can run here; empty if one can."""
    tools = TOOLS if os.geteuid() == 0 else {**TOOLS, "newuidmap": "uidmap"}
    packages = [package for tool, package in tools.items() if not shutil.which(tool, path=_path())]
    if platform.machine() != "x86_64":
        return "the virtual machine is made for x86_64"
    if sys.version_info[:2] != PYTHON:
        return "the virtual machine has Python {}.{}: run the tests with the same".format(*PYTHON)
    return f"apt-get install {' '.join(packages)}" if packages else ""


class VirtualMachine:
    """A booted machine. `run` runs commands in it, one after the other; leaving the context ends it."""

    def __enter__(self) -> Self:
        image, kernel = _root_image()
        self._directory = Path(tempfile.mkdtemp(prefix="skerry-vm-"))
        disks = [
            (image, "snapshot=on"),
            (_repository_image(self._directory), "cache=unsafe"),
            (self._swap(), ""),
        ]
        arguments = ["-M", "q35", "-accel", "tcg", "-smp", "2", "-m", "1024"]
        arguments += ["-nodefaults", "-no-reboot", "-display", "none"]
        arguments += ["-kernel", str(kernel), "-append"]
        arguments += [
            "root=/dev/nvme0n1 rw init=/sbin/skerry-init console=ttyS0 quiet panic=-1 mitigations=off ipv6.disable=1"
        ]
        for number, (path, options) in enumerate(disks):
            arguments += ["-drive", f"file={path},format=raw,if=none,id=disk{number},{options}".rstrip(",")]
            arguments += ["-device", f"nvme,drive=disk{number},serial=disk{number}"]
        arguments += ["-serial", f"file:{self._directory}/console.log"]
        arguments += ["-chardev", "stdio,id=commands,signal=off", "-serial", "chardev:commands"]
        self._qemu = subprocess.Popen(
            ["qemu-system-x86_64", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        assert self._qemu.stdout
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._qemu.stdout, selectors.EVENT_READ)
        self._received = b""
        try:
            self._receive(time.monotonic() + 120)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._selector.close()
        self._qemu.kill()
        with self._qemu:
            shutil.rmtree(self._directory)

    def run(
        self, argv: list[str], *, user: str = "root", env: dict[str, str] | None = None, timeout: float = 600
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the repository's copy, as `root`, or as `tester` in a delegated cgroup.

        Its output, stdout and stderr in one, goes to our stdout as it comes, and is returned.
        Raises MachineFailed if the machine dies or the command takes too long.
        """
        assert self._qemu.stdin
        request = {"argv": argv, "user": user, "env": env or {}}
        self._qemu.stdin.write(json.dumps(request).encode() + b"\n")
        deadline = time.monotonic() + timeout
        output = b""
        while "exit" not in (message := self._receive(deadline)):
            data = base64.b64decode(message["out"])
            sys.stdout.write(data.decode(errors="replace"))
            output += data
        return subprocess.CompletedProcess(argv, message["exit"], output.decode(errors="replace"))

    def _receive(self, deadline: float) -> dict[str, Any]:
        assert self._qemu.stdout
        while b"\n" not in self._received:
            if not self._selector.select(deadline - time.monotonic()):
                raise MachineFailed(f"no answer in time; the console says:\n{self._console()}")
            data = os.read(self._qemu.stdout.fileno(), 1 << 16)
            if not data:
                raise MachineFailed(f"it went down; the console says:\n{self._console()}")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        message = json.loads(line)
        assert isinstance(message, dict)
        return message

    def _console(self) -> str:
        return (self._directory / "console.log").read_text(errors="replace")[-4000:]

    def _swap(self) -> Path:
        path = self._directory / "swap"
        with path.open("wb") as file:
            file.truncate(256 << 20)
        return path


def _root_image() -> tuple[Path, Path]:
    """(root filesystem, kernel), from the cache if they are there."""
    recipe = [SUITE, *PACKAGES, (HERE / "init.sh").read_text()]
    key = hashlib.sha256("\0".join(recipe).encode()).hexdigest()[:12]
    image, kernel = CACHE / f"root-{key}.ext4", CACHE / f"vmlinuz-{key}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not image.exists():
            with tempfile.TemporaryDirectory(dir=CACHE) as directory:
                _build(Path(directory), image, kernel)
    return image, kernel


def _build(directory: Path, image: Path, kernel: Path) -> None:
    options = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "locale", "man")]
    options += ["--dpkgopt=force-confold", "--variant=minbase", f"--include={','.join(PACKAGES)}"]
    options += ["--aptopt=Acquire::Languages none", "--quiet"]
    # There is no initial RAM disk to make.
    options += ['--setup-hook=mkdir -p "$1/etc/initramfs-tools"']
    options += ['--setup-hook=echo update_initramfs=no > "$1/etc/initramfs-tools/update-initramfs.conf"']
    options += [f"--customize-hook=upload {HERE}/init.sh /sbin/skerry-init"]
    options += ['--customize-hook=chmod 755 "$1/sbin/skerry-init"']
    _do("mmdebstrap", *options, SUITE, str(directory / "root.tar"))
    root = directory / "root"
    root.mkdir()
    # Without root everything belongs to us in there, which does no harm: its only users are root and tester.
    _do("tar", "--extract", f"--file={directory}/root.tar", f"--directory={root}", "--exclude=./dev/*")
    _do("mke2fs", "-q", "-t", "ext4", "-d", str(root), str(directory / "root.ext4"), "1G")
    next((root / "boot").glob("vmlinuz-*")).rename(kernel)
    (directory / "root.ext4").rename(image)


def _repository_image(directory: Path) -> Path:
    staging, image = directory / "staging", directory / "repository.ext4"
    packages = sysconfig.get_paths()["purelib"]
    shutil.copytree(packages, staging / "site", ignore=shutil.ignore_patterns(*NOT_NEEDED_INSIDE))
    for name in ("src", "scripts", "tests"):
        shutil.copytree(REPOSITORY / name, staging / "repo" / name)
    shutil.copy(REPOSITORY / "pyproject.toml", staging / "repo")
    shutil.copy(HERE / "agent.py", staging)
    staging.chmod(0o755)
    (staging / "repo").chmod(0o777)
    _do("mke2fs", "-q", "-t", "ext4", "-d", str(staging), str(image), "8G")
    shutil.rmtree(staging)
    return image


def _do(*argv: str) -> None:
    done = subprocess.run(argv, env=os.environ | {"PATH": _path()}, capture_output=True, text=True)
    if done.returncode:
        raise MachineFailed(f"{argv[0]} failed:\n{done.stdout}{done.stderr}")


def _path() -> str:
    """Where to look for programs; plain users often lack the last two, in which mke2fs is."""
    return os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
