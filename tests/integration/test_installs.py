"""Package tools install from registries, with presets alone, as they would on the machine; the next command finds it.

The registries are the test's own, and the machine is set up for them by what an operator would set: variables.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from skerry.client.sync.client import Client
from skerry.client.sync.environment import Environment
from tests import certificates, support
from tests.integration import registries
from tests.integration.daemon import started
from tests.integration.internet import in_a_network_of_its_own, internet
from tests.integration.registries import MODULE, URL

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]
ADDRESS = "93.184.216.41"

Commands = list[tuple[str, str]]


def need(tool: str, package: str) -> None:
    """In the image `host`, which shows what the system has, and not all that is in this user's PATH."""
    if shutil.which(tool, path=support.PATH) is None:
        support.missing(f"{tool} is not installed (apt-get install {package})")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Commands], None]:
    """Run commands in an environment that has one preset, each of which must say something."""
    need("git", "git")
    registries.make_packages(tmp_path)
    authority = certificates.make().ca
    for name in ("SSL_CERT_FILE", "PIP_CERT", "NPM_CONFIG_CAFILE", "GIT_SSL_CAINFO"):
        monkeypatch.setenv(name, authority)
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_DIR", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)

    def run(preset: str, commands: Commands) -> None:
        def body() -> None:
            with (
                internet(
                    [ADDRESS], ports=(), also=lambda stack: registries.serve(tmp_path, stack)
                ) as outside,
                support.temporary_home() as home,
                started(home),
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

    return run


@pytest.mark.requirement("F4")
def test_pip(install: Callable[[str, Commands], None], monkeypatch: pytest.MonkeyPatch) -> None:
    need("pip", "python3-pip")
    monkeypatch.setenv("PIP_INDEX_URL", f"{URL}/simple")
    install(
        "python-packages",
        [
            ("pip install tiny", "Successfully installed tiny-1.0"),
            ("tiny-pip", "from pip"),
            ("python3 -c 'import tiny; print(tiny.__file__)'", "/workspace/"),
            ("python3 -m venv v && v/bin/pip install tiny && v/bin/tiny-pip", "from pip"),
        ],
    )


@pytest.mark.requirement("F4")
def test_npm(install: Callable[[str, Commands], None], monkeypatch: pytest.MonkeyPatch) -> None:
    need("npm", "npm")
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", f"{URL}/npm/")
    install(
        "npm-packages",
        [
            ("npm install tiny", "added 1 package"),
            ("""node -e 'console.log(require("tiny"))'""", "required"),
            ("npm install -g tiny && tiny-npm", "from npm"),
            ("command -v tiny-npm", "/workspace/"),
        ],
    )


def test_go(install: Callable[[str, Commands], None], monkeypatch: pytest.MonkeyPatch) -> None:
    need("go", "golang-go")
    monkeypatch.setenv("GOPROXY", f"{URL}/go")
    monkeypatch.setenv("GOSUMDB", "off")
    program = f'package main; import "{MODULE}"; func main() {{ println(tiny.Word, "required") }}'
    install(
        "go-modules",
        [
            (f"go install {MODULE}/cmd/tiny-go@latest", ""),
            ("tiny-go", "from go"),
            ("command -v tiny-go", "/workspace/go/bin/"),
            (f"mkdir mine && cd mine && go mod init mine && go get {MODULE}", "added"),
            (f"echo '{program}' > main.go && go run .", "from go required"),
            ("GOOS=plan9 go list -f {{.Target}} .", "/workspace/go/bin/plan9_"),
            ("rm -r ~/go", ""),
        ],
    )


def test_git(install: Callable[[str, Commands], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.{URL}/git/.insteadOf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "https://code.example.test/")
    install(
        "git-hosting",
        [
            ("git clone -q https://code.example.test/tiny.git && cat tiny/README", "from git"),
            (f"git clone -q --depth 1 {URL}/git/tiny.git other && cat other/README", "from git"),
            ("cd tiny && git pull", "Already up to date"),
        ],
    )


@pytest.mark.parametrize("signed", ["by", "trusted"])
def test_apt(
    install: Callable[[str, Commands], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    signed: str,
) -> None:
    """It finds and fetches, with the keys of the machine; it does not install."""
    need("apt-get", "apt")
    folder = tmp_path / "etc"
    for name in ("sources.list.d", "apt.conf.d", "preferences.d", "trusted.gpg.d"):
        (folder / name).mkdir(parents=True)
    key = folder / ("key.asc" if signed == "by" else "trusted.gpg.d/key.asc")
    shutil.copy(registries.DEBIAN / "key.asc", key)
    option = f" [signed-by={key}]" if signed == "by" else ""
    (folder / "sources.list").write_text(f"deb{option} http://{registries.NAME}/debian stable main\n")
    (tmp_path / "apt.conf").write_text(f'Dir::Etc "{folder}";\n')
    monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))
    install(
        "debian-packages",
        [
            ('test -z "$(apt-get update 2>&1 > /dev/null)"', ""),
            ("apt-cache show tiny", "says where it comes from"),
            ("apt-get download tiny && dpkg -x tiny_*.deb . && usr/bin/tiny-apt", "from apt"),
            ("apt-get install -y --download-only tiny && ls apt/archives", "tiny_1.0_all.deb"),
            ("! apt-get install -y tiny", "requires superuser privilege"),
        ],
    )
