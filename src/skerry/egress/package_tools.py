"""Runs this machine's package tools, and collects their settings for environments."""

from __future__ import annotations

import ipaddress
import os
import re
import signal
import subprocess
from dataclasses import dataclass, field
from urllib.parse import urlsplit, urlunsplit

from skerry.errors import PlatformError

FOLDER = "/tmp/.skerry"  # noqa: S108 - inside, where nobody else is
"""Directory of presets' files inside the environment."""
TIMEOUT = 20.0
"""Seconds for one run of a tool."""
PROXY = "this machine goes through a proxy; environments do not, as everything could be reached through it"
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_PATH = re.compile(r"(?<![\w:/.])/[\w.@+-]+(?:/[\w.@+-]+)*")


@dataclass(slots=True)
class ToolSettings:
    """Settings of one tool."""

    variables: dict[str, str] = field(default_factory=dict)
    reach: list[str] = field(default_factory=list)
    """Required URLs that no variable names."""
    beside: dict[str, str] = field(default_factory=dict)
    """The URL of a registry's files, by the host of the registry."""
    authorities: dict[str, str] = field(default_factory=dict)
    """This machine's CA files, by the variable that names them inside."""
    files: list[tuple[str, bytes]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def web(self, url: str, what: str) -> str:
        """The URL without credentials; "" and a note if environments cannot use it."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError:
            self.note(f"{what}: an invalid URL is left out")
            return ""
        if parts.scheme not in ("http", "https") or not host:
            self.note(f"{what}: a URL that is neither http nor https is left out")
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
        """Set the variables that have a value."""
        self.variables |= {name: value for name, value in variables.items() if value}


def host_settings(*own: str) -> ToolSettings:
    """CA files and proxies that this machine's environment variables name; `own` are the tool's variables."""
    found = ToolSettings()
    for name in (*own, "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        if path := os.environ.get(name):
            found.authorities[name] = path
    if any(os.environ.get(name) for name in _PROXIES):
        found.note(PROXY)
    return found


def run_tool(*argv: str) -> subprocess.CompletedProcess[str]:
    """Run a tool. A tool that cannot start, or exceeds TIMEOUT, gets a nonzero return code."""
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
            # The whole process group: its children would keep the pipes open.
            os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = process.communicate()
    return subprocess.CompletedProcess(argv, process.returncode, stdout, stderr)


def tool_output(preset: str, *argv: str) -> str:
    """The stdout of a tool. Raises PlatformError, naming the files that its stderr mentions.

    Never quotes stderr: it may contain passwords from those files.
    """
    done = run_tool(*argv)
    if done.returncode == 0:
        return done.stdout
    command = " ".join(("python3" if argv[0].startswith("/") else argv[0], *argv[1:]))
    files = dict.fromkeys(_PATH.findall(re.sub(r"\w+://\S*", "", done.stderr)))
    about = f": see {', '.join(list(files)[:3])}" if files else ""
    raise PlatformError(
        f"{preset}: `{command}` fails on this machine{about}",
        hint="run it as the daemon's user to see why",
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
