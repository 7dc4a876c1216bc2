"""The image `kai_agent_sandbox`, built by its command for real, and the LangChain tools on it: the ten scenarios that
they were documented with."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import skerry
from skerry.tools.langchain import sandbox_tools
from tests import support

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(600)]
IMAGE = "kai_agent_sandbox"


@dataclass
class Sandbox:
    home: Path
    before: str
    """What the tool said while there was no image."""
    build: subprocess.CompletedProcess[str]
    client: skerry.Client

    def python(self, code: str, **settings: object) -> str:
        tool, _ = sandbox_tools(image=IMAGE, url=f"unix://{self.home}/daemon.sock", **settings)
        text: str = tool.invoke({"code": code})
        return text

    def terminal(self, command: str) -> str:
        _, tool = sandbox_tools(image=IMAGE, url=f"unix://{self.home}/daemon.sock")
        text: str = tool.invoke({"command": command})
        return text

    def last(self) -> skerry.EnvironmentInfo:
        return max(self.client.environments(ended=True), key=lambda info: info.created_at)


def command(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "skerry.cli", *words],
        env={**os.environ, "SKERRY_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    support.require("mmdebstrap")
    folder = support.folder_in_memory()
    with support.temporary_home(folder=folder) as home, skerry.Client(str(home)) as client:
        client.version()  # starts the daemon
        tool, _ = sandbox_tools(image=IMAGE, url=f"unix://{home}/daemon.sock")
        before = tool.invoke({"code": "print(1)"})
        yield Sandbox(home, before, command(home, "image", "build", IMAGE), client)


@pytest.mark.requirement("R110")
def test_the_build_command(sandbox: Sandbox) -> None:
    """It says what it does, how far it is, and what to do next; the digest is on stdout, for scripts."""
    done = sandbox.build
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(rf"{IMAGE} sha256:[0-9a-f]{{64}}\n", done.stdout)
    *steps, last = done.stderr.splitlines()
    assert [line.split("% ")[1] for line in steps] == [
        "checking what a build needs",
        "reading the package lists",
        "downloading the base system",
        "extracting the base system",
        "installing the base system",
        "installing packages",
        "running the definition's commands",
        "unpacking the new root filesystem",
        "computing the digest",
        "done",
    ]
    assert re.fullmatch(
        rf"built in [\d.]+ (s|min), [\d.]+ MiB; use it: skerry run --image {IMAGE} -it -- sh", last
    )


@pytest.mark.requirement("R108")
def test_the_image(sandbox: Sandbox) -> None:
    image = sandbox.client.image(IMAGE)
    assert image.kind == "rootfs"
    assert image.size < 300 << 20
    [row] = [line for line in command(sandbox.home, "image", "ls").stdout.splitlines() if IMAGE in line]
    assert "Python, pip, pytest and requests" in row


@pytest.mark.requirement("R109")
def test_its_contents(sandbox: Sandbox) -> None:
    with skerry.Environment(IMAGE, client=sandbox.client) as env:

        def said(text: str) -> str:
            result = env.execute(text)
            assert result.ok, result.stderr
            return result.stdout.strip()

        assert said("python --version") == said("python3 --version")
        assert said("python3 --version").startswith("Python 3.11.")
        assert said("pip --version").startswith("pip ")
        assert said("pytest --version").startswith("pytest ")
        assert said("python3 -c 'import requests; print(requests.get.__name__)'") == "get"
        assert said("bash --version").startswith("GNU bash")
        assert int(said("grep -c BEGIN /etc/ssl/certs/ca-certificates.crt")) > 50
        assert said("id -un; id -u; id -gn; pwd").split() == ["appuser", "1000", "appuser", "/workspace"]
        assert said("find / -xdev -type f -perm /6000 2>/dev/null; true") == "", (
            "nothing in it makes anybody root"
        )
        assert said("command -v sudo; command -v gcc; command -v curl; true") == ""
        env.execute("printf 'def test_it():\\n    assert 6 * 7 == 42\\n' > test_it.py")
        assert "1 passed" in said("pytest -q")


@pytest.mark.requirement("R111", "R112")
def test_1_the_image_is_missed_and_found(sandbox: Sandbox) -> None:
    assert sandbox.before.startswith(f"Sandbox error: there is no image {IMAGE!r} ")
    assert f"skerry image build {IMAGE}" in sandbox.before
    assert sandbox.client.image(IMAGE).name == IMAGE


@pytest.mark.requirement("R112")
def test_2_simple_python(sandbox: Sandbox) -> None:
    assert sandbox.python("print('Hello, World!')") == "--- STDOUT ---\nHello, World!"


@pytest.mark.requirement("R112")
def test_3_calculations(sandbox: Sandbox) -> None:
    code = "x = 10\ny = 20\nprint(f'Sum: {x + y}')\nprint(f'Product: {x * y}')\n"
    assert sandbox.python(code) == "--- STDOUT ---\nSum: 30\nProduct: 200"


@pytest.mark.requirement("R112")
def test_4_terminal_commands(sandbox: Sandbox) -> None:
    text = sandbox.terminal("echo one && pwd && python -c 'print(6 * 7)' && whoami")
    assert text == "--- STDOUT ---\none\n/workspace\n42\nappuser"
    assert sandbox.terminal("false && echo never") == "--- EXIT CODE: 1 ---"


@pytest.mark.requirement("R112")
def test_5_errors(sandbox: Sandbox) -> None:
    text = sandbox.python("print(undefined_variable)")
    assert text.startswith("--- STDERR ---\nTraceback")
    assert text.endswith("NameError: name 'undefined_variable' is not defined\n--- EXIT CODE: 1 ---"), text


@pytest.mark.requirement("R112")
def test_6_installed_packages(sandbox: Sandbox) -> None:
    assert sandbox.python("import pytest, requests; print('both')") == "--- STDOUT ---\nboth"
    listed = {line.split()[0] for line in sandbox.terminal("pip list 2>/dev/null").splitlines()}
    assert {"pytest", "requests"} <= listed


@pytest.mark.requirement("R112")
def test_7_network_isolation(sandbox: Sandbox) -> None:
    code = "import socket; socket.create_connection(('192.0.2.1', 80), 5)"
    assert "OSError: [Errno 101] Network is unreachable" in sandbox.python(code)


@pytest.mark.requirement("R112")
def test_8_timeouts(sandbox: Sandbox) -> None:
    assert sandbox.python("while True: pass", python_timeout=1) == (
        "Execution timed out after 1 seconds. The process was terminated."
    )


@pytest.mark.requirement("R112", "R113")
def test_9_nothing_is_left(sandbox: Sandbox) -> None:
    sandbox.python("open('file', 'w').write('x')")
    used = sandbox.last().environment_id
    sandbox.terminal("sleep 600 & echo $!")
    assert sandbox.client.environments() == []
    for ended in (used, sandbox.last().environment_id):
        assert not (sandbox.home / "instances" / ended).exists()
        assert not list(Path("/sys/fs/cgroup").glob(f"**/skerry-{ended}"))


@pytest.mark.requirement("R112")
def test_10_resource_limits(sandbox: Sandbox) -> None:
    assert "killed: the environment's memory is used up" in sandbox.python("x = 'x' * (600 << 20)")
    info = sandbox.last()
    assert (info.limits["memory"], info.limits["cpus"]) == (512 << 20, 0.5)
    with skerry.Environment(IMAGE, memory="512m", cpus=0.5, client=sandbox.client) as env:
        enforced = {row["name"]: row["value"] for row in env.info().enforced if row["enforced"]}
    assert (enforced["memory"], enforced["cpu"]) == (str(512 << 20), "0.5")
