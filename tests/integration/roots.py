"""The smallest root file systems, for images."""

from __future__ import annotations

import io
import subprocess
import tarfile

FOLDERS = ("bin", "dev", "etc", "proc", "run", "tmp", "usr", "usr/bin", "workspace")


def rootfs(**programs: str) -> bytes:
    """The archive of a root file system with these programs (name: path here) and the libraries that they need."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", dereference=True) as tar:
        for folder in FOLDERS:
            info = tarfile.TarInfo(folder)
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(info)
        libraries: set[str] = set()
        for name, path in programs.items():
            tar.add(path, f"bin/{name}")
            listed = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
            libraries |= {word for word in listed.split() if word.startswith("/")}
        for library in sorted(libraries):
            tar.add(library, library.lstrip("/"))
    return packed.getvalue()
