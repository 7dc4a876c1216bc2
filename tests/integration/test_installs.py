"""Package tools, called without any option, install in the workspace, and the next command finds it.

Nothing is fetched: each tool gets a tiny package that is made inside.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from skerry.egress.presets import install_variables
from tests import support
from tests.integration.daemon import Daemon, started

MAKE = """
import io, pathlib, tarfile, zipfile
with zipfile.ZipFile("tiny-1.0-py3-none-any.whl", "w") as wheel:
    wheel.writestr("tiny.py", "def main():\\n    print('from pip')\\n")
    info = "tiny-1.0.dist-info"
    wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: tiny\\nVersion: 1.0\\n")
    wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
    wheel.writestr(f"{info}/entry_points.txt", "[console_scripts]\\ntiny-pip = tiny:main\\n")
    wheel.writestr(f"{info}/RECORD", "")
with tarfile.open("tiny.tgz", "w:gz") as archive:
    for name, text in {
        "package.json": '{"name": "tiny", "version": "1.0.0", "bin": {"tiny-npm": "cli.js"}}',
        "cli.js": "#!/usr/bin/env node\\nconsole.log('from npm')\\n",
        "index.js": "module.exports = 'required'\\n",
    }.items():
        member = tarfile.TarInfo(f"package/{name}")
        member.size, member.mode = len(text), 0o755
        archive.addfile(member, io.BytesIO(text.encode()))
module, version = "go.example.test/tiny-go", "v1.0.0"
folder = pathlib.Path("proxy", module, "@v")
folder.mkdir(parents=True)
mod = f"module {module}\\n\\ngo 1.18\\n"
(folder / "list").write_text(version)
(folder / f"{version}.info").write_text('{"Version": "v1.0.0"}')
(folder / f"{version}.mod").write_text(mod)
with zipfile.ZipFile(folder / f"{version}.zip", "w") as source:
    source.writestr(f"{module}@{version}/go.mod", mod)
    source.writestr(f"{module}@{version}/main.go", 'package main\\n\\nfunc main() { print("from go") }\\n')
"""
OFFLINE = {
    "PIP_NO_INDEX": "1",
    "PIP_FIND_LINKS": "/workspace",
    "GOPROXY": "file:///workspace/proxy",
    "GOSUMDB": "off",
}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with support.temporary_home() as home, started(home) as running:
        yield running


@pytest.fixture
def environment(daemon: Daemon) -> Iterator[str]:
    ref = daemon.create(env={**OFFLINE, **install_variables("/workspace", support.PATH)}, memory="2g")
    done = daemon.execute(ref, ["python3", "-c", MAKE])
    assert done["exit_code"] == 0, done
    yield ref
    daemon.call("DELETE", f"/environments/{ref}")


def run(daemon: Daemon, environment: str, command: str) -> str:
    done = daemon.execute(environment, command)
    assert done["exit_code"] == 0, done
    return f"{done['stdout']}{done['stderr']}".strip()


def has(program: str) -> bool:
    """In the `host` image, which shows what the system has."""
    return any(os.path.exists(f"{folder}/{program}") for folder in support.PATH.split(":"))


def test_pip(daemon: Daemon, environment: str) -> None:
    if not has("pip"):
        support.missing("pip is not installed (apt-get install python3-pip)")
    run(daemon, environment, "pip install tiny")
    assert run(daemon, environment, "tiny-pip") == "from pip"
    assert run(daemon, environment, "python3 -c 'import tiny; tiny.main()'") == "from pip"


def test_pip_in_a_virtual_environment(daemon: Daemon, environment: str) -> None:
    if not has("pip"):
        support.missing("pip is not installed (apt-get install python3-pip)")
    run(daemon, environment, "python3 -m venv v && v/bin/pip install tiny")
    assert run(daemon, environment, "v/bin/tiny-pip") == "from pip"


@pytest.mark.skipif(not has("npm"), reason="npm is not installed")
def test_npm(daemon: Daemon, environment: str) -> None:
    run(daemon, environment, "npm install ./tiny.tgz")
    assert run(daemon, environment, """node -e 'console.log(require("tiny"))'""") == "required"
    run(daemon, environment, "npm install -g ./tiny.tgz")
    assert run(daemon, environment, "tiny-npm") == "from npm"


@pytest.mark.skipif(not has("go"), reason="go is not installed")
def test_go(daemon: Daemon, environment: str) -> None:
    run(daemon, environment, "go install go.example.test/tiny-go@latest")
    assert run(daemon, environment, "tiny-go") == "from go"
    run(daemon, environment, "GOOS=plan9 go install go.example.test/tiny-go@latest")
    run(daemon, environment, "rm -r go")


@pytest.mark.skipif(not has("git"), reason="git is not installed")
def test_git(daemon: Daemon, environment: str) -> None:
    run(daemon, environment, "git init -q --bare origin && git clone -q origin copy && cd copy && git status")
