"""A daemon whose machine uses registries of the test's own, which tell what was asked of them."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from skerry.client.sync.client import Client
from tests import certificates, support
from tests.integration import registries
from tests.integration.daemon import Daemon, started
from tests.integration.internet import Internet, in_a_network_of_its_own, internet
from tests.integration.networks import home_of
from tests.integration.registries import URL

ADDRESS = "93.184.216.41"

PROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
BACKEND = """
import os, zipfile

def build_wheel(folder, settings=None, metadata=None):
    {deeds}
    name, info = "{name}-1.0-py3-none-any.whl", "{name}-1.0.dist-info"
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        wheel.writestr("{name}.py", "here = True\\n")
        wheel.writestr(f"{{info}}/METADATA", "Metadata-Version: 2.1\\nName: {name}\\nVersion: 1.0\\n")
        wheel.writestr(f"{{info}}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{{info}}/RECORD", "")
    return name
"""


class Shelves:
    """The registries, and the world around them. `asked` are the paths, in order."""

    def __init__(self, folder: Path, user: support.Nobody | None, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.seen: Callable[[str], object] = lambda path: None
        """Called with a path before it is answered."""
        self._packages = folder / "packages"
        self._user = user
        registries.make_packages(self._packages)
        where = folder if user is None else user.home
        authority = str(shutil.copy(certificates.make().ca, where / "ca.pem"))
        for name in (
            "SSL_CERT_DIR",
            "REQUESTS_CA_BUNDLE",
            "CURL_CA_BUNDLE",
            "PIP_FIND_LINKS",
            "PIP_EXTRA_INDEX_URL",
        ):
            monkeypatch.delenv(name, raising=False)
        variables = dict.fromkeys(("SSL_CERT_FILE", "PIP_CERT", "NPM_CONFIG_CAFILE"), authority)
        variables |= {"PIP_INDEX_URL": f"{URL}/simple", "NPM_CONFIG_REGISTRY": f"{URL}/npm/"}
        if user is not None:
            user.env |= variables
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    def add(self, name: str, deeds: str) -> None:
        """A package whose own code builds it: Python, which finds the place of the packages in PYTHONUSERBASE."""
        folder = self._packages / "simple" / name
        folder.mkdir()
        indented = deeds.strip().replace("\n", "\n    ")
        with tarfile.open(folder / f"{name}-1.0.tar.gz", "w:gz") as archive:
            for file, text in {
                "pyproject.toml": PROJECT,
                "backend.py": BACKEND.format(name=name, deeds=indented),
            }.items():
                member = tarfile.TarInfo(f"{name}-1.0/{file}")
                member.size = len(text)
                archive.addfile(member, BytesIO(text.encode()))
        link = f'<a href="{name}-1.0.tar.gz">{name}-1.0.tar.gz</a>'
        (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>{link}</body></html>")

    def run(self, test: Callable[[World], None], *options: str) -> None:
        """With a daemon that has these options."""

        def body() -> None:
            with (
                self._internet() as outside,
                home_of(self._user) as home,
                started(home, *options, user=self._user) as daemon,
            ):
                with Client(str(home)) as client:
                    test(World(self, outside, daemon, client))

        in_a_network_of_its_own(body)

    @contextmanager
    def _internet(self) -> Iterator[Internet]:
        def note(path: str) -> None:
            self.asked.append(path)
            self.seen(path)

        def serve(stack: Any) -> None:
            registries.serve(self._packages, stack, note)

        with internet([ADDRESS], (), serve) as outside:
            outside.names = {registries.NAME: ADDRESS}
            yield outside


class World:
    """What a test has."""

    def __init__(self, shelves: Shelves, outside: Internet, daemon: Daemon, client: Client) -> None:
        self.shelves = shelves
        self.outside = outside
        self.daemon = daemon
        self.client = client

    def forget(self) -> None:
        self.shelves.asked.clear()

    @property
    def asked(self) -> list[str]:
        return self.shelves.asked

    @property
    def kept(self) -> list[Path]:
        """What lies where the daemon keeps packages."""
        return sorted((self.daemon.home / "packages").glob("*"))
