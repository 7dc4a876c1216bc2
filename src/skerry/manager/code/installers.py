"""Installers of packages: accepted requirements, command lines, and variables to find the packages.

Requirements that an installer would read as an option, path, URL or repository are refused before anything is started:
packages come only from the operator's registries.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from skerry.errors import InstallFailed
from skerry.guest.errors import printable

REQUIREMENTS_MAX = 100
REQUIREMENT_MAX = 250
"""Characters."""

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_VERSION = r"(?:===|==|~=|!=|<=|>=|<|>)\s*[A-Za-z0-9.*+!_-]+"
_PYTHON = re.compile(
    rf"(?P<name>{_NAME})\s*(?:\[\s*(?P<extras>{_NAME}(?:\s*,\s*{_NAME})*)\s*\])?\s*"
    rf"(?P<versions>{_VERSION}(?:\s*,\s*{_VERSION})*)?\s*(?:;\s*(?P<marker>.+))?"
)
_VALUE = r"""(?:[a-z_]+|"[A-Za-z0-9 ._+*-]*"|'[A-Za-z0-9 ._+*-]*')"""
_TERM = rf"[( ]*{_VALUE}\s*(?:===|==|~=|!=|<=|>=|<|>|\bin\b|\bnot in\b)\s*{_VALUE}[ )]*"
_MARKER = re.compile(rf"{_TERM}(?:\b(?:and|or)\b{_TERM})*")
_NPM = re.compile(
    r"(?P<name>(?:@[a-z0-9][a-z0-9._~-]*/)?[a-z0-9][a-z0-9._~-]*)"
    r"(?:@(?P<range>[A-Za-z0-9*^~<>=][A-Za-z0-9.*^~<>=|+ -]*))?"
)
_ARCHIVE = re.compile(r"\.(?:tgz|tar|tar\.gz|zip|whl)(?:@|$)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Installer:
    """`{place}` in its texts stands for the directory of the packages."""

    name: str
    preset: str
    """Network preset that it runs with."""
    command: tuple[str, ...]
    """Requirements follow."""
    variables: dict[str, str]
    """Variables with which packages are found; PATH is prepended."""
    folder: str
    """Directory in a workspace where packages are found without any variable."""
    unreachable: re.Pattern[str]
    """Matches its output if the registry failed."""
    _normal: Callable[[str], str | None]
    example: str
    beside: tuple[str, ...] = ()
    """What a program searches in its own directory, whatever the variables say."""

    def normalized(self, requirements: Iterable[str]) -> tuple[str, ...]:
        """The canonical form of the set. Raises InstallFailed."""
        return tuple(sorted({self._checked(text) for text in _counted(requirements)}))

    def merged(self, before: tuple[str, ...], requirements: Iterable[str]) -> tuple[str, ...]:
        """Both, as `normalized`; new requirements replace old ones of the same package. Raises InstallFailed."""
        new = self.normalized(requirements)
        names = {_named(text) for text in new}
        return tuple(sorted({*new, *(text for text in before if _named(text) not in names)}))

    def argv(self, place: str, requirements: tuple[str, ...]) -> list[str]:
        return [*(word.replace("{place}", place) for word in self.command), *requirements]

    def found_by(self, place: str, path: str) -> dict[str, str]:
        """Variables for a program to find the packages in `place`; `path` is its PATH so far."""
        found = {name: value.replace("{place}", place) for name, value in self.variables.items()}
        return {**found, "PATH": f"{found['PATH']}:{path}"}

    def _checked(self, text: str) -> str:
        if len(text) > REQUIREMENT_MAX:
            raise InstallFailed(f"a package's name and version have more than {REQUIREMENT_MAX} characters")
        # Single spaces, because runs of them make the patterns backtrack.
        normal = None if _ARCHIVE.search(text) else self._normal(" ".join(text.split()))
        if normal is None:
            raise InstallFailed(
                f"{printable(text)} is not a package that {self.name} can be asked for",
                hint=f"a name, with versions if need be: {self.example}; no options, paths or URLs",
            )
        return normal


def _named(normal: str) -> str:
    """The package that a requirement, as `normalized`, is for."""
    return re.split(r"(?<!^)[@\[=~!<> ]", normal, maxsplit=1)[0]


def _counted(requirements: Iterable[str]) -> list[str]:
    found = list(requirements)
    if len(found) > REQUIREMENTS_MAX:
        raise InstallFailed(f"{len(found)} packages are too many", hint=f"at most {REQUIREMENTS_MAX}")
    return found


def _python(text: str) -> str | None:
    found = _PYTHON.fullmatch(text)
    if found is None or not text.isascii():
        return None
    marker = found["marker"] or ""
    if marker and not _MARKER.fullmatch(marker):
        return None
    extras = ",".join(sorted(map(_plain, re.split(r"\s*,\s*", found["extras"])))) if found["extras"] else ""
    versions = re.sub(r"\s", "", found["versions"] or "")
    return "".join(
        (
            _plain(found["name"]),
            f"[{extras}]" if extras else "",
            ",".join(sorted(versions.split(","))),
            f" ; {' '.join(marker.split())}" if marker else "",
        )
    )


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _npm(text: str) -> str | None:
    found = _NPM.fullmatch(text)
    return None if found is None else f"{found['name']}@{' '.join((found['range'] or 'latest').split())}"


INSTALLERS = {
    "pip": Installer(
        name="pip",
        preset="python-packages",
        command=(
            *("env", "PYTHONUSERBASE={place}", "python3", "-m", "pip", "install", "--user", "--quiet"),
            *("--no-input", "--no-cache-dir", "--disable-pip-version-check", "--no-warn-script-location"),
            *("--progress-bar=off", "--retries=2", "--timeout=15", "--"),
        ),
        variables={"PYTHONUSERBASE": "{place}", "PATH": "{place}/bin"},
        folder=".local",
        unreachable=re.compile(r"after connection broken by|HTTP error 5\d\d|[Rr]ead timed out"),
        _normal=_python,
        example="'pandas==2.*'",
    ),
    "npm": Installer(
        name="npm",
        preset="npm-packages",
        command=(
            *(
                "npm",
                "install",
                "--prefix={place}",
                "--no-save",
                "--no-package-lock",
                "--no-audit",
                "--no-fund",
            ),
            *("--no-update-notifier", "--no-progress", "--logs-max=0", "--loglevel=error"),
            *("--fetch-retries=1", "--fetch-retry-mintimeout=1000", "--"),
        ),
        variables={"NODE_PATH": "{place}/node_modules", "PATH": "{place}/node_modules/.bin"},
        folder=".",
        unreachable=re.compile(
            r"\b(?:ENOTFOUND|EAI_AGAIN|ECONN[A-Z]+|E[A-Z]*TIMEDOUT|E(?:HOST|NET)UNREACH|ERR_SOCKET_TIMEOUT|E5\d\d)\b"
        ),
        _normal=_npm,
        example="'lodash@^4.17'",
        beside=("node_modules",),  # `import` knows no NODE_PATH
    ),
}
"""By name, as languages refer to them."""
