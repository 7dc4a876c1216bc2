"""Where this machine's own package tools get packages from, as the tools themselves tell.

Each `ask_*` runs one tool, which knows its files, its variables and its built-in defaults better than we do. None
means that the tool is not here. URLs lose their credentials: what the machine may use is not for environments.
"""

from __future__ import annotations

import ast
import ipaddress
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from urllib.parse import urlsplit, urlunsplit

from skerry.errors import PlatformError

FOLDER = "/tmp/.skerry"  # noqa: S108 - inside, where nobody else is
"""Where the files of presets are, inside."""
GOFLAGS = "-modcacherw"
"""Else Go's cache of modules is read-only, and nobody can remove it."""
TIMEOUT = 20.0
"""Seconds for one question to one tool."""

_DEFAULT_INDEX = (
    "from pip._internal.models.index import PyPI as index; print(index.simple_url, index.file_storage_domain)"
)
_PROXY = "this machine goes through a proxy; environments do not, as everything could be reached through it"
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_PATH = re.compile(r"(?<![\w:/.])/[\w.@+-]+(?:/[\w.@+-]+)*")
_NPM = re.compile(r"([^;\s]\S*) = (.+)")
_INSTEAD = re.compile(r"url\.(.+)\.insteadof", re.DOTALL)
_SCP = re.compile(r"(?:[^@/:\s]+@)?([^@/:\s]+):(?!//)")


@dataclass(slots=True)
class Found:
    """What one tool told."""

    variables: dict[str, str] = field(default_factory=dict)
    reach: list[str] = field(default_factory=list)
    """URLs that must be reached and that no variable names."""
    beside: dict[str, str] = field(default_factory=dict)
    """The URL of a registry's files, by the host of the registry."""
    authorities: dict[str, str] = field(default_factory=dict)
    """Files of certificate authorities on this machine, by the variable that is to name them inside."""
    files: list[tuple[str, bytes]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def web(self, url: str, what: str) -> str:
        """A URL as environments may have it; "", with a note, if it is of no use to them."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError:
            self.note(f"{what}: something that is no URL is left out")
            return ""
        if parts.scheme not in ("http", "https") or not host:
            self.note(f"{what}: a place that is not on the web is left out")
            return ""
        if _is_loopback(host):
            self.note(f"{what}: a server on this machine's loopback is left out, no environment can reach it")
            return ""
        if "@" in parts.netloc or parts.query:
            self.note(
                f"{what}: the credentials for {host} stay here; to hand them on, write the URL to presets.toml"
            )
        shown = f"[{host}]" if ":" in host else host
        return urlunsplit((parts.scheme, shown if port is None else f"{shown}:{port}", parts.path, "", ""))

    def webs(self, urls: str, what: str) -> str:
        return " ".join(filter(None, (self.web(url, what) for url in urls.split())))

    def put(self, **variables: str) -> None:
        """Variables that have a value."""
        self.variables |= {name: value for name, value in variables.items() if value}


def ask_pip(preset: str) -> Found | None:
    """Raises PlatformError."""
    candidates = dict.fromkeys(filter(None, (shutil.which("python3"), sys.executable)))
    python = next((one for one in candidates if _try(one, "-c", "import pip").returncode == 0), None)
    if python is None:
        return None
    found = _begin("PIP_CERT")
    settings: dict[str, str] = {}
    told = [line.partition("=") for line in _ask(preset, python, "-m", "pip", "config", "list").splitlines()]
    for section in ("global.", "install.", ":env:."):  # the later ones win
        for key, _, value in told:
            if key.startswith(section):
                settings[key.removeprefix(section)] = str(ast.literal_eval(value))
    default = _try(python, "-c", _DEFAULT_INDEX).stdout.split()
    if len(default) == 2:
        found.beside[urlsplit(default[0]).hostname or ""] = f"https://{default[1]}"
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        found.put(PIP_NO_INDEX="1")
    else:
        index = settings.get("index-url") or (default[0] if default else "")
        found.put(
            PIP_INDEX_URL=found.webs(index, "pip's index"),
            PIP_EXTRA_INDEX_URL=found.webs(settings.get("extra-index-url", ""), "pip's further indexes"),
        )
    found.put(
        PIP_FIND_LINKS=found.webs(settings.get("find-links", ""), "pip's find-links"),
        PIP_TRUSTED_HOST=" ".join(settings.get("trusted-host", "").split()),
    )
    if settings.get("cert"):
        found.authorities["PIP_CERT"] = settings["cert"]
    if settings.get("proxy"):
        found.note(_PROXY)
    return found


def ask_npm(preset: str) -> Found | None:
    """Raises PlatformError."""
    if shutil.which("npm") is None:
        return None
    found = _begin("NODE_EXTRA_CA_CERTS")
    settings: dict[str, object] = {}
    # As text, as the JSON leaves out the registries of scopes.
    for line in _ask(preset, "npm", "config", "ls", "-l", "--logs-max=0").splitlines():
        if one := _NPM.fullmatch(line):
            try:
                settings[one[1]] = json.loads(one[2])
            except ValueError:  # an object over several lines, or a value that npm does not show
                continue
    found.put(NPM_CONFIG_REGISTRY=found.web(str(settings.get("registry") or ""), "npm's registry"))
    scopes = ""
    for name, value in settings.items():
        if name.startswith("@") and name.endswith(":registry"):
            scope = name.removesuffix(":registry")
            if url := found.web(str(value), f"npm's registry for {scope}"):
                found.reach.append(url)
                scopes += f"{name}={url}\n"
    if scopes:
        found.put(NPM_CONFIG_GLOBALCONFIG=f"{FOLDER}/npmrc")
        found.files.append((f"{FOLDER}/npmrc", scopes.encode()))
    if settings.get("cafile"):
        found.authorities["NPM_CONFIG_CAFILE"] = str(settings["cafile"])
    if settings.get("strict-ssl") is False:
        found.put(NPM_CONFIG_STRICT_SSL="false")
    if settings.get("proxy") or settings.get("https-proxy"):
        found.note(_PROXY)
    return found


def ask_go(preset: str) -> Found | None:
    """Raises PlatformError."""
    if shutil.which("go") is None:
        return None
    found = _begin()
    try:
        settings: dict[str, str] = json.loads(_ask(preset, "go", "env", "-json"))
    except ValueError as error:
        raise PlatformError(f"{preset}: `go env -json` does not answer in JSON") from error
    kept: list[str] = []
    # An entry together with what follows it: after a comma the next is asked for what is missing, after a bar always.
    for proxy, then in re.findall(r"([^,|]+)([,|]?)", settings.get("GOPROXY", "")):
        url = proxy if proxy in ("direct", "off") else found.web(proxy, "Go's proxy")
        kept += [f"{url}{then}"] if url else []
        if proxy == "direct":
            found.note(
                "Go asks a module's own host for what no proxy has; such hosts must be allowed as well"
            )
    name, _, url = settings.get("GOSUMDB", "").partition(" ")
    if url:
        url = found.web(url, "Go's checksum database")
    found.put(GOPROXY="".join(kept).rstrip(",|"), GOSUMDB=f"{name} {url}".strip())
    for variable in ("GOPRIVATE", "GONOPROXY", "GONOSUMDB", "GOINSECURE"):
        found.put(**{variable: settings.get(variable, "")})
    flags = [
        flag for flag in settings.get("GOFLAGS", "").split() if "/" not in flag
    ]  # no files of this machine
    if flags:
        found.put(GOFLAGS=" ".join(dict.fromkeys((*flags, *GOFLAGS.split()))))
    return found


def ask_git(preset: str) -> Found | None:
    """Raises PlatformError."""
    if shutil.which("git") is None:
        return None
    found = _begin("GIT_SSL_CAINFO")
    count = 0
    for record in _ask(preset, "git", "config", "--list", "-z").split("\0"):
        key, _, value = record.partition("\n")
        if key == "http.sslcainfo":
            found.authorities.setdefault("GIT_SSL_CAINFO", value)
        elif key == "http.proxy" and value:
            found.note(_PROXY)
        elif instead := _INSTEAD.fullmatch(key):
            base, reach = _git_base(found, instead[1])
            if base:
                found.reach.append(reach)
                found.variables |= {
                    f"GIT_CONFIG_KEY_{count}": f"url.{base}.insteadOf",
                    f"GIT_CONFIG_VALUE_{count}": _bare(value),
                }
                count += 1
    if count:
        found.put(GIT_CONFIG_COUNT=str(count))
    return found


def ask_apt(preset: str) -> Found | None:
    """Raises PlatformError."""
    if shutil.which("apt-get") is None:
        return None
    found = _begin()
    for url in re.findall(r"^'([^']+)'", _ask(preset, "apt-get", "update", "--print-uris"), re.MULTILINE):
        if url.startswith(("mirror+http", "mirror://")):
            found.note("apt's mirror list: the mirrors that it names must be allowed as well")
            url = url.removeprefix("mirror+").replace("mirror://", "http://", 1)
        if place := found.web(url, "apt's sources"):
            found.reach.append(place)
    if _try("apt-config", "shell", "A", "Acquire::http::Proxy", "B", "Acquire::https::Proxy").stdout.strip():
        found.note(_PROXY)
    found.note("the root of an environment is read-only: what must be installed by apt belongs into an image")
    return found


def _begin(*own: str) -> Found:
    """What holds for every tool: files of authorities, and proxies, that variables of this machine name."""
    found = Found()
    for name in (*own, "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        if path := os.environ.get(name):
            found.authorities[name] = path
    if any(os.environ.get(name) for name in _PROXIES):
        found.note(_PROXY)
    return found


def _git_base(found: Found, base: str) -> tuple[str, str]:
    """What git is to write instead, and the URL to be reached; "" twice if it is of no use."""
    scp = _SCP.match(base)
    if scp is None and not base.startswith("ssh://"):
        url = found.web(base, "git's insteadOf")
        return url, url
    found.note("git's insteadOf: keys for SSH stay here")
    return (base, f"ssh://{scp[1]}") if scp else (_bare(base), _bare(base))


def _bare(url: str) -> str:
    """Without a password; of SSH the user stays, who is a part of the address there."""
    if url.startswith("ssh://"):
        return re.sub(r"//([^/@:\s]*):[^/\s]*@", r"//\1@", url)
    return re.sub(r"//[^/\s]*@", "//", url)


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _try(*argv: str) -> subprocess.CompletedProcess[str]:
    """Raises nothing: what cannot be run, or takes too long, has failed."""
    try:
        process = subprocess.Popen(
            argv,
            cwd="/",  # no project's settings
            env={**os.environ, "LC_ALL": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return subprocess.CompletedProcess(argv, -1, "", type(error).__name__)
    with process:
        try:
            stdout, stderr = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            # With what it started, which would keep its output open.
            os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = process.communicate()
    return subprocess.CompletedProcess(argv, process.returncode, stdout, stderr)


def _ask(preset: str, *argv: str) -> str:
    """What a tool answers. Raises PlatformError, which names the files that the tool complains about.

    It says nothing else of the complaint: tools quote lines, and lines may hold passwords.
    """
    done = _try(*argv)
    if done.returncode == 0:
        return done.stdout
    command = " ".join(("python3" if argv[0].startswith("/") else argv[0], *argv[1:]))
    files = dict.fromkeys(_PATH.findall(re.sub(r"\w+://\S*", "", done.stderr)))
    about = f": see {', '.join(list(files)[:3])}" if files else ""
    raise PlatformError(
        f"{preset}: `{command}` fails on this machine{about}",
        hint="run it as the daemon's user to see why",
    )
