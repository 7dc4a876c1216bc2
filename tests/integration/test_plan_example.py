"""The example plan of the second document: clone, install, run; with an allowlist of presets alone."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from skerry.client.sync.client import Client
from skerry.client.sync.environment import Environment
from tests import support
from tests.integration.daemon import started
from tests.integration.internet import in_a_network_of_its_own, internet, relayed
from tests.integration.mirrors import public, registries

pytestmark = [pytest.mark.root, pytest.mark.timeout(400)]
GIT = "93.184.216.40"


def repository(folder: Path) -> None:
    work = folder / "work"
    work.mkdir()
    (work / "package.json").write_text(
        '{"name": "example", "version": "1.0.0", "dependencies": {"semver": "*"}}'
    )
    (work / "check.js").write_text('console.log(require("semver").gt("1.10.0", "1.9.0"))\n')
    author = ("-c", "user.name=test", "-c", "user.email=test@example.test")
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "first"]):
        subprocess.run(["git", *words], cwd=work, check=True)
    subprocess.run(["git", "clone", "-q", "--bare", work, folder / "example.git"], check=True)


@pytest.mark.requirement("R49", "F4")
@pytest.mark.soak
def test_clone_install_and_run(tmp_path: Path) -> None:
    if shutil.which("git") is None or shutil.which("npm") is None:
        support.missing("git and npm are needed")
    repository(tmp_path)
    # Not by way of git: it would start this as a child, which nobody ends.
    folder = subprocess.run(["git", "--exec-path"], stdout=subprocess.PIPE, text=True, check=True).stdout
    git_daemon = f"{folder.strip()}/git-daemon"
    with support.temporary_home() as home:
        (home / "presets.toml").write_text('[git-hosting]\nallow = ["git.example.test:9418"]\n')
        hosts = registries(home, "python-packages", "npm-packages")
        places = {(address, 443) for address in hosts.values()}
        with relayed(places, tmp_path) as there:

            def services(stack: ExitStack) -> None:
                there(stack)
                server = subprocess.Popen(
                    [
                        *(git_daemon, "--verbose", "--export-all", f"--base-path={tmp_path}"),
                        *(f"--listen={GIT}", tmp_path),
                    ],
                    stderr=subprocess.PIPE,
                    env={**os.environ, "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory"}
                    | {"GIT_CONFIG_VALUE_0": "*"},
                )
                stack.enter_context(server)
                stack.callback(server.kill)
                assert server.stderr is not None
                assert b"Ready to rumble" in server.stderr.readline()  # it listens

            def body() -> None:
                with internet([GIT, *set(hosts.values())], ports=(), also=services) as outside:
                    outside.names = {"git.example.test": GIT, **hosts}
                    os.environ["SKERRY_PUBLIC_RANGES"] = public(hosts)
                    try:
                        with started(home), Client(str(home)) as client:
                            plan(client)
                    finally:
                        del os.environ["SKERRY_PUBLIC_RANGES"]

            in_a_network_of_its_own(body)


def plan(client: Client) -> None:
    allow = ["git-hosting", "python-packages", "npm-packages"]
    report = "import pandas\nprint(pandas.Series([1, 2, 3]).sum())\n"
    with Environment(client=client, allow=allow, memory="1g", pids=512) as env:
        run(env, "git clone -q git://git.example.test/example.git && cd example")
        env.files.write("example/report.py", report)
        run(env, "pip install -q pandas")
        assert run(env, "python3 report.py") == "6\n"
        run(env, "npm install --silent --no-fund --no-audit")
        assert run(env, "node check.js") == "true\n"


def run(env: Environment, command: str) -> str:
    result = env.execute(command, timeout=180)
    assert result.ok, (command, result.stdout, result.stderr, env.network.denials())
    return result.stdout
