"""Presets: what must be allowed and set so that a package tool works inside as it does on this machine.

No registry is named here. The machine's own tools say where packages come from (`registries.py`, `debian.py`), and
an operator adds to that, or replaces it, in `presets.toml` in the daemon's home:

    [python-packages]
    allow = ["files.example.test"]        # rules, beside those that follow from the URLs
    ca = "/etc/ssl/mirror.pem"            # a file on this machine, for all tools of the preset
    [python-packages.variables]           # instead of what was found; "" takes one away
    PIP_INDEX_URL = "https://mirror.example.test/simple"
"""

from __future__ import annotations

import copy
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from skerry.egress.debian import ask_apt
from skerry.egress.package_tools import FOLDER, ToolSettings
from skerry.egress.registries import GOFLAGS, ask_git, ask_go, ask_npm, ask_pip
from skerry.egress.rules import Rule
from skerry.errors import InvalidRequest, PlatformError, SkerryError
from skerry.settings import Home
from skerry.tables import read

FILE = "presets.toml"
FRESH = 300.0
"""Seconds for which an answer holds; a change of presets.toml ends it at once."""
FRESH_FAILURE = 10.0
AUTHORITIES_MAX = 4 << 20

_ASK: dict[str, tuple[str, Callable[[str], ToolSettings | None]]] = {
    "debian-packages": ("apt-get", ask_apt),
    "git-hosting": ("git", ask_git),
    "go-modules": ("go", ask_go),
    "npm-packages": ("npm", ask_npm),
    "python-packages": ("pip", ask_pip),
}
_AUTHORITIES = (
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "NODE_EXTRA_CA_CERTS",
    "PIP_CERT",
    "GIT_SSL_CAINFO",
)
_PORTS = {"http": 80, "https": 443, "ssh": 22}
_URL = re.compile(r"[a-z]+://[^\s,|]+")
_CERTIFICATE = re.compile(
    rb"-----BEGIN (TRUSTED )?CERTIFICATE-----.+?-----END \1?CERTIFICATE-----\n?", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Preset:
    """What one preset allows, sets and brings along."""

    name: str
    rules: list[str]
    """As `Rule.parse` takes them."""
    variables: dict[str, str]
    files: list[tuple[str, bytes]]
    """(path inside, content). The same path has the same content in every preset."""
    notes: list[str] = field(default_factory=list)
    """What was left out and why, for people."""


@dataclass(frozen=True, slots=True)
class _Override:
    """What an operator adds to a preset, or replaces."""

    allow: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    ca: str = ""


def install_variables(workspace: str, path: str) -> dict[str, str]:
    """Variables with which packages are installed in the workspace, and found there by the next command.

    They are for every environment, with its workspace as HOME and its image's PATH as `path`. What is not here does
    the right thing by itself: pip installs for the user when the root is read-only (PIP_USER would break virtual
    environments), Go and all caches follow HOME.
    """
    return {
        # Programs of pip and of `npm install -g`, then those of `go install`. GOBIN would forbid to build for others.
        "PATH": f"{workspace}/.local/bin:{workspace}/go/bin:{path}",
        # Distributions forbid pip beside their own packages, even where it cannot touch them.
        "PIP_BREAK_SYSTEM_PACKAGES": "1",
        # Else `npm install -g` writes to the root.
        "NPM_CONFIG_PREFIX": f"{workspace}/.local",
        "GOFLAGS": GOFLAGS,
    }


def names() -> list[str]:
    return list(_ASK)


_now = time.monotonic
_answers: dict[tuple[str, str], tuple[float, int, Preset | SkerryError]] = {}
_asking = {name: threading.Lock() for name in _ASK}


def preset(name: str, home: Home) -> Preset:
    """A preset, as this machine is set up. The first call runs programs: make it in a thread.

    Raises InvalidRequest for a name that is not known, PlatformError when nothing can be found out.
    """
    if name not in _ASK:
        raise InvalidRequest(f"unknown preset {name!r}", hint=f"known: {', '.join(names())}")
    key = (name, home.path)
    with _asking[name]:
        until, stamp, answer = _answers.get(key, (0.0, 0, None))
        now = _stamp(home)
        if answer is None or stamp != now or _now() >= until:
            try:
                answer = _make(name, _overrides(name, home))
            except SkerryError as error:
                answer = error
            fresh = FRESH if isinstance(answer, Preset) else FRESH_FAILURE
            _answers[key] = (_now() + fresh, now, answer)
    if isinstance(answer, Preset):
        return copy.deepcopy(answer)
    raise type(answer)(answer.message, hint=answer.hint)


def _make(name: str, overrides: _Override) -> Preset:
    tool, ask = _ASK[name]
    found = ask(name)
    missing = f"`{tool}` is not installed here" if found is None else f"`{tool}` names no place to reach"
    found = found or ToolSettings()
    variables = {**found.variables, **overrides.variables}
    variables = {key: value for key, value in variables.items() if value}
    urls = [*found.reach, *_urls(variables)]
    hosts = [urlsplit(url).hostname or "" for url in urls]
    urls += [found.beside[host] for host in hosts if host in found.beside]
    rules = dict.fromkeys([*map(_rule, urls), *overrides.allow])
    for rule in rules:
        try:
            Rule.parse(rule)
        except InvalidRequest as error:
            raise PlatformError(f"{name}: {error.message}", hint=error.hint) from error
    if not rules:
        raise PlatformError(
            f"{name}: {missing} and {FILE} names no host", hint=f"add [{name}] with allow = [...] to {FILE}"
        )
    files = dict(found.files)
    authorities = dict.fromkeys(_AUTHORITIES, overrides.ca) if overrides.ca else found.authorities
    for variable, path in authorities.items():
        if variable not in overrides.variables:
            content = _certificates(name, variable, path)
            inside = f"{FOLDER}/ca-{hashlib.sha256(content).hexdigest()[:12]}.pem"
            files[inside] = content
            variables[variable] = inside
    return Preset(name, list(rules), variables, list(files.items()), found.notes)


def _urls(variables: dict[str, str]) -> list[str]:
    """The URLs that variables name. Git's are not among them: one half of those is what to write instead of."""
    found = []
    for name, value in variables.items():
        if name == "GOSUMDB" and "://" not in value and value != "off":
            found.append(f"https://{value.partition('+')[0]}")
        elif not name.startswith("GIT_CONFIG_"):
            found += _URL.findall(value)
    return found


def _rule(url: str) -> str:
    parts = urlsplit(url)
    host = parts.hostname or ""
    return f"{f'[{host}]' if ':' in host else host}:{parts.port or _PORTS.get(parts.scheme, 443)}"


def _certificates(name: str, variable: str, path: str) -> bytes:
    """The certificates of a file and nothing else of it, as a key may lie beside them. Raises PlatformError."""
    try:
        with open(path, "rb") as file:
            content = b"".join(found[0] for found in _CERTIFICATE.finditer(file.read(AUTHORITIES_MAX)))
    except OSError as error:
        raise PlatformError(
            f"{name}: cannot read {path}: {error.strerror}", hint=f"{variable} or {FILE} names it"
        ) from error
    if not content:
        raise PlatformError(f"{name}: no certificate is in {path}", hint=f"{variable} or {FILE} names it")
    return content


def _stamp(home: Home) -> int:
    try:
        return os.stat(f"{home.path}/{FILE}").st_mtime_ns
    except OSError:
        return 0


def _overrides(name: str, home: Home) -> _Override:
    """The operator's table for a preset. Raises PlatformError."""
    try:
        document = read(f"{home.path}/{FILE}", PlatformError)
        if document is None:
            return _Override()
        document.allow(names())
        table = document.table(name)
        table.allow(("allow", "variables", "ca"))
        return _Override(table.texts("allow"), table.mapping("variables"), table.text("ca"))
    except PlatformError as error:
        raise PlatformError(f"{name}: {error.message}", hint=error.hint) from error
