"""How this host gets Debian's packages, so that a build gets them the same way: mirrors, keys, proxies."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

_NOT_TRANSPORT = ("Changelogs", "CompressionTypes", "GzipIndexes", "IndexTargets", "Languages", "cdrom")


@dataclass(frozen=True, slots=True)
class Sources:
    """Entries for a suite in apt's two notations; either may be empty."""

    lines: str
    stanzas: str


def sources(suite: str, folder: Path = Path("/etc/apt")) -> Sources:
    """The host's own entries that serve a suite, its updates and its security fixes, from `main` archives.

    Other archives that the host uses have no place in an image.
    """
    wanted = {suite, f"{suite}-updates", f"{suite}-security", f"{suite}/updates"}
    lines: list[str] = []
    for path in (folder / "sources.list", *sorted(folder.glob("sources.list.d/*.list"))):
        lines += [line for line in _read(path).splitlines() if _line_serves(line, wanted)]
    stanzas: list[str] = []
    for path in (folder / "sources.list", *sorted(folder.glob("sources.list.d/*.sources"))):
        for stanza in _stanzas(_read(path)):
            kept = [name for name in stanza.get("suites", "").split() if name in wanted]
            if kept and _stanza_serves(stanza):
                fields = {**stanza, "types": "deb", "suites": " ".join(kept)}
                stanzas.append("".join(f"{key.title()}: {value}\n" for key, value in fields.items()))
    return Sources("".join(f"{line}\n" for line in lines), "\n".join(stanzas))


def settings() -> str:
    """The host's settings of apt's transports (proxies, certificates, retries), as a configuration file."""
    dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=True).stdout
    other = tuple(f"Acquire::{name}" for name in _NOT_TRANSPORT)
    lines = [x for x in dump.splitlines() if x.startswith("Acquire::") and not x.startswith(other)]
    # Passwords for mirrors stay where they are on the host.
    lines += [
        'Dir::Etc::netrc "/etc/apt/auth.conf";',
        'Dir::Etc::netrcparts "/etc/apt/auth.conf.d";',
    ]
    return "\n".join([*lines, ""])


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _has_main(components: str) -> bool:
    return "main" in components.split()


def _line_serves(line: str, wanted: set[str]) -> bool:
    """True if this machine can use `deb [options] uri suite components`."""
    kind, _, rest = line.strip().partition(" ")
    if kind != "deb":
        return False
    rest = rest.strip()
    if rest.startswith("["):
        rest = rest.partition("]")[2]
    parts = rest.partition("#")[0].split()
    return len(parts) > 2 and parts[1] in wanted and _has_main(" ".join(parts[2:]))


def _stanza_serves(stanza: dict[str, str]) -> bool:
    enabled = stanza.get("enabled", "yes").lower() not in ("no", "false", "0", "off")
    return enabled and "deb" in stanza.get("types", "").split() and _has_main(stanza.get("components", ""))


def _stanzas(text: str) -> list[dict[str, str]]:
    """The stanzas of a deb822 file: fields by their names in lower case, values with their further lines."""
    found: list[dict[str, str]] = [{}]
    last = ""
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        if not line.strip():
            found.append({})
        elif line[0] in " \t":
            if last in found[-1]:
                found[-1][last] += f"\n{line}"
        else:
            name, _, value = line.partition(":")
            last = name.strip().lower()
            found[-1][last] = value.strip()
    return [stanza for stanza in found if stanza]
