"""What presets allow and set follows from how this machine's tools are set up, and from presets.toml."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from skerry.egress import package_tools, presets
from skerry.egress.package_tools import ToolSettings
from skerry.egress.presets import Preset, names, preset
from skerry.egress.rules import Rule
from skerry.errors import InvalidRequest, PlatformError
from skerry.settings import Home
from tests.support import require

CERTIFICATE = b"-----BEGIN CERTIFICATE-----\nbWlycm9y\n-----END CERTIFICATE-----\n"
KEY = b"-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A machine on which nothing is set up, as far as a user can see to that."""
    for name in list(os.environ):
        known = ("pip_", "npm_config_", "go", "git_", "ssl_", "apt_")
        if name.lower().startswith(known) or name.lower().endswith(("_proxy", "_ca_bundle", "_ca_certs")):
            monkeypatch.delenv(name)
    for name in ("HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "user"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("npm_config_globalconfig", str(tmp_path / "npmrc-of-all"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setattr(presets, "_answers", {})
    (tmp_path / "user").mkdir()
    (tmp_path / "home").mkdir()
    return Home(str(tmp_path / "home"))


def operator(home: Home, text: str) -> None:
    Path(home.path, "presets.toml").write_text(text)


def found(monkeypatch: pytest.MonkeyPatch, name: str, answer: ToolSettings | None) -> None:
    monkeypatch.setitem(presets._ASK, name, ("tool", lambda _: answer))


def secret_free(preset: Preset, secret: str) -> None:
    assert secret not in repr(preset)


def test_names() -> None:
    assert names() == ["debian-packages", "git-hosting", "go-modules", "npm-packages", "python-packages"]


def test_an_unknown_one(home: Home) -> None:
    with pytest.raises(InvalidRequest, match="'ruby'") as error:
        preset("ruby", home)
    assert "python-packages" in error.value.hint


@pytest.mark.parametrize("name", names())
def test_without_the_tool_nothing_is_known(home: Home, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """So no registry is written down in Skerry itself."""
    monkeypatch.setenv("PATH", home.path)
    monkeypatch.setattr(sys, "executable", f"{home.path}/python")
    with pytest.raises(
        PlatformError, match=r"is not installed here and presets\.toml names no host"
    ) as error:
        preset(name, home)
    assert f"[{name}]" in error.value.hint
    operator(home, f'[{name}]\nallow = ["mirror.example.test"]\n')
    assert preset(name, home).rules == ["mirror.example.test"]


def test_pip(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://user:pass%%word@mirror.example.test:8443/simple\n"
        "extra-index-url =\n  http://more.example.test/simple\n  file:///srv/packages\n  http://localhost:3141/x\n"
        "trusted-host = more.example.test\nproxy = http://proxy.example.test:3128\n"
        "[install]\nfind-links = https://links.example.test/all.html /srv/wheels\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    got = preset("python-packages", home)
    assert got.rules == ["mirror.example.test:8443", "more.example.test:80", "links.example.test:443"]
    assert (
        got.variables.items()
        >= {
            "PIP_INDEX_URL": "https://mirror.example.test:8443/simple",
            "PIP_EXTRA_INDEX_URL": "http://more.example.test/simple",
            "PIP_FIND_LINKS": "https://links.example.test/all.html",
            "PIP_TRUSTED_HOST": "more.example.test",
        }.items()
    )
    secret_free(got, "word")
    notes = " ".join(got.notes)
    for part in (
        "credentials for mirror.example.test stay here",
        "neither http nor https",
        "loopback",
        "a proxy",
    ):
        assert part in notes


def test_variables_of_pip_win(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = https://file.example.test/simple\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_INDEX_URL", "https://variable.example.test/simple")
    assert preset("python-packages", home).rules == ["variable.example.test:443"]


def test_the_default_of_pip_has_its_files_on_another_host(home: Home) -> None:
    got = preset("python-packages", home)
    assert len(got.rules) == 2
    operator(home, '[python-packages.variables]\nPIP_INDEX_URL = "https://mirror.example.test/simple"\n')
    assert preset("python-packages", home).rules == ["mirror.example.test:443"]


def test_npm(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("npm")
    (tmp_path / "user/.npmrc").write_text(
        "registry=https://user:password@npm.example.test/all/\n@team:registry=https://team.example.test:4873/\n"
        "//npm.example.test/:_authToken=password\n"
    )
    got = preset("npm-packages", home)
    assert sorted(got.rules) == ["npm.example.test:443", "team.example.test:4873"]
    assert got.variables["NPM_CONFIG_REGISTRY"] == "https://npm.example.test/all/"
    content = dict(got.files)[got.variables["NPM_CONFIG_GLOBALCONFIG"]]
    assert content == b"@team:registry=https://team.example.test:4873/\n"
    secret_free(got, "password")
    (tmp_path / "user/.npmrc").unlink()
    (tmp_path / "npmrc").write_bytes(content)
    for name, value in {**got.variables, "NPM_CONFIG_GLOBALCONFIG": str(tmp_path / "npmrc")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("npm_config_globalconfig")
    operator(home, "")
    assert sorted(preset("npm-packages", home).rules) == sorted(got.rules)


def test_go(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    require("go", "golang-go")
    monkeypatch.setenv(
        "GOPROXY", "https://u:password@go.example.test/p|file:///srv/go,https://b.example.test,direct"
    )
    monkeypatch.setenv("GOSUMDB", "sum.example.test+1234+abcd")
    monkeypatch.setenv("GOPRIVATE", "private.example.test")
    monkeypatch.setenv("GOFLAGS", "-mod=mod -modfile=/srv/go.mod")
    got = preset("go-modules", home)
    assert got.rules == ["go.example.test:443", "b.example.test:443", "sum.example.test:443"]
    assert got.variables["GOPROXY"] == "https://go.example.test/p|https://b.example.test,direct"
    assert got.variables["GONOSUMDB"] == got.variables["GOPRIVATE"] == "private.example.test"
    assert got.variables["GOFLAGS"] == "-mod=mod -modcacherw"
    assert "own host" in " ".join(got.notes)
    secret_free(got, "password")


def test_git(home: Home, tmp_path: Path) -> None:
    require("git")
    (tmp_path / "ca.pem").write_bytes(CERTIFICATE)
    (tmp_path / "user/.gitconfig").write_text(
        '[url "https://token:password@git.example.test/mirror/"]\n insteadOf = https://code.example.test/\n'
        '[url "git@ssh.example.test:"]\n insteadOf = https://other.example.test/\n'
        '[url "/srv/git/"]\n insteadOf = https://local.example.test/\n'
        f"[http]\n sslCAInfo = {tmp_path}/ca.pem\n"
    )
    got = preset("git-hosting", home)
    assert got.rules == ["git.example.test:443", "ssh.example.test:22"]
    assert got.variables["GIT_CONFIG_COUNT"] == "2"
    assert got.variables["GIT_CONFIG_KEY_0"] == "url.https://git.example.test/mirror/.insteadOf"
    assert got.variables["GIT_CONFIG_VALUE_0"] == "https://code.example.test/"
    assert (got.variables["GIT_SSL_CAINFO"], CERTIFICATE) in got.files
    (tmp_path / "user/.gitconfig").unlink()
    asked = subprocess.run(
        ["git", "ls-remote", "--get-url", "https://code.example.test/a.git"],
        env={**os.environ, **got.variables},
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    assert asked.stdout == "https://git.example.test/mirror/a.git\n"
    secret_free(got, "password")


def test_apt(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("apt-get", "apt")
    folder = tmp_path / "apt"
    for name in ("sources.list.d", "apt.conf.d", "preferences.d"):
        (folder / name).mkdir(parents=True)
    (tmp_path / "apt.conf").write_text(f'Dir::Etc "{folder}";\n')
    monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))
    for name in ("one", "two", "hidden"):
        (folder / f"{name}.gpg").write_bytes(name.encode())
    (folder / "hidden.gpg").chmod(0o600)
    (folder / "sources.list").write_text(
        "# http://u:password@old.example.test/\n"
        f"deb [arch=amd64 signed-by={folder}/one.gpg,{folder}/hidden.gpg]"
        " http://u:password@one.example.test:3142/debian stable main\n"
        "deb mirror+https://list.example.test/mirrors.txt stable main\n"
        "deb file:/srv/debian stable main\n"
    )
    (folder / "sources.list.d/two.sources").write_text(
        "Types: deb\nURIs: https://two.example.test/debian\nSuites: stable\nComponents: main\n"
        f"# a comment\nSigned-By: {folder}/two.gpg\n\n"
        "Enabled: no\nTypes: deb\nURIs: https://off.example.test/\nSuites: stable\nComponents: main\n"
    )
    got = preset("debian-packages", home)
    assert sorted(got.rules) == ["list.example.test:443", "one.example.test:3142", "two.example.test:443"]
    files = dict(got.files)
    one, two = (path for path, content in got.files if content in (b"one", b"two"))
    assert files["/tmp/.skerry/apt/sources/sources.list"].decode() == (
        f"deb [arch=amd64 signed-by={one},{folder}/hidden.gpg] http://one.example.test:3142/debian stable main\n"
        "deb mirror+https://list.example.test/mirrors.txt stable main\n"
    )
    assert files["/tmp/.skerry/apt/sources/two.sources"].decode() == (
        "Types: deb\nURIs: https://two.example.test/debian\nSuites: stable\nComponents: main\n"
        f"Signed-By: {two}\n\n"
        "Enabled: no\nTypes: deb\nURIs: https://off.example.test/\nSuites: stable\nComponents: main\n"
    )
    assert got.variables["APT_CONFIG"] in files
    assert b"hidden" not in files.values(), "what not everybody may read stays here"
    secret_free(got, "password")


@pytest.mark.parametrize(
    ("name", "file", "text"),
    [
        ("python-packages", "pip.conf", "[global\nindex-url = https://u:password@x.example.test\n"),
        ("git-hosting", ".gitconfig", "[http\n extraHeader = password\n"),
    ],
)
def test_a_broken_file_is_named_and_not_quoted(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, file: str, text: str
) -> None:
    (tmp_path / "user" / file).write_text(text)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "user/pip.conf"))
    with pytest.raises(PlatformError, match=f"{name}: .*/user/{file}") as error:
        preset(name, home)
    assert "password" not in str(error.value)
    found(monkeypatch, "npm-packages", ToolSettings(reach=["https://npm.example.test"]))
    assert preset("npm-packages", home).rules == ["npm.example.test:443"]


def test_a_tool_that_hangs(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "npm").write_text("#!/bin/sh\nsleep 600 &\nwait\n")
    (tmp_path / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(package_tools, "TIMEOUT", 0.1)
    with pytest.raises(PlatformError, match="npm-packages: `npm config ls"):
        preset("npm-packages", home)


def test_authorities_come_along_without_keys(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ca.pem").write_bytes(KEY + CERTIFICATE)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    monkeypatch.setenv("PIP_CERT", str(tmp_path / "ca.pem"))
    got = preset("python-packages", home)
    [(path, content)] = got.files
    assert content == CERTIFICATE
    assert got.variables["SSL_CERT_FILE"] == got.variables["PIP_CERT"] == path


@pytest.mark.parametrize("content", [None, b"", KEY])
def test_authorities_that_cannot_be_read(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "ca.pem").write_bytes(content)
    monkeypatch.setenv("PIP_CERT", str(tmp_path / "ca.pem"))
    with pytest.raises(PlatformError, match=r"python-packages: .*/ca\.pem"):
        preset("python-packages", home)
    found(monkeypatch, "npm-packages", ToolSettings(reach=["https://npm.example.test"]))
    preset("npm-packages", home)


def test_what_the_operator_says(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = ToolSettings(
        {"A": "https://a.example.test", "B": "https://b.example.test"}, reach=["https://c.example.test"]
    )
    found(monkeypatch, "npm-packages", tool)
    (tmp_path / "ca.pem").write_bytes(CERTIFICATE)
    operator(
        home,
        f'[npm-packages]\nallow = ["*.cdn.example.test", "203.0.113.0/24:8080"]\nca = "{tmp_path}/ca.pem"\n'
        '[npm-packages.variables]\nA = "https://u:p@mine.example.test:99/"\nB = ""\n',
    )
    got = preset("npm-packages", home)
    assert got.rules == [
        "c.example.test:443",
        "mine.example.test:99",
        "*.cdn.example.test",
        "203.0.113.0/24:8080",
    ]
    assert got.variables["A"] == "https://u:p@mine.example.test:99/"
    assert "B" not in got.variables
    assert got.variables["NODE_EXTRA_CA_CERTS"] == got.files[0][0]


@pytest.mark.parametrize(
    "text",
    [
        "[npm-packages\n",
        "[npm-package]\n",
        "npm-packages = 1\n",
        "[npm-packages]\nallowed = []\n",
        '[npm-packages]\nallow = "a.example.test"\n',
        "[npm-packages]\nallow = [1]\n",
        '[npm-packages]\nallow = ["a b"]\n',
        "[npm-packages]\nvariables = []\n",
        "[npm-packages.variables]\nA = 1\n",
        "[npm-packages]\nca = 1\n",
        '[npm-packages]\nca = "/nonexistent/ca.pem"\n',
    ],
)
def test_what_an_operator_cannot_say(home: Home, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    found(monkeypatch, "npm-packages", ToolSettings(reach=["https://npm.example.test"]))
    operator(home, text)
    with pytest.raises(PlatformError, match="npm-packages"):
        preset("npm-packages", home)


def test_rules_are_rules() -> None:
    for url in (
        "https://a.example.test",
        "http://[2001:db8::1]:99/x",
        "https://203.0.113.7/",
        "ssh://g@b.test/x",
    ):
        Rule.parse(presets._rule(url))


def test_asked_once_and_again_when_it_is_old(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    clock = [1000.0]
    together = threading.Barrier(4)

    def ask(name: str) -> ToolSettings | None:
        asked.append(name)
        return ToolSettings(reach=["https://npm.example.test"]) if len(asked) != 3 else None

    def first(_: int) -> Preset:
        together.wait()
        return preset("npm-packages", home)

    monkeypatch.setitem(presets._ASK, "npm-packages", ("npm", ask))
    monkeypatch.setattr(presets, "_now", lambda: clock[0])
    with ThreadPoolExecutor(4) as threads:
        for got in threads.map(first, range(4)):
            got.rules.append("nobody else sees this")
    assert preset("npm-packages", home).rules == ["npm.example.test:443"]
    assert len(asked) == 1
    clock[0] += presets.FRESH
    preset("npm-packages", home)
    assert len(asked) == 2
    operator(home, "")
    for _ in range(2):
        with pytest.raises(PlatformError, match="not installed"):
            preset("npm-packages", home)
    assert len(asked) == 3
    clock[0] += presets.FRESH_FAILURE
    preset("npm-packages", home)
    assert len(asked) == 4
