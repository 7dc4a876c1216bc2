"""Checks what an image build needs of this machine, and reports everything missing at once."""

from __future__ import annotations

import os
import pwd
import shutil
from collections.abc import Iterator
from pathlib import Path

from skerry.errors import ImageBuildFailed
from skerry.images import apt
from skerry.policy import format_size

SPACE = 1 << 30
"""Bytes: the smallest of images takes a fifth of it, twice while it is built."""
KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")

Missing = tuple[str, str]
"""(what is missing, advice)."""


def check(suite: str, folder: Path) -> str:
    """The path of mmdebstrap. Raises ImageBuildFailed unless an image of a suite can be built below a folder."""
    missing = [*_programs(), *_ids(), *_keys(suite), *_space(folder)]
    program = shutil.which("mmdebstrap")
    if missing or program is None:
        raise ImageBuildFailed(
            f"an image cannot be built here: {'; '.join(what for what, _ in missing)}",
            hint="; ".join(advice for _, advice in missing),
        )
    return program


def _programs() -> Iterator[Missing]:
    needed = {"mmdebstrap": "mmdebstrap", "apt-config": "apt"}
    needed |= {} if os.geteuid() == 0 else {"newuidmap": "uidmap"}
    for program, package in needed.items():
        if shutil.which(program) is None:
            yield f"{program} is not installed", f"apt install {package}"


def _ids() -> Iterator[Missing]:
    """Without root, the image's users need subordinate ids."""
    if os.geteuid() == 0:
        return
    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        user = str(os.geteuid())
    for path, option in ((Path("/etc/subuid"), "subuids"), (Path("/etc/subgid"), "subgids")):
        rows = path.read_text().splitlines() if path.exists() else []
        if not any(row.split(":")[0] in (user, str(os.geteuid())) for row in rows):
            yield (
                f"{user} has no ids in {path}",
                f"usermod --add-{option} 100000-165535 {user}, or build as root, or import an archive",
            )


def _keys(suite: str) -> Iterator[Missing]:
    """A host that does not get this suite itself has no reason to know who signs it."""
    found = apt.sources(suite)
    if not found.lines and not found.stanzas and not KEYS.exists():
        yield f"the keys of Debian's {suite} are not installed", "apt install debian-archive-keyring"


def _space(folder: Path) -> Iterator[Missing]:
    free = shutil.disk_usage(folder).free
    if free < SPACE:
        yield (
            f"only {format_size(free)} are free at {folder}",
            f"make {format_size(SPACE)} free, or set SKERRY_HOME to a directory elsewhere",
        )
