"""apt inside an environment: with the sources and keys of this machine, and with a place where it may write.

It finds packages and fetches them. It cannot install them: the root is read-only, and nobody inside is root.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import shutil
import stat
from pathlib import Path

from skerry.egress.package_tools import FOLDER, PROXY, ToolSettings, host_settings, run_tool, tool_output

_PLACES = (
    *("SOURCES", "Dir::Etc::sourcelist/f", "PARTS", "Dir::Etc::sourceparts/d"),
    *("TRUSTED", "Dir::Etc::trusted/f", "KEYS", "Dir::Etc::trustedparts/d"),
    *(
        "HTTP",
        "Acquire::http::Proxy",
        "HTTPS",
        "Acquire::https::Proxy",
        "AUTHORITIES",
        "Acquire::https::CAInfo/f",
    ),
)
_URL = re.compile(r"(?<![\w=])[a-z][a-z+]*:\S+")
_SIGNED_BY = re.compile(r"(?<=signed-by)(\s*[:=]\s*)(/[^\s\]]*)", re.IGNORECASE)
_SETTINGS = f"""\
Dir::Etc::parts "/dev/null";
Dir::Etc::sourcelist "/dev/null";
Dir::Etc::sourceparts "{FOLDER}/apt/sources";
Dir::Etc::trusted "/dev/null";
Dir::Etc::trustedparts "{FOLDER}/apt/keys";
Dir::State "/workspace/apt";
Dir::Cache "/workspace/apt";
Debug::NoLocking "true"; // else what is fetched could only be fetched by root
"""


def ask_apt(preset: str) -> ToolSettings | None:
    """Raises PlatformError."""
    if shutil.which("apt-get") is None:
        return None
    found = host_settings()
    for url in re.findall(
        r"^'([^']+)'", tool_output(preset, "apt-get", "update", "--print-uris"), re.MULTILINE
    ):
        if place := _web(found, url):
            found.reach.append(place)
    told = shlex.split(run_tool("apt-config", "shell", *_PLACES).stdout)
    places = dict(one.split("=", 1) for one in told)
    if places.get("HTTP") or places.get("HTTPS"):
        found.note(PROXY)
    if places.get("AUTHORITIES"):
        found.note("apt's own certificate authorities stay here; inside, those of the image count")
    _hand_on(found, places)
    found.note("apt cannot install on a read-only root: what it must install belongs into an image")
    return found


def _hand_on(found: ToolSettings, places: dict[str, str]) -> None:
    """Sources, their keys, and settings that name both."""
    files = [Path(places.get("SOURCES", "/dev/null"))]
    for kind in ("list", "sources"):
        files += sorted(Path(places.get("PARTS", "/dev/null")).glob(f"*.{kind}"))
    everybodys = False
    for file in files:
        lines = _read(file).decode(errors="replace").splitlines()
        text = "\n".join(line.rstrip() for line in lines if not line.lstrip().startswith("#"))
        parted = "\n\n" if file.suffix == ".sources" else "\n"
        entries = [kept for entry in text.split(parted) if (kept := _entry(found, entry))]
        everybodys = everybodys or not all(map(_SIGNED_BY.search, entries))
        found.files.append((f"{FOLDER}/apt/sources/{file.name}", f"{parted.join(entries)}\n".encode()))
    if everybodys:
        trusted = [Path(places.get("TRUSTED", "/dev/null"))]
        for kind in ("asc", "gpg"):
            trusted += sorted(Path(places.get("KEYS", "/dev/null")).glob(f"*.{kind}"))
        found.files += [(f"{FOLDER}/apt/keys/{file.name}", key) for file in trusted if (key := _read(file))]
    found.files.append((f"{FOLDER}/apt/apt.conf", _SETTINGS.encode()))
    found.put(APT_CONFIG=f"{FOLDER}/apt/apt.conf")


def _entry(found: ToolSettings, entry: str) -> str:
    """A line or a stanza of sources as environments may have it; "" if it is of no use to them."""
    urls = {url: _web(found, url) for url in _URL.findall(entry)}
    if not urls or not all(urls.values()):
        return ""
    for url, kept in urls.items():
        entry = entry.replace(url, f"mirror+{kept}" if url.startswith("mirror") else kept)
    return _SIGNED_BY.sub(
        lambda one: one[1] + ",".join(_key(found, path) for path in one[2].split(",")), entry
    )


def _web(found: ToolSettings, url: str) -> str:
    if url.startswith(("mirror+http", "mirror://")):
        found.note("apt's mirror list: the mirrors that it names must be allowed as well")
        url = url.removeprefix("mirror+").replace("mirror://", "http://", 1)
    return found.web(url, "apt's sources")


def _key(found: ToolSettings, path: str) -> str:
    """Where a file of keys is inside; as it is, what is none."""
    if not (content := _read(Path(path))):
        return path
    kind = "asc" if content.startswith(b"-----BEGIN") else "gpg"
    inside = f"{FOLDER}/apt/{hashlib.sha256(content).hexdigest()[:12]}.{kind}"
    found.files.append((inside, content))
    return inside


def _read(path: Path) -> bytes:
    """A file that everybody may read; b"" for anything else."""
    try:
        mode = path.stat().st_mode
        return path.read_bytes() if stat.S_ISREG(mode) and mode & stat.S_IROTH else b""
    except OSError:
        return b""
