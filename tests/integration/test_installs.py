"""Package tools install from registries, with presets alone, as they would on the machine; the next command finds it.

The registries are the test's own, and the machine is set up for them by what an operator would set: variables.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from skerry.client.sync.client import Client
from skerry.client.sync.environment import Environment
from tests import certificates, support
from tests.integration import registries
from tests.integration.daemon import started
from tests.integration.internet import in_a_network_of_its_own, internet
from tests.integration.networks import home_of
from tests.integration.registries import MODULE, URL

pytestmark = [pytest.mark.root, pytest.mark.timeout(300), pytest.mark.needs("network")]
ADDRESS = "93.184.216.41"


class Machine:
    """One that uses our registries: root's daemon, or a plain user's."""

    def __init__(self, folder: Path, user: support.Nobody | None, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder if user is None else user.home
        """For files of the operator, which the daemon may read."""
        self._packages = folder / "packages"
        self._user = user
        self._monkeypatch = monkeypatch
        registries.make_packages(self._packages)
        authority = str(shutil.copy(certificates.make().ca, self.folder / "ca.pem"))
        for name in ("SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_FIND_LINKS"):
            monkeypatch.delenv(name, raising=False)
        self.set(SSL_CERT_FILE=authority, PIP_CERT=authority, NPM_CONFIG_CAFILE=authority)
        self.set(GIT_SSL_CAINFO=authority)

    def set(self, **variables: str) -> None:
        """In the environment of the daemon."""
        if self._user is not None:
            self._user.env |= variables
        for name, value in variables.items():
            self._monkeypatch.setenv(name, value)

    def run(self, preset: str, *commands: tuple[str, str]) -> None:
        """Commands in an environment that has one preset, each of which must say something."""

        def body() -> None:
            with (
                internet([ADDRESS], (), lambda stack: registries.serve(self._packages, stack)) as outside,
                home_of(self._user) as home,
                started(home, user=self._user),
                Client(str(home)) as client,
                Environment(client=client, allow=[preset], memory="2g", cpus=2, pids=512) as env,
            ):
                outside.names = {registries.NAME: ADDRESS}
                assert env.execute("id -un").stdout == "appuser\n"
                for command, says in commands:
                    result = env.execute(command, timeout=200)
                    assert result.ok, (command, result.stdout, result.stderr, env.network.denials())
                    assert says in result.stdout + result.stderr
                assert env.network.show()["received_bytes"] > 0
                assert set(outside.asked) == {registries.NAME}

        in_a_network_of_its_own(body)


@pytest.fixture
def machine(tmp_path: Path, user: support.Nobody | None, monkeypatch: pytest.MonkeyPatch) -> Machine:
    need("git", "git")
    return Machine(tmp_path, user, monkeypatch)


def need(tool: str, package: str) -> None:
    """In the image `host`, which shows what the system has, and not all that is in this user's PATH."""
    if shutil.which(tool, path=support.PATH) is None:
        support.missing(f"{tool} is not installed (apt-get install {package})")


@pytest.mark.requirement("F4")
def test_pip(machine: Machine) -> None:
    need("pip", "python3-pip")
    machine.set(PIP_INDEX_URL=f"{URL}/simple")
    machine.run(
        "python-packages",
        ("pip install tiny", "Successfully installed tiny-1.0"),
        ("tiny-pip", "from pip"),
        ("python3 -c 'import tiny; print(tiny.__file__)'", "/workspace/"),
        ("python3 -m venv v && v/bin/pip install tiny && v/bin/tiny-pip", "from pip"),
    )


@pytest.mark.requirement("F4")
def test_npm(machine: Machine) -> None:
    need("npm", "npm")
    machine.set(NPM_CONFIG_REGISTRY=f"{URL}/npm/")
    machine.run(
        "npm-packages",
        ("npm install tiny", "added 1 package"),
        ("""node -e 'console.log(require("tiny"))'""", "required"),
        ("npm install -g tiny && tiny-npm", "from npm"),
        ("command -v tiny-npm", "/workspace/"),
    )


def test_go(machine: Machine) -> None:
    need("go", "golang-go")
    machine.set(GOPROXY=f"{URL}/go", GOSUMDB="off")
    program = f'package main; import "{MODULE}"; func main() {{ println(tiny.Word, "required") }}'
    machine.run(
        "go-modules",
        (f"go install {MODULE}/cmd/tiny-go@latest", ""),
        ("tiny-go", "from go"),
        ("command -v tiny-go", "/workspace/go/bin/"),
        (f"mkdir mine && cd mine && go mod init mine && go get {MODULE}", "added"),
        (f"echo '{program}' > main.go && go run .", "from go required"),
        ("GOOS=plan9 go list -f {{.Target}} .", "/workspace/go/bin/plan9_"),
        ("rm -r ~/go", ""),
    )


def test_git(machine: Machine) -> None:
    machine.set(
        GIT_CONFIG_COUNT="1",
        GIT_CONFIG_KEY_0=f"url.{URL}/git/.insteadOf",
        GIT_CONFIG_VALUE_0="https://code.example.test/",
    )
    machine.run(
        "git-hosting",
        ("git clone -q https://code.example.test/tiny.git && cat tiny/README", "from git"),
        (f"git clone -q --depth 1 {URL}/git/tiny.git other && cat other/README", "from git"),
        ("cd tiny && git pull", "Already up to date"),
    )


@pytest.mark.parametrize("signed", ["by", "trusted"])
def test_apt(machine: Machine, signed: str) -> None:
    """It finds and fetches, with the keys of the machine; it does not install."""
    need("apt-get", "apt")
    folder = machine.folder / "etc"
    for name in ("sources.list.d", "apt.conf.d", "preferences.d", "trusted.gpg.d"):
        (folder / name).mkdir(parents=True)
    key = folder / ("key.asc" if signed == "by" else "trusted.gpg.d/key.asc")
    shutil.copy(registries.DEBIAN / "key.asc", key)
    option = f" [signed-by={key}]" if signed == "by" else ""
    (folder / "sources.list").write_text(f"deb{option} http://{registries.NAME}/debian stable main\n")
    (folder / "machine.conf").write_text(f'Dir::Etc "{folder}";\n')
    machine.set(APT_CONFIG=str(folder / "machine.conf"))
    machine.run(
        "debian-packages",
        ('test -z "$(apt-get update 2>&1 > /dev/null)"', ""),
        ("apt-cache show tiny", "says where it comes from"),
        ("apt-get download tiny && dpkg -x tiny_*.deb . && usr/bin/tiny-apt", "from apt"),
        ("apt-get install -y --download-only tiny && ls apt/archives", "tiny_1.0_all.deb"),
        ("! apt-get install -y tiny", "requires superuser privilege"),
    )
