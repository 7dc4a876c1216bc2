"""Where this machine's own package tools get packages from, as the tools themselves tell.

Each `ask_*` runs one tool, which knows its files, its variables and its built-in defaults better than we do. None
means that the tool is not here. URLs lose their credentials: what the machine may use is not for environments.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import sys
from urllib.parse import urlsplit

from skerry.egress.package_tools import FOLDER, PROXY, ToolSettings, host_settings, run_tool, tool_output
from skerry.errors import PlatformError

GOFLAGS = "-modcacherw"
"""Else Go's cache of modules is read-only, and nobody can remove it."""

_DEFAULT_INDEX = (
    "from pip._internal.models.index import PyPI as index; print(index.simple_url, index.file_storage_domain)"
)
_NPM = re.compile(r"([^;\s]\S*) = (.+)")
_INSTEAD = re.compile(r"url\.(.+)\.insteadof", re.DOTALL)
_SCP = re.compile(r"(?:[^@/:\s]+@)?([^@/:\s]+):(?!//)")


def ask_pip(preset: str) -> ToolSettings | None:
    """Raises PlatformError."""
    candidates = dict.fromkeys(filter(None, (shutil.which("python3"), sys.executable)))
    python = next((one for one in candidates if run_tool(one, "-c", "import pip").returncode == 0), None)
    if python is None:
        return None
    found = host_settings("PIP_CERT")
    settings: dict[str, str] = {}
    told = [
        line.partition("=")
        for line in tool_output(preset, python, "-m", "pip", "config", "list").splitlines()
    ]
    for section in ("global.", "install.", ":env:."):  # the later ones win
        for key, _, value in told:
            if key.startswith(section):
                settings[key.removeprefix(section)] = str(ast.literal_eval(value))
    default = run_tool(python, "-c", _DEFAULT_INDEX).stdout.split()
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
        found.note(PROXY)
    return found


def ask_npm(preset: str) -> ToolSettings | None:
    """Raises PlatformError."""
    if shutil.which("npm") is None:
        return None
    found = host_settings("NODE_EXTRA_CA_CERTS")
    settings: dict[str, object] = {}
    # As text, as the JSON leaves out the registries of scopes.
    for line in tool_output(preset, "npm", "config", "ls", "-l", "--logs-max=0").splitlines():
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
        found.note(PROXY)
    return found


def ask_go(preset: str) -> ToolSettings | None:
    """Raises PlatformError."""
    if shutil.which("go") is None:
        return None
    found = host_settings()
    try:
        settings: dict[str, str] = json.loads(tool_output(preset, "go", "env", "-json"))
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
    # But for those that name files of this machine.
    if flags := [flag for flag in settings.get("GOFLAGS", "").split() if "/" not in flag]:
        found.put(GOFLAGS=" ".join(dict.fromkeys((*flags, *GOFLAGS.split()))))
    return found


def ask_git(preset: str) -> ToolSettings | None:
    """Raises PlatformError."""
    if shutil.which("git") is None:
        return None
    found = host_settings("GIT_SSL_CAINFO")
    count = 0
    for record in tool_output(preset, "git", "config", "--list", "-z").split("\0"):
        key, _, value = record.partition("\n")
        if key == "http.sslcainfo":
            found.authorities.setdefault("GIT_SSL_CAINFO", value)
        elif key == "http.proxy" and value:
            found.note(PROXY)
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


def _git_base(found: ToolSettings, base: str) -> tuple[str, str]:
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
